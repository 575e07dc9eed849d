// SPDX-License-Identifier: Apache-2.0
//! @file Where the rows of the bank lie as they were at the start of a chunk, and which rows need
//! not be read or made.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"
#include "sdm_kernels/sdm/sdm_params.h"

namespace sdm::cuda {

struct SdmSources {
  int* row;      // [q][n] by group: codes, see below
  int* written;  // [N * H][S]: the saved row that a slot has at this point of the pass, -1: none
  int* touched;  // [N * H][S]: the first chunk seen so far that touches a slot, kNeverTouched
};

// A code is 1 + the row of the saved tensor (counted from the head's first) that holds the slot's
// row at the start of the chunk, 0: the bank does. And two bits.
constexpr int kUntouchedBit = INT32_MIN;  // no later chunk touches the slot: its gradient is zero
constexpr int kReadLaterBit = 1 << 30;    // log: the row that the chunk makes is read later
constexpr int kSourceMask = kReadLaterBit - 1;

// memset of bytes 0x7f
constexpr int kNeverTouched = 0x7f7f7f7f;

__host__ __device__ constexpr int source_row(int code) {
  return (code & kSourceMask) - 1;
}

// What the saved rows are, and what that makes of the bank.
enum class SavedRows {
  kOld,         // [H][rows_per_head]: every chunk's as they were before it; the bank at the end
  kLog,         // [H][rows_per_head]: every chunk's as it leaves them; the bank at the start
  kForwardLog,  // the same while the forward makes it
  kSlotLog,    // forward: [N * H][S]: every slot's as the last chunk left it, if any; the same bank
  kReplayLog,  // [N * H][chunks of a window but the last][rows of a chunk]: the same of a window;
               // the bank at its start
};

// SdmSaved::links has the code of every row's slot before its chunk, [H][rows_per_head], and
// behind them SdmSources::written as the last chunk leaves it.
struct SavedRowsLayout {
  SavedRows kind;
  bool zero_gradient;  // backward: of the bank at the end of the call
  bool keep_all;       // forward: all rows of this window are read later
  int64_t reserved;
  int64_t rows_per_head;
  int* links;          // kLog, kForwardLog
  const int* written;  // backward from a log: at the end
};

inline int* written_at_end(const SdmSaved& saved, const SdmDims& dims, int64_t n) {
  return saved.links + dims.H * saved.rows_per_head + n * dims.H * dims.S;
}

// Before the first window.
[[nodiscard]] cudaError_t launch_forget_touched(
    const SdmDims& dims, const SdmSources& sources, cudaStream_t stream
);

// Fills sources.row for a window. The backward visits windows from the last to the first, the
// forward from the first to the last; `restart` forgets what others have written. With a gradient
// of zero, the writes of slots that no later chunk touches lose their slot in records.write_post.
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

// Forward from a log: puts -1 - code in the place of the slot in records.lane where code > 0.
[[nodiscard]] cudaError_t launch_lane_sources(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    const SdmRecords& records,
    const SdmSources& sources,
    cudaStream_t stream
);

// The bank at the end of a call: rows of the log, and of the initial bank where there is none.
[[nodiscard]] cudaError_t launch_bank_of_log(
    DType dtype,
    const SdmDims& dims,
    const BankView& initial,
    const int* written,
    const SdmSaved& log,
    const BankView& to,
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
