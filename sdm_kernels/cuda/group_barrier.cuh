// SPDX-License-Identifier: Apache-2.0
//! @file Barrier among the blocks of one small group through a counter in global memory. All blocks
//! of the launch must be resident (cooperative launch), and the counter must start at zero.
#pragma once

namespace sdm::cuda {

// Waits until all `group_size` blocks have arrived `round` times. What any thread of a block wrote
// to global memory before is visible to every thread of the group after, through loads that bypass
// L1.
__device__ __forceinline__ void group_barrier(
    unsigned* counter, unsigned group_size, unsigned round
) {
  __syncthreads();  // this block's writes and reads come first
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
    const unsigned target = group_size * round;
    unsigned arrived;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < target);
    __threadfence();
  }
  __syncthreads();
}

}  // namespace sdm::cuda
