// SPDX-License-Identifier: Apache-2.0
//! @file Where the backward finds the rows of the bank as they were at the start of a chunk, and
//! which rows it need not read or make.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

struct SdmSources {
  int* row;      // [q][n] by group: codes, see below
  int* written;  // [N * H][S] scratch: the saved row that a slot has at this point of the pass
  int* touched;  // [N * H][S]: the first chunk seen so far that touches a slot, kNeverTouched
};

// A code is 1 + the row of the saved tensor (counted from the head's first) that holds the slot's
// row at the start of the chunk, 0: the bank does, which is that at the end of the call or, with a
// replay, at the start of the window. And two bits.
constexpr int kUntouchedBit = INT32_MIN;  // no later chunk touches the slot: its gradient is zero
constexpr int kReadLaterBit = 1 << 30;    // replay: a later chunk of the window touches the slot
constexpr int kSourceMask = kReadLaterBit - 1;

// memset of bytes 0x7f
constexpr int kNeverTouched = 0x7f7f7f7f;

__host__ __device__ constexpr int source_row(int code) {
  return (code & kSourceMask) - 1;
}

// Of the saved rows, as a tensor that the walk reads.
struct SavedRowsLayout {
  bool replay;  // [N * H][chunks of a window but the last][rows of a chunk], not [H][rows_per_head]
  bool zero_gradient;  // of the bank at the end of the call
  int64_t reserved;
  int64_t rows_per_head;
};

// Before the first window.
[[nodiscard]] cudaError_t launch_forget_touched(
    const SdmDims& dims, const SdmSources& sources, cudaStream_t stream
);

// Fills sources.row for a window. Windows are visited from the last to the first; `restart` forgets
// what the later ones have written. With a gradient of zero, the writes of slots that no later
// chunk touches lose their slot in records.write_post.
[[nodiscard]] cudaError_t launch_sdm_sources(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    const SdmRecords& records,
    const SavedRowsLayout& layout,
    const SdmSources& sources,
    bool restart,
    cudaStream_t stream
);

// Zeroes the rows of `bank`, contiguous, that no chunk touches; after the last window.
[[nodiscard]] cudaError_t launch_clear_untouched(
    const SdmDims& dims,
    const SdmSources& sources,
    void* bank,
    int64_t row_bytes,
    cudaStream_t stream
);

}  // namespace sdm::cuda
