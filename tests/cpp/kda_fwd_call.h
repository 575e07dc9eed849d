// SPDX-License-Identifier: Apache-2.0
//! @file One call of the tensor-core forward of Kimi delta attention with guards round its outputs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "tests/cpp/kda_case.h"

namespace sdm::kda::test {

using Bytes = std::vector<uint8_t>;

inline constexpr size_t kGuard =
    256;  // bytes before and after every output that must stay as they are
inline constexpr uint8_t kFill = 0xff;  // NaN in every type

struct GpuAnswer {
  Bytes out, final_state, chunk_states;  // without guards
};

// An output between guards.
struct Output {
  DeviceArray<uint8_t> memory;

  explicit Output(size_t bytes) : memory(bytes + 2 * kGuard) {
    check(cudaMemset(memory.data, kFill, memory.size), "cudaMemset");
  }

  uint8_t* data() const { return memory.data + kGuard; }

  Bytes take(int* broken) const {
    const Bytes all = memory.to_host();
    for (size_t i = 0; i < kGuard; ++i) {
      *broken += all[i] != kFill || all[all.size() - 1 - i] != kFill;
    }
    return Bytes(all.begin() + kGuard, all.end() - kGuard);
  }
};

inline void state_strides(const KdaDims& d, bool v_first, int64_t (&stride)[4]) {
  stride[0] = d.HV * d.K * d.V;
  stride[1] = d.K * d.V;
  stride[2] = v_first ? 1 : d.V;
  stride[3] = v_first ? d.K : 1;
}

inline GpuAnswer run(const HostInputs& in, int* failures) {
  const KdaDims& d = in.dims;
  const Case& c = in.c;
  const bool packed = in.offsets.size() > 1;
  const DeviceArray<uint8_t> q(in.q.bytes), k(in.k.bytes), v(in.v.bytes), g(in.g.bytes),
      beta(in.beta.bytes);
  const DeviceArray<float> A_log(in.A_log), dt_bias(in.dt_bias);
  Bytes offsets(in.offsets.size() * (c.int64_offsets ? 8 : 4));
  for (size_t i = 0; i < in.offsets.size(); ++i) {
    const int32_t narrow = static_cast<int32_t>(in.offsets[i]);
    if (c.int64_offsets) {
      std::memcpy(offsets.data() + i * 8, &in.offsets[i], 8);
    } else {
      std::memcpy(offsets.data() + i * 4, &narrow, 4);
    }
  }
  const DeviceArray<uint8_t> cu(offsets);

  KdaCudaFwdParams p = {};
  p.base.dims = d;
  p.base.options = in.options;
  p.base.tokens.q = in.q.view;
  p.base.tokens.k = in.k.view;
  p.base.tokens.v = in.v.view;
  p.base.tokens.g = in.g.view;
  p.base.tokens.beta = in.beta.view;
  p.base.tokens.q.data = q.data;
  p.base.tokens.k.data = k.data;
  p.base.tokens.v.data = v.data;
  p.base.tokens.g.data = g.data;
  p.base.tokens.beta.data = beta.data;
  p.base.tokens.A_log = in.A_log.empty() ? nullptr : A_log.data;
  p.base.tokens.dt_bias = in.dt_bias.empty() ? nullptr : dt_bias.data;
  p.cu_seqlens = {packed ? cu.data : nullptr, c.int64_offsets};

  int64_t stride[4];
  state_strides(d, c.v_first, stride);
  const DType initial_dtype = c.initial == 2 ? DType::kBf16 : DType::kF32;
  Bytes initial_bytes(in.initial.size() * static_cast<size_t>(element_size(initial_dtype)));
  for (size_t i = 0; i < in.initial.size(); ++i) {
    const int64_t V = d.V, K = d.K, x = static_cast<int64_t>(i);
    const int64_t at = x / (K * V) * K * V + x / V % K * stride[2] + x % V * stride[3];
    store_scalar(initial_bytes.data(), initial_dtype, at, in.initial[i]);
  }
  const DeviceArray<uint8_t> initial(initial_bytes);
  const size_t states = static_cast<size_t>(d.N * d.HV * d.K * d.V);
  const Output out(static_cast<size_t>(d.B * d.T * d.HV * d.V) * 2);
  const Output final_state(states * 4);
  const DType chunk_dtype = c.chunk_states == 2 ? DType::kF32 : DType::kBf16;
  const Output chunk_states(
      static_cast<size_t>(chunk_state_rows(d, packed) * d.HV * d.K * d.V) *
      static_cast<size_t>(element_size(chunk_dtype))
  );
  p.base.initial = {c.initial == 0 ? nullptr : initial.data, initial_dtype, {}};
  p.base.final_state = {final_state.data(), DType::kF32, {}};
  for (int i = 0; i < 4; ++i) {
    p.base.initial.stride[i] = stride[i];
    p.base.final_state.stride[i] = stride[i];
  }
  p.base.chunk_states = {
      c.chunk_states == 0 ? nullptr : chunk_states.data(), chunk_dtype, c.v_first
  };
  p.base.out = out.data();

  const DeviceArray<uint8_t> workspace(kda_tensor_fwd_workspace(p));
  check(cudaMemset(workspace.data, kFill, workspace.size), "cudaMemset");
  check(launch_kda_tensor_fwd(p, workspace.data, nullptr), "launch_kda_tensor_fwd");
  check(cudaDeviceSynchronize(), "kda_tensor_fwd");
  GpuAnswer answer;
  int broken = 0;
  answer.out = out.take(&broken);
  answer.final_state = final_state.take(&broken);
  answer.chunk_states = chunk_states.take(&broken);
  if (broken != 0) {
    std::printf("FAIL %s: wrote outside an output\n", c.name);
    ++*failures;
  }
  return answer;
}

}  // namespace sdm::kda::test
