// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, sort: the sort key of every lane of a window, and what all stages of phase 1
//! share.
//!
//! Key of a lane = q << slot_bits | slot, with slot = S for a lane without an entry. One stable
//! radix sort over the whole window then leaves every chunk in its own segment [q * n, (q + 1) *
//! n), sorted by (slot, lane), unused lanes last. As write lanes precede read lanes and both run by
//! token, a group comes out as the specification wants it: writes first, each kind in token order.
//!
//! A block makes kTile keys of one chunk and its beta. Bytes a lane: 4 or 8 of the id in, 8 (12
//! with 64-bit keys) out; the sort moves twice that per 8 bits of key.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

constexpr int kThreads = 256;
constexpr int kItems = 8;
constexpr int kTile = kThreads * kItems;
constexpr int kMaxChunk = 256;  // rows in shared memory of gram and solve

// Partial result of the scan over a run of sorted entries.
struct SdmScanState {
  double sum;              // gates since the last head in the run, or since its start
  int32_t with_writes;     // heads of groups with writes
  int32_t without_writes;  // heads of groups of reads only
  int32_t head;            // 1: the run holds a head
  int32_t head_writes;     // 1: the group of the last head has writes
};

// Arguments of all kernels of phase 1.
struct SdmPhase1Params {
  SdmCudaInputs in;
  SdmWindow window;
  SdmRecords records;
  bool gram;
  int32_t slot_bits;
  int32_t tiles;                // ceil(n / kTile)
  const void* sorted_keys;      // [q][n] uint32 or uint64
  const int32_t* sorted_lanes;  // [q][n]
  void* keys;                   // [q][n] before the sort
  int32_t* lanes;               // [q][n] before the sort
  SdmScanState* tile_state;     // [q][tiles]
  int32_t* group_of;            // [q][n] sorted: index of the entry's group
  float2* pair;                 // [q][n] sorted: {k or q, token as int bits}
  int2* span;                   // [q][n] by lane: sorted writes [x, y) that pair with the entry
  float* scaled_a;              // [q][Cp][Cp] A[i,j] * beta[j], strictly lower, zero elsewhere
};

__device__ __forceinline__ float load_float(const FloatView& view, int64_t at) {
  switch (view.dtype) {
    case DType::kF32:
      return static_cast<const float*>(view.data)[at];
    case DType::kBf16:
      return __uint_as_float(
          static_cast<uint32_t>(static_cast<const uint16_t*>(view.data)[at]) << 16
      );
    default:
      return __half2float(static_cast<const __half*>(view.data)[at]);
  }
}

// Element 0 of token i of the chunk.
template <typename View>
__device__ __forceinline__ int64_t token_offset(const View& view, const ChunkPlace& place, int i) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2];
}

// A lane number taken apart.
struct LaneId {
  bool write;
  int32_t token;
  int32_t a;
};

__device__ __forceinline__ LaneId split_lane(const SdmDims& dims, int32_t lane) {
  const uint32_t writes = static_cast<uint32_t>(dims.C * dims.W);
  const bool write = static_cast<uint32_t>(lane) < writes;
  const uint32_t local = static_cast<uint32_t>(lane) - (write ? 0u : writes);
  const uint32_t lanes = static_cast<uint32_t>(write ? dims.W : dims.R);
  const uint32_t token = local / lanes;
  return {write, static_cast<int32_t>(token), static_cast<int32_t>(local - token * lanes)};
}

template <typename Key>
__device__ __forceinline__ int32_t slot_of(Key key, int slot_bits) {
  return static_cast<int32_t>(key & ((Key{1} << slot_bits) - 1));
}

// Grid: num_q * tiles blocks.
template <typename Key>
__global__ void __launch_bounds__(kThreads) sdm_keys_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  const SdmDims& dims = p.in.dims;
  const SdmTokens& tokens = p.in.tokens;
  const int64_t q = blockIdx.x / p.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % p.tiles);
  const int32_t n = p.records.n;
  ChunkPlace place{0, 0, 0, 0};
  const bool exists = find_chunk(dims, p.in.sequences, p.window, q, &place);
  Key* keys = static_cast<Key*>(p.keys) + q * n;
  int32_t* lanes = p.lanes + q * n;

#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int32_t lane = tile * kTile + item * kThreads + static_cast<int32_t>(threadIdx.x);
    if (lane < n) {
      int64_t slot = dims.S;
      const LaneId id = split_lane(dims, lane);
      if (id.token < place.num_tokens) {
        const IndexView& view = id.write ? tokens.write_idx : tokens.read_idx;
        const int64_t at = token_offset(view, place, id.token) + id.a * view.stride[3];
        const int64_t found = view.is_int64 ? static_cast<const int64_t*>(view.data)[at]
                                            : static_cast<const int32_t*>(view.data)[at];
        slot = found >= 0 && found < dims.S ? found : dims.S;
      }
      keys[lane] = static_cast<Key>(q) << p.slot_bits | static_cast<Key>(slot);
      lanes[lane] = lane;
    }
  }
  if (tile == 0) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < dims.C; i += kThreads) {
      const FloatView& view = tokens.beta;
      p.records.beta[q * dims.C + i] =
          i < place.num_tokens ? load_float(view, token_offset(view, place, i)) : 0.0f;
    }
    if (!exists && threadIdx.x == 0) {
      p.records.group_count[q] = make_int2(0, 0);
    }
  }
}

}  // namespace sdm::cuda
