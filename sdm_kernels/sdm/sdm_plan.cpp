// SPDX-License-Identifier: Apache-2.0
//! @file Sequences and chunks of a call.

#include "sdm_kernels/sdm/sdm_plan.h"

namespace sdm {

int64_t saved_row_bytes(SdmSave mode, DType bank_dtype, int64_t columns) {
  switch (mode) {
    case SdmSave::kBf16:
      return columns * 2;
    case SdmSave::kFp8:
      return columns;
    case SdmSave::kInt4:
      return ceil_div(columns, 2);
    default:
      return columns * element_size(bank_dtype);
  }
}

Status make_sdm_sequences(
    const SdmDims& dims,
    const int64_t* cu_seqlens,
    const int64_t* state_indices,
    int64_t pool,
    int64_t segment_chunks,
    std::vector<SdmSequence>* sequences
) {
  if (dims.S > INT32_MAX || checked_mul(dims.C, dims.W + dims.R) > INT32_MAX / 2) {
    return Status::kTooLarge;
  }
  std::vector<bool> used(static_cast<size_t>(state_indices != nullptr ? pool : 0), false);
  int64_t checkpoint = 0;
  int64_t row = 0;
  int64_t end = 0;
  sequences->clear();
  sequences->reserve(static_cast<size_t>(dims.N));
  for (int64_t n = 0; n < dims.N; ++n) {
    SdmSequence sequence{n, 0, dims.T, n, 0, checkpoint, row};
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
      sequence.bank = state_indices[n];
      if (sequence.bank < -1 || sequence.bank >= pool ||
          (sequence.bank >= 0 && used[static_cast<size_t>(sequence.bank)])) {
        return Status::kBadStateIndices;
      }
      if (sequence.bank >= 0) {
        used[static_cast<size_t>(sequence.bank)] = true;
      }
    }
    sequence.num_chunks = ceil_div(sequence.length, dims.C);
    checkpoint += num_checkpoints(sequence.num_chunks, segment_chunks);
    if (sequence.num_chunks > 0) {
      const int64_t full = sequence.num_chunks - 1;
      row +=
          full * rows_of_chunk(dims, dims.C) + rows_of_chunk(dims, sequence.length - full * dims.C);
    }
    sequences->push_back(sequence);
  }
  if (cu_seqlens != nullptr && end != dims.T) {
    return Status::kBadSequences;
  }
  return Status::kOk;
}

}  // namespace sdm
