// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1 of the CUDA kernels against a plain host computation in double, and its speed.
//!
//! Standalone: returns 0 when every record of every case agrees. Run with "time" it also times two
//! shapes. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90 tests/cpp/test_phase1.cu
//! sdm_kernels/sdm/cuda/sdm_phase1.cu sdm_kernels/sdm/sdm_plan.cpp
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_phase1.h"
#include "tests/cpp/phase1_case.h"
#include "tests/cpp/phase1_reference.h"

namespace sdm::test {
namespace {

// Sequences of the case on the device and, checked against them, on the host.
struct Sequences {
  std::vector<SdmSequence> host;
  DeviceArray<SdmSequence> device;
  int64_t max_chunks = 0;

  explicit Sequences(size_t count) : device(count) {}
};

void make_sequences(const Case& c, const SdmDims& dims, Sequences* out, Report* report) {
  std::vector<int64_t> offsets(1, 0);
  for (int64_t length : c.lengths) {
    offsets.push_back(offsets.back() + length);
  }
  std::vector<int64_t> states;
  for (int64_t n = 0; n < dims.N; ++n) {
    states.push_back(n % 3 == 1 ? -1 : dims.N - n);
  }
  const bool packed = !c.lengths.empty();
  const int64_t pool = dims.N + 1;
  const int64_t segment = 2;
  if (make_sdm_sequences(
          dims,
          packed ? offsets.data() : nullptr,
          c.skip_some ? states.data() : nullptr,
          pool,
          segment,
          &out->host
      ) != sdm::Status::kOk) {
    std::printf("bad case\n");
    std::exit(2);
  }
  const DeviceArray<uint8_t> device_offsets(pack_ids(offsets, c.write_int64));
  const DeviceArray<uint8_t> device_states(pack_ids(states, c.read_int64));
  check(
      sdm::launch_sdm_sequences(
          dims,
          packed ? device_offsets.data : nullptr,
          c.write_int64,
          c.skip_some ? device_states.data : nullptr,
          c.read_int64,
          pool,
          segment,
          out->device.data,
          nullptr
      ),
      "launch_sdm_sequences"
  );
  const std::vector<SdmSequence> got = to_host(out->device.data, out->host.size());
  for (size_t n = 0; n < got.size(); ++n) {
    const SdmSequence& want = out->host[n];
    report->same(got[n].batch, want.batch, "batch");
    report->same(got[n].begin, want.begin, "begin");
    report->same(got[n].length, want.length, "length");
    report->same(got[n].bank, want.bank, "bank");
    report->same(got[n].num_chunks, want.num_chunks, "num_chunks");
    report->same(got[n].first_checkpoint, want.first_checkpoint, "first_checkpoint");
    report->same(got[n].first_row, want.first_row, "first_row");
    out->max_chunks = std::max(out->max_chunks, want.num_chunks);
  }
}

// Offsets that no packing has must still give disjoint sequences inside the tokens.
int test_bad_offsets() {
  const int64_t N = 600, T = 1000;
  std::mt19937_64 random(7);
  std::uniform_int_distribution<int64_t> any(-500, 2000);
  std::vector<int64_t> offsets(static_cast<size_t>(N + 1));
  for (int64_t& x : offsets) {
    x = any(random) / 2 + static_cast<int64_t>(&x - offsets.data());
  }
  offsets[0] = 3;
  SdmDims dims{1, T, 1, 2, 2, 8, 16, N, 16, false};
  const DeviceArray<int64_t> device_offsets(offsets);
  const DeviceArray<SdmSequence> device(static_cast<size_t>(N));
  check(
      sdm::launch_sdm_sequences(
          dims, device_offsets.data, true, nullptr, false, N, 1, device.data, nullptr
      ),
      "launch_sdm_sequences"
  );
  int64_t end = 0;
  int64_t row = 0;
  int wrong = 0;
  for (const SdmSequence& s : to_host(device.data, static_cast<size_t>(N))) {
    wrong += s.begin < end || s.length < 0 || s.begin + s.length > T || s.first_row != row;
    end = s.begin + s.length;
    for (int64_t k = 0; k < s.num_chunks; ++k) {
      row += sdm::rows_of_chunk(dims, std::min(dims.C, s.length - k * dims.C));
    }
  }
  std::printf("%-4s bad offsets\n", wrong == 0 ? "ok" : "FAIL");
  return wrong;
}

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Everything that two runs must have in common bit for bit; what is past the counts is not
// compared.
bool same_bits(const HostRecords& a, const HostRecords& b) {
  return same_bytes(a.lane, b.lane) && same_bytes(a.write_post, b.write_post) &&
         same_bytes(a.position, b.position) && same_bytes(a.entry, b.entry) &&
         same_bytes(a.group, b.group) && same_bytes(a.group_decay, b.group_decay) &&
         same_bytes(a.group_count, b.group_count) && same_bytes(a.beta, b.beta) &&
         same_bytes(a.inverse, b.inverse) && same_bytes(a.qk, b.qk);
}

HostRecords run_window(const Inputs& in, const Sequences& sequences, SdmWindow window, bool gram) {
  const sdm::SdmCudaInputs inputs{in.dims, in.device, DType::kF32, sequences.device.data};
  size_t bytes = 0;
  check(sdm::sdm_phase1_workspace(in.dims, window, gram, &bytes), "sdm_phase1_workspace");
  const DeviceArray<uint8_t> workspace(bytes);
  check(cudaMemset(workspace.data, 0xff, bytes), "cudaMemset");  // NaN wherever nothing is written
  SdmRecords records;
  check(
      sdm::launch_sdm_phase1(inputs, window, gram, &records, workspace.data, nullptr),
      "launch_sdm_phase1"
  );
  check(cudaDeviceSynchronize(), "phase 1");
  return fetch(records, in.dims.C, static_cast<size_t>(in.dims.W), gram);
}

int test_case(const Case& c) {
  Inputs in;
  make_inputs(c, &in);
  Report report;
  Sequences sequences(static_cast<size_t>(in.dims.N));
  make_sequences(c, in.dims, &sequences, &report);
  const int64_t Cp = sdm::round_up(c.C, 16);
  for (int64_t k0 = 0; k0 < sequences.max_chunks; k0 += c.window) {
    const SdmWindow window{k0, c.window};
    const HostRecords got = run_window(in, sequences, window, true);
    const HostRecords plain = run_window(in, sequences, window, false);
    report.same(same_bits(got, run_window(in, sequences, window, true)), 1, "same bits");
    for (int64_t q = 0; q < in.dims.N * c.window * c.H; ++q) {
      ChunkPlace place;
      if (sdm::find_chunk(in.dims, sequences.host.data(), window, q, &place)) {
        compare_chunk(in, place, got, q, Cp, true, &report);
        compare_chunk(in, place, plain, q, Cp, false, &report);
      } else {
        report.same(got.group_count[static_cast<size_t>(q)].y, 0, "groups of no chunk");
      }
    }
  }
  std::printf(
      "%-4s %-28s weight %.1e  log %.1e  qk %.1e  inverse %.1e\n",
      report.wrong == 0 ? "ok" : "FAIL",
      c.name,
      report.weight,
      report.log_decay,
      report.qk,
      report.inverse
  );
  return report.wrong != 0;
}

// Median time of phase 1 over the whole call as one window.
void time_shape(int64_t N, int64_t T, int64_t W, double hot, bool gram) {
  Case c{"time", N, T, 2, W, W, 65536, 256};
  c.dtype = DType::kBf16;
  c.unused = 0.0;
  c.repeat = 0.0;
  c.hot = hot;
  Inputs in;
  make_inputs(c, &in);
  Report report;
  Sequences sequences(static_cast<size_t>(in.dims.N));
  make_sequences(c, in.dims, &sequences, &report);
  const SdmWindow window{0, sequences.max_chunks};
  const sdm::SdmCudaInputs inputs{in.dims, in.device, DType::kF32, sequences.device.data};
  size_t bytes = 0;
  check(sdm::sdm_phase1_workspace(in.dims, window, gram, &bytes), "sdm_phase1_workspace");
  const DeviceArray<uint8_t> workspace(bytes);
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  std::vector<float> times;
  for (int run = 0; run < 23; ++run) {
    SdmRecords records;
    check(cudaEventRecord(start), "event");
    check(
        sdm::launch_sdm_phase1(inputs, window, gram, &records, workspace.data, nullptr),
        "launch_sdm_phase1"
    );
    check(cudaEventRecord(stop), "event");
    check(cudaEventSynchronize(stop), "event");
    float time = 0;
    check(cudaEventElapsedTime(&time, start, stop), "event");
    if (run >= 3) {
      times.push_back(time);
    }
  }
  std::sort(times.begin(), times.end());
  std::printf(
      "time N=%lld H=2 T=%lld W=R=%lld S=65536 C=256 hot=%.2f gram=%d: %.3f ms, workspace %.0f "
      "MB\n",
      (long long)N,
      (long long)T,
      (long long)W,
      hot,
      gram,
      times[times.size() / 2],
      static_cast<double>(bytes) * 1e-6
  );
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c) { cases.push_back(c); };
  add({"C=1", 2, 5, 2, 8, 4, 64, 1});
  add({"C=7", 2, 40, 2, 5, 3, 40, 7, true, true, false});
  add({"C=16 bf16", 1, 70, 3, 16, 16, 300, 16, false, false, true, DType::kBf16});
  add({"C=64 f16", 2, 200, 1, 16, 24, 1000, 64, true, true, true, DType::kF16});
  add({"C=100", 1, 250, 2, 12, 20, 500, 100, true});
  add({"C=256", 1, 600, 1, 32, 16, 4096, 256});
  add({"C=256 power-of-two bank", 1, 512, 1, 16, 16, 65536, 256, true});
  add({"one slot", 1, 90, 1, 4, 4, 1, 32, true});
  add({"few slots", 1, 150, 2, 8, 8, 8, 64, false});
  add({"T < C", 3, 10, 2, 8, 8, 50, 64});
  add({"W = R = 1", 2, 100, 1, 1, 1, 20, 48});
  Case hot{"hot slot", 1, 300, 1, 16, 16, 5000, 256, true};
  hot.hot = 0.3;
  add(hot);
  Case dense{"repeated lanes", 1, 128, 1, 40, 40, 4000, 128, true};
  dense.repeat = 0.7;
  add(dense);
  Case empty{"all unused", 1, 64, 1, 8, 8, 100, 32};
  empty.unused = 1.1;
  add(empty);
  Case packed{"packed", 1, 333, 2, 8, 12, 100, 32, true, false, true};
  packed.lengths = {0, 100, 0, 0, 1, 31, 32, 33, 136, 0};
  add(packed);
  packed.name = "packed, some skipped";
  packed.skip_some = true;
  packed.write_int64 = true;
  add(packed);
  Case gates{"large gates", 1, 200, 1, 8, 8, 30, 64, true};
  gates.gate = 3e4;
  add(gates);
  gates.name = "medium gates";
  gates.gate = 60;
  add(gates);
  Case wide{"64-bit keys", 4, 40, 2, 4, 4, INT32_MAX, 4};
  wide.window = 10;
  wide.hot = 0.3;
  add(wide);
  Case one{"one slot, many tiles", 1, 16, 1, 200, 150, 1, 16, true};
  one.window = 1;
  add(one);
  Case lanes{"64-bit links", 1, 2, 1, 40000, 30000, 100000, 2, true};
  lanes.window = 1;
  add(lanes);
  Case full{"full words", 1, 256, 1, 128, 128, 65536, 256};
  full.window = 1;
  add(full);
  add({"a block of 512 sorts", 2, 600, 2, 32, 16, 5000, 256, true});
  add({"a block of 1024 sorts", 1, 600, 2, 64, 32, 20000, 256, true, false});
  add({"two blocks sort", 2, 600, 1, 128, 64, 60000, 256, false, true});
  add({"two blocks sort few slots", 1, 256, 2, 128, 128, 3, 256, true});
  Case tiles{"many tiles", 1, 256, 1, 300, 200, 20000, 256, true};
  tiles.hot = 0.002;
  tiles.window = 1;
  add(tiles);
  return cases;
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  using namespace sdm::test;
  int failures = test_bad_offsets();
  for (const Case& c : all_cases()) {
    failures += test_case(c);
  }
  std::printf("%d failures\n", failures);
  if (argc > 1 && std::string(argv[1]) == "time") {
    for (const bool gram : {true, false}) {
      time_shape(1, 8192, 64, 0.0, gram);
      time_shape(4, 4096, 128, 0.0, gram);
      time_shape(4, 4096, 128, 0.05, gram);
      time_shape(1, 32768, 64, 0.0, gram);
    }
  }
  return failures != 0;
}
