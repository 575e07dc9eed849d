// SPDX-License-Identifier: Apache-2.0
//! @file Loads of elements whose width is known only at run time.
//!
//! An element comes as two halves, which are the same for a narrow type: no branch, and no load
//! waits for the register of its twin of another width. Values are put together when they are
//! needed, so that many loads can be on their way.
#pragma once

#include <cuda_fp16.h>

namespace sdm::cuda {

// An int64 or int32 as it lies in memory. `high`: bytes from the low half to the high half of an
// element, 0 for the narrow type.
struct RawId {
  unsigned low, high;
};

// Not as a constant: such a load may sink below a barrier, far from where it should be started.
__device__ __forceinline__ RawId load_id(const char* at, int high) {
  return {
      __ldcg(reinterpret_cast<const unsigned*>(at)),
      __ldcg(reinterpret_cast<const unsigned*>(at + high))
  };
}

// The id, or -1 outside [0, count).
__device__ __forceinline__ int id_below(const RawId& id, int high, int count) {
  return (high == 0 || id.high == 0) && id.low < static_cast<unsigned>(count)
             ? static_cast<int>(id.low)
             : -1;
}

// A float32, bfloat16 or float16 as it lies in memory.
struct RawFloat {
  unsigned short low, high;
};

__device__ __forceinline__ RawFloat load_raw(const char* at, int high) {
  return {
      __ldg(reinterpret_cast<const unsigned short*>(at)),
      __ldg(reinterpret_cast<const unsigned short*>(at + high))
  };
}

__device__ __forceinline__ float raw_value(const RawFloat& raw, int high, bool is_half) {
  const float value =
      __uint_as_float(static_cast<unsigned>(raw.high) << 16 | (high != 0 ? raw.low : 0u));
  return is_half ? __half2float(__ushort_as_half(raw.high)) : value;
}

}  // namespace sdm::cuda
