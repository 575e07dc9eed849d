// SPDX-License-Identifier: Apache-2.0
//! @file The top-k backward on the CPU: d_scores[column of factor f] = sum of the d_values whose
//! slot uses that column, added in lane order.
//!
//! Bytes per row: kk * (dtype + id) read, N * dtype written; F * kk additions and (F - 1) * kk
//! divisions. Rows are independent, so threads share them and no sum depends on the split. Sums are
//! float32 (double for float64) and are rounded once.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/topk/topk_launch.h"

namespace sdm {
namespace {

constexpr int64_t kBlockRows = 32;

// One factor but the most significant, whose column is what the others leave of the id.
struct Radix {
  int64_t width;
  int64_t offset;       // of its first column in the row
  uint64_t reciprocal;  // ceil(2^64 / width), or 0 for width 1
};

struct BwdPlan {
  std::vector<Radix> radices;  // [F - 1], least significant first
  int64_t num_columns;         // N
  int64_t num_slots;           // P
  bool dense;                  // 16-bit gradients: convert whole rows, not the touched columns
};

BwdPlan make_plan(const TopkBwdParams& params) {
  BwdPlan plan{{}, params.factor_dims[0], params.factor_dims[0], false};
  for (int64_t f = 1; f < params.num_factors; ++f) {
    const int64_t width = params.factor_dims[f];
    plan.radices.push_back(
        {width, plan.num_columns, UINT64_MAX / static_cast<uint64_t>(width) + 1}
    );
    plan.num_columns += width;
    plan.num_slots *= width;
  }
  std::reverse(plan.radices.begin(), plan.radices.end());
  // A touched column costs a division and scattered accesses, a converted one less than a cycle.
  plan.dense = plan.num_columns <= 16 * params.num_factors * params.num_selected;
  return plan;
}

// A 32-bit id is divided by a multiplication: the upper half of id * ceil(2^64 / width) is exact.
inline uint32_t divide(uint32_t id, const Radix& radix) {
#ifdef __SIZEOF_INT128__
  if (radix.reciprocal == 0) {
    return id;
  }
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint32_t>((static_cast<Wide>(radix.reciprocal) * id) >> 64);
#else
  return id / static_cast<uint32_t>(radix.width);
#endif
}

inline uint64_t divide(uint64_t id, const Radix& radix) {
  return id / static_cast<uint64_t>(radix.width);
}

// Calls f(column) for the column of every factor.
template <typename Word, typename F>
inline void for_each_column(const BwdPlan& plan, Word id, F&& f) {
  for (const Radix& radix : plan.radices) {
    const Word rest = divide(id, radix);
    f(radix.offset + static_cast<int64_t>(id - rest * static_cast<Word>(radix.width)));
    id = rest;
  }
  f(static_cast<int64_t>(id));
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

// Calls f(lane, column) for every factor of every lane with a valid id, in lane order.
template <typename Id, typename Word, typename F>
inline void for_each_entry(
    const TopkBwdParams& params, const BwdPlan& plan, const Id* indices, F&& f
) {
  for (int64_t lane = 0; lane < params.num_selected; ++lane) {
    const int64_t id = indices[lane * params.indices_stride];
    if (id >= 0 && id < plan.num_slots) {
      for_each_column(plan, static_cast<Word>(id), [&](int64_t column) { f(lane, column); });
    }
  }
}

// sums: [N], all zero before and after.
template <typename T, typename Sum, typename Id, typename Word>
void scatter_rows(
    const TopkBwdParams& params, const BwdPlan& plan, Sum* sums, int64_t begin, int64_t end
) {
  const size_t num_columns = static_cast<size_t>(plan.num_columns);
  for (int64_t row = begin; row < end; ++row) {
    const T* d_values = static_cast<const T*>(params.d_values) + params.d_values_rows.offset(row);
    const Id* indices = static_cast<const Id*>(params.indices) + params.indices_rows.offset(row);
    T* d_scores = static_cast<T*>(params.d_scores) + row * plan.num_columns;
    if constexpr (std::is_same_v<T, Sum>) {
      sums = d_scores;  // the output is the accumulator
    }
    if (std::is_same_v<T, Sum> || !plan.dense) {
      std::memset(static_cast<void*>(d_scores), 0, num_columns * sizeof(T));
    }
    for_each_entry<Id, Word>(params, plan, indices, [&](int64_t lane, int64_t column) {
      sums[column] += load_sum<T, Sum>(d_values[lane * params.d_values_stride]);
    });
    if constexpr (!std::is_same_v<T, Sum>) {
      if (plan.dense) {
        for (size_t column = 0; column < num_columns; ++column) {
          d_scores[column] = store_sum<T, Sum>(sums[column]);
        }
        std::memset(sums, 0, num_columns * sizeof(Sum));
        continue;
      }
      for_each_entry<Id, Word>(params, plan, indices, [&](int64_t, int64_t column) {
        d_scores[column] = store_sum<T, Sum>(sums[column]);
      });
      for_each_entry<Id, Word>(params, plan, indices, [&](int64_t, int64_t column) {
        sums[column] = 0;
      });
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
