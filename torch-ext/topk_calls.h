// SPDX-License-Identifier: Apache-2.0
//! @file The two halves of a product-key top-k op: prepare_* checks the arguments, allocates the
//! results and fills the parameters, which point into the arguments and into factor_dims; run_*,
//! for each backend, launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/topk_params.h"
#include "torch-ext/backend.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

struct TopkFwdCall {
  TopkFwdParams params;
  Tensor values;
  Tensor indices;
};

struct TopkBwdCall {
  TopkBwdParams params;
  Tensor d_scores;
};

// Number of slots; fails on a dimension below 1 and when ids would not fit int64.
inline int64_t checked_num_slots(const char* op, const std::vector<int64_t>& factor_dims) {
  check(!factor_dims.empty(), op, ": factor_dims must not be empty");
  int64_t num_slots = 1;
  for (const int64_t width : factor_dims) {
    check(width >= 1, op, ": factor_dims must all be at least 1, got ", width);
    num_slots = checked_mul(num_slots, width);
    check(num_slots >= 0, op, ": the product of factor_dims must fit in int64");
  }
  return num_slots;
}

inline int64_t num_columns(const std::vector<int64_t>& factor_dims) {
  int64_t total = 0;
  for (const int64_t width : factor_dims) {
    total += width;  // at most their product + the number of ones
  }
  return total;
}

// The shape of t with another last dimension.
inline std::vector<int64_t> shape_with_last(const Tensor& t, int64_t last) {
  const auto sizes = t.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return shape;
}

inline TopkRows leading_rows(const Tensor& t) {
  return TopkRows{t.dim() - 1, t.sizes().data(), t.strides().data()};
}

inline int64_t count_rows(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) {
    rows *= t.size(dim);
  }
  return rows;
}

inline TopkFwdCall prepare_topk_fwd(
    const char* op, const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
) {
  const int64_t num_slots = checked_num_slots(op, factor_dims);
  const DType dtype = dtype_of(op, "scores", scores);
  check_last_dense(op, "scores", scores);
  check(
      scores.size(-1) == num_columns(factor_dims),
      op,
      ": the last dimension of scores must be the sum of factor_dims, got shape ",
      shape_string(scores)
  );
  check(k >= 1 && k <= kMaxTopk, op, ": k must be from 1 to ", kMaxTopk, ", got ", k);

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
  return {params, values, indices};
}

inline TopkBwdCall prepare_topk_bwd(
    const char* op,
    const Tensor& d_values,
    const Tensor& indices,
    const std::vector<int64_t>& factor_dims
) {
  checked_num_slots(op, factor_dims);
  const DType dtype = dtype_of(op, "d_values", d_values);
  check(d_values.dim() >= 1, op, ": d_values must have a dimension");
  check_same_device(op, "indices", indices, d_values);
  bool same_shape = d_values.dim() == indices.dim();
  for (int64_t dim = 0; same_shape && dim < d_values.dim(); ++dim) {
    same_shape = d_values.size(dim) == indices.size(dim);
  }
  check(
      same_shape,
      op,
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
  params.wide_ids = is_int64(op, "indices", indices);
  Tensor d_scores = new_empty(d_values, shape_with_last(d_values, num_columns(factor_dims)), dtype);
  params.d_scores = d_scores.mutable_data_ptr();
  return {params, d_scores};
}

void run_topk_fwd(const Cpu& backend, const char* op, const TopkFwdParams& params);
void run_topk_bwd(const Cpu& backend, const char* op, const TopkBwdParams& params);

#ifdef CUDA_KERNEL
void run_topk_fwd(const Cuda& backend, const char* op, const TopkFwdParams& params);
void run_topk_bwd(const Cuda& backend, const char* op, const TopkBwdParams& params);
#endif

}  // namespace sdm::ext
