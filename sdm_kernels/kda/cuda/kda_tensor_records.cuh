// SPDX-License-Identifier: Apache-2.0
//! @file What the tensor path of Kimi delta attention computes once per chunk and value head and
//! hands to its scans, and how the tokens are cut into windows of such records.
//!
//! Letters as in kda_params.h; the chunk has 64 rows, rows past the end of the sequence are neutral
//! (q = k = 0, decay 1, beta 0). With q and k normalised and G the sum of the log-decays up to and
//! including a row, a record holds, all matrices in fp16:
//!   kd = k exp(G)    qd = q exp(G)    kr = k exp(GT - G)     [64, K]
//!   inverse = (I + diag(beta) F)^-1   F[i, j] = sum k_i k_j exp(G_i - G_j) for j < i    [64, 64]
//!   scores: the same with q_i for k_i and j <= i                                     [64, 64]
//!   gamma = exp(GT) [K], beta [64], factors of the norms of q and k [64], in float
//! `scale` is in none of them. So that
//!   U = inverse diag(beta) (v - kd S)    o = scale (qd S + scores U)    S' = gamma S + kr^T U
//!
//! fp16 holds all of these with 11 bits because nothing exceeds the norm of q or k. A matrix lies
//! as shared memory wants it: panels of 64 columns, in each the 16-byte pieces of row r permuted by
//! r % 8, which keeps matrix loads free of bank conflicts and is the 128-byte swizzle of sm_90.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sdm_kernels/cuda/device_integers.h"
#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda {

inline constexpr int kPanelElements = 64 * 64;
inline constexpr int kPanelBytes = kPanelElements * 2;

// Element of a swizzled matrix of 64 rows, in elements from its start.
SDM_HD constexpr int panel_offset(int row, int col) {
  return (col >> 6) * kPanelElements + row * 64 + ((((col >> 3) & 7) ^ (row & 7)) << 3) + (col & 7);
}

// Byte offsets inside the record of one chunk and head. What the scan of a segment reads
// (kda_tensor_segment_scan.cuh), from kd to beta, is in one piece.
template <int kK>
struct KdaRecord {
  static_assert(kK % 64 == 0);
  static constexpr int kTileBytes = kK / 64 * kPanelBytes;
  static constexpr int kQd = 0;
  static constexpr int kScores = kQd + kTileBytes;
  static constexpr int kKd = kScores + kPanelBytes;
  static constexpr int kInverse = kKd + kTileBytes;
  static constexpr int kKr = kInverse + kPanelBytes;
  static constexpr int kGamma = kKr + kTileBytes;    // float [K]
  static constexpr int kBeta = kGamma + kK * 4;      // float [64]
  static constexpr int kKeyNorm = kBeta + 256;       // float [64]: k normalised = k * this
  static constexpr int kQueryNorm = kKeyNorm + 256;  // float [64]
  static constexpr int kForwardBytes = kQueryNorm + 256;
  static_assert(kForwardBytes % 256 == 0);
};

// The records of a window: [slot][HV], `stride` bytes apart.
struct KdaRecords {
  char* data;
  int64_t stride;  // KdaRecord<K>::kForwardBytes
};

// A window is `num_chunks` chunks of each of `num_sequences` sequences. With cu_seqlens, whose
// lengths the host does not know, it is `num_chunks` consecutive rows of chunk_state_row() instead,
// whatever sequences they belong to. Slot: sequence * num_chunks + chunk, or the row.
//
// With segments (kda_tensor_segments.cuh) a window holds whole ones: those that begin in its first
// `starts` chunks or rows.
struct KdaWindow {
  int64_t first_sequence, num_sequences;  // without cu_seqlens
  int64_t first_chunk, num_chunks;        // with cu_seqlens: first row, rows
  int64_t parity;   // of its number: states go from one window to the next through two buffers
  int64_t segment;  // chunks of a segment; 0: there are none
  int64_t starts;

  SDM_HD int64_t slots() const { return num_sequences * num_chunks; }

  // Of a sequence; packed, of the window: no two segments with another behind them begin in the
  // same `segment` rows.
  SDM_HD int64_t segment_slots() const { return ceil_div(starts, segment); }

  // Sequences that begin or go on in the window, at most.
  SDM_HD int64_t max_spans(bool packed, int64_t N) const {
    return !packed ? num_sequences : (N < starts ? N : starts);
  }

  // The same for parts of sequences that are scanned by themselves.
  SDM_HD int64_t max_pieces(bool packed, int64_t N) const {
    return max_spans(packed, N) + (segment > 0 ? num_sequences * segment_slots() : 0);
  }
};

// How a call is cut into windows. Results do not depend on it.
struct KdaWindowPlan {
  bool packed;
  int64_t sequences;      // N, or 1 when packed
  int64_t chunks;         // of a sequence; packed: rows in all
  int64_t group;          // sequences of a window
  int64_t window_chunks;  // chunks of a window, multiples of a segment; packed: its `starts`
  int64_t segment;        // as in KdaWindow

  SDM_HD int64_t windows_of_group() const {
    return chunks > 0 ? ceil_div(chunks, window_chunks) : 1;
  }

  SDM_HD int64_t num_windows() const { return ceil_div(sequences, group) * windows_of_group(); }

  SDM_HD int64_t max_slots() const { return group * (window_chunks + tail()); }

  SDM_HD int64_t max_segment_slots() const {
    return segment > 0 ? group * ceil_div(window_chunks, segment) : 0;
  }

  // Sequences that may go on in another window.
  SDM_HD int64_t carry_rows() const { return packed ? 1 : group; }

  SDM_HD KdaWindow window(int64_t index) const {
    const int64_t per_group = windows_of_group();
    KdaWindow w;
    w.first_sequence = index / per_group * group;
    w.num_sequences = sequences - w.first_sequence < group ? sequences - w.first_sequence : group;
    w.first_chunk = index % per_group * window_chunks;
    const int64_t left = chunks - w.first_chunk;
    w.starts = left < window_chunks ? left : window_chunks;
    w.num_chunks = left < window_chunks + tail() ? left : window_chunks + tail();
    w.parity = index & 1;
    w.segment = segment;
    return w;
  }

 private:
  // Rows behind those in which a segment may begin.
  SDM_HD int64_t tail() const { return packed && segment > 0 ? segment - 1 : 0; }
};

// The segments of a call: by what does not change with the sequences in it or with tokens behind
// others, except that nothing needs to be cut where no sequence is longer than a segment.
inline int64_t kda_segment_chunks(const KdaDims& dims) {
  return dims.HV <= kSegmentHeads && ceil_div(dims.T, kTensorChunk) > kSegmentChunks
             ? kSegmentChunks
             : 0;
}

// `target` is the number of records (chunks times heads) that a window should have: enough to fill
// the machine, few enough to stay in the second-level cache.
inline KdaWindowPlan kda_window_plan(const KdaDims& dims, bool packed, int64_t target) {
  KdaWindowPlan plan;
  plan.packed = packed;
  plan.sequences = packed ? 1 : dims.N;
  plan.chunks = packed ? dims.T / kTensorChunk + dims.N : ceil_div(dims.T, kTensorChunk);
  plan.segment = kda_segment_chunks(dims);
  const int64_t heads = dims.HV > 0 ? dims.HV : 1;
  const int64_t sequences = plan.sequences > 0 ? plan.sequences : 1;
  // Sequences in parallel until a chunk of each makes half the target; with segments, which are
  // parallel themselves, so many as are there as a whole.
  const int64_t each = plan.segment > 0 ? heads * plan.chunks : 2 * heads;
  const int64_t most = target / each > 1 ? target / each : 1;
  plan.group = ceil_div(sequences, ceil_div(sequences, most));
  const int64_t chunks = target / (plan.group * heads);
  plan.window_chunks = chunks < 1 ? 1 : (chunks > plan.chunks ? plan.chunks : chunks);
  if (plan.segment > 0 && chunks < plan.chunks) {
    // Windows of about the same size.
    const int64_t segments = ceil_div(plan.chunks, plan.segment);
    const int64_t fit = chunks / plan.segment > 1 ? chunks / plan.segment : 1;
    plan.window_chunks = plan.segment * ceil_div(segments, ceil_div(segments, fit));
  }
  if (plan.window_chunks < 1) {
    plan.window_chunks = 1;
  }
  return plan;
}

#ifdef __CUDACC__

namespace cuda {

// A sequence: its batch row, first token in that row, number of tokens.
struct KdaSequence {
  int64_t index, batch, begin, length;

  __device__ __forceinline__ int64_t chunks() const { return ceil_div(length, kTensorChunk); }

  // Row of chunk 0 in the order of chunk_state_row().
  __device__ __forceinline__ int64_t first_row(int64_t T) const {
    return chunk_state_row(index, batch * T + begin, 0, kTensorChunk);
  }
};

// The chunks [first, last) of a sequence that a window holds; the first is in slot `slot`. The
// window of the last chunk (or of row 0 of an empty sequence) has `ends`.
struct KdaSpan {
  KdaSequence sequence;
  int64_t first, last, slot;
  bool valid, ends;
};

__device__ __forceinline__ int64_t kda_offset(const DeviceIntegers& cu, int64_t n, int64_t T) {
  const int64_t x = cu.is_int64 ? static_cast<const int64_t*>(cu.data)[n]
                                : static_cast<int64_t>(static_cast<const int32_t*>(cu.data)[n]);
  return x < 0 ? 0 : (x > T ? T : x);  // offsets that are no packing must not lead outside
}

__device__ __forceinline__ KdaSequence
kda_sequence(const DeviceIntegers& cu, int64_t n, int64_t T) {
  if (cu.data == nullptr) {
    return {n, n, 0, T};
  }
  const int64_t begin = kda_offset(cu, n, T);
  const int64_t end = kda_offset(cu, n + 1, T);
  return {n, 0, begin, end > begin ? end - begin : 0};
}

// The packed sequence that owns a row: the last one that starts at or before it.
__device__ __forceinline__ int64_t
kda_sequence_of_row(const DeviceIntegers& cu, int64_t row, int64_t N, int64_t T) {
  int64_t low = 0, high = N - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (kda_offset(cu, middle, T) / kTensorChunk + middle <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Chunk `chunk` of sequence `index` of the window (packed: row `chunk`, index 0), slot index *
// num_chunks + chunk: `first` is its number; not valid: the slot is not used.
__device__ __forceinline__ KdaSpan kda_chunk_of_window(
    const DeviceIntegers& cu,
    const KdaWindow& window,
    int64_t index,
    int64_t chunk,
    const KdaDims& dims
) {
  KdaSpan span;
  if (cu.data == nullptr) {
    span.sequence = kda_sequence(cu, window.first_sequence + index, dims.T);
    span.first = window.first_chunk + chunk;
  } else {
    const int64_t row = window.first_chunk + chunk;
    span.sequence = kda_sequence(cu, kda_sequence_of_row(cu, row, dims.N, dims.T), dims.T);
    span.first = row - span.sequence.first_row(dims.T);
  }
  span.last = span.first + 1;
  span.slot = index * window.num_chunks + chunk;
  span.valid = span.first >= 0 && span.first < span.sequence.chunks();
  if (cu.data != nullptr && window.segment > 0) {
    const int64_t start = chunk - span.first % window.segment;  // of its segment
    span.valid = span.valid && start >= 0 && start < window.starts;
  }
  span.ends = span.last == span.sequence.chunks();
  return span;
}

// The same by slot.
__device__ __forceinline__ KdaSpan kda_chunk_of_slot(
    const DeviceIntegers& cu, const KdaWindow& window, int64_t slot, const KdaDims& dims
) {
  return kda_chunk_of_window(cu, window, slot / window.num_chunks, slot % window.num_chunks, dims);
}

// The `index`-th sequence that the window touches; not valid: there is none, or it has ended
// before.
__device__ __forceinline__ KdaSpan
kda_span(const DeviceIntegers& cu, const KdaWindow& window, int64_t index, const KdaDims& dims) {
  KdaSpan span;
  int64_t first, last;  // chunks of the sequence in the window, before its length is applied
  if (cu.data == nullptr) {
    span.sequence = kda_sequence(cu, window.first_sequence + index, dims.T);
    first = window.first_chunk;
    last = first + window.num_chunks;
    span.slot = index * window.num_chunks;
    span.valid = true;
  } else {
    const int64_t n = kda_sequence_of_row(cu, window.first_chunk, dims.N, dims.T) + index;
    if (n >= dims.N) {
      span.valid = false;
      return span;
    }
    span.sequence = kda_sequence(cu, n, dims.T);
    const int64_t row = span.sequence.first_row(dims.T);
    first = window.first_chunk > row ? window.first_chunk - row : 0;
    last = window.first_chunk + window.num_chunks - row;
    span.slot = row + first - window.first_chunk;
    span.valid = last > 0;
  }
  const int64_t chunks = span.sequence.chunks();
  span.first = first;
  span.last = last < chunks ? last : chunks;
  span.ends = last >= chunks;
  span.valid = span.valid && (first < chunks || first == 0);
  return span;
}

}  // namespace cuda

#endif  // __CUDACC__

}  // namespace sdm::kda
