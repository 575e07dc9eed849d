// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the lanes of a token, from their scattered loads to one record a row.
//!
//! Loads of either width come as two halves, which are the same for a narrow type: without
//! branches, so that no load waits for the register of its twin. Values are put together late, and
//! the search for equal slots runs while the rows are on their way.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sdm_kernels/common/dtype.h"

namespace sdm::cuda {

// A token tensor. Strides and distances are in bytes; Stride is int32_t where all of them fit,
// which halves what a block fetches of its arguments.
template <typename Stride>
struct StepView {
  const char* data;
  Stride stride[4];  // sequence, token, head, last
  int32_t high;      // from an element's low half to its high half, 0 for a narrow type
  int32_t is_half;   // float16

  const __device__ __forceinline__ char* at(int32_t n, int32_t t, int32_t head) const {
    return data + static_cast<int64_t>(n) * stride[0] + static_cast<int64_t>(t) * stride[1] +
           static_cast<int64_t>(head) * stride[2];
  }

  __device__ __forceinline__ int64_t lane(int32_t a) const {
    return static_cast<int64_t>(a) * stride[3];
  }
};

// An int64 or int32 as it lies in memory.
struct RawId {
  unsigned low, high;
};

__device__ __forceinline__ RawId load_id(const char* at, int32_t high) {
  return {
      __ldg(reinterpret_cast<const unsigned*>(at)),
      __ldg(reinterpret_cast<const unsigned*>(at + high))
  };
}

// The slot, or -1 for an id outside the bank.
__device__ __forceinline__ int slot_of_id(const RawId& id, int32_t high, int num_slots) {
  return (high == 0 || id.high == 0) && id.low < static_cast<unsigned>(num_slots)
             ? static_cast<int>(id.low)
             : -1;
}

// A float32, bfloat16 or float16 as it lies in memory.
struct RawFloat {
  unsigned short low, high;
};

__device__ __forceinline__ RawFloat load_raw(const char* at, int32_t high) {
  return {
      __ldg(reinterpret_cast<const unsigned short*>(at)),
      __ldg(reinterpret_cast<const unsigned short*>(at + high))
  };
}

template <typename View>
__device__ __forceinline__ float raw_value(const View& view, const RawFloat& raw) {
  const float value =
      __uint_as_float(static_cast<unsigned>(raw.high) << 16 | (view.high != 0 ? raw.low : 0u));
  return view.is_half ? __half2float(__ushort_as_half(raw.high)) : value;
}

// What the threads share of a token.
struct StepLanes {
  float4* write;  // [W] {k * decay, decay, key, 1 where the row is stored}; key: sum of k over the
                  // lanes of the slot
  int* write_slot;  // [W] -1 unused; then up to a multiple of four
  float2* gate;     // [W] {k, exp(g)} of the lane
  float* read;      // [R] q, times the decay of a slot that is written too
  float* overlap;   // [R] q * key of such a slot, else 0
  int* read_slot;   // [R] -1 unused
};

__host__ __device__ constexpr int64_t step_lane_bytes(int64_t W, int64_t R) {
  return W * 24 + (W + 3) / 4 * 16 + R * 12;
}

__device__ __forceinline__ StepLanes step_lanes(unsigned char* memory, int W, int R) {
  StepLanes s;
  s.write = reinterpret_cast<float4*>(memory);
  s.write_slot = reinterpret_cast<int*>(s.write + W);
  s.gate = reinterpret_cast<float2*>(s.write_slot + (W + 3) / 4 * 4);
  s.read = reinterpret_cast<float*>(s.gate + W);
  s.overlap = s.read + R;
  s.read_slot = reinterpret_cast<int*>(s.overlap + R);
  return s;
}

// Where a slot stands among the write lanes.
struct StepOwner {
  int lane;   // the lowest lane that writes the slot, -1 if none does
  float key;  // sum of k over those lanes
};

// Up to here all write lanes are compared; beyond, a binary search is used if they ascend.
constexpr int kStepCompared = 128;

__device__ __forceinline__ StepOwner
find_owner(const StepLanes& s, int W, int slot, bool ascending) {
  constexpr int kMatch = 1 << 16;  // above the lane numbers
  int matches = 0;
  if (ascending) {
    int low = 0;
#pragma unroll 1
    for (int count = W; count > 0;) {
      const int half = count / 2;
      const bool below = s.write_slot[low + half] < slot;
      low += below ? half + 1 : 0;
      count = below ? count - half - 1 : half;
    }
    matches = low < W && s.write_slot[low] == slot ? kMatch + low : 0;
  } else {
#pragma unroll 4
    for (int a = 0; a < W; a += 4) {
      const int4 four = *reinterpret_cast<const int4*>(s.write_slot + a);
      matches += four.x == slot ? kMatch + a : 0;
      matches += four.y == slot ? kMatch + a + 1 : 0;
      matches += four.z == slot ? kMatch + a + 2 : 0;
      matches += four.w == slot ? kMatch + a + 3 : 0;
    }
  }
  if (slot < 0 || matches < kMatch) {
    return {-1, 0.0f};
  }
  int lane = matches - kMatch;
  if (lane < kMatch) {
    return {lane, s.gate[lane].x};
  }
  // several lanes write the slot
  StepOwner owner{-1, 0.0f};
#pragma unroll 1
  for (int a = 0; a < W; ++a) {
    if (s.write_slot[a] == slot) {
      owner.lane = owner.lane < 0 ? a : owner.lane;
      owner.key += s.gate[a].x;
    }
  }
  return owner;
}

// Completes lane x; true if it reads a slot that the token writes as well.
__device__ __forceinline__ bool finish_lane(const StepLanes& s, int W, int x, bool ascending) {
  const bool write = x < W;
  const int slot = write ? s.write_slot[x] : s.read_slot[x - W];
  const StepOwner owner = find_owner(s, W, slot, ascending);
  const bool written = owner.lane >= 0;
  const float decay = written ? s.gate[owner.lane].y : 1.0f;
  if (write) {
    const float k = written ? s.gate[x].x : 0.0f;
    s.write[x] = make_float4(k * decay, decay, owner.key, owner.lane == x ? 1.0f : 0.0f);
    return false;
  }
  const float q = slot >= 0 ? s.read[x - W] : 0.0f;
  s.read[x - W] = q * decay;
  s.overlap[x - W] = written ? q * owner.key : 0.0f;
  return written;
}

// Sum of all overlaps by the first warp; the order depends on R alone.
__device__ __forceinline__ float sum_overlap(const StepLanes& s, int R) {
  float sum = 0.0f;
#pragma unroll 1
  for (int b = static_cast<int>(threadIdx.x); b < R; b += 32) {
    sum += s.overlap[b];
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

}  // namespace sdm::cuda
