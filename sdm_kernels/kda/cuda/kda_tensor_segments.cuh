// SPDX-License-Identifier: Apache-2.0
//! @file Long sequences of calls with few heads are scanned in segments side by side.
//!
//! Segments have kSegmentChunks chunks, counted from the first token of their sequence, whatever
//! its length. One maps the state at its start to S' = P S + B with P [K, K]. For all segments with
//! another behind them P and B are scanned at once (kda_tensor_segment_scan.cuh), S goes through
//! them in a short chain (kda_tensor_segment_chain.cuh), and then every segment is scanned from its
//! own state as a sequence that is not cut. The first segment of a sequence starts from a state
//! that is known and needs no P. The backward does the same in reverse, dS = P^T dS' + R, from the
//! last segment on.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/kda/cuda/kda_tensor_records.cuh"

namespace sdm::kda {

// What the segments of a window hand on. States are float, in the order of the registers of a scan
// (ScanState::put_carry), [V / 16][carry_floats()] for each head.
struct KdaSegments {
  int64_t slots;       // of the window
  int64_t carry_rows;  // sequences that may go on in another window
  // [slots][HV]: P^T, bfloat16, two terms of panels [K / 64][K / 64] (kda_tensor_records.cuh).
  char* transitions;
  // [slots + carry_rows][HV]: B; R of the segment behind the slot's, then R of those in front of
  // which the window begins.
  float* offsets;
  float* states;  // [slots][HV]: behind the segment, or the gradient there
  float* carry;   // [2][carry_rows][HV]: the same between windows

  SDM_HD static int64_t carry_floats(int64_t K) { return 16 * K + 64; }

  SDM_HD static int64_t transition_bytes(int64_t K) { return 2 * K * K * 2; }

  SDM_HD static int64_t state_floats(const KdaDims& dims) {
    return dims.V / 16 * carry_floats(dims.K);
  }

  SDM_HD char* transition(const KdaDims& dims, int64_t slot, int64_t hv) const {
    return transitions + (slot * dims.HV + hv) * transition_bytes(dims.K);
  }

  // Of the warp that has the value columns from column0 on.
  SDM_HD static float* part(
      float* data, const KdaDims& dims, int64_t row, int64_t hv, int64_t column0
  ) {
    return data + ((row * dims.HV + hv) * (dims.V / 16) + column0 / 16) * carry_floats(dims.K);
  }

  SDM_HD int64_t carry_row(const KdaWindow& window, int64_t sequence) const {
    return carry_rows == 1 ? 0 : sequence - window.first_sequence;
  }

  // Of a sequence that goes on in another window.
  SDM_HD float* carried(
      const KdaDims& dims,
      const KdaWindow& window,
      int64_t parity,
      int64_t sequence,
      int64_t hv,
      int64_t column0
  ) const {
    return part(carry, dims, parity * carry_rows + carry_row(window, sequence), hv, column0);
  }

  static KdaSegments carve(const KdaDims& dims, const KdaWindowPlan& plan, DeviceCarver* carver) {
    KdaSegments s = {};
    s.slots = plan.max_segment_slots();
    s.carry_rows = plan.carry_rows();
    const int64_t state = dims.HV * state_floats(dims);
    if (plan.windows_of_group() > 1) {
      s.carry = carver->take<float>(2 * s.carry_rows * state);
    }
    if (plan.segment > 0) {
      s.transitions = carver->take<char>(s.slots * dims.HV * transition_bytes(dims.K));
      s.offsets = carver->take<float>((s.slots + s.carry_rows) * state);
      s.states = carver->take<float>(s.slots * state);
    }
    return s;
  }
};

#ifdef __CUDACC__

namespace cuda {

// A part of a sequence that a block scans: what a window has of it, or a segment.
struct KdaPiece {
  KdaSpan span;
  int64_t slot;    // of the segment, if another follows
  int64_t before;  // slot of the segment in front of it, -1: not in the window
};

// Where the segments of a sequence lie in a window.
struct KdaSegmentRow {
  KdaSequence sequence;
  int64_t row;    // of chunk 0, from the start of the window
  int64_t index;  // of the sequence in the window; packed: 0

  __device__ __forceinline__ int64_t first_in_window(const KdaWindow& window) const {
    return row >= 0 ? 0 : ceil_div(-row, window.segment);
  }

  __device__ __forceinline__ int64_t segments(const KdaWindow& window) const {
    const int64_t count = ceil_div(sequence.chunks(), window.segment);
    return count > 0 ? count : 1;
  }

  // Those from `first` on in the window; 0 or less: none.
  __device__ __forceinline__ int64_t count(const KdaWindow& window, int64_t first) const {
    const int64_t room = ceil_div(window.starts - (row + first * window.segment), window.segment);
    const int64_t left = segments(window) - first;
    return left < room ? left : room;
  }

  __device__ __forceinline__ int64_t slot(const KdaWindow& window, int64_t segment) const {
    return index * window.segment_slots() + (row + segment * window.segment) / window.segment;
  }

  __device__ __forceinline__ KdaPiece piece(const KdaWindow& window, int64_t segment) const {
    const int64_t begin = row + segment * window.segment;
    const int64_t chunks = sequence.chunks();
    KdaPiece p;
    p.span.sequence = sequence;
    p.span.first = segment * window.segment;
    p.span.last = p.span.first + window.segment < chunks ? p.span.first + window.segment : chunks;
    p.span.slot = index * window.num_chunks + begin;
    p.span.ends = segment + 1 == segments(window);
    p.span.valid =
        segment >= 0 && segment < segments(window) && begin >= 0 && begin < window.starts;
    p.slot = slot(window, segment);
    p.before = begin >= window.segment ? p.slot - 1 : -1;
    return p;
  }
};

// The `index`-th sequence that the window may touch; false: there is none.
__device__ __forceinline__ bool kda_segment_row(
    KdaSegmentRow& out,
    const DeviceIntegers& cu,
    const KdaWindow& window,
    int64_t index,
    const KdaDims& dims
) {
  if (cu.data == nullptr) {
    out = {kda_sequence(cu, window.first_sequence + index, dims.T), -window.first_chunk, index};
    return true;
  }
  const int64_t n = kda_sequence_of_row(cu, window.first_chunk, dims.N, dims.T) + index;
  if (n >= dims.N) {
    return false;
  }
  out.sequence = kda_sequence(cu, n, dims.T);
  out.row = out.sequence.first_row(dims.T) - window.first_chunk;
  out.index = 0;
  return true;
}

// The segment with another behind it that has the slot; not valid: there is none.
__device__ __forceinline__ KdaPiece kda_segment_of_slot(
    KdaSegmentRow& row,
    const DeviceIntegers& cu,
    const KdaWindow& window,
    int64_t slot,
    const KdaDims& dims
) {
  int64_t segment;
  if (cu.data == nullptr) {
    const int64_t each = window.segment_slots();
    kda_segment_row(row, cu, window, slot / each, dims);
    segment = (slot % each * window.segment - row.row) / window.segment;
  } else {
    // It holds the last of the rows in which it may begin.
    const int64_t last = (slot + 1) * window.segment - 1;
    const int64_t n = kda_sequence_of_row(cu, window.first_chunk + last, dims.N, dims.T);
    row.sequence = kda_sequence(cu, n, dims.T);
    row.row = row.sequence.first_row(dims.T) - window.first_chunk;
    row.index = 0;
    segment = (last - row.row) / window.segment;
  }
  KdaPiece piece = row.piece(window, segment);
  piece.span.valid = piece.span.valid && !piece.span.ends;
  return piece;
}

// Piece `index` of the window, below KdaWindow::max_pieces(): what it has of its sequences, or with
// segments their first ones, then those that follow the segment of a slot.
__device__ __forceinline__ KdaPiece
kda_piece(const DeviceIntegers& cu, const KdaWindow& window, int64_t index, const KdaDims& dims) {
  KdaPiece piece;
  piece.slot = piece.before = -1;
  if (window.segment == 0) {
    piece.span = kda_span(cu, window, index, dims);
    return piece;
  }
  const int64_t spans = window.max_spans(cu.data != nullptr, dims.N);
  KdaSegmentRow row;
  if (index < spans) {
    if (!kda_segment_row(row, cu, window, index, dims)) {
      piece.span.valid = false;
      return piece;
    }
    return row.piece(window, row.first_in_window(window));
  }
  piece = kda_segment_of_slot(row, cu, window, index - spans, dims);
  return piece.span.valid ? row.piece(window, piece.span.last / window.segment) : piece;
}

}  // namespace cuda

#endif  // __CUDACC__

}  // namespace sdm::kda
