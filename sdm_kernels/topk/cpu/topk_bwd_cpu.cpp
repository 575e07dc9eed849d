// SPDX-License-Identifier: Apache-2.0
//! @file The top-k backward on the CPU: d_scores[column of factor f] = sum of the d_values whose
//! slot uses that column, added in lane order.
//!
//! Bytes per row: kk * (dtype + id) read, N * dtype written; F * kk divisions and additions. Rows
//! are independent, so threads share them and no sum depends on the split. Sums are float32 (double
//! for float64) and are rounded once.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/topk/topk_launch.h"

namespace sdm {
namespace {

constexpr int64_t kBlockRows = 32;

// One factor, least significant first.
struct Radix {
  int64_t width;
  int64_t offset;  // of its first column in the row
};

struct BwdPlan {
  std::vector<Radix> radices;  // [F]
  int64_t num_columns;
  int64_t num_slots;
};

BwdPlan make_plan(const TopkBwdParams& params) {
  BwdPlan plan{{}, 0, 1};
  for (int64_t f = 0; f < params.num_factors; ++f) {
    plan.radices.push_back({params.factor_dims[f], plan.num_columns});
    plan.num_columns += params.factor_dims[f];
    plan.num_slots *= params.factor_dims[f];
  }
  std::reverse(plan.radices.begin(), plan.radices.end());
  return plan;
}

// Calls f(column) for the column of every factor. Unsigned: a shift for powers of two is not worth
// a branch, but 32-bit division is several times faster than 64-bit.
template <typename Word, typename F>
inline void for_each_column(const BwdPlan& plan, Word id, F&& f) {
  for (const Radix& radix : plan.radices) {
    const Word width = static_cast<Word>(radix.width);
    const Word rest = id / width;
    f(radix.offset + static_cast<int64_t>(id - rest * width));
    id = rest;
  }
}

template <typename T, typename Sum>
Sum load_sum(T x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return to_f32(x);
  }
}

template <typename T, typename Sum>
T store_sum(Sum x) {
  if constexpr (std::is_same_v<T, double>) {
    return x;
  } else {
    return from_f32<T>(x);
  }
}

// sums: [N], all zero before and after.
template <typename T, typename Sum, typename Id, typename Word>
void scatter_rows(
    const TopkBwdParams& params, const BwdPlan& plan, Sum* sums, int64_t begin, int64_t end
) {
  const int64_t num_selected = params.num_selected;
  for (int64_t row = begin; row < end; ++row) {
    const T* d_values = static_cast<const T*>(params.d_values) + params.d_values_rows.offset(row);
    const Id* indices = static_cast<const Id*>(params.indices) + params.indices_rows.offset(row);
    T* d_scores = static_cast<T*>(params.d_scores) + row * plan.num_columns;
    std::memset(static_cast<void*>(d_scores), 0, plan.num_columns * sizeof(T));
    if constexpr (std::is_same_v<T, Sum>) {
      sums = d_scores;  // the output is the accumulator
    }
    for (int64_t lane = 0; lane < num_selected; ++lane) {
      const int64_t id = indices[lane * params.indices_stride];
      if (id < 0 || id >= plan.num_slots) {
        continue;
      }
      const Sum d_value = load_sum<T, Sum>(d_values[lane * params.d_values_stride]);
      for_each_column(plan, static_cast<Word>(id), [&](int64_t column) {
        sums[column] += d_value;
      });
    }
    if constexpr (!std::is_same_v<T, Sum>) {
      for (int64_t lane = 0; lane < num_selected; ++lane) {
        const int64_t id = indices[lane * params.indices_stride];
        if (id < 0 || id >= plan.num_slots) {
          continue;
        }
        for_each_column(plan, static_cast<Word>(id), [&](int64_t column) {
          d_scores[column] = store_sum<T, Sum>(sums[column]);
        });
      }
      for (int64_t lane = 0; lane < num_selected; ++lane) {
        const int64_t id = indices[lane * params.indices_stride];
        if (id < 0 || id >= plan.num_slots) {
          continue;
        }
        for_each_column(plan, static_cast<Word>(id), [&](int64_t column) { sums[column] = 0; });
      }
    }
  }
}

template <typename T, typename Sum>
Status run(const TopkBwdParams& params, const cpu::ParallelFor& parallel) {
  const BwdPlan plan = make_plan(params);
  const int64_t num_blocks = ceil_div(params.num_rows, kBlockRows);
  const int64_t workers = cpu::num_workers(parallel, num_blocks);
  constexpr bool kNeedsSums = !std::is_same_v<T, Sum>;
  const int64_t stride = kNeedsSums ? round_up(plan.num_columns, 16) : 0;
  std::unique_ptr<Sum[]> sums(new (std::nothrow) Sum[stride * workers + 1]());
  if (sums == nullptr) {
    return Status::kOutOfMemory;
  }
  void (*scatter)(const TopkBwdParams&, const BwdPlan&, Sum*, int64_t, int64_t) =
      params.wide_ids ? (plan.num_slots > UINT32_MAX ? &scatter_rows<T, Sum, int64_t, uint64_t>
                                                     : &scatter_rows<T, Sum, int64_t, uint32_t>)
                      : &scatter_rows<T, Sum, int32_t, uint32_t>;
  cpu::for_each_item(parallel, num_blocks, [&](int64_t worker, int64_t block) {
    scatter(
        params,
        plan,
        sums.get() + worker * stride,
        block * kBlockRows,
        std::min(params.num_rows, (block + 1) * kBlockRows)
    );
  });
  return Status::kOk;
}

}  // namespace

Status topk_bwd_cpu(const TopkBwdParams& params, const cpu::ParallelFor& parallel) {
  switch (params.dtype) {
    case DType::kF32:
      return run<float, float>(params, parallel);
    case DType::kBf16:
      return run<Bf16, float>(params, parallel);
    case DType::kF16:
      return run<F16, float>(params, parallel);
    default:
      return run<double, double>(params, parallel);
  }
}

}  // namespace sdm
