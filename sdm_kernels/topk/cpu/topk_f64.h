// SPDX-License-Identifier: Apache-2.0
//! @file The top-k forward for float64 scores: the rule of docs/topk.md step by step, with the
//! standard library's sorts. It serves gradient checks, so it is plain rather than fast.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/cpu/topk_choose.h"
#include "sdm_kernels/topk/cpu/topk_plan.h"

namespace sdm {

struct TopkPickF64 {
  int64_t key;
  int64_t tie;  // larger first among equal keys
  int64_t id;
};

// Working memory of one worker; reserved once, so that no row allocates.
struct TopkScratchF64 {
  std::vector<TopkPickF64> list;
  std::vector<TopkPickF64> factor;
  std::vector<TopkPickF64> candidates;

  void reserve(const TopkPlan& plan) {
    const size_t width = static_cast<size_t>(plan.max_width);
    list.reserve(std::max(width, static_cast<size_t>(plan.max_selected)));
    factor.reserve(width);
    candidates.reserve(static_cast<size_t>(plan.max_candidates));
  }
};

// Sorts the best `want` picks to the front and drops the rest.
inline void keep_best_f64(std::vector<TopkPickF64>& picks, int64_t want) {
  std::partial_sort(
      picks.begin(),
      picks.begin() + want,
      picks.end(),
      [](const TopkPickF64& a, const TopkPickF64& b) {
        return a.key != b.key ? a.key > b.key : a.tie > b.tie;
      }
  );
  picks.resize(static_cast<size_t>(want));
}

inline void rank_factor_f64(
    std::vector<TopkPickF64>& picks, const double* scores, int64_t width, int64_t want
) {
  picks.clear();
  for (int64_t column = 0; column < width; ++column) {
    picks.push_back({order_key(scores[column]), column, column});
  }
  keep_best_f64(picks, want);
}

template <typename Id>
void select_row_f64(
    const TopkPlan& plan, const double* scores, TopkScratchF64& scratch, double* values, Id* ids
) {
  rank_factor_f64(scratch.list, scores, plan.first_width, plan.first_len);
  for (const TopkStage& stage : plan.stages) {
    rank_factor_f64(scratch.factor, scores + stage.column_offset, stage.width, stage.factor_len);
    scratch.candidates.clear();
    for (int32_t i = 0; i < stage.list_len; ++i) {
      const int32_t end = std::min(stage.num_selected / (i + 1), stage.factor_len);
      for (int32_t j = 0; j < end; ++j) {
        const TopkPickF64& a = scratch.list[static_cast<size_t>(i)];
        const TopkPickF64& b = scratch.factor[static_cast<size_t>(j)];
        scratch.candidates.push_back(
            {order_key(key_score(a.key) + key_score(b.key)),
             tie_payload(i, j),
             a.id * stage.width + b.id}
        );
      }
    }
    keep_best_f64(scratch.candidates, stage.num_selected);
    scratch.list.swap(scratch.candidates);
  }
  std::sort(
      scratch.list.begin(), scratch.list.end(), [](const TopkPickF64& a, const TopkPickF64& b) {
        return a.id < b.id;
      }
  );
  for (size_t pos = 0; pos < scratch.list.size(); ++pos) {
    ids[pos] = static_cast<Id>(scratch.list[pos].id);
    values[pos] = slot_value(plan, scores, scratch.list[pos].id);
  }
}

}  // namespace sdm
