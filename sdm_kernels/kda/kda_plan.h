// SPDX-License-Identifier: Apache-2.0
//! @file How a call is cut into sequences and chunks. Pure host.
#pragma once

#include <vector>

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda {

struct KdaSequence {
  int64_t index;   // in [0, N)
  int64_t batch;   // row of the [B, T, ...] tensors
  int64_t begin;   // first token in that row
  int64_t length;  // tokens
  int64_t state;   // row of the states, -1: skip
};

// Index of a sequence's first token among all tokens, as chunk_state_row() wants it.
SDM_HD int64_t first_token(const KdaSequence& sequence, const KdaDims& dims) {
  return sequence.batch * dims.T + sequence.begin;
}

// Checks cu_seqlens and state_indices, each null or of the host.
Status make_kda_sequences(
    const KdaDims& dims,
    const int64_t* cu_seqlens,
    const int64_t* state_indices,
    int64_t pool,
    std::vector<KdaSequence>* sequences
);

}  // namespace sdm::kda
