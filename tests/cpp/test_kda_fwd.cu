// SPDX-License-Identifier: Apache-2.0
//! @file The tensor-core forward of Kimi delta attention against the token recurrence in double,
//! and its speed.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times shapes, as a whole
//! and the preparation alone; with "speed" it only does that; with another word it runs only the
//! cases that have it in their name. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90a
//! tests/cpp/test_kda_fwd.cu sdm_kernels/kda/cuda/kda_tensor_prep.cu
//! sdm_kernels/kda/cuda/kda_tensor_fwd.cu sdm_kernels/kda/cuda/kda_tensor_segments.cu
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "tests/cpp/kda_time.h"

namespace sdm::test {
namespace {

using Bytes = std::vector<uint8_t>;

struct Answer {
  Bytes out, final_state, chunk_states;

  bool operator==(const Answer& other) const {
    return out == other.out && final_state == other.final_state &&
           chunk_states == other.chunk_states;
  }
};

Answer run(const KdaProblem& p) {
  const KdaDevice device(p);
  const KdaForward fwd(device);
  const DeviceBytes workspace(static_cast<int64_t>(kda::kda_tensor_fwd_workspace(fwd.params)));
  check(kda::launch_kda_tensor_fwd(fwd.params, workspace.data(), nullptr), "launch_kda_tensor_fwd");
  check(cudaDeviceSynchronize(), "kda_tensor_fwd");
  workspace.fetch("workspace");
  return {
      fwd.out.fetch("out"),
      fwd.final_state.fetch("final_state"),
      fwd.chunk_states.fetch("chunk_states")
  };
}

constexpr double kBf16Limit = 2.6e-3;

struct Test {
  KdaCase c;
  double limit;  // of the relative L2 errors; states in bfloat16 are never held to less than theirs
};

int test_case(const Test& test) {
  const KdaCase& c = test.c;
  KdaProblem p = make_problem(c);
  solve(&p, false);
  const Answer got = run(p);
  const auto state_error = [&](const Bytes& bytes, DType dtype, const std::vector<double>& want) {
    const std::vector<double> values = to_doubles(bytes, dtype);
    return relative_error(c.v_first ? swap_last(values, c.V, c.K) : values, want, c.v_size);
  };
  const DType saved_dtype = c.saved == 2 ? DType::kBf16 : DType::kF32;
  const double out = relative_error(to_doubles(got.out, c.dtype), p.out, c.v_size);
  const double final_state = state_error(got.final_state, DType::kF32, p.final_state);
  const double chunks =
      c.saved == 0 ? 0 : state_error(got.chunk_states, saved_dtype, p.chunk_states);
  const double chunks_limit = c.saved == 2 ? std::max(test.limit, kBf16Limit) : test.limit;
  const bool good = out <= test.limit && final_state <= test.limit && chunks <= chunks_limit;
  const bool same = run(p) == got;
  std::printf(
      "%-4s %-34s out %.2e  final %.2e  chunks %.2e%s\n",
      good && same ? "ok" : "FAIL",
      c.name,
      out,
      final_state,
      chunks,
      same ? "" : "  two runs differ"
  );
  return good && same ? 0 : 1;
}

// That `part` lies in `whole`, behind `begin` bytes.
bool lies_at(const Bytes& part, const Bytes& whole, size_t begin) {
  return begin + part.size() <= whole.size() &&
         std::equal(part.begin(), part.end(), whole.begin() + static_cast<int64_t>(begin));
}

// Rows do not depend on later ones, sequences not on those packed beside them, bit for bit.
int test_bits(const KdaCase& c) {
  const KdaProblem p = make_problem(c);
  const Answer whole = run(p);
  const size_t row = static_cast<size_t>(c.HV * c.V * 2);
  const size_t state = static_cast<size_t>(c.HV * c.K * c.V * 4);
  bool same = true;
  if (c.lengths.empty()) {
    for (const int64_t tokens : std::vector<int64_t>{1, 17, 64, 100, 1024, 1025, 2049, c.T - 1}) {
      if (tokens < c.T) {
        same = same && lies_at(run(part_of(p, 0, tokens, 0)).out, whole.out, 0);
      }
    }
  }
  for (size_t n = 0; n < c.lengths.size(); ++n) {
    const int64_t begin = p.offsets[n], end = p.offsets[n + 1];
    const Answer part = run(part_of(p, begin, end, static_cast<int64_t>(n)));
    same = same && lies_at(part.out, whole.out, row * static_cast<size_t>(begin));
    same = same && lies_at(part.final_state, whole.final_state, state * n);
  }
  std::printf("%-4s %s\n", same ? "ok" : "FAIL", c.name);
  return same ? 0 : 1;
}

std::vector<Test> all_tests() {
  std::vector<Test> tests;
  const auto add = [&](const char* name, auto&& change, double limit = kBf16Limit) {
    KdaCase c{name};
    c.T = 130;
    c.HV = 1;
    c.K = c.V = 128;
    c.dtype = c.gate_dtype = DType::kBf16;
    c.saved = 2;
    c.rows_behind = 2;
    c.int64_offsets = false;
    change(&c);
    tests.push_back({c, limit});
  };
  for (const int64_t T : {1, 15, 16, 17, 63, 64, 65, 130}) {
    add(T == 1 ? "T=1" : (T < 64 ? "T<64" : "T>=64"), [&](KdaCase* c) {
      c->T = T, c->rows_behind = T % 2;  // also tensors at whose end the memory ends
    });
  }
  add("batch, GVA, V first",
      [](KdaCase* c) { c->B = 3, c->T = 100, c->H = 2, c->HV = 4, c->v_first = true; });
  add(
      "batch, GVA, V first, fp16, float states",
      [](KdaCase* c) {
        c->B = 3, c->T = 100, c->H = 2, c->HV = 4, c->v_first = true, c->saved = 1;
        c->dtype = c->gate_dtype = DType::kF16, c->beta_dtype = DType::kBf16;
      },
      1.2e-3
  );
  add("K=V=64", [](KdaCase* c) { c->K = c->V = 64; });
  add("K=64 V=128 strided", [](KdaCase* c) {
    c->K = 64, c->v_first = true, c->state_dtype = DType::kBf16;
    c->heads_outer = true, c->pad = 1;
  });
  add(
      "K=128 V=64 fp16 strided",
      [](KdaCase* c) {
        c->V = 64, c->v_first = true, c->state_dtype = DType::kBf16;
        c->heads_outer = true, c->pad = 1, c->dtype = DType::kF16, c->gate_dtype = DType::kF32;
      },
      1.2e-3
  );
  add("eleven chunks", [](KdaCase* c) { c->T = 700, c->H = c->HV = 2; });
  add("many heads", [](KdaCase* c) { c->T = 70, c->H = c->HV = 66; });
  add("no states, no A_log, no bias", [](KdaCase* c) {
    c->T = 700, c->H = c->HV = 2, c->initial = c->A_log = c->dt_bias = false, c->saved = 0;
  });
  add("softplus gate", [](KdaCase* c) {
    c->T = 300, c->gate = KdaGate::kSoftplus, c->gate_mean = -2, c->gate_spread = 3;
  });
  add("softplus gate, +-30",
      [](KdaCase* c) { c->T = 300, c->gate = KdaGate::kSoftplus, c->gate_spread = 30; });
  add("gates -60, -1e-6 and between", [](KdaCase* c) {
    c->T = 300, c->gate = KdaGate::kActivated, c->gate_dtype = DType::kF32, c->gate_spread = 30;
    c->mixed_gates = true;
  });
  add("slow decay, beta to 2", [](KdaCase* c) {
    c->T = 300, c->gate = KdaGate::kActivated, c->gate_dtype = DType::kF32, c->gate_spread = 0.03;
    c->beta = KdaBeta::kTwoSigmoid;
  });
  const auto low_bound = [](KdaCase* c) {
    c->T = 300, c->gate_dtype = DType::kF32, c->gate_spread = 2, c->lower_bound = -50;
    c->beta = KdaBeta::kTwoSigmoid;
  };
  add("lower bound -50", low_bound);
  add("beta logits far out",
      [&](KdaCase* c) { low_bound(c), c->beta_mean = -90, c->beta_spread = 60; });
  const auto keys = [&](const char* name, double alike, int64_t run, double beta, double limit) {
    add(
        name,
        [&](KdaCase* c) {
          c->T = 300, c->gate = KdaGate::kActivated, c->gate_dtype = DType::kF32;
          c->gate_spread = 0.001, c->beta = KdaBeta::kActivated, c->fixed_beta = beta;
          c->alike = alike, c->run = run;
        },
        limit
    );
  };
  keys("similar keys", 0.77, 1, 0.99, 3.4e-3);
  keys("identical keys", 1, 1, 0.99, 3.4e-3);
  keys("sixteen identical keys, beta 1.99", 0, 16, 1.99, 2e-2);
  keys("64 identical keys, beta 1.99", 0, 64, 1.99, 2e-2);
  keys("similar keys, beta 1.99", 0.77, 1, 1.99, 2e-2);
  const auto no_norm = [&](const char* name, double v_size, double outlier) {
    add(name, [&](KdaCase* c) {
      c->T = 200, c->l2norm = false, c->v_size = v_size, c->outlier = outlier;
    });
  };
  no_norm("no norm", 1, 1);
  no_norm("tiny values", 1e-20, 1);
  no_norm("huge values", 1e20, 1);
  no_norm("outliers in v", 1, 3e4);
  const auto packed = [](KdaCase* c) {
    c->lengths = {0, 100, 0, 0, 1, 63, 64, 65, 137, 0}, c->T = 430, c->H = c->HV = 2;
  };
  add("packed", packed);
  add("packed, int64 offsets", [&](KdaCase* c) {
    packed(c), c->int64_offsets = true, c->v_first = true, c->rows_behind = 0;
  });
  add("three segments", [](KdaCase* c) { c->T = 2500, c->HV = 2; });
  add("one segment", [](KdaCase* c) { c->T = 1024, c->HV = 2; });
  add("a segment and a token", [](KdaCase* c) { c->T = 1025, c->HV = 2, c->saved = 1; });
  add("segments, K=64 V=128 strided", [](KdaCase* c) {
    c->B = 2, c->T = 1300, c->K = 64, c->v_first = true, c->heads_outer = true, c->pad = 1;
  });
  add(
      "segments, K=128 V=64 fp16",
      [](KdaCase* c) { c->T = 1300, c->V = 64, c->dtype = DType::kF16, c->initial = false; },
      1.2e-3
  );
  add("segments, no norm, huge values",
      [](KdaCase* c) { c->T = 2300, c->l2norm = false, c->v_size = 1e20; });
  add(
      "segments, similar keys",
      [](KdaCase* c) {
        c->T = 3000, c->gate = KdaGate::kActivated, c->gate_dtype = DType::kF32;
        c->gate_spread = 0.001, c->beta = KdaBeta::kActivated, c->fixed_beta = 0.99;
        c->alike = 0.77;
      },
      3.4e-3
  );
  // What a chunk leaves of a transition is 0 in fp16 and not in float.
  add("segments, decay of 2^-37 a chunk", [](KdaCase* c) {
    c->T = 2500, c->gate_dtype = DType::kF32, c->gate_mean = -2.44, c->gate_spread = 0.05;
    c->A_log = c->dt_bias = false;
  });
  add("segments, packed",
      [](KdaCase* c) { c->lengths = {1024, 0, 1025, 2300, 1, 63, 2048}, c->T = 6461; });
  const auto long_windows = [](KdaCase* c) {
    c->T = 35000, c->H = c->HV = 8, c->K = c->V = 64, c->saved = 0;
  };
  add("segments, two windows", long_windows);
  add("segments, packed, two windows",
      [&](KdaCase* c) { long_windows(c), c->lengths = {9000, 0, 70, 24600, 1, 1329}; });
  // So many heads that a window holds few chunks.
  const auto windows = [](KdaCase* c) { c->T = 330, c->H = 200, c->HV = 400, c->K = c->V = 64; };
  add("two windows", windows);
  add("packed, four windows",
      [&](KdaCase* c) { windows(c), c->lengths = {65, 0, 1, 140, 0, 124}; });
  add("two groups of two windows",
      [&](KdaCase* c) { windows(c), c->B = 5, c->T = 200, c->H = 120, c->HV = 240; });
  return tests;
}

// Medians of the forward, and of its preparation alone in windows of the same size.
void time_shape(int64_t B, int64_t T, int64_t heads, bool states) {
  constexpr int64_t kK = KdaLargeInputs::kK, kV = KdaLargeInputs::kV;
  const KdaLargeInputs in(B, T, heads);
  const DeviceBytes out(in.rows() * kV * 2), final_state(B * heads * kK * kV * 4);
  const DeviceBytes chunk_states(states ? in.chunk_rows() * heads * kK * kV * 2 : int64_t{0});
  kda::KdaCudaFwdParams p{};
  p.base.dims = in.dims;
  p.base.options = in.options();
  p.base.tokens = in.tokens();
  p.base.final_state = {final_state.data(), DType::kF32, {heads * kK * kV, kK * kV, kV, 1}};
  p.base.chunk_states = {states ? chunk_states.data() : nullptr, DType::kBf16, false};
  p.base.out = out.data();
  const int64_t bytes = static_cast<int64_t>(kda::kda_tensor_fwd_workspace(p));
  const DeviceBytes workspace(bytes);

  kda::KdaPrepParams prep{in.dims, p.base.options, p.base.tokens, {}, {}, {}};
  prep.records = {static_cast<char*>(workspace.data()), kda::KdaRecord<kK>::kForwardBytes};
  const kda::KdaWindowPlan plan = kda::kda_window_plan(in.dims, false, 1584);

  Stopwatch time;
  std::vector<float> whole, preparation;
  for (int i = 0; i < 15; ++i) {
    const float w = time([&] { return kda::launch_kda_tensor_fwd(p, workspace.data(), nullptr); });
    const float r = time([&] {
      cudaError_t error = cudaSuccess;
      for (int64_t window = 0; window < plan.num_windows() && error == cudaSuccess; ++window) {
        prep.window = plan.window(window);
        error = kda::launch_kda_tensor_prep(prep, nullptr);
      }
      return error;
    });
    if (i >= 5) {
      whole.push_back(w);
      preparation.push_back(r);
    }
  }
  std::printf(
      "time B=%lld T=%lld H=%lld states=%d: forward %.3f ms, prep alone %.3f ms, %lld windows, "
      "workspace %.0f MB\n",
      static_cast<long long>(B),
      static_cast<long long>(T),
      static_cast<long long>(heads),
      states,
      median(whole),
      median(preparation),
      static_cast<long long>(plan.num_windows()),
      static_cast<double>(bytes) * 1e-6
  );
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  using namespace sdm::test;
  const std::string mode = argc > 1 ? argv[1] : "";
  int failures = 0;
  for (const Test& test : all_tests()) {
    const bool named = std::string(test.c.name).find(mode) != std::string::npos;
    if (mode == "time" || named) {
      failures += test_case(test);
    }
  }
  if (mode.empty() || mode == "time" || mode == "bits") {
    KdaCase c{"a prefix has the same bits"};
    c.T = 200;
    c.H = c.HV = 2;
    c.K = c.V = 128;
    c.dtype = c.gate_dtype = sdm::DType::kBf16;
    c.saved = 2;
    failures += test_bits(c);
    c.name = "packed sequences have the bits of single ones";
    c.lengths = {70, 1, 0, 129};
    failures += test_bits(c);
    c.name = "a prefix of segments has the same bits";
    c.lengths = {};
    c.T = 2200;
    failures += test_bits(c);
    c.name = "packed segments have the bits of single ones";
    c.lengths = {1025, 0, 1024, 2049};
    c.T = 4098;
    failures += test_bits(c);
  }
  std::printf("%d failures\n", failures);
  if (mode == "time" || mode == "speed") {
    for (const bool states : {false, true}) {
      time_shape(1, 8192, 96, states);
      time_shape(1, 8192, 64, states);
      time_shape(1, 8192, 32, states);
      time_shape(8, 2048, 32, states);
      time_shape(1, 32768, 32, states);
      time_shape(1, 8192, 8, states);
    }
  }
  return failures != 0;
}
