// SPDX-License-Identifier: Apache-2.0
//! @file Whole-bank work around the loops: copies, checkpoints and the sum over sequences.
#pragma once

#include <type_traits>

#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

constexpr int kBankThreads = 256;
constexpr int kBankBatch = 4;  // pieces of a thread in flight

// Which sequences a copy is for.
struct BankCopy {
  BankView from, to;
  int64_t N, H, S, D;
  // only sequences with more than first_chunk chunks, into their checkpoint of that chunk
  const SdmSequence* sequences;  // null: all, into `to`
  void* checkpoints;
  int64_t first_chunk, segment_chunks;
};

// All sequences begin with one bank.
__host__ __device__ inline bool shared_source(const BankCopy& p) {
  return p.from.stride[0] == 0 && p.sequences == nullptr;
}

// Where a stream's slots lie.
template <typename T>
struct BankPart {
  T* data;
  int64_t slot_stride;

  // Piece `at` of the stream, of `pieces` a slot.
  template <int kCount>
  __device__ __forceinline__ T* piece(int64_t at, int64_t pieces) const {
    if (slot_stride == pieces * kCount) {
      return data + at * kCount;
    }
    return data + at / pieces * slot_stride + at % pieces * kCount;
  }
};

// to[n, h] = from[n, h], kCount elements a piece. A block goes through a share of the pieces of its
// streams; a bank that all sequences share is read once. Grid: shares, streams.
template <typename T, int kCount>
__global__ void __launch_bounds__(kBankThreads) sdm_copy_bank_kernel(
    const __grid_constant__ BankCopy p
) {
  using Piece = std::conditional_t<kCount == 1, T, uint4>;
  const bool shared = shared_source(p);
  const int64_t pieces = p.D / kCount, total = p.S * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBankThreads * kBankBatch;
  for (int64_t stream = blockIdx.y; stream < (shared ? p.H : p.N * p.H); stream += gridDim.y) {
    const int64_t head = stream % p.H, n = stream / p.H;
    const BankPart<const T> from{
        static_cast<const T*>(p.from.data) + n * p.from.stride[0] + head * p.from.stride[1],
        p.from.stride[2]
    };
    BankPart<T> to{
        static_cast<T*>(p.to.data) + n * p.to.stride[0] + head * p.to.stride[1], p.to.stride[2]
    };
    if (p.sequences != nullptr) {
      if (p.first_chunk >= p.sequences[n].num_chunks) {
        continue;
      }
      const int64_t index = p.sequences[n].first_checkpoint + p.first_chunk / p.segment_chunks - 1;
      to = {static_cast<T*>(p.checkpoints) + (index * p.H + head) * p.S * p.D, p.D};
    }
    for (int64_t at = static_cast<int64_t>(blockIdx.x) * kBankThreads * kBankBatch + threadIdx.x;
         at < total;
         at += step) {
      Piece piece[kBankBatch];
#pragma unroll
      for (int k = 0; k < kBankBatch; ++k) {
        const int64_t own = at + k * kBankThreads;
        if (own < total) {
          piece[k] =
              __ldcs(reinterpret_cast<const Piece*>(from.template piece<kCount>(own, pieces)));
        }
      }
      for (int64_t copy = 0; copy < (shared ? p.N : 1); ++copy) {
        const BankPart<T> target{to.data + copy * p.to.stride[0], to.slot_stride};
#pragma unroll
        for (int k = 0; k < kBankBatch; ++k) {
          const int64_t own = at + k * kBankThreads;
          if (own < total) {
            __stcs(reinterpret_cast<Piece*>(target.template piece<kCount>(own, pieces)), piece[k]);
          }
        }
      }
    }
  }
}

// sum[h] = parts[0, h] + parts[1, h] + ..., added in float in sequence order, rounded once.
// kAligned: `elements` is a number of 16-byte pieces, and all parts are on their boundaries.
template <typename S, bool kAligned>
__global__ void __launch_bounds__(kBankThreads) sdm_sum_banks_kernel(
    const S* parts, S* sum, int64_t N, int64_t elements
) {
  constexpr int kCount = kAligned ? kVec<S> : 1;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * kCount;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
       at < elements;
       at += step) {
    float total[kCount] = {};
#pragma unroll 4
    for (int64_t n = 0; n < N; ++n) {
      const S* part = parts + n * elements + at;
      if constexpr (kAligned) {
        Piece<S> piece;
        piece.raw = __ldcs(reinterpret_cast<const uint4*>(part));
        float x[kCount];
        unpack(piece, x);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          total[k] += x[k];
        }
      } else {
        total[0] += to_float(*part);
      }
    }
    if constexpr (kAligned) {
      __stcs(reinterpret_cast<uint4*>(sum + at), pack<S>(total).raw);
    } else {
      sum[at] = from_float<S>(total[0]);
    }
  }
}

}  // namespace sdm::cuda
