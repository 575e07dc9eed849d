// SPDX-License-Identifier: Apache-2.0
//! @file What the forward computes once per call from the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/topk/topk_params.h"

namespace sdm {

// Widest vector the kernels use, in 32-bit lanes; buffers keep this much slack behind their end.
constexpr int64_t kTopkMaxLanes = 8;

// Most lane maxima (topk_list-inl.h) per factor.
constexpr int64_t kTopkMaxMaxima = 64;

// Combines the running list (of the factors before) with one more factor.
struct TopkStage {
  int64_t width;               // columns of the factor
  int64_t column_offset;       // of the factor in the row
  int32_t list_len;            // n = min(k, product of the widths before)
  int32_t factor_len;          // m = min(k, width)
  int32_t num_selected;        // c = min(k, n * m)
  int32_t root;                // floor(sqrt(c))
  std::vector<int32_t> limit;  // [root] c / (i + 1): ranks j below it pair with rank i

  // Pairs (r, q) of ranks with (r + 1) * (q + 1) >= c: the sum of any of them is not above the
  // c-th largest sum, so the largest of them is where the search for that sum starts.
  std::vector<std::pair<int32_t, int32_t>> bounds;
};

struct TopkPlan {
  int64_t num_factors;
  int64_t num_columns;            // N
  int64_t first_width;            // n_0
  int64_t max_width;              // widest factor
  int64_t num_maxima;             // lane maxima per factor: 16, 32 or 64
  int32_t first_len;              // min(k, n_0)
  int32_t max_selected;           // largest c
  int64_t max_candidates;         // keys one stage can hold, vectors padded
  std::vector<TopkStage> stages;  // [F - 1]
};

inline TopkPlan make_topk_plan(const TopkFwdParams& params) {
  const int64_t k = params.num_selected;
  TopkPlan plan{};
  plan.num_factors = params.num_factors;
  plan.first_width = params.factor_dims[0];
  plan.first_len = static_cast<int32_t>(std::min(k, plan.first_width));
  plan.max_selected = plan.first_len;
  // At least twice the ranks that matter most, sqrt(k): fewer bound loosely, more cost their
  // sorting. With one factor rank k itself matters, and the sorting is cheap beside the rest.
  plan.num_maxima = params.num_factors == 1 || k > 256 ? kTopkMaxMaxima : k <= 16 ? 16 : 32;
  int64_t list_len = plan.first_len;
  for (int64_t f = 0; f < params.num_factors; ++f) {
    const int64_t width = params.factor_dims[f];
    plan.max_width = std::max(plan.max_width, width);
    if (f > 0) {
      TopkStage stage{};
      stage.width = width;
      stage.column_offset = plan.num_columns;
      stage.list_len = static_cast<int32_t>(list_len);
      stage.factor_len = static_cast<int32_t>(std::min(k, width));
      const int32_t c = static_cast<int32_t>(std::min(k, list_len * stage.factor_len));
      stage.num_selected = c;
      while ((stage.root + 1) * (stage.root + 1) <= c) {
        ++stage.root;
      }
      int64_t candidates = 0;
      for (int32_t i = 0; i < stage.root; ++i) {
        stage.limit.push_back(c / (i + 1));
        candidates += 2 * round_up(stage.limit.back() + 1, kTopkMaxLanes);
      }
      plan.max_candidates = std::max(plan.max_candidates, candidates);
      // Ranks about a sixth apart: the bound is then within a few ranks of the best one.
      for (int32_t r = 1; r <= stage.list_len; r += 1 + r / 6) {
        if (ceil_div(c, r) <= stage.factor_len) {
          stage.bounds.emplace_back(r - 1, static_cast<int32_t>(ceil_div(c, r)) - 1);
        }
      }
      list_len = c;
      plan.max_selected = std::max(plan.max_selected, c);
      plan.stages.push_back(std::move(stage));
    }
    plan.num_columns += width;
  }
  return plan;
}

}  // namespace sdm
