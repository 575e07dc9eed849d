// SPDX-License-Identifier: Apache-2.0
//! @file How the plain path cuts a call: tiles of 16 tokens inside the chunks of the call, windows
//! of chunks that share one workspace, and which sequence a block works on.
//!
//! Without cu_seqlens a window is the same range of chunks in a few sequences. With cu_seqlens it
//! is a range of chunk_state_row(): sequences one after the other, found on the device. Results do
//! not depend on the cut.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_cuda.h"

namespace sdm::kda::plain {

// Tokens of a tile: the recurrence advances by one tile at a time.
constexpr int kTile = 16;
constexpr int kScores = kTile * kTile;

struct PlainWindow {
  int64_t first_sequence, sequences;  // of the window; 0, 1 with cu_seqlens
  int64_t first_chunk, chunks;        // of each of them; rows of all sequences with cu_seqlens
};

// What the stages of one window hand on, tile by tile. Slot of a tile: PlainCall::slot.
struct PlainRecords {
  float* w;       // [16, K] (I + F diag(beta))^-1 k exp(G)
  float* qd;      // [16, K] scale q exp(G); then, in the backward, gradient of q
  float* kr;      // [16, K] k exp(G_last - G); then, in the backward, gradient of k
  float* u;       // [16, V] (I + F diag(beta))^-1 v; then r = u - w S, what the state lacks
  float* gamma;   // [K] exp(G_last)
  float* scores;  // [16, 16] scale q k^T decayed, on and below the diagonal; F transposed above it
  float* beta;    // [16]
  // backward only
  float* du;        // [16, V] gradient of the writes
  float* states;    // [V / 4, K, 4] at the start of the tile
  float* d_states;  // [V / 4, K, 4] gradient of the state after the tile
  float* d_bias;    // [K] this tile's part of d_dt_bias
  float* d_rate;    // [1] and of d_A_log
};

struct PlainCall {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  const int64_t* offsets;  // [N + 1] in device memory, increasing; null: no cu_seqlens
  PlainWindow window;
  PlainRecords records;

  SDM_HD int64_t tiles() const { return dims.C / kTile; }

  // Chunks for which the window has records.
  SDM_HD int64_t rows() const { return window.sequences * window.chunks; }

  SDM_HD int64_t slot(int64_t row, int64_t tile, int64_t hv) const {
    return (row * tiles() + tile) * dims.HV + hv;
  }
};

struct PlainSequence {
  int64_t n, batch, begin, length;
  int64_t first_row;  // of the chunk states

  SDM_HD int64_t chunks(int64_t C) const { return ceil_div(length, C); }
};

__device__ __forceinline__ PlainSequence get_sequence(const PlainCall& p, int64_t n) {
  PlainSequence s{n, n, 0, p.dims.T, 0};
  if (p.offsets != nullptr) {
    s.batch = 0;
    s.begin = p.offsets[n];
    s.length = p.offsets[n + 1] - s.begin;
  }
  const int64_t first_token = p.offsets != nullptr ? s.begin : n * p.dims.T;
  s.first_row = chunk_state_row(n, first_token, 0, p.dims.C);
  return s;
}

// The last sequence whose rows begin at or before `row`.
__device__ __forceinline__ int64_t find_sequence(const PlainCall& p, int64_t row) {
  int64_t low = 0, high = p.dims.N;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (chunk_state_row(middle, p.offsets[middle], 0, p.dims.C) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sequence and chunk of a row of the window; false if there is none.
__device__ __forceinline__ bool find_chunk(
    const PlainCall& p, int64_t row, PlainSequence* sequence, int64_t* chunk
) {
  const PlainWindow& window = p.window;
  if (p.offsets == nullptr) {
    const unsigned row32 = static_cast<unsigned>(row), each = static_cast<unsigned>(window.chunks);
    *sequence = get_sequence(p, window.first_sequence + row32 / each);
    *chunk = window.first_chunk + row32 % each;
  } else {
    const int64_t global = window.first_chunk + row;
    *sequence = get_sequence(p, find_sequence(p, global));
    *chunk = global - sequence->first_row;
  }
  return *chunk * p.dims.C < sequence->length;
}

// The part of one sequence that lies in the window.
struct PlainItem {
  PlainSequence sequence;
  int64_t first_chunk, end_chunk;
  int64_t first_row;  // of the window, of first_chunk
  int64_t lane;       // where its state waits between windows
  bool live;
  bool starts, ends;  // the window has the start or the end of the sequence
};

SDM_HD int64_t window_items(const PlainCall& p) {
  return p.offsets == nullptr ? p.window.sequences : p.window.chunks + 1;
}

__device__ __forceinline__ PlainItem get_item(const PlainCall& p, int64_t index) {
  const PlainWindow& window = p.window;
  const int64_t end = window.first_chunk + window.chunks;
  PlainItem item{};
  if (p.offsets == nullptr) {
    item.sequence = get_sequence(p, window.first_sequence + index);
    const int64_t chunks = item.sequence.chunks(p.dims.C);
    item.live = true;
    item.first_chunk = window.first_chunk;
    item.end_chunk = end < chunks ? end : chunks;
    item.first_row = index * window.chunks;
    item.lane = index;
    item.starts = window.first_chunk == 0;
    item.ends = end >= chunks;
    return item;
  }
  const int64_t n = find_sequence(p, window.first_chunk) + index;
  if (n >= p.dims.N) {
    return item;
  }
  item.sequence = get_sequence(p, n);
  const int64_t row = item.sequence.first_row;
  const int64_t chunks = item.sequence.chunks(p.dims.C);
  const int64_t last = row + (chunks > 0 ? chunks : 1);  // an empty sequence has its state
  item.live = row < end && last > window.first_chunk;
  item.starts = row >= window.first_chunk;
  item.ends = last <= end;
  item.first_chunk = item.starts ? 0 : window.first_chunk - row;
  item.end_chunk = end - row < chunks ? end - row : chunks;
  item.first_row = row + item.first_chunk - window.first_chunk;
  return item;
}

}  // namespace sdm::kda::plain
