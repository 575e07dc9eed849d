// SPDX-License-Identifier: Apache-2.0
//! @file The preparation's loads ahead of time. All blocks of a wave load, compute and store at
//! about the same time, so that the memory is idle while they compute; then each block brings the
//! rows of a block of the next wave into the second-level cache.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_rows.cuh"

namespace sdm::kda::cuda {

// Fetches q, k and g of the block that is args.ahead_* behind this one, in this window or the next.
// 16-bit elements, no packed sequences.
template <int kK>
__device__ __forceinline__ void fetch_for_later(const KdaPrepArgs& args, int lane) {
  constexpr int kLines = kK / 64;  // of 128 bytes in a row
  const KdaPrepParams& p = args.params;
  int64_t chunk = blockIdx.x + args.ahead_chunks;
  int64_t hv = blockIdx.y + args.ahead_heads;
  int64_t sequence = blockIdx.z;
  if (chunk >= p.window.num_chunks) {
    chunk -= p.window.num_chunks;
    ++hv;
  }
  if (hv >= p.dims.HV) {
    hv -= p.dims.HV;
    ++sequence;
  }
  if (sequence == p.window.num_sequences) {
    sequence = 0;
    chunk += p.window.num_chunks;
  }
  const int64_t token = (p.window.first_chunk + chunk) * kTensorChunk;
  const int64_t left = p.dims.T - token;
  if (hv >= p.dims.HV || left <= 0) {
    return;
  }
  const KdaView& view = (&p.tokens.q)[lane < 3 ? lane : 3];
  const int64_t start =
      reinterpret_cast<int64_t>(view.data) +
      2 * ((p.window.first_sequence + sequence) * view.stride[0] + token * view.stride[1] +
           (lane < 2 ? hv / args.group : hv) * view.stride[2]);
#pragma unroll
  for (int first = 0; first < 3 * 64 * kLines; first += kPrepThreads) {
    const int index = first + threadIdx.x;
    const int tensor = index / (64 * kLines);  // of all lanes of the warp
    const int row = index / kLines % 64;
    const int from = tensor < 2 ? tensor : 3;
    const unsigned low = __shfl_sync(0xffffffffu, static_cast<unsigned>(start), from);
    const unsigned high = __shfl_sync(0xffffffffu, static_cast<unsigned>(start >> 32), from);
    if (tensor < 3 && row < left) {
      const char* head = reinterpret_cast<const char*>(static_cast<int64_t>(high) << 32 | low);
      prefetch_l2(
          head + 2 * row * static_cast<int>((&p.tokens.q)[from].stride[1]) + index % kLines * 128
      );
    }
  }
}

}  // namespace sdm::kda::cuda
