// SPDX-License-Identifier: Apache-2.0
//! @file The tensor-core forward of Kimi delta attention against the token recurrence in double,
//! and its speed.
//!
//! Standalone: returns 0 when every case agrees. Run with "time" it also times shapes, as a whole
//! and the preparation alone; with "speed" it only does that; with another word it runs only the
//! cases that have it in their name. Build: nvcc -std=c++17 -O3 -I. -arch=sm_90a
//! tests/cpp/test_kda_fwd.cu sdm_kernels/kda/cuda/kda_tensor_prep.cu
//! sdm_kernels/kda/cuda/kda_tensor_fwd.cu
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "tests/cpp/kda_case.h"
#include "tests/cpp/kda_fwd_call.h"

namespace sdm::kda::test {
namespace {

// Relative L2 error; NaN where the reference has none counts as infinite. What has decayed to less
// than 1e-15 of `size` counts as zero.
struct Error {
  double size;
  double wrong = 0.0, total = 0.0;

  void add(double got, double want) {
    const double diff = std::isfinite(got) ? got - want : INFINITY;
    wrong += diff * diff;
    total += want * want + 1e-30 * size * size;
  }

  double value() const { return total > 0 ? std::sqrt(wrong / total) : std::sqrt(wrong); }
};

int judge(const HostInputs& in, const GpuAnswer& got) {
  const KdaDims& d = in.dims;
  const HostAnswer want = reference(in);
  Error out{in.c.v_size}, final_state{in.c.v_size}, chunk_states{in.c.v_size};
  for (size_t i = 0; i < want.out.size(); ++i) {
    out.add(load_scalar(got.out.data(), in.c.dtype, static_cast<int64_t>(i)), want.out[i]);
  }
  int64_t stride[4];
  state_strides(d, in.c.v_first, stride);
  const auto at = [&](int64_t x) {
    return x / (d.K * d.V) * d.K * d.V + x / d.V % d.K * stride[2] + x % d.V * stride[3];
  };
  for (size_t i = 0; i < want.final_state.size(); ++i) {
    const int64_t from = at(static_cast<int64_t>(i));
    final_state.add(load_scalar(got.final_state.data(), DType::kF32, from), want.final_state[i]);
  }
  if (in.c.chunk_states != 0) {
    const DType dtype = in.c.chunk_states == 2 ? DType::kF32 : DType::kBf16;
    for (size_t i = 0; i < want.chunk_states.size(); ++i) {
      if (std::isfinite(want.chunk_states[i])) {
        const int64_t from = at(static_cast<int64_t>(i));
        chunk_states.add(load_scalar(got.chunk_states.data(), dtype, from), want.chunk_states[i]);
      }
    }
  }
  const double limit = in.c.limit;
  const bool ok =
      out.value() <= limit && final_state.value() <= limit && chunk_states.value() <= limit;
  std::printf(
      "%-4s %-34s out %.2e  final %.2e  chunks %.2e\n",
      ok ? "ok" : "FAIL",
      in.c.name,
      out.value(),
      final_state.value(),
      chunk_states.value()
  );
  return ok ? 0 : 1;
}

int test_case(const Case& c) {
  int failures = 0;
  const HostInputs in = make_inputs(c);
  const GpuAnswer answer = run(in, &failures);
  failures += judge(in, answer);
  const GpuAnswer again = run(in, &failures);
  if (answer.out != again.out || answer.final_state != again.final_state ||
      answer.chunk_states != again.chunk_states) {
    std::printf("FAIL %s: two runs differ\n", c.name);
    ++failures;
  }
  return failures;
}

// The first `tokens` tokens of a tensor.
HostTensor cut(const HostTensor& x, const Case& c, int64_t begin, int64_t tokens) {
  std::vector<double> values;
  for (int64_t t = begin; t < begin + tokens; ++t) {
    for (int64_t i = 0; i < x.heads * x.last; ++i) {
      values.push_back(x.values[static_cast<size_t>(t * x.heads * x.last + i)]);
    }
  }
  return make_tensor(values, c, x.heads, x.last, x.view.dtype);
}

// Tokens [begin, begin + tokens) of a batch of one as a call of its own, from state row `n`.
HostInputs part_of(const HostInputs& in, int64_t begin, int64_t tokens, int64_t n) {
  HostInputs part = in;
  part.c.T = tokens;
  part.c.lengths.clear();
  part.dims.T = tokens;
  part.dims.N = 1;
  part.offsets = {0};
  part.q = cut(in.q, part.c, begin, tokens);
  part.k = cut(in.k, part.c, begin, tokens);
  part.v = cut(in.v, part.c, begin, tokens);
  part.g = cut(in.g, part.c, begin, tokens);
  part.beta = cut(in.beta, part.c, begin, tokens);
  const size_t state = static_cast<size_t>(in.dims.HV * in.dims.K * in.dims.V);
  if (!in.initial.empty()) {
    const auto from = in.initial.begin() + static_cast<int64_t>(state) * n;
    part.initial.assign(from, from + static_cast<int64_t>(state));
  }
  return part;
}

bool same_bits(const Bytes& a, size_t a_begin, const Bytes& b, size_t b_begin, size_t count) {
  return a_begin + count <= a.size() && b_begin + count <= b.size() &&
         std::memcmp(a.data() + a_begin, b.data() + b_begin, count) == 0;
}

// Rows do not depend on later ones, sequences not on those packed beside them, bit for bit.
int test_bits(Case c, const char* name) {
  int failures = 0;
  const HostInputs in = make_inputs(c);
  const GpuAnswer whole = run(in, &failures);
  const size_t row = static_cast<size_t>(c.HV * c.V * 2);
  const size_t state = static_cast<size_t>(c.HV * c.K * c.V * 4);
  bool same = true;
  if (c.lengths.empty()) {
    for (int64_t tokens : {int64_t{1}, int64_t{17}, int64_t{64}, int64_t{100}, c.T - 1}) {
      if (tokens < c.T) {
        const GpuAnswer part = run(part_of(in, 0, tokens, 0), &failures);
        same = same && same_bits(whole.out, 0, part.out, 0, row * static_cast<size_t>(tokens));
      }
    }
  } else {
    for (size_t n = 0; n < c.lengths.size(); ++n) {
      if (c.lengths[n] > 0) {
        const GpuAnswer part =
            run(part_of(in, in.offsets[n], c.lengths[n], static_cast<int64_t>(n)), &failures);
        same = same && same_bits(
                           whole.out,
                           row * static_cast<size_t>(in.offsets[n]),
                           part.out,
                           0,
                           row * static_cast<size_t>(c.lengths[n])
                       );
        same = same && same_bits(whole.final_state, state * n, part.final_state, 0, state);
      }
    }
  }
  std::printf("%-4s %s\n", same ? "ok" : "FAIL", name);
  return failures + (same ? 0 : 1);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, Case c) {
    c.name = name;
    cases.push_back(c);
  };
  const Case base{"", 1, 130, 1, 1, 128, 128};
  for (int64_t T : {1, 15, 16, 17, 63, 64, 65, 130}) {
    Case c = base;
    c.T = T;
    c.pad = T % 2;  // also tensors at whose end the memory ends
    add(T == 1 ? "T=1" : (T < 64 ? "T<64" : "T>=64"), c);
  }
  Case c = base;
  c.B = 3;
  c.T = 100;
  c.H = 2;
  c.HV = 4;
  c.v_first = true;
  add("batch, GVA, V first", c);
  c.dtype = DType::kF16;
  c.gate_dtype = DType::kF16;
  c.beta_dtype = DType::kBf16;
  c.chunk_states = 2;
  c.limit = 1.2e-3;
  add("fp16, float states", c);
  c = base;
  c.K = 64;
  c.V = 64;
  add("K=V=64", c);
  c.V = 128;
  c.v_first = true;
  c.initial = 2;
  c.strided = true;
  add("K=64 V=128 strided", c);
  c.dtype = DType::kF16;
  c.K = 128;
  c.V = 64;
  c.gate_dtype = DType::kF32;
  c.limit = 1.2e-3;
  add("K=128 V=64 fp16 strided", c);
  c = base;
  c.T = 700;
  c.H = 2;
  c.HV = 2;
  add("eleven chunks", c);
  Case many = c;
  many.T = 70;
  many.H = many.HV = 66;
  add("many heads", many);
  c.initial = 0;
  c.chunk_states = 0;
  c.with_bias = false;
  c.with_A_log = false;
  add("no states, no A_log, no bias", c);
  c = base;
  c.T = 300;
  c.gate = KdaGate::kSoftplus;
  c.gate_mean = -2.0;
  c.gate_spread = 3.0;
  add("softplus gate", c);
  c.gate_mean = 0.0;
  c.gate_spread = 30.0;
  add("softplus gate, +-30", c);
  c.gate = KdaGate::kActivated;
  c.gate_dtype = DType::kF32;
  c.mixed_gates = true;
  add("gates -60, -1e-6 and between", c);
  c.mixed_gates = false;
  c.gate_spread = 0.03;
  c.beta = KdaBeta::kTwoSigmoid;
  add("slow decay, beta to 2", c);
  c.gate = KdaGate::kLowerBound;
  c.gate_spread = 2.0;
  c.lower_bound = -50.0;
  add("lower bound -50", c);
  c.beta_mean = -90.0;
  c.beta_spread = 60.0;
  add("beta logits far out", c);
  c = base;
  c.T = 300;
  c.gate = KdaGate::kActivated;
  c.gate_dtype = DType::kF32;
  c.beta = KdaBeta::kActivated;
  c.gate_spread = 0.001;
  c.noise = 0.3;
  c.beta_mean = 0.99;
  c.beta_spread = 0.0;
  c.limit = 3.4e-3;
  add("similar keys", c);
  c.noise = 0.0;
  add("identical keys", c);
  c.beta_mean = 1.99;
  c.limit = 2e-2;
  c.noise = -1.0;
  c.run = 16;
  add("sixteen identical keys, beta 1.99", c);
  c.run = 64;
  add("64 identical keys, beta 1.99", c);
  c.run = 1;
  c.noise = 0.3;
  add("similar keys, beta 1.99", c);
  c = base;
  c.T = 200;
  c.l2norm = false;
  c.limit = 2.6e-3;
  add("no norm", c);
  c.v_size = 1e-20;
  add("tiny values", c);
  c.v_size = 1e20;
  add("huge values", c);
  c.v_size = 1.0;
  c.outlier = 3e4;
  add("outliers in v", c);
  c = base;
  c.lengths = {0, 100, 0, 0, 1, 63, 64, 65, 137, 0};
  c.T = 430;
  c.H = 2;
  c.HV = 2;
  add("packed", c);
  c.int64_offsets = true;
  c.v_first = true;
  c.pad = 0;
  add("packed, int64 offsets", c);
  // So many heads that a window holds few chunks.
  c = base;
  c.T = 330;
  c.H = 200;
  c.HV = 400;
  c.K = 64;
  c.V = 64;
  add("two windows", c);
  c.lengths = {65, 0, 1, 140, 0, 124};
  add("packed, four windows", c);
  c.lengths.clear();
  c.B = 5;
  c.T = 200;
  c.H = 120;
  c.HV = 240;
  add("two groups of two windows", c);
  return cases;
}

// Launches of the target shapes with real-sized inputs; rotates two sets so that L2 is cold.
void time_shape(int64_t B, int64_t T, int64_t H, bool states) {
  const int64_t K = 128, V = 128;
  const KdaDims d{B, T, H, H, K, V, B, 64};
  const size_t tokens = static_cast<size_t>(B * T * H);
  std::vector<uint16_t> host(tokens * 128);
  uint32_t x = 12345;
  for (uint16_t& y : host) {  // bf16 of magnitude 0.25 to 1
    x = x * 1664525u + 1013904223u;
    y = static_cast<uint16_t>((x >> 31 << 15) | (0x3e80u + ((x >> 8) & 0xffu)));
  }
  const DeviceArray<uint16_t> q(host), k(host), v(host), g(host);
  const DeviceArray<float> beta(std::vector<float>(tokens, 0.3f));
  const DeviceArray<float> A_log(std::vector<float>(static_cast<size_t>(H), 0.1f));
  const DeviceArray<float> bias(std::vector<float>(static_cast<size_t>(H * K), 0.1f));
  const DeviceArray<uint16_t> out(tokens * 128);
  const DeviceArray<float> final_state(static_cast<size_t>(B * H * K * V));
  const int64_t rows = chunk_state_rows(d, false);
  const DeviceArray<uint16_t> chunk_states(states ? static_cast<size_t>(rows * H * K * V) : 1);
  KdaCudaFwdParams p = {};
  p.base.dims = d;
  p.base.options = {0.0883883, true, KdaGate::kLowerBound, -5.0, KdaBeta::kSigmoid};
  const auto view = [&](const void* data, DType dtype, int64_t last) {
    return KdaView{data, dtype, {T * H * last, H * last, last, 1}};
  };
  p.base.tokens = {
      view(q.data, DType::kBf16, K),
      view(k.data, DType::kBf16, K),
      view(v.data, DType::kBf16, V),
      view(g.data, DType::kBf16, K),
      view(beta.data, DType::kF32, 1),
      A_log.data,
      bias.data,
  };
  p.base.final_state = {final_state.data, DType::kF32, {H * K * V, K * V, V, 1}};
  p.base.chunk_states = {states ? chunk_states.data : nullptr, DType::kBf16, false};
  p.base.out = out.data;
  const DeviceArray<uint8_t> workspace(kda_tensor_fwd_workspace(p));

  // The preparation alone, in windows of the same size.
  KdaPrepParams prep{d, p.base.options, p.base.tokens, {}, {}, {}};
  prep.records = {reinterpret_cast<char*>(workspace.data), KdaRecord<128>::kForwardBytes};
  const KdaWindowPlan plan = kda_window_plan(d, false, 1584);

  cudaEvent_t start, stop;
  check(cudaEventCreate(&start), "event");
  check(cudaEventCreate(&stop), "event");
  double ms[2];
  for (int kind = 0; kind < 2; ++kind) {
    std::vector<float> times;
    for (int i = 0; i < 15; ++i) {
      check(cudaEventRecord(start), "event");
      if (kind == 0) {
        check(launch_kda_tensor_fwd(p, workspace.data, nullptr), "launch");
      } else {
        for (int64_t w = 0; w < plan.num_windows(); ++w) {
          prep.window = plan.window(w);
          check(launch_kda_tensor_prep(prep, nullptr), "launch");
        }
      }
      check(cudaEventRecord(stop), "event");
      check(cudaEventSynchronize(stop), "event");
      float time = 0;
      check(cudaEventElapsedTime(&time, start, stop), "event");
      if (i >= 5) {
        times.push_back(time);
      }
    }
    std::sort(times.begin(), times.end());
    ms[kind] = times[times.size() / 2];
  }
  std::printf(
      "time B=%lld T=%lld H=%lld states=%d: forward %.3f ms, prep alone %.3f ms, %lld windows, "
      "workspace %.0f MB\n",
      (long long)B,
      (long long)T,
      (long long)H,
      states,
      ms[0],
      ms[1],
      (long long)plan.num_windows(),
      static_cast<double>(workspace.size) * 1e-6
  );
}

}  // namespace
}  // namespace sdm::kda::test

int main(int argc, char** argv) {
  using namespace sdm::kda::test;
  const std::string mode = argc > 1 ? argv[1] : "";
  int failures = 0;
  for (const Case& c : all_cases()) {
    if (mode.empty() || mode == "time" || std::string(c.name).find(mode) != std::string::npos) {
      failures += test_case(c);
    }
  }
  if (mode.empty() || mode == "time" || mode == "bits") {
    Case c{"bits", 1, 200, 2, 2, 128, 128};
    failures += test_bits(c, "a prefix has the same bits");
    c.lengths = {70, 1, 0, 129};
    failures += test_bits(c, "packed sequences have the bits of single ones");
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
