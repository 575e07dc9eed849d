// SPDX-License-Identifier: Apache-2.0
//! @file Pair stage of the CUDA backward against a plain double program on the host. Exits
//! with 1 on a failure. Run with "time" it also times some shapes. Build:
//!
//!   nvcc -I. -std=c++17 -O3 -arch=native -o test_pairs tests/cpp/test_pairs.cu
//!       sdm_kernels/sdm/cuda/sdm_pairs.cu && ./test_pairs [time]
//!
//! Every case runs over one window, once more (same bits), and over windows of one chunk (same
//! bits, although the sums over columns are then split over blocks).

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "sdm_kernels/sdm/cuda/sdm_pairs.h"
#include "tests/cpp/pairs_problem.h"

namespace {

using namespace pairs_test;

constexpr int kSentinel = 0x7f;  // bytes of outputs that nobody wrote: 3.4e38, or NaN in 16 bits

struct Outputs {
  std::vector<unsigned char> bytes[4];  // d_write_val, d_read_val, d_beta, d_g
};

struct DeviceOutputs {
  SdmPairGrads grads = {};
  size_t bytes[4] = {};

  void make(const Problem& p, Buffers* device) {
    const Case& c = p.c;
    const int64_t tokens = c.B * c.T * c.H;
    const int64_t counts[4] = {
        tokens * c.W, tokens * c.R, tokens, tokens * (c.gate_per_write ? c.W : 1)
    };
    void** data[4] = {&grads.d_write_val, &grads.d_read_val, &grads.d_beta, &grads.d_g};
    for (int x = 0; x < 4; ++x) {
      bytes[x] = static_cast<size_t>(counts[x] * element_size(c.values));
      *data[x] = device->bytes(bytes[x]);
      check(cudaMemset(*data[x], kSentinel, bytes[x]), "memset");
    }
  }

  Outputs fetch() const {
    Outputs out;
    const void* data[4] = {grads.d_write_val, grads.d_read_val, grads.d_beta, grads.d_g};
    for (int x = 0; x < 4; ++x) {
      out.bytes[x].resize(bytes[x]);
      check(cudaMemcpy(out.bytes[x].data(), data[x], bytes[x], cudaMemcpyDeviceToHost), "fetch");
    }
    return out;
  }
};

void run_window(Problem* p, const SdmWindow& window, const SdmPairGrads& grads, Grads* ref) {
  Buffers device;
  WindowData data;
  make_window(p, window, &device, &data, ref);
  const size_t size = sdm_pairs_workspace(p->inputs.dims, window);
  void* workspace = device.bytes(size);
  check(cudaMemset(workspace, 0xff, size), "memset");
  check(
      launch_sdm_pairs(
          p->inputs,
          window,
          data.records,
          data.dots,
          p->device_errors,
          p->d_out.view,
          grads,
          workspace,
          nullptr
      ),
      "launch"
  );
  check(cudaDeviceSynchronize(), "run");
}

bool same(const Outputs& a, const Outputs& b) {
  bool equal = true;
  for (int x = 0; x < 4; ++x) {
    equal = equal && a.bytes[x] == b.bytes[x];
  }
  return equal;
}

bool compare(
    const Case& c,
    const char* name,
    const std::vector<unsigned char>& got,
    const std::vector<double>& ref
) {
  double worst = 0, scale = 0;
  int64_t zeros = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double x = load_scalar(got.data(), c.values, static_cast<int64_t>(i));
    const double error = std::fabs(x - ref[i]);
    worst = error <= worst ? worst : error;  // keeps a NaN
    scale = std::max(scale, std::fabs(ref[i]));
    zeros += ref[i] == 0.0 && std::signbit(ref[i]) && x != 0.0;
  }
  const double eps = c.values == DType::kBf16 ? 0x1p-8 : c.values == DType::kF16 ? 0x1p-11 : 0;
  const bool ok = worst <= (2e-5 + eps) * scale && zeros == 0;
  std::printf(
      "    %-12s error %.1e of %.1e, %lld wrong zeros%s\n",
      name,
      worst,
      scale,
      static_cast<long long>(zeros),
      ok ? "" : "  FAILED"
  );
  return ok;
}

bool run_case(const Case& c) {
  std::printf("%s\n", c.name);
  Problem p;
  make_problem(c, &p);
  Grads ref;  // -0 where no entry has a gradient
  ref.d_k.assign(p.k.x.size(), -0.0);
  ref.d_q.assign(p.q.x.size(), -0.0);
  ref.d_beta.assign(p.beta.x.size(), -0.0);
  ref.d_g.assign(p.g.x.size(), -0.0);
  const SdmWindow whole = {0, p.most_chunks};
  DeviceOutputs first, second, single;
  first.make(p, &p.device);
  second.make(p, &p.device);
  single.make(p, &p.device);
  run_window(&p, whole, first.grads, &ref);
  run_window(&p, whole, second.grads, nullptr);
  for (int64_t k = 0; k < p.most_chunks; ++k) {
    run_window(&p, {k, 1}, single.grads, nullptr);
  }
  const Outputs out = first.fetch();
  bool ok = compare(c, "d_write_val", out.bytes[0], ref.d_k);
  ok &= compare(c, "d_read_val", out.bytes[1], ref.d_q);
  ok &= compare(c, "d_beta", out.bytes[2], ref.d_beta);
  ok &= compare(c, "d_g", out.bytes[3], ref.d_g);
  const bool again = same(out, second.fetch()), cut = same(out, single.fetch());
  std::printf("    same bits again: %d, chunk by chunk: %d\n", again, cut);
  return ok && again && cut;
}

void time_case(const Case& c) {
  Problem p;
  make_problem(c, &p);
  const SdmWindow window = {0, p.most_chunks};
  Buffers device;
  WindowData data;
  data.plain_dots = true;
  make_window(&p, window, &device, &data, nullptr);
  void* workspace = device.bytes(sdm_pairs_workspace(p.inputs.dims, window));
  DeviceOutputs out;
  out.make(p, &device);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  constexpr int kRuns = 20;
  for (int run = -3; run < kRuns; ++run) {
    if (run == 0) {
      check(cudaEventRecord(begin), "event");
    }
    check(
        launch_sdm_pairs(
            p.inputs,
            window,
            data.records,
            data.dots,
            p.device_errors,
            p.d_out.view,
            out.grads,
            workspace,
            nullptr
        ),
        "launch"
    );
  }
  check(cudaEventRecord(end), "event");
  check(cudaEventSynchronize(end), "run");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end), "event");
  std::printf("%s: %.1f us\n", c.name, static_cast<double>(ms) * 1e3 / kRuns);
}

}  // namespace

int main(int argc, char** argv) {
  const DType f32 = DType::kF32, bf16 = DType::kBf16, f16 = DType::kF16;
  // name; B, T, H, W, R, D, S, C; gate per write; bank, values, d_out; slices; unused, hot,
  // distinct; gates from, to; sequences
  // clang-format off
  const Case cases[] = {
      {"one token a chunk", 2, 5, 2, 3, 4, 8, 6, 1, false, f32, f32, f32, 1, 0.1, 0, false, -1, 0, {}},
      {"C 7, odd sizes", 2, 23, 3, 5, 3, 37, 16, 7, true, f32, f32, f32, 3, 0.1, 0, false, -1, 0.1, {}},
      {"C 64", 2, 200, 2, 8, 12, 320, 64, 64, false, f32, f32, f32, 5, 0, 0, true, -1, 0, {}},
      {"C 100, packed", 1, 331, 2, 9, 4, 96, 50, 100, true, f32, f32, bf16, 2, 0.2, 0.1, false, -1, 0,
       {0, 7, 7, 300, 331}},
      {"C 256, hot slot", 1, 600, 1, 4, 6, 64, 300, 256, true, f32, f32, f32, 2, 0.1, 0.6, true, -0.1, 0, {}},
      {"C 256, repeats of a hot slot", 1, 256, 1, 6, 5, 64, 30, 256, false, f32, f32, f32, 2, 0.1, 0.7,
       false, -0.1, 0, {}},
      {"bf16", 2, 150, 2, 16, 8, 256, 100, 64, false, bf16, bf16, bf16, 4, 0.1, 0.1, true, -1, 0, {}},
      {"f16, gate per write", 2, 150, 2, 8, 16, 264, 100, 64, true, f16, f16, f16, 4, 0.1, 0.1, true, -1, 0, {}},
      {"bf16 bank, f32 weights", 1, 300, 2, 8, 8, 768, 64, 100, true, bf16, f32, f16, 16, 0, 0, true, -1, 0, {}},
      {"no gates", 1, 100, 1, 4, 4, 32, 8, 64, true, f32, f32, f32, 1, 0, 0, false, 0, 0, {}},
      {"steep gates", 1, 100, 1, 4, 4, 32, 8, 64, true, f32, f32, f32, 1, 0, 0, false, -1e4, 0, {}},
      {"no lane used", 1, 20, 1, 4, 4, 32, 8, 16, true, f32, f32, f32, 1, 1, 0, false, -1, 0, {}},
      {"whole bank each token", 1, 256, 1, 32, 32, 64, 32, 128, false, f32, f32, f32, 1, 0, 0, false, -0.1, 0, {}},
      {"many chunks, columns split or not", 1, 1040, 4, 4, 4, 520, 64, 16, true, bf16, f32, bf16, 2, 0, 0,
       true, -1, 0, {}},
      {"the same in f32", 1, 1040, 4, 4, 4, 3000, 64, 16, true, f32, f32, f32, 2, 0, 0, true, -1, 0, {}},
  };
  const Case shapes[] = {
      {"N 1, H 2, T 8192, W R 64, D 1024, C 256, bf16, 16 slices", 1, 8192, 2, 64, 64, 1024, 65536, 256,
       false, bf16, bf16, bf16, 16, 0, 0, false, -1, 0, {}},
      {"the same, f32 bank, 32 slices", 1, 8192, 2, 64, 64, 1024, 65536, 256,
       false, f32, f32, f32, 32, 0, 0, false, -1, 0, {}},
      {"N 4, H 2, T 4096, W R 128, D 1024, C 256, bf16, 16 slices", 4, 4096, 2, 128, 128, 1024, 65536, 256,
       false, bf16, bf16, bf16, 16, 0, 0, false, -1, 0, {}},
      {"N 4, H 8, T 4096, W R 32, D 128, C 256, bf16, 2 slices", 4, 4096, 8, 32, 32, 128, 16384, 256,
       false, bf16, bf16, bf16, 2, 0, 0, false, -1, 0, {}},
      {"first shape, 6 % of the lanes on one slot", 1, 8192, 2, 64, 64, 1024, 65536, 256,
       false, bf16, bf16, bf16, 16, 0, 0.06, false, -0.1, 0, {}},
      {"first shape, 64 slots", 1, 8192, 2, 64, 64, 1024, 64, 256,
       false, bf16, bf16, bf16, 16, 0, 0, false, -0.1, 0, {}},
  };
  // clang-format on
  bool ok = true;
  for (const Case& c : cases) {
    ok &= run_case(c);
  }
  const bool timed = argc > 1 && std::strcmp(argv[1], "time") == 0;
  for (const Case& c : shapes) {
    if (timed) {
      time_case(c);
    }
  }
  std::printf(ok ? "all passed\n" : "FAILED\n");
  return ok ? 0 : 1;
}
