// SPDX-License-Identifier: Apache-2.0
//! @file Gate gradients of the groups of a window that the pull kernel leaves: large ones, and
//! those whose entries two of its blocks share. From the changes of every entry
//! (sdm_bwd_pairs.cuh):
//!
//!     dg(owner) = sum of d_before over entries from it on + sum of d_after over earlier writes
//!                 + decay <G, M>
//!
//! Writes count in sorted order, reads from the owner's token on. Sums are double, in an order that
//! depends on the group alone: serial for small groups, by scans of 32 for the others.
//! Bytes: 16 a group, and of the groups left 32 an entry, 4 a write.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_bwd_pairs.cuh"

namespace sdm::cuda::pairs {

// Inclusive sums over the lanes of a warp, lane 0 first.
__device__ __forceinline__ double warp_scan(double x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double below = __shfl_up_sync(0xffffffffu, x, step);
    x += lane >= step ? below : 0.0;
  }
  return x;
}

// The same by one warp, 32 entries a step: three scans, the first two in place.
__device__ __forceinline__ void scan_gates(const GateGroup& s, float2* write_part) {
  const int lane = threadIdx.x % 32;
  double carry = 0.0;
  for (int tile = s.end - 1; tile >= s.mid; tile -= 32) {  // reads: sum from the entry on
    const int read = tile - lane;
    const double sum = carry + warp_scan(read >= s.mid ? s.changes[read].x : 0.0);
    carry = __shfl_sync(0xffffffffu, sum, 31);
    if (read >= s.mid) {
      s.changes[read].x = sum;
    }
  }
  carry = 0.0;
  for (int tile = s.begin; tile < s.mid; tile += 32) {  // writes: sum before the entry
    const int w = tile + lane;
    const double sum = carry + warp_scan(w < s.mid ? s.changes[w].y : 0.0);
    const double below = __shfl_up_sync(0xffffffffu, sum, 1);
    if (w < s.mid) {
      s.changes[w].y = lane > 0 ? below : carry;
    }
    carry = __shfl_sync(0xffffffffu, sum, 31);
  }
  __syncwarp();  // the sums above are visible to the lanes that use them below
  carry = 0.0;
  for (int tile = s.mid - 1; tile >= s.begin; tile -= 32) {
    const int w = tile - lane;
    const double2 change = w >= s.begin ? s.changes[w] : make_double2(0.0, 0.0);
    const double sum = carry + warp_scan(change.x);
    carry = __shfl_sync(0xffffffffu, sum, 31);
    const int row = w >= s.begin ? s.row[w * s.row_stride] : 0;
    if ((row & kOwnerBit) != 0) {
      // the first read of this token or a later one
      int low = s.mid, high = s.end;
      while (low < high) {
        const int middle = low + (high - low) / 2;
        if (s.row[middle * s.row_stride] - s.C < (row & ~kOwnerBit)) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      const double reads = low < s.end ? s.changes[low].x : 0.0;
      write_part[w].y = static_cast<float>(sum + reads + change.y + s.d_decay);
    }
  }
}

__global__ void __launch_bounds__(kThreads) sdm_pairs_gates_kernel(const SdmBwdPairsParams p) {
  const SdmDims& dims = p.dims;
  const int64_t n = p.records.n, writes = dims.C * dims.W;
  __shared__ BlockChunk s_chunk;
  if (!find_block_chunk(p, writes, kThreads, &s_chunk)) {
    return;
  }
  const int64_t q = s_chunk.q;
  const int32_t g = s_chunk.first + static_cast<int32_t>(threadIdx.x);
  GateGroup own = {
      &p.records.entry[q * n].x,
      p.changes + q * n,
      sizeof(int4) / sizeof(int32_t),
      static_cast<int32_t>(dims.C),
      0,
      0,
      0,
      0.0,
  };
  float2* write_part = p.write_part + q * n;
  if (g < p.records.group_count[q].x) {
    const int4 group = p.records.group[q * n + g];
    if (gates_left(group.y, group.y + group.z + group.w)) {
      own.begin = group.y;
      own.mid = group.y + group.z;
      own.end = own.mid + group.w;
      own.d_decay = static_cast<double>(p.records.group_decay[q * n + g]) *
                    static_cast<double>(p.decay_sum[q * writes + g]);
    }
  }
  const int size = own.end - own.begin;
  if (size > 0 && size <= kSmallGroup) {
    walk_gates(own, [&](int w, float gate) { write_part[w].y = gate; });
  }
  unsigned large = __ballot_sync(0xffffffffu, size > kSmallGroup);
  while (large != 0) {
    const int lane = __ffs(static_cast<int>(large)) - 1;
    large &= large - 1;
    GateGroup theirs = own;
    theirs.begin = __shfl_sync(0xffffffffu, own.begin, lane);
    theirs.mid = __shfl_sync(0xffffffffu, own.mid, lane);
    theirs.end = __shfl_sync(0xffffffffu, own.end, lane);
    theirs.d_decay = __shfl_sync(0xffffffffu, own.d_decay, lane);
    scan_gates(theirs, write_part);
  }
}

}  // namespace sdm::cuda::pairs
