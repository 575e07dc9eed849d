// SPDX-License-Identifier: Apache-2.0
//! @file Asynchronous copies of a thread from global into shared memory, closed in groups.
#pragma once

#include <cstdint>

namespace sdm::cuda {

// Starts the copy of 4, 8 or 16 bytes to an address in shared memory; those of 16 bypass L1.
template <int kBytes>
__device__ __forceinline__ void start_copy(uint32_t to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
  }
}

// The same; writes zeroes and reads nothing when not `valid`.
template <int kBytes>
__device__ __forceinline__ void start_copy(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to),
                 "l"(from),
                 "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
}

template <int kBytes, typename... Valid>
__device__ __forceinline__ void start_copy(void* to, const void* from, Valid... valid) {
  start_copy<kBytes>(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from, valid...);
}

// Closes the copies since the last close.
__device__ __forceinline__ void close_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace sdm::cuda
