// SPDX-License-Identifier: Apache-2.0
//! @file How the work of a CPU call is spread over threads. It sets time and memory, never a
//! result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/kda/kda_plan.h"

namespace sdm::kda {

inline cpu::ParallelFor one_thread() {
  return {nullptr, 1};
}

// The threads for a call of `multiply_adds`: waking them takes longer than a small one.
inline cpu::ParallelFor threads_for(const cpu::ParallelFor& parallel, int64_t multiply_adds) {
  constexpr int64_t kSmallCall = int64_t{1} << 21;
  return multiply_adds < kSmallCall ? one_thread() : parallel;
}

// A sequence and key head.
struct Unit {
  KdaSequence sequence;
  int64_t key_head;
};

// The units of a call. The first `shared` ones are worked on by all threads together, one after the
// other; the rest goes one unit to a thread.
struct UnitPlan {
  std::vector<Unit> units;
  int64_t shared;
  int64_t longest;  // tokens
};

inline UnitPlan plan_units(
    const KdaSequence* sequences, int64_t num_sequences, int64_t key_heads, int64_t threads
) {
  UnitPlan plan{{}, 0, 0};
  int64_t rest = 0;
  for (int64_t n = 0; n < num_sequences; ++n) {
    for (int64_t head = 0; head < key_heads; ++head) {
      plan.units.push_back({sequences[n], head});
      rest += sequences[n].length;
    }
    plan.longest = std::max(plan.longest, sequences[n].length);
  }
  if (threads == 1) {
    return plan;
  }
  // longest first: the ends are even
  std::stable_sort(plan.units.begin(), plan.units.end(), [](const Unit& a, const Unit& b) {
    return a.sequence.length > b.sequence.length;
  });
  const int64_t count = static_cast<int64_t>(plan.units.size());
  const auto length = [&](int64_t i) { return plan.units[static_cast<size_t>(i)].sequence.length; };
  while (plan.shared < count && length(plan.shared) > 0 && length(plan.shared) * threads > rest) {
    rest -= length(plan.shared++);
  }
  const int64_t others = count - plan.shared;
  if (others < 4 * threads) {
    plan.shared += others % threads;
  }
  return plan;
}

// Calls f(unit, parallel, worker) for every unit; `worker` names the buffers of a unit, and of the
// first thread that works on it. A shared unit has worker 0 and all threads.
template <typename F>
void for_each_unit(const UnitPlan& plan, const cpu::ParallelFor& parallel, F&& f) {
  for (int64_t i = 0; i < plan.shared; ++i) {
    f(plan.units[static_cast<size_t>(i)], parallel, int64_t{0});
  }
  const int64_t others = static_cast<int64_t>(plan.units.size()) - plan.shared;
  cpu::for_each_item(parallel, others, [&](int64_t worker, int64_t item) {
    f(plan.units[static_cast<size_t>(plan.shared + item)], one_thread(), worker);
  });
}

}  // namespace sdm::kda
