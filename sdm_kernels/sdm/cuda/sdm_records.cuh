// SPDX-License-Identifier: Apache-2.0
//! @file What the stages of the CUDA kernels hand to each other: sequences, the records of a window
//! of chunks, and the dot products of the backward.
//!
//! A window is Kw chunks of every sequence and head. Its chunks are numbered
//! q = (n * Kw + k) * H + h for chunk k0 + k of sequence n; a q without a chunk is skipped by every
//! kernel. A chunk has n = C * (W + R) lanes, numbered token * W + a for writes, then
//! C * W + token * R + b for reads. A lane with a slot inside the bank is an entry; sorted by
//! (slot, lane) the entries of a slot are a group, writes first, in token order.
#pragma once

#include <cstdint>

#include "sdm_kernels/sdm/sdm_params.h"
#include "sdm_kernels/sdm/sdm_plan.h"

namespace sdm {

// What a pair of entries needs of the earlier one, and of its own.
struct alignas(16) SdmPair {
  float value;       // k or q
  uint32_t info;     // token, and above kPairTokenBits the distance back to the group's first entry
  double log_decay;  // sum of the group's gates up to the entry
};

constexpr int kPairTokenBits = 8;

// Arrays are indexed [q][...]; see sdm_entries-inl.h for the quantities.
struct SdmRecords {
  int64_t num_q;  // N * Kw * H
  int32_t n;      // lanes of a chunk
  int32_t Cp;     // C rounded up to 16: rows of the matrices
  int2* lane;     // [q][n] {slot or -1, weight as float bits}: weight = k or q times exp(log_decay)
  int2* write_post;   // [q][C * W] {slot or -1, post bits}: the writes again, for the gradient's
                      // gather
  int32_t* position;  // [q][n] of a lane: its place among the sorted entries, -1 if it has none
  int4* entry;        // [q][n] sorted {row, weight bits, post bits, lane | pairs << kPairsBit}
                      // row = token of a write, C + token of a read; bit 30 set: owner of its gate
                      // post = k * exp(total - log_decay) * beta (writes; 0 for reads)
                      // pairs: earlier writes that pair with it, kManyPairs for so many and more
  SdmPair* pair;      // [q][n] sorted
  int32_t* entry_group;  // [q][n] sorted: number of the entry's group
  int4* group;  // [q][n] {slot, first entry, writes, reads}: groups with writes in ascending slot
                // order, then those without
  float* group_decay;  // [q][n] exp of the sum of all gates of the group (1 without writes)
  int4* head_post;  // [q][n] by group {row, post bits} of its first and second entry, so that most
  int4* head_weight;     //        groups need no look at `entry`; likewise {row, weight bits}
  int2* group_count;     // [q] {groups with writes, all groups}
  int32_t* entry_count;  // [q] sorted entries
  float* beta;           // [q][C]
  // Lower triangular, zero beyond the last token; not written beyond the block of 32 (qk: 16)
  // columns that has a row's diagonal.
  float* inverse;  // [q][Cp][Cp] (I + A diag(beta))^-1
  float* qk;       // [q][Cp][Cp] QK[i,j] * beta[j]
};

constexpr int32_t kOwnerBit = 1 << 30;
constexpr int kPairsBit = 24;
constexpr int kManyPairs = 127;
constexpr int kMaxLanes = 1 << kPairsBit;  // of a chunk
constexpr int32_t kLaneMask = kMaxLanes - 1;

// In the first row of a head_post: the group has a second write, more than two writes. In the first
// row of a head_weight: a second entry, more than two.
constexpr int32_t kSecondBit = 1 << 29;
constexpr int32_t kMoreBit = 1 << 28;
constexpr int32_t kRowMask = kMoreBit - 1;

// Dots of the backward, one plane a slice of columns; summed in slice order.
struct SdmDots {
  int64_t num_slices;  // of error_grad
  int64_t row_slices;  // of row and decay
  float* error_grad;   // [slice][q][C * W] by lane: <e, G> with G at the chunk's end
  float* row;          // [slice][q][n] by sorted entry: <dv, M> of a write, <dy, M> of a read
  float* decay;        // [slice][q][n] by group: <G, M>
  float* d_v;          // [q][C][D] gradient of the values in float
};

// The window that a launch works on.
struct SdmWindow {
  int64_t first_chunk;  // k0
  int64_t chunks;       // Kw
};

struct SdmCudaInputs {
  SdmDims dims;
  SdmTokens tokens;
  DType bank_dtype;
  const SdmSequence* sequences;  // device, [N]
};

// Whether the k-th chunk of the window is the sequence's last in it.
SDM_HD bool is_last_chunk(const SdmSequence& sequence, const SdmWindow& window, int64_t k) {
  return k + 1 == window.chunks || window.first_chunk + k + 1 == sequence.num_chunks;
}

// The chunk that q stands for; false when there is none.
SDM_HD bool find_chunk(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    int64_t q,
    ChunkPlace* place
) {
  const int64_t head = q % dims.H;
  const int64_t k = q / dims.H % window.chunks + window.first_chunk;
  const SdmSequence& sequence = sequences[q / (dims.H * window.chunks)];
  if (sequence.bank < 0 || k >= sequence.num_chunks) {
    return false;
  }
  *place = chunk_place(sequence, head, k, dims.C);
  return true;
}

}  // namespace sdm
