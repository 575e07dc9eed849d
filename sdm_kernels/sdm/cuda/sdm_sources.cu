// SPDX-License-Identifier: Apache-2.0
//! @file Where the backward finds the rows of the bank as they were at the start of a chunk.
//!
//! Every chunk keeps the rows that it writes as they were before (a replay: but for the last chunk,
//! before which its bank stops). So a row at the start of chunk k is the one kept by the first
//! chunk from k on that writes its slot, or that of the bank at the end. One pass over the chunks
//! from last to first with a table of the rows kept so far tells which: 4 bytes a group to write
//! and 4 in the table, instead of a copy of the bank that is taken back chunk by chunk, 2 KB a
//! written row.
//!
//! A block owns a range of a stream's slots, so that blocks need not meet; the groups of a range
//! are found by bisection, since both kinds of groups are sorted by slot.

#include <algorithm>

#include "sdm_kernels/sdm/cuda/sdm_sources.h"

namespace sdm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = kThreads / 4;  // chunks whose bounds are found together

struct SourcesParams {
  SdmDims dims;
  SdmWindow window;
  const SdmSequence* sequences;
  SdmRecords records;
  SavedRowsLayout layout;
  SdmSources sources;
  int ranges;  // of a stream
};

// The first group in [begin, end) whose slot is at least `slot`.
__device__ int lower_bound(const int4* groups, int begin, int end, int64_t slot) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (groups[middle].x < slot) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

__global__ void __launch_bounds__(kThreads) sdm_sources_kernel(
    const __grid_constant__ SourcesParams p
) {
  const int64_t stream = blockIdx.x / p.ranges;
  const int64_t range = blockIdx.x % p.ranges;
  const int64_t head = stream % p.dims.H;
  const int64_t n = stream / p.dims.H;
  const SdmSequence& sequence = p.sequences[n];
  const int64_t first_slot = p.dims.S * range / p.ranges;
  const int64_t end_slot = p.dims.S * (range + 1) / p.ranges;
  int* written = p.sources.written + stream * p.dims.S;
  __shared__ int bounds[kBatch][4];  // of a chunk: written groups, other groups
  for (int64_t first = (p.window.chunks - 1) / kBatch * kBatch; first >= 0; first -= kBatch) {
    // a bisection waits for one load after the other: all those of a batch at once
    {
      const int64_t k = first + threadIdx.x / 4;
      if (k < p.window.chunks && p.window.first_chunk + k < sequence.num_chunks) {
        const int64_t q = (n * p.window.chunks + k) * p.dims.H + head;
        const int2 count = p.records.group_count[q];
        const bool other = threadIdx.x % 4 >= 2;
        bounds[threadIdx.x / 4][threadIdx.x % 4] = lower_bound(
            p.records.group + q * p.records.n,
            other ? count.x : 0,
            other ? count.y : count.x,
            threadIdx.x % 2 == 0 ? first_slot : end_slot
        );
      }
    }
    __syncthreads();  // bounds
    const int64_t end = first + kBatch < p.window.chunks ? first + kBatch : p.window.chunks;
    for (int64_t k = end - 1; k >= first; --k) {
      const int64_t chunk = p.window.first_chunk + k;
      if (chunk >= sequence.num_chunks) {
        continue;
      }
      const int64_t q = (n * p.window.chunks + k) * p.dims.H + head;
      const int4* groups = p.records.group + q * p.records.n;
      int* rows = p.sources.row + q * p.records.n;
      const int* bound = bounds[k - first];
      for (int g = bound[2] + static_cast<int>(threadIdx.x); g < bound[3]; g += kThreads) {
        rows[g] = written[groups[g].x];
      }
      const int64_t first_row = p.layout.replay ? (stream * p.window.chunks + k) * p.layout.reserved
                                                : sequence.first_row + chunk * p.layout.reserved;
      // a replayed window keeps no rows of its last chunk: the bank has them
      const bool kept = !p.layout.replay || !is_last_chunk(sequence, p.window, k);
      for (int g = bound[0] + static_cast<int>(threadIdx.x); g < bound[1]; g += kThreads) {
        if (!kept) {
          rows[g] = -1;
          continue;
        }
        const int slot = groups[g].x;
        const int row = static_cast<int>(first_row + g);
        rows[g] = row;
        written[slot] = row;  // its slot is in no other group of this chunk
      }
      __syncthreads();  // the table is as this chunk leaves it; bounds may be overwritten
    }
  }
}

}  // namespace

cudaError_t launch_sdm_sources(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    const SdmRecords& records,
    const SavedRowsLayout& layout,
    const SdmSources& sources,
    bool restart,
    cudaStream_t stream
) {
  const int64_t streams = dims.N * dims.H;
  const int64_t rows =
      layout.replay ? streams * window.chunks * layout.reserved : layout.rows_per_head;
  // small ranges fill the card with few streams, but leave each thread a group or two a chunk
  const int64_t ranges = std::clamp<int64_t>(dims.S / (2 * kThreads), 1, 64);
  if (rows > INT32_MAX || streams * ranges > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (restart) {
    const size_t bytes = static_cast<size_t>(streams * dims.S) * sizeof(int);
    const cudaError_t error = cudaMemsetAsync(sources.written, 0xff, bytes, stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  const SourcesParams p{
      dims, window, sequences, records, layout, sources, static_cast<int>(ranges)
  };
  sdm_sources_kernel<<<static_cast<unsigned>(streams * ranges), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace sdm::cuda
