// SPDX-License-Identifier: Apache-2.0
//! @file Where the backward finds the rows of the bank as they were at the start of a chunk.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

// By [q][group]: the row of the saved tensor (counted from the head's first) that holds the slot's
// row, or -1: the bank at the end does.
struct SdmSources {
  int* row;      // [q][n]
  int* written;  // [N * H][S] scratch: the first saved row of a slot in the chunks seen so far
};

// First of the saved rows of a chunk, as a row of the tensor that the walk reads.
struct SavedRowsLayout {
  bool replay;  // [N * H][window][rows of a chunk] rather than [H][rows_per_head]
  int64_t reserved;
  int64_t rows_per_head;
};

// Fills sources.row for a window. Windows are visited from the last to the first; `restart` forgets
// what the later ones have seen.
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

}  // namespace sdm::cuda
