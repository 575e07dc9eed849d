// SPDX-License-Identifier: Apache-2.0
//! @file The forward recurrence over the tiles of a window: one block a sequence, value head and
//! slice of value columns, its part of the state in registers.
//!
//!     r <- u - w S;  U <- diag(beta) r;  o <- qd S + M U;  S <- diag(gamma) S + kr^T U
//!
//! In the backward it runs again without outputs and leaves the state of every tile and r.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_state.cuh"

namespace sdm::kda::plain {

struct ForwardScanParams {
  PlainCall call;
  KdaStateView initial, final_state;  // data null: zero; not wanted
  KdaChunkStates chunk_states;        // data null: none
  // Each chunk starts from chunk_states by itself; otherwise chunk_states are written.
  bool from_chunk_states;
  const float* carry_in;  // [lanes, HV, V / 4, K, 4] of the windows before and after
  float* carry_out;
  void* out;  // null: not wanted
  DType out_dtype;
  bool keep;  // leave states and r in the records
  int64_t slices;
};

template <int kLanes>
struct ForwardScanShared {
  static constexpr int kKeys = ScanShape<kLanes>::kKeys;
  static constexpr int kSlice = ScanShape<kLanes>::kSlice;
  static constexpr int kStages = kLanes == 32 ? 1 : 2;  // two of the widest do not fit 99 KB
  static constexpr int kRows = kTile * kKeys;

  static constexpr int kStage = 3 * kRows + kKeys + kScores + kTile + kTile * kSlice;
  static constexpr int kFloats = kStages * kStage + 2 * kTile * kSlice;

  float* base;

  __device__ __forceinline__ float* w(int stage) const { return base + stage * kStage; }

  __device__ __forceinline__ float* kr(int stage) const { return w(stage) + kRows; }

  __device__ __forceinline__ float* qd(int stage) const { return w(stage) + 2 * kRows; }

  __device__ __forceinline__ float* gamma(int stage) const { return w(stage) + 3 * kRows; }

  __device__ __forceinline__ float* scores(int stage) const { return gamma(stage) + kKeys; }

  __device__ __forceinline__ float* beta(int stage) const { return scores(stage) + kScores; }

  __device__ __forceinline__ float* u(int stage) const { return beta(stage) + kTile; }

  __device__ __forceinline__ float* writes() const { return base + kStages * kStage; }

  __device__ __forceinline__ float* reads() const { return writes() + kTile * kSlice; }
};

// The range of tiles and the records of one block.
struct ScanWork {
  PlainItem item;
  int64_t hv, slice;
  int64_t first_tile, end_tile;  // of the sequence
  int64_t first_slot, slot_step;

  __device__ __forceinline__ int64_t slot(int64_t tile) const {
    return first_slot + (tile - first_tile) * slot_step;
  }
};

__device__ __forceinline__ ScanWork
make_work(const PlainCall& call, const PlainItem& item, int64_t hv, int64_t slice) {
  ScanWork work;
  work.item = item;
  work.hv = hv;
  work.slice = slice;
  const int64_t tiles = call.tiles();
  work.first_tile = item.first_chunk * tiles;
  const int64_t end = item.end_chunk * tiles;
  const int64_t all = ceil_div(item.sequence.length, int64_t{kTile});
  work.end_tile = end < all ? end : all;
  work.first_slot = call.slot(item.first_row, 0, hv);
  work.slot_step = call.dims.HV;
  return work;
}

template <int kLanes>
__device__ __forceinline__ void load_forward_stage(
    const ForwardScanParams& p, const ScanWork& work, int64_t tile, int stage
) {
  const ForwardScanShared<kLanes> s{shared_floats()};
  constexpr int kKeys = ScanShape<kLanes>::kKeys;
  const PlainRecords& records = p.call.records;
  const int64_t K = p.call.dims.K, V = p.call.dims.V, slot = work.slot(tile);
  copy_rows<kKeys>(s.w(stage), records.w + slot * kTile * K, K);
  copy_rows<kKeys>(s.kr(stage), records.kr + slot * kTile * K, K);
  if (p.out != nullptr) {
    copy_rows<kKeys>(s.qd(stage), records.qd + slot * kTile * K, K);
    copy_floats(s.scores(stage), records.scores + slot * kScores, kScores);
  }
  copy_floats(s.gamma(stage), records.gamma + slot * K, K);
  copy_floats(s.beta(stage), records.beta + slot * kTile, kTile);
  copy_slice<ScanShape<kLanes>::kSlice>(s.u(stage), records.u + slot * kTile * V, work.slice, V);
  close_copies();
}

template <int kLanes>
__device__ __forceinline__ void forward_tile(
    const ForwardScanParams& p,
    const ScanWork& work,
    int64_t tile,
    int stage,
    StatePart<kLanes>* state
) {
  constexpr int kKeys = ScanShape<kLanes>::kKeys, kSlice = ScanShape<kLanes>::kSlice;
  constexpr int kOwn = 32 / kLanes;  // elements of 8 rows and 4 columns that a lane finishes
  const ForwardScanShared<kLanes> s{shared_floats()};
  const int64_t V = p.call.dims.V, slot = work.slot(tile);
  const int columns = static_cast<int>(threadIdx.x) / 32 * ScanShape<kLanes>::kWarpColumns +
                      state->warp_column;  // of the slice
  float *writes = s.writes(), *reads = s.reads();
  const float *u = s.u(stage), *beta = s.beta(stage);
  // Rolled up, as are the loops below: straight through, the code would not stay in its cache.
#pragma unroll 1
  for (int first = 0; first < kTile; first += 8) {
#pragma unroll 1
    for (int product = 0; product < (p.out != nullptr ? 2 : 1); ++product) {
      const bool predicts = product == 0;
      float sums[32];
      state->multiply_rows((predicts ? s.w(stage) : s.qd(stage)) + first * kKeys, sums);
      reduce_scatter<kLanes, 32>(sums, state->lane);
#pragma unroll
      for (int m = 0; m < kOwn; ++m) {
        const int at = state->lane * kOwn + m;
        const int row = first + at / 4, place = row * kSlice + columns + at % 4;
        if (!predicts) {
          reads[place] = sums[m];
          continue;
        }
        const float r = u[place] - sums[m];
        writes[place] = beta[row] * r;
        if (p.keep && state->live) {
          p.call.records.u[(slot * kTile + row) * V + state->column + at % 4] = r;
        }
      }
    }
  }
  __syncwarp();  // a warp reads its own columns of the writes only
  if (p.out != nullptr && state->live) {
    const PlainSequence& sequence = work.item.sequence;
    const int64_t token = sequence.begin + tile * kTile;
    const int64_t rows = sequence.length - tile * kTile;
    const float* scores = s.scores(stage);
#pragma unroll 1
    for (int m = 0; m < 2 * kOwn; ++m) {
      const int at = state->lane * kOwn + m % kOwn;
      const int row = m / kOwn * 8 + at / 4, b = at % 4;
      float o = reads[row * kSlice + columns + b];
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        if (j <= row) {
          o = fmaf(scores[row * kTile + j], writes[j * kSlice + columns + b], o);
        }
      }
      if (row < rows) {
        const int64_t t = sequence.batch * p.call.dims.T + token + row;
        store_any(p.out, p.out_dtype, (t * p.call.dims.HV + work.hv) * V + state->column + b, o);
      }
    }
  }
  state->decay(s.gamma(stage));
#pragma unroll 4
  for (int i = 0; i < kTile; ++i) {
    state->add_outer(s.kr(stage) + i * kKeys, load4(writes + i * kSlice + columns));
  }
}

template <int kLanes>
__global__ void __launch_bounds__(kThreads, kLanes == 4 ? 2 : 3) kda_plain_forward_scan_kernel(
    const __grid_constant__ ForwardScanParams p
) {
  using Shared = ForwardScanShared<kLanes>;
  const KdaDims& dims = p.call.dims;
  const int64_t slice = blockIdx.x % p.slices;
  const int64_t hv = blockIdx.x / p.slices % dims.HV;
  const int64_t index = blockIdx.x / p.slices / dims.HV;
  PlainItem item;
  if (p.from_chunk_states) {
    int64_t chunk;
    if (!find_chunk(p.call, index, &item.sequence, &chunk)) {
      return;
    }
    item.first_chunk = chunk;
    item.end_chunk = chunk + 1;
    item.first_row = index;
    item.lane = 0;
    item.starts = item.ends = false;
  } else {
    item = get_item(p.call, index);
    if (!item.live) {
      return;
    }
  }
  const ScanWork work = make_work(p.call, item, hv, slice);
  const int64_t row = item.sequence.first_row + item.first_chunk;
  const int64_t carry = (item.lane * dims.HV + hv) * dims.K * dims.V;

  StatePart<kLanes> state(dims.K, dims.V, slice);
  if (p.from_chunk_states) {
    state.load(p.chunk_states, row * dims.HV + hv, dims.V);
  } else if (!item.starts) {
    state.load_packed(p.carry_in + carry);
  } else if (p.initial.data != nullptr) {
    state.load(p.initial, item.sequence.n, hv);
  }
  float* shared = shared_floats();
  for (int e = static_cast<int>(threadIdx.x); e < Shared::kFloats; e += kThreads) {
    shared[e] = 0.0f;  // what is beyond K stays so
  }
  __syncthreads();

  if (work.first_tile < work.end_tile) {
    load_forward_stage<kLanes>(p, work, work.first_tile, 0);
  }
  for (int64_t tile = work.first_tile; tile < work.end_tile; ++tile) {
    const int64_t step = tile - work.first_tile;
    const int stage = Shared::kStages == 2 ? static_cast<int>(step % 2) : 0;
    const bool more = tile + 1 < work.end_tile;
    if (Shared::kStages == 2 && more) {
      load_forward_stage<kLanes>(p, work, tile + 1, 1 - stage);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();  // the tile is there
    if (p.keep) {
      state.store_packed(p.call.records.states + work.slot(tile) * dims.K * dims.V);
    } else if (p.chunk_states.data != nullptr && tile % p.call.tiles() == 0) {
      const int64_t chunk = item.sequence.first_row + tile / p.call.tiles();
      state.store(p.chunk_states, chunk * dims.HV + hv, dims.V);
    }
    forward_tile<kLanes>(p, work, tile, stage, &state);
    __syncthreads();  // its memory is free
    if (Shared::kStages == 1 && more) {
      load_forward_stage<kLanes>(p, work, tile + 1, 0);
    }
  }
  if (p.from_chunk_states) {
    return;
  }
  if (!item.ends) {
    if (p.carry_out != nullptr) {
      state.store_packed(p.carry_out + carry);
    }
  } else if (p.final_state.data != nullptr) {
    state.store(p.final_state, item.sequence.n, hv);
  }
}

}  // namespace sdm::kda::plain
