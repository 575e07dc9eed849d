// SPDX-License-Identifier: Apache-2.0
//! @file Records of consecutive chunks on their way through a ring of buffers in shared memory.
//!
//! From sm_90 on one thread starts a bulk copy, whose bytes a barrier in shared memory counts. In a
//! block of more than four warps, which multiply together, those that are done with a record count
//! themselves and the last one replaces it: the groups are never brought together, so that one
//! multiplies while another does the rest. Below sm_90 all threads copy 16 bytes at a time.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/hd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_mma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KDA_BULK_COPIES 1
#else
#define KDA_BULK_COPIES 0
#endif

namespace sdm::kda::cuda {

template <int kRecordBytes, int kThreads>
struct RecordRing {
  static constexpr int kMaxBuffers = 3;
  // Panels start at multiples of 1024 bytes, as their swizzle wants.
  static constexpr int kBuffer = (kRecordBytes + 1023) / 1024 * 1024;

  // A barrier of 8 bytes and a count of 4 behind the buffers, for each.
  SDM_HD static constexpr int bytes(int buffers) { return buffers * kBuffer + kMaxBuffers * 16; }

  uint32_t memory;  // address in shared memory
  int buffers;
  const char* record;  // to fetch next
  int64_t step;        // to the record of the next chunk
  int left;            // records to fetch
  int fetched = 0;     // buffer of the next record to fetch
  int awaited = 0;     // buffer of the next record to wait for
  uint32_t phase = 0;  // of its barrier

  // Starts the copy of the first record.
  __device__ __forceinline__
  RecordRing(const void* shared, int buffers, const char* record, int64_t step, int chunks)
      : memory(shared_address(shared)), buffers(buffers), record(record), step(step), left(chunks) {
#if KDA_BULK_COPIES
    if (threadIdx.x == 0) {
      for (int i = 0; i < buffers; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier(i)) : "memory");
        asm volatile("st.shared.u32 [%0], 0;" ::"r"(barrier(i) + 8) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
#endif
    fetch(threadIdx.x == 0);
  }

  // Starts the copies of the others that there is room for. Not in the constructor: what is loaded
  // in between arrives before them.
  __device__ __forceinline__ void fill() {
    for (int i = 1; i < buffers; ++i) {
      fetch(threadIdx.x == 0);
    }
  }

  __device__ __forceinline__ uint32_t barrier(int buffer) const {
    return memory + buffers * kBuffer + buffer * 16;
  }

  // Ends the use of the oldest record by this warp; the next one to fetch comes into its place.
  __device__ __forceinline__ void replace() {
#if KDA_BULK_COPIES
    bool leads = threadIdx.x == 0;
    if constexpr (kThreads > 128) {
      constexpr uint32_t kWarps = kThreads / 32;
      static_assert((kWarps & (kWarps - 1)) == 0);
      leads = false;
      if (left > 0) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          uint32_t before;
          asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;"
                       : "=r"(before)
                       : "r"(barrier(fetched) + 8)
                       : "memory");
          leads = before % kWarps == kWarps - 1;
        }
      }
    } else {
      __syncthreads();
    }
    fetch(leads);
#else
    __syncthreads();
    fetch(true);
#endif
  }

  // Waits for the next record and returns its offset in the ring. Of the records before it all but
  // one must have been ended by replace().
  __device__ __forceinline__ int wait() {
    const int buffer = awaited;
#if KDA_BULK_COPIES
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier(buffer)),
        "r"(phase)
        : "memory"
    );
#else
    if (buffers == 2) {
      wait_for_copies<0>();
    } else {
      wait_for_copies<1>();
    }
    __syncthreads();
#endif
    awaited = buffer + 1 == buffers ? 0 : buffer + 1;
    phase ^= awaited == 0 ? 1u : 0u;
    return buffer * kBuffer;
  }

 private:
  // Starts the copy of the next record, into the oldest buffer, which nobody reads any more; with
  // bulk copies `leads` is true of one thread.
  __device__ __forceinline__ void fetch(bool leads) {
    const uint32_t to = memory + fetched * kBuffer;
#if KDA_BULK_COPIES
    if (leads && left > 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(fetched)),
                   "r"(kRecordBytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(to),
          "l"(record),
          "r"(kRecordBytes),
          "r"(barrier(fetched))
          : "memory"
      );
    }
#else
    if (left > 0) {
      for (int i = threadIdx.x * 16; i < kRecordBytes; i += kThreads * 16) {
        start_copy<16>(to + i, record + i);
      }
    }
    close_copies();
#endif
    record += step;
    --left;
    fetched = fetched + 1 == buffers ? 0 : fetched + 1;
  }
};

}  // namespace sdm::kda::cuda
