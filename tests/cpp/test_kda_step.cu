// SPDX-License-Identifier: Apache-2.0
//! @file The decode step of Kimi delta attention against the token recurrence in double.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times some shapes. Build:
//! nvcc -std=c++17 -O3 -I. -arch=sm_90 tests/cpp/test_kda_step.cu
//! sdm_kernels/kda/cuda/kda_step.cu
#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "tests/cpp/kda_device.h"

namespace sdm::test {
namespace {

struct StepCase {
  KdaCase kda;
  bool indexed = false;  // a pool with rows in another order, some sequences skipped
  bool wide_indices = true;
  int64_t state_pad = 0;  // unused elements behind each run of the state's last dimension
};

// The states of a case in the rows of a pool; the rest is NaN.
struct Pool {
  std::vector<uint8_t> bytes;
  kda::KdaStateView view;
  int64_t rows;
};

Pool make_pool(const StepCase& s, const KdaProblem& p, const std::vector<int64_t>& rows) {
  const KdaCase& c = s.kda;
  const int64_t runs = c.v_first ? c.V : c.K, run = (c.v_first ? c.K : c.V) + s.state_pad;
  Pool pool;
  pool.rows = p.N + (s.indexed ? 2 : 0);
  pool.bytes.assign(
      static_cast<size_t>(pool.rows * c.HV * runs * run * element_size(c.state_dtype)), 0xff
  );
  pool.view = {
      nullptr,
      c.state_dtype,
      {c.HV * runs * run, runs * run, c.v_first ? 1 : run, c.v_first ? run : 1}
  };
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t row = rows[static_cast<size_t>(n)];
    for (int64_t e = 0; row >= 0 && row < pool.rows && e < c.HV * c.K * c.V; ++e) {
      const int64_t at = row * pool.view.stride[0] + e / (c.K * c.V) * pool.view.stride[1] +
                         e / c.V % c.K * pool.view.stride[2] + e % c.V * pool.view.stride[3];
      store_scalar(
          pool.bytes.data(),
          c.state_dtype,
          at,
          p.initial[static_cast<size_t>(n * c.HV * c.K * c.V + e)]
      );
    }
  }
  return pool;
}

int test_case(const StepCase& s) {
  const KdaCase& c = s.kda;
  KdaProblem p = make_problem(c);
  solve(&p);
  const KdaDevice d(p);
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < p.N; ++n) {
    rows.push_back(!s.indexed ? n : n % 4 == 1 ? -1 : n % 4 == 3 ? p.N + 100 : p.N - n);
  }
  Pool pool = make_pool(s, p, rows);
  const std::vector<uint8_t> before = pool.bytes;
  const DeviceBytes states(pool.bytes);
  pool.view.data = states.data();
  std::vector<uint8_t> index_bytes(rows.size() * 8);
  for (size_t n = 0; n < rows.size(); ++n) {
    const int32_t narrow = static_cast<int32_t>(rows[n]);
    if (s.wide_indices) {
      std::memcpy(index_bytes.data() + 8 * n, &rows[n], 8);
    } else {
      std::memcpy(index_bytes.data() + 4 * n, &narrow, 4);
    }
  }
  const DeviceBytes indices(index_bytes);
  const DeviceBytes out(c.B * c.T * c.HV * c.V * element_size(c.dtype));
  kda::KdaCudaStepParams params{};
  params.base.dims = d.dims();
  params.base.options = d.options();
  params.base.tokens = d.tokens();
  params.base.pool = pool.rows;
  params.base.initial = pool.view;
  params.base.final_state = pool.view;
  params.base.out = out.data();
  params.cu_seqlens = d.cu_seqlens();
  params.state_indices = {s.indexed ? indices.data() : nullptr, s.wide_indices};
  check(kda::launch_kda_step(params, nullptr), "launch_kda_step");
  check(cudaDeviceSynchronize(), "step");

  int wrong = 0;
  const auto live = [&](int64_t n) {
    const int64_t row = rows[static_cast<size_t>(n)];
    return row >= 0 && row < pool.rows;
  };
  for (int64_t n = 0; n < p.N; ++n) {
    const bool packed = !p.offsets.empty();
    const int64_t begin = packed ? p.offsets[static_cast<size_t>(n)] : n * c.T;
    const int64_t end = packed ? p.offsets[static_cast<size_t>(n + 1)] : begin + c.T;
    for (int64_t e = begin * c.HV * c.V; !live(n) && e < end * c.HV * c.V; ++e) {
      p.out[static_cast<size_t>(e)] = 0;
    }
  }
  const double out_error = relative_error(to_doubles(out.fetch("out"), c.dtype), p.out);
  const std::vector<uint8_t> after = states.fetch("states");
  // new states where sequences are, everything else as it was
  std::vector<uint8_t> expected_places(before.size(), 0);
  std::vector<double> got, want;
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t e = 0; live(n) && e < c.HV * c.K * c.V; ++e) {
      const int64_t at = rows[static_cast<size_t>(n)] * pool.view.stride[0] +
                         e / (c.K * c.V) * pool.view.stride[1] +
                         e / c.V % c.K * pool.view.stride[2] + e % c.V * pool.view.stride[3];
      got.push_back(load_scalar(after.data(), c.state_dtype, at));
      want.push_back(p.final_state[static_cast<size_t>(n * c.HV * c.K * c.V + e)]);
      const int64_t size = element_size(c.state_dtype);
      for (int64_t byte = at * size; byte < (at + 1) * size; ++byte) {
        expected_places[static_cast<size_t>(byte)] = 1;
      }
    }
  }
  for (size_t i = 0; i < before.size(); ++i) {
    wrong += expected_places[i] == 0 && before[i] != after[i];
  }
  const double state_error = relative_error(got, want);
  const auto limit = [](DType dtype) {
    return dtype == DType::kBf16 ? 4e-3 : dtype == DType::kF16 ? 1e-3 : 2e-6;
  };
  wrong += !(out_error <= limit(c.dtype)) + !(state_error <= limit(c.state_dtype));
  std::printf(
      "%-4s %s: out %.1e state %.1e\n", wrong == 0 ? "ok" : "FAIL", c.name, out_error, state_error
  );
  return wrong != 0;
}

std::vector<StepCase> all_cases() {
  std::vector<StepCase> cases;
  const auto add = [&](const char* name, auto&& change) {
    StepCase s{KdaCase{name}};
    s.kda.B = 6;
    s.kda.T = 1;
    s.kda.K = s.kda.V = 128;
    change(&s);
    cases.push_back(s);
  };
  add("one token", [](StepCase*) {});
  add("V first", [](StepCase* s) { s->kda.v_first = true; });
  add("four tokens, pool", [](StepCase* s) { s->kda.T = 4, s->indexed = true; });
  add("pool, int32, V first", [](StepCase* s) {
    s->kda.T = 3, s->kda.v_first = true, s->indexed = true, s->wide_indices = false;
  });
  add("bfloat16 pool", [](StepCase* s) {
    s->kda.dtype = s->kda.gate_dtype = s->kda.state_dtype = DType::kBf16, s->indexed = true;
  });
  add("bfloat16 pool, V first", [](StepCase* s) {
    s->kda.state_dtype = DType::kBf16, s->kda.v_first = true, s->kda.dtype = DType::kF16;
  });
  add("K=16, V=48", [](StepCase* s) { s->kda.K = 16, s->kda.V = 48, s->kda.T = 5; });
  add("K=80, V=16, V first, 2 -> 6 heads", [](StepCase* s) {
    s->kda.K = 80, s->kda.V = 16, s->kda.v_first = true, s->kda.H = 2, s->kda.HV = 6;
  });
  add("K=256, V=112", [](StepCase* s) { s->kda.K = 256, s->kda.V = 112, s->kda.T = 2; });
  add("K=240, V=256, V first",
      [](StepCase* s) { s->kda.K = 240, s->kda.V = 256, s->kda.v_first = true; });
  add("unaligned state", [](StepCase* s) { s->state_pad = 3, s->kda.T = 2; });
  add("unaligned state, V first", [](StepCase* s) { s->state_pad = 5, s->kda.v_first = true; });
  add("strided tokens, softplus",
      [](StepCase* s) { s->kda.pad = 3, s->kda.T = 16, s->kda.gate = KdaGate::kSoftplus; });
  add("given g and beta, no norm", [](StepCase* s) {
    s->kda.gate = KdaGate::kActivated, s->kda.beta = KdaBeta::kActivated, s->kda.l2norm = false;
    s->kda.A_log = s->kda.dt_bias = false, s->kda.T = 7;
  });
  add("packed", [](StepCase* s) {
    s->kda.B = 1, s->kda.T = 11, s->kda.lengths = {1, 0, 4, 3, 2, 1}, s->indexed = true;
    s->kda.K = s->kda.V = 64;
  });
  return cases;
}

// Mean time of a step in a chain of steps over a float32 pool, and the share of bytes moved.
void time_shape(int64_t N, int64_t heads, int64_t T, bool v_first) {
  StepCase s{KdaCase{"time"}};
  KdaCase& c = s.kda;
  c.B = N;
  c.T = T;
  c.H = c.HV = heads;
  c.K = c.V = 128;
  c.dtype = c.gate_dtype = c.beta_dtype = DType::kBf16;
  c.initial = c.d_final = false;
  c.gate_mean = -1;
  c.v_first = v_first;
  const KdaProblem p = make_problem(c);
  const KdaDevice d(p);
  const int64_t state = heads * c.K * c.V;
  const DeviceBytes states(std::vector<uint8_t>(static_cast<size_t>(N * state * 4), 0));
  const DeviceBytes out(N * T * heads * c.V * 2);
  kda::KdaCudaStepParams params{};
  params.base.dims = d.dims();
  params.base.options = d.options();
  params.base.tokens = d.tokens();
  params.base.pool = N;
  params.base.initial = params.base.final_state = state_view(states.data(), DType::kF32, c);
  params.base.out = out.data();
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  constexpr int kSteps = 200;
  for (int i = 0; i < kSteps + 20; ++i) {
    if (i == 20) {
      check(cudaEventRecord(start), "event");
    }
    check(kda::launch_kda_step(params, nullptr), "launch_kda_step");
  }
  check(cudaEventRecord(stop), "event");
  check(cudaEventSynchronize(stop), "event");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, start, stop), "event");
  const double us = 1e3 * static_cast<double>(ms) / kSteps;
  std::printf(
      "time N=%lld H=%lld T=%lld K=V=128 float32%s: %.2f us, %.2f TB/s of states\n",
      static_cast<long long>(N),
      static_cast<long long>(heads),
      static_cast<long long>(T),
      v_first ? " V first" : "",
      us,
      static_cast<double>(N * state * 8) / us * 1e-6
  );
}

}  // namespace
}  // namespace sdm::test

int main(int argc, char** argv) {
  using namespace sdm::test;
  int failures = 0;
  for (const StepCase& s : all_cases()) {
    failures += test_case(s);
  }
  std::printf("%d failures\n", failures);
  if (argc > 1 && std::string(argv[1]) == "time") {
    for (const bool v_first : {false, true}) {
      time_shape(1, 32, 1, v_first);
      time_shape(16, 32, 1, v_first);
      time_shape(128, 32, 1, v_first);
      time_shape(128, 32, 4, v_first);
    }
  }
  return failures != 0;
}
