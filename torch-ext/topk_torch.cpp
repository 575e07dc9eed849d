// SPDX-License-Identifier: Apache-2.0
//! @file Product-key top-k for torch on the CPU.

#include <cstdint>
#include <tuple>
#include <vector>

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/topk/topk_launch.h"
#include "torch-ext/topk_calls.h"
#include "torch-ext/torch_binding.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

std::tuple<Tensor, Tensor> product_key_topk_fwd_cpu(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
) {
  constexpr const char* kOp = "product_key_topk_fwd";
  const TopkFwdCall call = prepare_topk_fwd(kOp, scores, factor_dims, k);
  const Status status = topk_fwd_cpu(call.params, torch_parallel_for());
  check(status == Status::kOk, kOp, ": ", status_message(status));
  return {call.values, call.indices};
}

Tensor product_key_topk_bwd_cpu(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
) {
  constexpr const char* kOp = "product_key_topk_bwd";
  const TopkBwdCall call = prepare_topk_bwd(kOp, d_values, indices, factor_dims);
  const Status status = topk_bwd_cpu(call.params, torch_parallel_for());
  check(status == Status::kOk, kOp, ": ", status_message(status));
  return call.d_scores;
}

}  // namespace sdm::ext
