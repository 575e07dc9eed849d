// SPDX-License-Identifier: Apache-2.0
//! @file What the forward and backward chunk loops share: their parameters, the split of the work,
//! and the update of the written rows.
//!
//! A work item is one (stream, slice of 128 bytes of columns); columns never mix, so an item walks
//! all chunks of the window without regard to the others. With fewer items than multiprocessors,
//! group_blocks blocks share an item: tokens and slots are divided among them, token rows exchanged
//! through global memory (group_barrier.cuh). No sum is divided, so the division leaves no trace in
//! the result.
#pragma once

#include "sdm_kernels/cuda/group_barrier.cuh"
#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm::cuda {

constexpr int kRowGroups = kLoopThreads / kRowLanes;  // rows that a block works on at a time

struct SdmLoopParams {
  SdmDims dims;
  SdmWindow window;
  int64_t first_k, end_k;        // the part of the window to walk
  const SdmSequence* sequences;  // [N]
  SdmRecords records;
  FloatView v;         // forward
  BankView bank;       // advanced (forward) or taken back (backward) in place
  void* out;           // forward: [B, T, H, D] in v's dtype
  float* errors;       // [B, T, H, D]; forward: written unless null; otherwise read
  SdmSaved saved;      // rows or checkpoints of the forward
  void* replay_rows;   // replay: [N * H][window][rows of a chunk][D]
  FloatView d_out;     // backward
  BankView grad;       // backward: gradient of the bank
  void* d_v;           // backward: [B, T, H, D] in d_out's dtype
  SdmDots dots;        // backward
  float* exchange;     // [items][2][Cp][kSliceColumns]
  unsigned* counters;  // [items], zero at launch
  int group_blocks;
  int64_t num_slices;
  bool token_vectors;  // v and out (or d_out and d_v) rows are on 16-byte boundaries
};

struct LoopItem {
  int64_t item, stream, slice, head;
  const SdmSequence* sequence;
  int rank;

  __device__ __forceinline__ explicit LoopItem(const SdmLoopParams& p) {
    item = blockIdx.x / p.group_blocks;
    rank = static_cast<int>(blockIdx.x % p.group_blocks);
    stream = item / p.num_slices;
    slice = item % p.num_slices;
    head = stream % p.dims.H;
    sequence = p.sequences + stream / p.dims.H;
  }

  __device__ __forceinline__ int64_t record(const SdmLoopParams& p, int64_t k) const {
    return (stream / p.dims.H * p.window.chunks + k) * p.dims.H + head;
  }
};

// The row of a token in a contiguous [B, T, H, D] tensor.
__device__ __forceinline__ int64_t
token_row(const SdmDims& dims, const ChunkPlace& place, int64_t i) {
  return ((place.batch * dims.T + place.token + i) * dims.H + place.head) * dims.D;
}

__device__ __forceinline__ int64_t
view_row(const FloatView& view, const ChunkPlace& place, int64_t i) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2];
}

// kVec columns of a token tensor; one or two 16-byte loads where the layout allows.
template <typename S>
__device__ __forceinline__ void load_token_columns(
    const FloatView& view, int64_t row, const LaneColumns& at, bool vectors, float (&x)[kVec<S>]
) {
  const int64_t offset = row + at.first;
  if (vectors && at.count == kVec<S>) {
    if (view.dtype == DType::kF32) {
      const float4* p =
          reinterpret_cast<const float4*>(static_cast<const float*>(view.data) + offset);
#pragma unroll
      for (int part = 0; part < kVec<S> / 4; ++part) {
        const float4 four = __ldg(p + part);
        x[part * 4] = four.x;
        x[part * 4 + 1] = four.y;
        x[part * 4 + 2] = four.z;
        x[part * 4 + 3] = four.w;
      }
      return;
    }
    if constexpr (kVec<S> == 8) {
      const uint4 raw =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const __half*>(view.data) + offset));
      if (view.dtype == DType::kBf16) {
        Piece<__nv_bfloat16> piece;
        piece.raw = raw;
        unpack(piece, x);
      } else {
        Piece<__half> piece;
        piece.raw = raw;
        unpack(piece, x);
      }
      return;
    }
  }
  load_any(view.data, view.dtype, offset, at.count, x);
}

template <typename S>
__device__ __forceinline__ void store_token_columns(
    void* data,
    DType dtype,
    int64_t row,
    const LaneColumns& at,
    bool vectors,
    const float (&x)[kVec<S>]
) {
  const int64_t offset = row + at.first;
  if (vectors && at.count == kVec<S>) {
    if (dtype == DType::kF32) {
      float4* p = reinterpret_cast<float4*>(static_cast<float*>(data) + offset);
#pragma unroll
      for (int part = 0; part < kVec<S> / 4; ++part) {
        p[part] = make_float4(x[part * 4], x[part * 4 + 1], x[part * 4 + 2], x[part * 4 + 3]);
      }
      return;
    }
    if constexpr (kVec<S> == 8) {
      uint4* p = reinterpret_cast<uint4*>(static_cast<__half*>(data) + offset);
      *p = dtype == DType::kBf16 ? pack<__nv_bfloat16>(x).raw : pack<__half>(x).raw;
      return;
    }
  }
  store_any(data, dtype, offset, at.count, x);
}

// Brings rows [0, Cp) of token rows together in every block of an item: each wrote rows
// [own_begin, own_end) of x. `plane` tells apart two exchanges between the same barriers.
template <typename S>
__device__ __forceinline__ void exchange_rows(
    const SdmLoopParams& p,
    const LoopItem& it,
    float* x,
    int own_begin,
    int own_end,
    int plane,
    unsigned* round
) {
  if (p.group_blocks == 1) {
    __syncthreads();
    return;
  }
  constexpr int kColumns = kSliceColumns<S>;
  const int Cp = p.records.Cp;
  float* shared_rows = p.exchange + (it.item * 2 + plane) * Cp * kColumns;
  __syncthreads();
  for (int at = threadIdx.x * 4; at < (own_end - own_begin) * kColumns; at += kLoopThreads * 4) {
    const int row = own_begin + at / kColumns;
    const float4 four = *reinterpret_cast<const float4*>(x + row * kTokenStride<S> + at % kColumns);
    *reinterpret_cast<float4*>(shared_rows + row * kColumns + at % kColumns) = four;
  }
  group_barrier(p.counters + it.item, p.group_blocks, ++*round);
  for (int at = threadIdx.x * 4; at < Cp * kColumns; at += kLoopThreads * 4) {
    const int row = at / kColumns;
    if (row < own_begin || row >= own_end) {
      const float4 four =
          __ldcg(reinterpret_cast<const float4*>(shared_rows + row * kColumns + at % kColumns));
      *reinterpret_cast<float4*>(x + row * kTokenStride<S> + at % kColumns) = four;
    }
  }
  __syncthreads();
}

// All blocks of the item have finished with the bank rows of this chunk.
__device__ __forceinline__ void finish_rows(
    const SdmLoopParams& p, const LoopItem& it, unsigned* round
) {
  if (p.group_blocks == 1) {
    __syncthreads();
  } else {
    group_barrier(p.counters + it.item, p.group_blocks, ++*round);
  }
}

// Rows of the chunk's tokens that this block owns; whole blocks of 16.
__device__ __forceinline__ void own_rows(const SdmLoopParams& p, int rank, int* begin, int* end) {
  const int blocks = p.records.Cp / 16;
  const int per_block = (blocks + p.group_blocks - 1) / p.group_blocks;
  *begin = min(rank * per_block, blocks) * 16;
  *end = min((rank + 1) * per_block, blocks) * 16;
}

// M[slot] = decay * M[slot] + sum over writes of post * e[token] for this block's share of the
// written slots; the old rows go to rows [first_row, ...) of `saved_rows` unless that is null, and
// the rest of the chunk's `reserved` rows is zeroed.
template <typename S, bool kAligned>
__device__ __forceinline__ void update_rows(
    const SdmLoopParams& p,
    const LoopItem& it,
    int64_t q,
    S* bank,
    const float* errors,
    S* saved_rows,
    int64_t first_row,
    int64_t reserved
) {
  constexpr int kUnroll = 4;
  const SdmRecords& r = p.records;
  const int4* groups = r.group + q * r.n;
  const float* decays = r.group_decay + q * r.n;
  const int4* entries = r.entry + q * r.n;
  const int count = r.group_count[q].x;
  const LaneColumns at = lane_columns<S>(it.slice, p.dims.D);
  const int begin = static_cast<int>(static_cast<int64_t>(count) * it.rank / p.group_blocks);
  const int end = static_cast<int>(static_cast<int64_t>(count) * (it.rank + 1) / p.group_blocks);
  for (int base = begin + threadIdx.x / kRowLanes; base < end; base += kRowGroups * kUnroll) {
    int4 group[kUnroll];
    Piece<S> row[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int g = base + u * kRowGroups;
      group[u] = g < end ? __ldg(groups + g) : make_int4(-1, 0, 0, 0);
    }
    int4 entry[kUnroll];
    float decay[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (group[u].x >= 0) {
        row[u] = load_piece<S, kAligned>(bank + group[u].x * p.bank.stride[2], at);
        entry[u] = __ldg(entries + group[u].y);
        decay[u] = __ldg(decays + base + u * kRowGroups);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (group[u].x < 0) {
        continue;
      }
      if (saved_rows != nullptr) {
        store_piece<S, kAligned>(
            saved_rows + (first_row + base + u * kRowGroups) * p.dims.D, at, row[u]
        );
      }
      float x[kVec<S>];
      unpack(row[u], x);
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        x[i] *= decay[u];
      }
      int4 e = entry[u];
      for (int k = 0;;) {
        float error[kVec<S>];
        load_token<S>(errors + (e.x & ~kOwnerBit) * kTokenStride<S>, error);
        const float post = __int_as_float(e.z);
#pragma unroll
        for (int i = 0; i < kVec<S>; ++i) {
          x[i] = fmaf(post, error[i], x[i]);
        }
        if (++k >= group[u].z) {
          break;
        }
        e = __ldg(entries + group[u].y + k);
      }
      store_piece<S, kAligned>(bank + group[u].x * p.bank.stride[2], at, pack<S>(x));
    }
  }
  if (saved_rows != nullptr && it.rank == 0) {
    for (int64_t g = count + threadIdx.x / kRowLanes; g < reserved; g += kRowGroups) {
      store_piece<S, kAligned>(saved_rows + (first_row + g) * p.dims.D, at, Piece<S>());
    }
  }
}

}  // namespace sdm::cuda
