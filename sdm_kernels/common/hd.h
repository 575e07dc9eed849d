// SPDX-License-Identifier: Apache-2.0
//! @file Macros and integer helpers shared by host, CPU and CUDA code.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SDM_HD __host__ __device__ inline
#else
#define SDM_HD inline
#endif

#define SDM_RESTRICT __restrict__

namespace sdm {

SDM_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

SDM_HD constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

// a * b for non-negative sizes; -1 when the product does not fit, and -1 stays -1.
SDM_HD constexpr int64_t checked_mul(int64_t a, int64_t b) {
  if (a < 0 || b < 0) {
    return -1;
  }
  return b != 0 && a > INT64_MAX / b ? -1 : a * b;
}

}  // namespace sdm
