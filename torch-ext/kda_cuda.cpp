//! @file Kimi delta attention on CUDA: the launches of the prepared calls, on torch's current
//! stream and with a workspace of its allocator.
// SPDX-License-Identifier: Apache-2.0
#ifdef CUDA_KERNEL
#include "sdm_kernels/kda/cuda/kda_cuda.h"

#include "torch-ext/kda_calls.h"

namespace sdm::ext {

void run_kda_fwd(
    const Cuda& backend,
    const char* op,
    kda::KdaFwdParams params,
    const std::optional<Tensor>& cu_seqlens
) {
  const kda::KdaCudaFwdParams call{params, backend.integers(op, "cu_seqlens", cu_seqlens)};
  launch_in_workspace(backend, op, call, kda::kda_fwd_cuda_workspace, kda::launch_kda_fwd);
}

void run_kda_bwd(
    const Cuda& backend,
    const char* op,
    kda::KdaBwdParams params,
    const std::optional<Tensor>& cu_seqlens
) {
  const kda::KdaCudaBwdParams call{params, backend.integers(op, "cu_seqlens", cu_seqlens)};
  launch_in_workspace(backend, op, call, kda::kda_bwd_cuda_workspace, kda::launch_kda_bwd);
}

void run_kda_step(
    const Cuda& backend,
    const char* op,
    kda::KdaStepParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices
) {
  const kda::KdaCudaStepParams call{
      params,
      backend.integers(op, "cu_seqlens", cu_seqlens),
      backend.integers(op, "state_indices", state_indices)
  };
  check_cuda(op, kda::launch_kda_step(call, backend.stream()));
}

}  // namespace sdm::ext
#endif
