// SPDX-License-Identifier: Apache-2.0
//! @file How a call is cut into sequences and chunks, and what the saved tensors hold. Pure host.
#pragma once

#include <vector>

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/sdm/sdm_params.h"

namespace sdm {

struct SdmSequence {
  int64_t batch;             // row of the [B, T, ...] tensors
  int64_t begin;             // first token in that row
  int64_t length;            // tokens
  int64_t bank;              // row of the bank, -1: skip
  int64_t num_chunks;        // ceil(length / C)
  int64_t first_checkpoint;  // replay: index of its first bank checkpoint
  int64_t first_row;         // rows modes: index of its first saved row
};

// Where a chunk stands in the [B, T, H, ...] tensors.
struct ChunkPlace {
  int64_t batch, head;
  int64_t token;  // its first token in the batch row
  int64_t num_tokens;
};

SDM_HD int64_t chunk_tokens(const SdmSequence& sequence, int64_t chunk, int64_t C) {
  const int64_t rest = sequence.length - chunk * C;
  return rest < C ? rest : C;
}

SDM_HD ChunkPlace chunk_place(const SdmSequence& sequence, int64_t head, int64_t chunk, int64_t C) {
  return {sequence.batch, head, sequence.begin + chunk * C, chunk_tokens(sequence, chunk, C)};
}

// Rows reserved in the saved tensor for one chunk of `tokens` tokens.
SDM_HD int64_t rows_of_chunk(const SdmDims& dims, int64_t tokens) {
  const int64_t writes = tokens * dims.W;
  return writes < dims.S ? writes : dims.S;
}

// Checkpoints of a sequence: the bank at the start of every segment but the first.
SDM_HD int64_t num_checkpoints(int64_t num_chunks, int64_t segment_chunks) {
  return num_chunks == 0 ? 0 : ceil_div(num_chunks, segment_chunks) - 1;
}

// Bytes of one saved row in a rows mode.
int64_t saved_row_bytes(SdmSave mode, DType bank_dtype, int64_t columns);

Status make_sdm_sequences(
    const SdmDims& dims,
    const int64_t* cu_seqlens,
    const int64_t* state_indices,
    int64_t pool,
    int64_t segment_chunks,
    std::vector<SdmSequence>* sequences
);

}  // namespace sdm
