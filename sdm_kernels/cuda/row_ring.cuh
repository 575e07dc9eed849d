// SPDX-License-Identifier: Apache-2.0
//! @file A ring of 16-byte pieces in shared memory, private to each thread: asynchronous copies
//! that need no registers while they are in flight.
//!
//! Every issue() starts one copy and closes it as a group of its own, so that waiting for the
//! oldest leaves the others in flight. A thread reads back only what it copied itself: no barriers.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/async_copy.cuh"

namespace sdm::cuda {

template <int kDepth, int kThreads>
struct RowRing {
  uint4* slots;  // [kDepth][kThreads] in shared memory, 16-byte aligned

  __device__ __forceinline__ explicit RowRing(void* memory)
      : slots(static_cast<uint4*>(memory) + threadIdx.x) {}

  static constexpr int64_t kBytes = int64_t{kDepth} * kThreads * 16;

  // Starts a copy of 16 bytes through L2 into a slot; zeroes when `valid` is false.
  __device__ __forceinline__ void issue(int slot, const void* from, bool valid) const {
    start_copy<16>(slots + slot * kThreads, from, valid);
  }

  // Puts a piece that is at hand, for layouts that the copy engine cannot serve.
  __device__ __forceinline__ void put(int slot, uint4 piece) const {
    slots[slot * kThreads] = piece;
  }

  // Closes the copies since the last close.
  __device__ __forceinline__ static void close() { close_copies(); }

  // Waits until at most kPending groups are in flight.
  template <int kPending>
  __device__ __forceinline__ static void wait() {
    wait_for_copies<kPending>();
  }

  __device__ __forceinline__ uint4 get(int slot) const { return slots[slot * kThreads]; }
};

}  // namespace sdm::cuda
