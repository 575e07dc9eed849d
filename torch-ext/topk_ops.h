// SPDX-License-Identifier: Apache-2.0
//! @file The ops of product-key top-k, for every backend. Name = schema name. Shapes and meanings:
//! docs/semantics.md; prepare_* checks them.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "torch-ext/topk_calls.h"

namespace sdm::ext {

// Returns values, indices.
template <typename Backend>
std::tuple<Tensor, Tensor> product_key_topk_fwd(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
) {
  const char* op = "product_key_topk_fwd";
  const Backend backend(scores);
  const TopkFwdCall call = prepare_topk_fwd(op, scores, factor_dims, k);
  run_topk_fwd(backend, op, call.params);
  return {call.values, call.indices};
}

// Returns d_scores.
template <typename Backend>
Tensor product_key_topk_bwd(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
) {
  const char* op = "product_key_topk_bwd";
  const Backend backend(d_values);
  const TopkBwdCall call = prepare_topk_bwd(op, d_values, indices, factor_dims);
  run_topk_bwd(backend, op, call.params);
  return call.d_scores;
}

}  // namespace sdm::ext
