// SPDX-License-Identifier: Apache-2.0
//! @file Working memory of one worker of the top-k forward, carved out of one allocation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/topk/cpu/topk_plan.h"

namespace sdm {

// Up to this many columns too many are sorted along; more are first cut by their threshold.
constexpr int64_t kTopkListSlack = 32;

// One vector of TopkScratch::candidates: sums of one rank of one list with consecutive ranks of the
// other, hence descending.
struct TopkSpan {
  int32_t fixed;      // the one rank
  int32_t first;      // the first of the consecutive ranks
  bool fixed_factor;  // the one rank is in the factor list, not in the running list
};

// One factor on its way from raw columns to a list in descending order.
struct TopkFactor {
  int32_t* keys;     // [max_width] order keys of all columns, then of those that may matter
  int32_t* columns;  // [max_width] columns of the latter
};

// Id is int32_t or int64_t. Every array has kTopkMaxLanes elements of slack.
template <typename Id>
struct TopkScratch {
  TopkFactor factors[2];
  // Lists, descending; sorting may leave up to kTopkListSlack surplus elements behind the end.
  float* list_scores;    // [max_selected] running list
  Id* list_ids;          // [max_selected]
  float* factor_scores;  // [max_selected] factor list
  int32_t* factor_cols;  // [max_selected]

  int32_t* candidates;                 // [max_candidates] keys of sums
  TopkSpan* spans;                     // [max_candidates / lanes]
  int32_t* tied;                       // [max_candidates] tie payloads; also room for sorting
  int64_t* merged;                     // [max_selected] key and tie payload in one word
  int32_t* picked_keys;                // [max_selected]
  Id* picked_ids;                      // [max_selected]
  int32_t* ranks;                      // [max_selected or kTopkMaxMaxima]
  uint64_t* radix[2];                  // [max_selected]
  std::pair<int64_t, int32_t>* pairs;  // [max_selected]
};

// Carves `memory` (64-byte aligned, or null to measure only) and returns the bytes needed.
template <typename Id>
int64_t carve_topk_scratch(const TopkPlan& plan, char* memory, TopkScratch<Id>* scratch) {
  int64_t used = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + used);
    used += round_up((count + 2 * kTopkMaxLanes) * static_cast<int64_t>(sizeof(T)), 64);
  };
  for (TopkFactor& factor : scratch->factors) {
    take(factor.keys, plan.max_width);
    take(factor.columns, plan.max_width);
  }
  take(scratch->list_scores, plan.max_selected + kTopkListSlack);
  take(scratch->list_ids, plan.max_selected + kTopkListSlack);
  take(scratch->factor_scores, plan.max_selected + kTopkListSlack);
  take(scratch->factor_cols, plan.max_selected + kTopkListSlack);
  take(scratch->candidates, plan.max_candidates);
  take(scratch->spans, plan.max_candidates / 4);  // 4 lanes is the shortest vector
  take(scratch->tied, plan.max_candidates);
  take(scratch->merged, plan.max_selected);
  take(scratch->picked_keys, plan.max_selected);
  take(scratch->picked_ids, plan.max_selected);
  take(scratch->ranks, std::max(plan.max_selected + kTopkListSlack, kTopkMaxMaxima));
  take(scratch->radix[0], plan.max_selected + kTopkListSlack);
  take(scratch->radix[1], plan.max_selected + kTopkListSlack);
  take(scratch->pairs, plan.max_selected);
  return used;
}

}  // namespace sdm
