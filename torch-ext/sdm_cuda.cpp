//! @file Sparse delta memory on CUDA: the launches of the prepared calls, on torch's current stream
//! and with a workspace of its allocator.
// SPDX-License-Identifier: Apache-2.0
#ifdef CUDA_KERNEL
#include "sdm_kernels/sdm/cuda/sdm_cuda.h"

#include "torch-ext/sdm_calls.h"

namespace sdm::ext {

void run_sdm_fwd(
    const Cuda& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
) {
  const SdmCudaFwdParams call{
      params,
      backend.integers(op, "cu_seqlens", cu_seqlens),
      backend.integers(op, "state_indices", state_indices),
      num_states
  };
  launch_in_workspace(backend, op, call, sdm_fwd_cuda_workspace, launch_sdm_fwd);
}

void run_sdm_bwd(
    const Cuda& backend,
    const char* op,
    SdmBwdParams params,
    const std::optional<Tensor>& cu_seqlens
) {
  const SdmCudaBwdParams call{params, backend.integers(op, "cu_seqlens", cu_seqlens)};
  launch_in_workspace(backend, op, call, sdm_bwd_cuda_workspace, launch_sdm_bwd);
}

void run_sdm_step(
    const Cuda& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
) {
  const SdmCudaFwdParams call{
      params, {nullptr, false}, backend.integers(op, "state_indices", state_indices), num_states
  };
  check_cuda(op, launch_sdm_step(call, backend.stream()));
}

void run_sdm_check_indices(
    const Cuda& backend, const char* op, const SdmIndices& idx, int64_t* first_bad
) {
  check_cuda(
      op,
      launch_sdm_check_indices(
          {idx.data, idx.wide}, idx.count, idx.num_slots, first_bad, backend.stream()
      )
  );
}

}  // namespace sdm::ext
#endif
