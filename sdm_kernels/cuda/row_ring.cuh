// SPDX-License-Identifier: Apache-2.0
//! @file A ring of 16-byte pieces in shared memory, private to each thread: asynchronous copies
//! that need no registers while they are in flight.
//!
//! Every issue() starts one copy and closes it as a group of its own, so that waiting for the
//! oldest leaves the others in flight. A thread reads back only what it copied itself: no barriers.
#pragma once

#include <cstdint>

namespace sdm::cuda {

template <int kDepth, int kThreads>
struct RowRing {
  uint4* slots;  // [kDepth][kThreads] in shared memory, 16-byte aligned

  __device__ __forceinline__ explicit RowRing(void* memory)
      : slots(static_cast<uint4*>(memory) + threadIdx.x) {}

  static constexpr int64_t kBytes = int64_t{kDepth} * kThreads * 16;

  // Starts a copy of 16 bytes through L2 into a slot; zeroes when `valid` is false.
  __device__ __forceinline__ void issue(int slot, const void* from, bool valid) const {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(slots + slot * kThreads));
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }

  // Puts a piece that is at hand, for layouts that the copy engine cannot serve.
  __device__ __forceinline__ void put(int slot, uint4 piece) const {
    slots[slot * kThreads] = piece;
  }

  // Closes the copies since the last close.
  __device__ __forceinline__ static void close() {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Waits until at most kPending groups are in flight.
  template <int kPending>
  __device__ __forceinline__ static void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }

  __device__ __forceinline__ uint4 get(int slot) const { return slots[slot * kThreads]; }
};

}  // namespace sdm::cuda
