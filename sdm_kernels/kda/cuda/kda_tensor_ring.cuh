// SPDX-License-Identifier: Apache-2.0
//! @file Pieces of global memory on their way through three slots of shared memory, copied by all
//! threads of the block. Piece p lies in slot p % 3.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

namespace sdm::kda::cuda {

template <int kSlotBytes, int kThreads>
struct PieceRing {
  static constexpr int kSlots = 3;
  static constexpr int kBytes = kSlots * kSlotBytes;

  uint32_t memory;  // address in shared memory
  int slot = 0;     // of the next piece to wait for

  __device__ __forceinline__ explicit PieceRing(const void* shared)
      : memory(shared_address(shared)) {}

  // Starts the copy of a piece, a multiple of 16 bytes; not valid: there is none, but it counts.
  // The block must have synchronised after the last read of the slot.
  __device__ __forceinline__ void fetch(int to, const char* from, int bytes, bool valid) const {
    const uint32_t address = memory + to * kSlotBytes;
    if (valid) {
      for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16) {
        copy_async(address + i, from + i);
      }
    }
    close_copies();
  }

  // Until this thread's part of the piece of `slot` is there, of which kNewer have been fetched
  // since.
  template <int kNewer>
  __device__ __forceinline__ void wait() const {
    wait_copies<kNewer>();
  }

  __device__ __forceinline__ void next() { slot = slot_after(); }

  __device__ __forceinline__ int slot_before() const { return slot == 0 ? kSlots - 1 : slot - 1; }

  __device__ __forceinline__ int slot_after() const { return slot == kSlots - 1 ? 0 : slot + 1; }
};

}  // namespace sdm::kda::cuda
