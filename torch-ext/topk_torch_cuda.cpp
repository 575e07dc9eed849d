// SPDX-License-Identifier: Apache-2.0
//! @file Product-key top-k for torch on CUDA: the tensors' device and its current stream. The
//! kernels need no workspace.
#ifdef CUDA_KERNEL
#include <cstdint>
#include <tuple>
#include <vector>

#include "sdm_kernels/topk/cuda/topk_cuda.h"
#include "torch-ext/topk_calls.h"
#include "torch-ext/torch_binding.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {
namespace {

void check_supported(const char* op, DType dtype, const std::vector<int64_t>& factor_dims) {
  check(dtype != DType::kF64, op, ": float64 has no CUDA kernel");
  check(
      factor_dims.size() <= static_cast<size_t>(kTopkCudaMaxFactors),
      op,
      ": at most ",
      kTopkCudaMaxFactors,
      " factors on CUDA, got ",
      factor_dims.size()
  );
}

}  // namespace

std::tuple<Tensor, Tensor> product_key_topk_fwd_cuda(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
) {
  constexpr const char* kOp = "product_key_topk_fwd";
  check_supported(kOp, dtype_of(kOp, "scores", scores), factor_dims);
  const DeviceGuard guard(scores.get_device_index());
  const TopkFwdCall call = prepare_topk_fwd(kOp, scores, factor_dims, k);
  check_cuda(kOp, launch_topk_fwd(call.params, current_stream(scores)));
  return {call.values, call.indices};
}

Tensor product_key_topk_bwd_cuda(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
) {
  constexpr const char* kOp = "product_key_topk_bwd";
  check_supported(kOp, dtype_of(kOp, "d_values", d_values), factor_dims);
  const DeviceGuard guard(d_values.get_device_index());
  const TopkBwdCall call = prepare_topk_bwd(kOp, d_values, indices, factor_dims);
  check(
      call.params.num_selected <= kMaxTopk,
      kOp,
      ": at most ",
      kMaxTopk,
      " slots a row on CUDA, got ",
      call.params.num_selected
  );
  check_cuda(kOp, launch_topk_bwd(call.params, current_stream(d_values)));
  return call.d_scores;
}

}  // namespace sdm::ext
#endif
