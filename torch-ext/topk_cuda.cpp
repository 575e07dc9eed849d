// SPDX-License-Identifier: Apache-2.0
//! @file Product-key top-k on CUDA: the launches of the prepared calls, on torch's current stream.
//! The kernels need no workspace.
#ifdef CUDA_KERNEL
#include "sdm_kernels/topk/cuda/topk_cuda.h"

#include "torch-ext/topk_calls.h"

namespace sdm::ext {
namespace {

void check_supported(const char* op, DType dtype, int64_t num_factors) {
  check(dtype != DType::kF64, op, ": float64 has no CUDA kernel");
  check(
      num_factors <= kTopkCudaMaxFactors,
      op,
      ": at most ",
      kTopkCudaMaxFactors,
      " factors on CUDA, got ",
      num_factors
  );
}

}  // namespace

void run_topk_fwd(const Cuda& backend, const char* op, const TopkFwdParams& params) {
  check_supported(op, params.dtype, params.num_factors);
  check_cuda(op, launch_topk_fwd(params, backend.stream()));
}

void run_topk_bwd(const Cuda& backend, const char* op, const TopkBwdParams& params) {
  check_supported(op, params.dtype, params.num_factors);
  check(
      params.num_selected <= kMaxTopk,
      op,
      ": at most ",
      kMaxTopk,
      " slots a row on CUDA, got ",
      params.num_selected
  );
  check_cuda(op, launch_topk_bwd(params, backend.stream()));
}

}  // namespace sdm::ext
#endif
