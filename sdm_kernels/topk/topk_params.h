// SPDX-License-Identifier: Apache-2.0
//! @file What goes into and comes out of the product-key top-k kernels.
//!
//! Letters: F factors with n_f columns each, N = sum of n_f, P = product of n_f, k asked for,
//! kk = min(k, P) delivered. Slot (c_0 .. c_{F-1}) has the id (..(c_0 * n_1 + c_1)..) * n_{F-1} +
//! c_{F-1}.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"

namespace sdm {

// The leading dimensions of a tensor, of any number and any strides (in elements, 0 allowed).
struct TopkRows {
  int64_t num_dims;
  const int64_t* sizes;    // [num_dims]
  const int64_t* strides;  // [num_dims]

  int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int64_t dim = num_dims - 1; dim >= 0; --dim) {
      result += row % sizes[dim] * strides[dim];
      row /= sizes[dim];
    }
    return result;
  }
};

struct TopkFwdParams {
  DType dtype;                 // of scores and values
  const int64_t* factor_dims;  // [F], each >= 1; their product fits int64
  int64_t num_factors;         // F
  int64_t num_selected;        // kk, 1 .. kMaxTopk
  int64_t num_rows;
  const void* scores;  // [rows, N], contiguous in N
  TopkRows scores_rows;
  void* values;   // [num_rows, kk] contiguous, dtype of scores
  void* indices;  // [num_rows, kk] contiguous, int64 if wide_ids else int32, ascending
  bool wide_ids;
};

struct TopkBwdParams {
  DType dtype;                 // of d_values and d_scores
  const int64_t* factor_dims;  // [F]
  int64_t num_factors;         // F
  int64_t num_selected;        // kk
  int64_t num_rows;
  const void* d_values;  // [rows, kk], any strides
  TopkRows d_values_rows;
  int64_t d_values_stride;  // between lanes
  const void* indices;      // [rows, kk], any strides; an id outside [0, P) is skipped
  TopkRows indices_rows;
  int64_t indices_stride;  // between lanes
  bool wide_ids;
  void* d_scores;  // [num_rows, N] contiguous, fully written
};

}  // namespace sdm
