// SPDX-License-Identifier: Apache-2.0
//! @file How much work a CPU call holds at a time. It sets memory and balance, never a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/cpu/parallel.h"

namespace sdm {

// The threads for a call that moves `bytes` of rows: waking them takes longer than a small one.
inline cpu::ParallelFor threads_for(const cpu::ParallelFor& parallel, int64_t bytes) {
  constexpr int64_t kSmallCall = int64_t{1} << 20;
  cpu::ParallelFor threads = parallel;
  threads.num_threads = bytes < kSmallCall ? 1 : parallel.num_threads;
  return threads;
}

struct WorkShape {
  int64_t columns;  // of D that one thread carries through the chunks
  int64_t streams;  // streams in a group
  int64_t chunks;   // chunks of each in a window
};

// Enough streams that slices keep the threads busy, enough chunks that their entries do. Slices are
// `least` columns or a multiple: memory likes long pieces of rows, but the token rows of a chunk
// should stay in a core's second-level cache. `even`: all sequences have equally many chunks.
inline WorkShape choose_work(
    const cpu::ParallelFor& parallel,
    int64_t num_streams,
    int64_t D,
    int64_t least,
    int64_t max_chunks,
    bool even
) {
  constexpr int64_t kLongPiece = 256;
  const int64_t wide = std::max(least, kLongPiece / least * least);
  const int64_t threads = parallel.num_threads;
  const int64_t wide_items = num_streams * ceil_div(D, wide);
  int64_t columns = least;
  int64_t wanted = 2 * threads;  // two items a thread even out items of different length
  if (threads == 1 || (even && wide_items % threads == 0)) {
    columns = wide;
    wanted = threads;
  }
  const int64_t streams = std::min(num_streams, ceil_div(wanted, ceil_div(D, columns)));
  constexpr int64_t kMaxChunks = 16;
  const int64_t chunks =
      std::min({max_chunks, std::max<int64_t>(2, ceil_div(wanted, streams)), kMaxChunks});
  return {columns, streams, std::max<int64_t>(1, chunks)};
}

}  // namespace sdm
