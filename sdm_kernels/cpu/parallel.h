// SPDX-License-Identifier: Apache-2.0
//! @file Threads for CPU kernels. The loop itself is handed in by the caller (torch-ext passes
//! torch's pool), so that the kernels know neither torch nor a threading library.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

namespace sdm {
namespace cpu {

struct ParallelFor {
  // Calls body(ctx, begin, end) on disjoint ranges that cover [begin, end), from any threads.
  // body must not throw.
  using Body = void (*)(void* ctx, int64_t begin, int64_t end);
  void (*run)(int64_t begin, int64_t end, int64_t grain, Body body, void* ctx);
  int num_threads;
};

// Number of workers that for_each_item will use: the size for per-worker scratch.
inline int64_t num_workers(const ParallelFor& parallel, int64_t num_items) {
  return std::max<int64_t>(1, std::min<int64_t>(parallel.num_threads, num_items));
}

// Calls f(worker, item) once for every item in [0, num_items). Items are claimed one at a time, so
// uneven items balance; results must not depend on which worker takes which item.
template <typename F>
void for_each_item(const ParallelFor& parallel, int64_t num_items, F&& f) {
  const int64_t workers = num_workers(parallel, num_items);
  if (workers == 1) {
    for (int64_t item = 0; item < num_items; ++item) {
      f(int64_t{0}, item);
    }
    return;
  }

  struct Context {
    F* f;
    int64_t num_items;
    std::atomic<int64_t> next;
  };

  Context context{&f, num_items, {0}};
  parallel.run(
      0,
      workers,
      1,
      [](void* ctx, int64_t begin, int64_t end) {
        auto* c = static_cast<Context*>(ctx);
        for (int64_t worker = begin; worker < end; ++worker) {
          for (int64_t item;
               (item = c->next.fetch_add(1, std::memory_order_relaxed)) < c->num_items;) {
            (*c->f)(worker, item);
          }
        }
      },
      &context
  );
}

// Calls f(begin, end) on ranges of at least `grain` items.
template <typename F>
void for_each_range(const ParallelFor& parallel, int64_t num_items, int64_t grain, F&& f) {
  if (num_items <= grain || parallel.num_threads == 1) {
    f(int64_t{0}, num_items);
    return;
  }
  parallel.run(
      0,
      num_items,
      grain,
      [](void* ctx, int64_t begin, int64_t end) {
        (*static_cast<std::remove_reference_t<F>*>(ctx))(begin, end);
      },
      &f
  );
}

}  // namespace cpu
}  // namespace sdm
