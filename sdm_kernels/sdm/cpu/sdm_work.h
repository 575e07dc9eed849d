// SPDX-License-Identifier: Apache-2.0
//! @file How much work a CPU call holds at a time. It sets memory and balance, never a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/cpu/parallel.h"

namespace sdm {

struct WorkShape {
  int64_t streams;  // streams in a group
  int64_t chunks;   // chunks of each in a window
};

// Enough streams that slices keep the threads busy, enough chunks that their entries do.
inline WorkShape choose_work(
    const cpu::ParallelFor& parallel, int64_t num_streams, int64_t slices, int64_t max_chunks
) {
  constexpr int64_t kItemsPerThread = 2;  // evens out threads of different speed
  const int64_t wanted = parallel.num_threads == 1 ? 1 : kItemsPerThread * parallel.num_threads;
  const int64_t streams = std::min(num_streams, ceil_div(wanted, slices));
  constexpr int64_t kMaxChunks = 16;
  const int64_t chunks =
      std::min({max_chunks, std::max<int64_t>(2, ceil_div(wanted, streams)), kMaxChunks});
  return {streams, std::max<int64_t>(1, chunks)};
}

}  // namespace sdm
