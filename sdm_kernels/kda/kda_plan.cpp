// SPDX-License-Identifier: Apache-2.0
//! @file Sequences of a call.

#include "sdm_kernels/kda/kda_plan.h"

namespace sdm::kda {

Status make_kda_sequences(
    const KdaDims& dims,
    const int64_t* cu_seqlens,
    const int64_t* state_indices,
    int64_t pool,
    std::vector<KdaSequence>* sequences
) {
  std::vector<bool> used(static_cast<size_t>(state_indices != nullptr ? pool : 0), false);
  int64_t end = 0;
  sequences->clear();
  sequences->reserve(static_cast<size_t>(dims.N));
  for (int64_t n = 0; n < dims.N; ++n) {
    KdaSequence sequence{n, n, 0, dims.T, n};
    if (cu_seqlens != nullptr) {
      if (cu_seqlens[n] != end || cu_seqlens[n + 1] < end || cu_seqlens[n + 1] > dims.T) {
        return Status::kBadSequences;
      }
      end = cu_seqlens[n + 1];
      sequence.batch = 0;
      sequence.begin = cu_seqlens[n];
      sequence.length = end - sequence.begin;
    }
    if (state_indices != nullptr) {
      sequence.state = state_indices[n];
      if (sequence.state < -1 || sequence.state >= pool) {
        return Status::kBadStateIndices;
      }
      if (sequence.state >= 0) {
        if (used[static_cast<size_t>(sequence.state)]) {
          return Status::kBadStateIndices;
        }
        used[static_cast<size_t>(sequence.state)] = true;
      }
    }
    sequences->push_back(sequence);
  }
  if (cu_seqlens != nullptr && end != dims.T) {
    return Status::kBadSequences;
  }
  return Status::kOk;
}

}  // namespace sdm::kda
