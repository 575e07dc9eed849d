// SPDX-License-Identifier: Apache-2.0
//! @file The top-k forward of one row (docs/topk.md).
//!
//! Per row: read N scores, write kk values and kk ids; nothing else leaves the first-level cache
//! unless a factor is wider than it. Stages of a row with two factors of 256 and k = 64:
//!   load     keys of all columns and their lane maxima (one pass over the scores)
//!   bound    a sum reached by at least k pairs, from the sorted maxima
//!   list     of each factor the columns that can reach the bound, sorted (about 45 of 256)
//!   stage    candidate sums along the hyperbola of ranks (280)
//!   pick     the k-th largest sum by counting; ids of the candidates above it
//!   order    by id
//! About 1.2 us on one Zen 4 server core with AVX2; waiting for the scores is a fifth of that.
//! All of it is integer compares in fixed order, so the result depends on nothing but the row.

// clang-format off: each needs those above it
#include "sdm_kernels/topk/cpu/topk_simd-inl.h"
#include "sdm_kernels/topk/cpu/topk_sort-inl.h"
#include "sdm_kernels/topk/cpu/topk_threshold-inl.h"
#include "sdm_kernels/topk/cpu/topk_list-inl.h"
#include "sdm_kernels/topk/cpu/topk_stage-inl.h"
// clang-format on

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// One factor: no sums and no sorting, the best columns in column order.
template <typename T, typename Id>
inline void select_columns(
    const TopkPlan& plan, const T* scores, TopkScratch<Id>& scratch, T* values, Id* ids
) {
  int32_t maxima[kTopkMaxMaxima];
  Estimate estimate;
  const TopkFactor& factor = scratch.factors[0];
  load_keys(scores, plan.first_width, plan.num_maxima, factor.keys, maxima);
  sort_maxima(maxima, plan.num_maxima, plan.first_width, scratch.ranks, &estimate);
  const int32_t want = plan.first_len;
  const int32_t bound = want <= estimate.length ? order_key(estimate.scores[want - 1]) : kNegInfKey;
  const int64_t num = keep_columns(factor, plan.first_width, bound);
  if (num > want) {
    keep_best(factor, num, want, bound, order_key(estimate.scores[0]));
  }
  for (int32_t pos = 0; pos < want; ++pos) {
    values[pos] = scores[factor.columns[pos]];
    ids[pos] = static_cast<Id>(factor.columns[pos]);
  }
}

// Writes the picked slots in ascending order of id.
template <typename T>
inline void write_by_id(TopkScratch<int32_t>& scratch, int64_t num, T* values, int32_t* ids) {
  if (num <= kMaxCounted) {
    count_id_ranks(scratch.picked_ids, num, scratch.ranks);
    for (int64_t pos = 0; pos < num; ++pos) {
      const int32_t rank = scratch.ranks[pos];
      ids[rank] = scratch.picked_ids[pos];
      values[rank] = from_f32<T>(key_score(scratch.picked_keys[pos]));
    }
    return;
  }
  for (int64_t pos = 0; pos < num; ++pos) {
    const uint64_t id = static_cast<uint32_t>(scratch.picked_ids[pos]);
    scratch.radix[0][pos] = id << 32 | static_cast<uint32_t>(scratch.picked_keys[pos]);
  }
  const uint64_t* sorted = radix_sort(scratch.radix[0], scratch.radix[1], num);
  for (int64_t pos = 0; pos < num; ++pos) {
    ids[pos] = static_cast<int32_t>(sorted[pos] >> 32);
    values[pos] = from_f32<T>(key_score(static_cast<int32_t>(sorted[pos] & 0xffffffffu)));
  }
}

template <typename T>
inline void write_by_id(TopkScratch<int64_t>& scratch, int64_t num, T* values, int64_t* ids) {
  sort_by_id(scratch.picked_ids, scratch.picked_keys, scratch.pairs, num);
  for (int64_t pos = 0; pos < num; ++pos) {
    ids[pos] = scratch.picked_ids[pos];
    values[pos] = from_f32<T>(key_score(scratch.picked_keys[pos]));
  }
}

template <typename T, typename Id>
inline void select_slots(
    const TopkPlan& plan, const T* scores, TopkScratch<Id>& scratch, T* values, Id* ids
) {
  int32_t maxima[2][kTopkMaxMaxima];
  Estimate estimate[2];
  for (size_t f = 0; f < plan.stages.size(); ++f) {
    const TopkStage& stage = plan.stages[f];
    const bool last = f + 1 == plan.stages.size();
    const TopkFactor& factor = scratch.factors[1];
    load_keys(scores + stage.column_offset, stage.width, plan.num_maxima, factor.keys, maxima[1]);
    sort_maxima(maxima[1], plan.num_maxima, stage.width, scratch.ranks, &estimate[1]);
    const float factor_most = estimate[1].scores[0];
    int32_t bound;
    if (f == 0) {
      const TopkFactor& first = scratch.factors[0];
      load_keys(scores, plan.first_width, plan.num_maxima, first.keys, maxima[0]);
      sort_maxima(maxima[0], plan.num_maxima, plan.first_width, scratch.ranks, &estimate[0]);
      const float first_most = estimate[0].scores[0];
      bound = sum_bound(
          stage, estimate[0].scores, estimate[0].length, estimate[1].scores, estimate[1].length
      );
      make_list(
          first,
          plan.first_width,
          plan.first_len,
          column_bound(bound, factor_most),
          first_most,
          scratch,
          scratch.list_scores,
          scratch.list_ids
      );
    } else {
      bound = kNegInfKey;
    }
    bound = std::max(
        bound,
        sum_bound(
            stage, scratch.list_scores, stage.list_len, estimate[1].scores, estimate[1].length
        )
    );
    make_list(
        factor,
        stage.width,
        stage.factor_len,
        column_bound(bound, scratch.list_scores[0]),
        factor_most,
        scratch,
        scratch.factor_scores,
        scratch.factor_cols
    );
    bound = std::max(
        bound,
        sum_bound(
            stage, scratch.list_scores, stage.list_len, scratch.factor_scores, stage.factor_len
        )
    );
    const Candidates candidates = make_candidates(stage, scratch, bound);
    const int32_t most = order_key(scratch.list_scores[0] + scratch.factor_scores[0]);
    const Threshold threshold = find_threshold(
        scratch.candidates,
        candidates.padded,
        stage.num_selected,
        bound,
        sum_lanes(candidates.num_ge),
        most
    );
    if (!last) {
      pick_running<T>(stage, scratch, candidates, threshold);
      continue;
    }
    pick_last(stage, scratch, candidates, threshold);
    write_by_id(scratch, stage.num_selected, values, ids);
    if (threshold.key == kNegInfKey) {  // NaN travelled as -inf
      for (int64_t pos = 0; pos < stage.num_selected; ++pos) {
        values[pos] = slot_value(plan, scores, ids[pos]);
      }
    }
  }
}

// Asks for the first columns of a row while the row before it is worked on; the hardware follows
// a longer one by itself.
template <typename T>
inline void prefetch(const T* scores, int64_t num_columns) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t end = std::min<int64_t>(num_columns, 4096 / sizeof(T));
  for (int64_t column = 0; column < end; column += kLine) {
    __builtin_prefetch(scores + column);
  }
}

template <typename T, typename Id>
void select_rows(
    const TopkFwdParams& params,
    const TopkPlan& plan,
    TopkScratch<Id>& scratch,
    int64_t begin,
    int64_t end
) {
  const T* next = static_cast<const T*>(params.scores) + params.scores_rows.offset(begin);
  for (int64_t row = begin; row < end; ++row) {
    const T* scores = next;
    if (row + 1 < params.num_rows) {
      next = static_cast<const T*>(params.scores) + params.scores_rows.offset(row + 1);
      prefetch(next, plan.num_columns);
    }
    T* values = static_cast<T*>(params.values) + row * params.num_selected;
    Id* ids = static_cast<Id*>(params.indices) + row * params.num_selected;
    if (plan.stages.empty()) {
      select_columns(plan, scores, scratch, values, ids);
    } else {
      select_slots(plan, scores, scratch, values, ids);
    }
  }
}

template <typename Id>
void select_rows_of(
    const TopkFwdParams& params,
    const TopkPlan& plan,
    TopkScratch<Id>& scratch,
    int64_t begin,
    int64_t end
) {
  switch (params.dtype) {
    case DType::kBf16:
      return select_rows<Bf16>(params, plan, scratch, begin, end);
    case DType::kF16:
      return select_rows<F16>(params, plan, scratch, begin, end);
    default:
      return select_rows<float>(params, plan, scratch, begin, end);
  }
}

void topk_rows_narrow(
    const TopkFwdParams& params,
    const TopkPlan& plan,
    TopkScratch<int32_t>& scratch,
    int64_t begin,
    int64_t end
) {
  select_rows_of(params, plan, scratch, begin, end);
}

void topk_rows_wide(
    const TopkFwdParams& params,
    const TopkPlan& plan,
    TopkScratch<int64_t>& scratch,
    int64_t begin,
    int64_t end
) {
  select_rows_of(params, plan, scratch, begin, end);
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
