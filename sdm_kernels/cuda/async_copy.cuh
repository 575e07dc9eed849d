// SPDX-License-Identifier: Apache-2.0
//! @file Asynchronous copies of a thread from global into shared memory, closed in groups.
#pragma once

#include <cstring>

namespace sdm::cuda {

// Starts the copy of 8 or 16 bytes; zeroes when `valid` is false, and then reads nothing.
template <int kBytes>
__device__ __forceinline__ void start_copy(void* to, const void* from, bool valid = true) {
  static_assert(kBytes == 8 || kBytes == 16);
#ifdef __CUDA_ARCH__
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address),
                 "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address),
                 "l"(from),
                 "r"(bytes)
                 : "memory");
  }
#else
  if (valid) {
    std::memcpy(to, from, kBytes);
  } else {
    std::memset(to, 0, kBytes);
  }
#endif
}

// Closes the copies since the last close.
__device__ __forceinline__ void close_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace sdm::cuda
