// SPDX-License-Identifier: Apache-2.0
//! @file The parts of the top-k forward that lean on the standard library or are rare: compiled for
//! the baseline instruction set only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/topk/cpu/topk_plan.h"

namespace sdm {

// Moves the `want` largest payloads to the front, in no particular order.
inline void choose_largest(int32_t* payloads, int64_t want, int64_t num) {
  if (want < num) {
    std::nth_element(payloads, payloads + want, payloads + num, std::greater<int32_t>());
  }
}

inline void sort_descending(int64_t* words, int64_t num) {
  std::sort(words, words + num, std::greater<int64_t>());
}

// Sorts ids with their keys by id. words: room for num pairs.
inline void sort_by_id(
    int64_t* ids, int32_t* keys, std::pair<int64_t, int32_t>* pairs, int64_t num
) {
  for (int64_t pos = 0; pos < num; ++pos) {
    pairs[pos] = {ids[pos], keys[pos]};
  }
  std::sort(pairs, pairs + num);
  for (int64_t pos = 0; pos < num; ++pos) {
    ids[pos] = pairs[pos].first;
    keys[pos] = pairs[pos].second;
  }
}

// T is the dtype of the scores; a double score is never rounded.
template <typename T>
struct TopkArithmetic {
  using Sum = float;

  static float load(T x) { return to_f32(x); }

  static T store(float x) { return from_f32<T>(x); }

  static float round(float x) { return to_f32(from_f32<T>(x)); }
};

template <>
struct TopkArithmetic<double> {
  using Sum = double;

  static double load(double x) { return x; }

  static double store(double x) { return x; }

  static double round(double x) { return x; }
};

// The value of a slot by the definition, from the raw scores; one NaN for all NaNs, because which
// operand's payload an addition keeps differs between machines.
template <typename T>
T slot_value(const TopkPlan& plan, const T* scores, int64_t id) {
  using Arithmetic = TopkArithmetic<T>;
  if (plan.stages.empty()) {
    return scores[id];
  }
  // Least significant factor last: peel the columns off, then add in factor order.
  int64_t divisor = 1;
  for (const TopkStage& stage : plan.stages) {
    divisor *= stage.width;
  }
  typename Arithmetic::Sum sum = Arithmetic::load(scores[id / divisor]);
  for (size_t f = 0; f < plan.stages.size(); ++f) {
    const TopkStage& stage = plan.stages[f];
    id %= divisor;
    divisor /= stage.width;
    sum = (f == 0 ? sum : Arithmetic::round(sum)) +
          Arithmetic::load(scores[stage.column_offset + id / divisor]);
  }
  return Arithmetic::store(std::isnan(sum) ? std::nanf("") : sum);
}

}  // namespace sdm
