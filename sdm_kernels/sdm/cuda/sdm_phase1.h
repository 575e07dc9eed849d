// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1 of the CUDA kernels: everything of a window of chunks that does not depend on the
//! bank. Host side.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm {

// Fills `sequences` [N] on the device. cu_seqlens [N + 1] and state_indices [N] are device pointers
// to int32 or int64, or null (sequence n is batch row n; bank row n). Bad values cause no access
// out of range: offsets are clamped and made monotone, state indices outside [0, pool) skip.
[[nodiscard]] cudaError_t launch_sdm_sequences(
    const SdmDims& dims,
    const void* cu_seqlens,
    bool cu_seqlens_is_int64,
    const void* state_indices,
    bool state_indices_is_int64,
    int64_t pool,
    int64_t segment_chunks,
    SdmSequence* sequences,
    cudaStream_t stream
);

// Bytes that launch_sdm_phase1 needs for the window; enough for every shorter window of the same
// call too. Without `gram` the arrays inverse and qk are left out.
[[nodiscard]] cudaError_t sdm_phase1_workspace(
    const SdmDims& dims, const SdmWindow& window, bool gram, size_t* bytes
);

// Builds the records of a window. They lie in `workspace` (256-byte aligned), whose first
// *records_bytes bytes they take: the rest is free again once the launches have run.
//
// What consumers may rely on: entries, pairs and groups are written up to the counts of the
// chunk; lane and position for all n lanes; beta is 0 from the chunk's number of tokens on; rows
// of inverse and qk are zero from there on, the diagonal of inverse included.
// group_count is {0, 0} where there is no chunk. Errors: cudaErrorInvalidValue when C > 256 or a
// size is beyond the grid, else those of the launches.
[[nodiscard]] cudaError_t launch_sdm_phase1(
    const SdmCudaInputs& inputs,
    const SdmWindow& window,
    bool gram,
    SdmRecords* records,
    void* workspace,
    cudaStream_t stream,
    size_t* records_bytes = nullptr
);

}  // namespace sdm
