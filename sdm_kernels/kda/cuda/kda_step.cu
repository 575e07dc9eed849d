// SPDX-License-Identifier: Apache-2.0
//! @file Launcher of the decode step of Kimi delta attention.

#include "sdm_kernels/kda/cuda/kda_step.cuh"

namespace sdm::kda {
namespace plain {
namespace {

// Whether runs of 4 elements along `last` are aligned pieces.
bool has_runs(const KdaStateView& view, int last) {
  const int64_t bytes = 4 * element_size(view.dtype);
  bool aligned = view.data != nullptr && view.stride[last] == 1 &&
                 reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0;
  for (int d = 0; d < 4; ++d) {
    aligned = aligned && (d == last || view.stride[d] % 4 == 0);
  }
  return aligned;
}

}  // namespace
}  // namespace plain

cudaError_t launch_kda_step(const KdaCudaStepParams& params, cudaStream_t stream) {
  using namespace plain;
  const KdaStepParams& base = params.base;
  const KdaDims& dims = base.dims;
  const KdaTokens& in = base.tokens;
  for (const DType dtype :
       {in.q.dtype,
        in.k.dtype,
        in.v.dtype,
        in.g.dtype,
        in.beta.dtype,
        base.initial.dtype,
        base.final_state.dtype}) {
    if (dtype == DType::kF64) {
      return cudaErrorNotSupported;
    }
  }
  if (params.cu_seqlens.data != nullptr) {
    // tokens that malformed offsets leave out
    const int64_t bytes = dims.B * dims.T * dims.HV * dims.V * element_size(in.q.dtype);
    const cudaError_t error = cudaMemsetAsync(base.out, 0, static_cast<size_t>(bytes), stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  const KdaStateView& leading = base.final_state.data != nullptr ? base.final_state : base.initial;
  const bool columns_last = leading.data == nullptr || leading.stride[3] == 1;
  StepParams p{};
  p.call = params;
  p.slices = ceil_div(dims.V, int64_t{kStepColumns});
  p.initial_runs = has_runs(base.initial, columns_last ? 3 : 2);
  p.final_runs = has_runs(base.final_state, columns_last ? 3 : 2);
  const int64_t blocks = dims.N * dims.HV * p.slices;
  if (blocks == 0) {
    return cudaSuccess;
  }
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const bool overlap = params.cu_seqlens.data == nullptr && kernels_overlap();
  const auto launch_with = [&](auto* by_columns, auto* by_keys) {
    const dim3 grid(static_cast<unsigned>(blocks));
    return launch_kernel(
        columns_last ? by_columns : by_keys, grid, kThreads, 0, stream, overlap, p
    );
  };
  if (dims.K <= 64) {
    return launch_with(&kda_step_kernel<4, true>, &kda_step_kernel<4, false>);
  }
  return dims.K <= 128 ? launch_with(&kda_step_kernel<8, true>, &kda_step_kernel<8, false>)
                       : launch_with(&kda_step_kernel<16, true>, &kda_step_kernel<16, false>);
}

}  // namespace sdm::kda
