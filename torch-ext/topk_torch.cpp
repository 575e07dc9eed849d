// SPDX-License-Identifier: Apache-2.0
//! @file Product-key top-k for torch: check, allocate, fill the parameters, launch.

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/common/status.h"
#include "sdm_kernels/topk/topk_launch.h"
#include "torch-ext/torch_binding.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {
namespace {

// Number of slots; fails on a dimension below 1 and when ids would not fit int64.
int64_t checked_num_slots(const char* op, const std::vector<int64_t>& factor_dims) {
  check(!factor_dims.empty(), op, ": factor_dims must not be empty");
  int64_t num_slots = 1;
  for (const int64_t width : factor_dims) {
    check(width >= 1, op, ": factor_dims must all be at least 1, got ", width);
    num_slots = checked_mul(num_slots, width);
    check(num_slots >= 0, op, ": the product of factor_dims must fit in int64");
  }
  return num_slots;
}

int64_t num_columns(const std::vector<int64_t>& factor_dims) {
  int64_t total = 0;
  for (const int64_t width : factor_dims) {
    total += width;  // at most their product + the number of ones
  }
  return total;
}

// The shape of t with another last dimension.
std::vector<int64_t> shape_with_last(const Tensor& t, int64_t last) {
  const auto sizes = t.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return shape;
}

TopkRows leading_rows(const Tensor& t) {
  return TopkRows{t.dim() - 1, t.sizes().data(), t.strides().data()};
}

int64_t count_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
    rows *= t.size(dim);
  }
  return rows;
}

}  // namespace

std::tuple<Tensor, Tensor> product_key_topk_fwd_cpu(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
) {
  constexpr const char* kOp = "product_key_topk_fwd";
  const int64_t num_slots = checked_num_slots(kOp, factor_dims);
  const DType dtype = dtype_of(kOp, "scores", scores);
  check_last_dense(kOp, "scores", scores);
  check(
      scores.size(-1) == num_columns(factor_dims),
      kOp,
      ": the last dimension of scores must be the sum of factor_dims, got shape ",
      shape_string(scores)
  );
  check(k >= 1 && k <= kMaxTopk, kOp, ": k must be from 1 to ", kMaxTopk, ", got ", k);

  TopkFwdParams params{};
  params.dtype = dtype;
  params.factor_dims = factor_dims.data();
  params.num_factors = static_cast<int64_t>(factor_dims.size());
  params.num_selected = std::min(k, num_slots);
  params.num_rows = count_rows(scores);
  params.wide_ids = num_slots > INT32_MAX;
  const std::vector<int64_t> shape = shape_with_last(scores, params.num_selected);
  Tensor values = new_empty(scores, shape, dtype);
  Tensor indices = new_empty(scores, shape, params.wide_ids ? ScalarType::Long : ScalarType::Int);
  params.scores = scores.const_data_ptr();
  params.scores_rows = leading_rows(scores);
  params.values = values.mutable_data_ptr();
  params.indices = indices.mutable_data_ptr();
  const Status status = topk_fwd_cpu(params, torch_parallel_for());
  check(status == Status::kOk, kOp, ": ", status_message(status));
  return {values, indices};
}

Tensor product_key_topk_bwd_cpu(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
) {
  constexpr const char* kOp = "product_key_topk_bwd";
  checked_num_slots(kOp, factor_dims);
  const DType dtype = dtype_of(kOp, "d_values", d_values);
  check(d_values.dim() >= 1, kOp, ": d_values must have a dimension");
  bool same_shape = d_values.dim() == indices.dim();
  for (int64_t dim = 0; same_shape && dim < d_values.dim(); ++dim) {
    same_shape = d_values.size(dim) == indices.size(dim);
  }
  check(
      same_shape,
      kOp,
      ": indices must have the shape of d_values ",
      shape_string(d_values),
      ", got ",
      shape_string(indices)
  );

  TopkBwdParams params{};
  params.dtype = dtype;
  params.factor_dims = factor_dims.data();
  params.num_factors = static_cast<int64_t>(factor_dims.size());
  params.num_selected = d_values.size(-1);
  params.num_rows = count_rows(d_values);
  params.d_values = d_values.const_data_ptr();
  params.d_values_rows = leading_rows(d_values);
  params.d_values_stride = d_values.stride(-1);
  params.indices = indices.const_data_ptr();
  params.indices_rows = leading_rows(indices);
  params.indices_stride = indices.stride(-1);
  params.wide_ids = is_int64(kOp, "indices", indices);
  Tensor d_scores = new_empty(d_values, shape_with_last(d_values, num_columns(factor_dims)), dtype);
  params.d_scores = d_scores.mutable_data_ptr();
  const Status status = topk_bwd_cpu(params, torch_parallel_for());
  check(status == Status::kOk, kOp, ": ", status_message(status));
  return d_scores;
}

}  // namespace sdm::ext
