// SPDX-License-Identifier: Apache-2.0
//! @file Whole-bank work around the loops: copies, checkpoints and the sum over sequences.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

constexpr int kBankThreads = 256;

// Which sequences a copy is for.
struct BankCopy {
  BankView from, to;
  int64_t N, H, S, D;
  // replay: only sequences with more than first_chunk chunks, and in the place of `from` (or `to`)
  // their checkpoint of that chunk, where it is not the first
  const SdmSequence* sequences;  // null: all
  void* checkpoints;
  bool into_checkpoints;
  int64_t first_chunk, segment_chunks;
};

// to[n, h] = from[n, h]; a thread moves up to 16 bytes at a time.
template <typename T, int kCount>
__global__ void sdm_copy_bank_kernel(const BankCopy p) {
  const int64_t pieces = p.D / kCount;
  const int64_t total = p.N * p.H * p.S * pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
       at += step) {
    const int64_t piece = at % pieces;
    const int64_t slot = at / pieces % p.S;
    const int64_t head = at / (pieces * p.S) % p.H;
    const int64_t n = at / (pieces * p.S * p.H);
    const T* from = static_cast<const T*>(p.from.data) + n * p.from.stride[0] +
                    head * p.from.stride[1] + slot * p.from.stride[2];
    T* to = static_cast<T*>(p.to.data) + n * p.to.stride[0] + head * p.to.stride[1] +
            slot * p.to.stride[2];
    if (p.sequences != nullptr) {
      if (p.first_chunk >= p.sequences[n].num_chunks) {
        continue;
      }
      if (p.first_chunk > 0) {
        const int64_t index =
            p.sequences[n].first_checkpoint + p.first_chunk / p.segment_chunks - 1;
        T* row = static_cast<T*>(p.checkpoints) + ((index * p.H + head) * p.S + slot) * p.D;
        if (p.into_checkpoints) {
          to = row;
        } else {
          from = row;
        }
      }
    }
    if constexpr (kCount == 1) {
      to[piece] = from[piece];
    } else {
      reinterpret_cast<uint4*>(to)[piece] = __ldg(reinterpret_cast<const uint4*>(from) + piece);
    }
  }
}

// sum[h] = parts[0, h] + parts[1, h] + ..., added in float in sequence order, rounded once.
template <typename S>
__global__ void sdm_sum_banks_kernel(const S* parts, S* sum, int64_t N, int64_t elements) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < elements;
       at += step) {
    float total = 0.0f;
    for (int64_t n = 0; n < N; ++n) {
      total += to_float(parts[n * elements + at]);
    }
    sum[at] = from_float<S>(total);
  }
}

}  // namespace sdm::cuda
