// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the lanes of a token, from their scattered loads to one record a row.
//!
//! A read needs to know whether the token writes its slot as well, and a write whether it shares
//! its slot with another lane. Written slots are put into a hash table as soon as they are known;
//! reads look there, and only a token that does name a slot twice compares all lanes. All of it
//! runs while the rows are on their way.
#pragma once

#include <cstdint>

#include "sdm_kernels/cuda/raw_load.cuh"

namespace sdm::cuda {

// A token of a stream; `row` counts the rows of a contiguous [N, T, H, last] tensor.
struct StepToken {
  int n, t, head, row;
};

// A token tensor, distances in bytes. Its rows lie at equal distances, as those of a contiguous one
// do, and everything inside a row fits 32 bits: one multiplication finds a row.
struct StepRows {
  using Stride = int32_t;
  const char* data;
  int32_t row_stride, lane_stride;
  int32_t high;     // from an element's low half to its high half, 0 for a narrow type
  int32_t is_half;  // float16

  const __device__ __forceinline__ char* at(const StepToken& token) const {
    return data + static_cast<int64_t>(token.row) * row_stride;
  }

  __device__ __forceinline__ int32_t lane(int a) const { return a * lane_stride; }
};

// Any other one.
struct StepStrides {
  using Stride = int64_t;
  const char* data;
  int64_t stride[4];  // sequence, token, head, last
  int32_t high, is_half;

  const __device__ __forceinline__ char* at(const StepToken& token) const {
    return data + token.n * stride[0] + token.t * stride[1] + token.head * stride[2];
  }

  __device__ __forceinline__ int64_t lane(int a) const { return a * stride[3]; }
};

// Has a value brought into L2.
__device__ __forceinline__ void prefetch_step_value(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// As load_raw, from L2, whatever L1 has: the value may have been loaded before it was written.
__device__ __forceinline__ RawFloat load_step_value(const char* at, int high) {
  return {
      __ldcg(reinterpret_cast<const unsigned short*>(at)),
      __ldcg(reinterpret_cast<const unsigned short*>(at + high))
  };
}

template <typename View>
__device__ __forceinline__ float raw_value(const View& view, const RawFloat& raw) {
  return raw_value(raw, view.high, view.is_half != 0);
}

// What the threads share of a token. Arrays by lane have room for the rows that a block holds.
struct StepLanes {
  float4* write;   // [W] {k * decay, decay, key, 1 where the row is stored}; key: sum of k over the
                   // lanes of the slot
  float2* gate;    // [W] {k, exp(g)} of the lane
  float* read;     // [R] q, times the decay of a slot that is written too
  float* overlap;  // [R] q * key of such a slot, else 0
  int* write_slot;  // [W] -1 unused
  int* read_slot;   // [R] -1 unused
  int* table_slot;  // [2^table_bits] -1 free
  int* table_lane;  // [2^table_bits] of the write lane
};

// At most half of the table is used, a quarter where that is cheap.
__host__ __device__ constexpr int step_table_bits(int64_t W) {
  int bits = 2;
  while ((int64_t{1} << bits) < (W <= 512 ? 4 : 2) * W) {
    ++bits;
  }
  return bits;
}

// For arrays of that many rows.
__host__ __device__ constexpr int64_t step_lane_bytes(
    int64_t write_rows, int64_t read_rows, int table_bits
) {
  return write_rows * 28 + read_rows * 12 + (int64_t{8} << table_bits);
}

__device__ __forceinline__ StepLanes
step_lanes(unsigned char* memory, int write_rows, int read_rows, int table_bits) {
  StepLanes s;
  s.write = reinterpret_cast<float4*>(memory);
  s.gate = reinterpret_cast<float2*>(s.write + write_rows);
  s.write_slot = reinterpret_cast<int*>(s.gate + write_rows);
  s.read = reinterpret_cast<float*>(s.write_slot + write_rows);
  s.overlap = s.read + read_rows;
  s.read_slot = reinterpret_cast<int*>(s.overlap + read_rows);
  s.table_slot = s.read_slot + read_rows;
  s.table_lane = s.table_slot + (1 << table_bits);
  return s;
}

template <int kThreads>
__device__ __forceinline__ void clear_table(const StepLanes& s, int table_bits) {
  int4* table = reinterpret_cast<int4*>(s.table_slot);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 1 << (table_bits - 2); i += kThreads) {
    table[i] = make_int4(-1, -1, -1, -1);
  }
}

__device__ __forceinline__ int table_home(int slot, int table_bits) {
  return static_cast<int>(static_cast<unsigned>(slot) * 0x9e3779b1u >> (32 - table_bits));
}

// Puts write lane a into the table; false if its slot is there already. Which place a slot gets
// depends on who comes first, what a search finds does not.
__device__ __forceinline__ bool insert_lane(const StepLanes& s, int table_bits, int slot, int a) {
  int at = table_home(slot, table_bits);
#pragma unroll 1
  while (true) {
    const int found = atomicCAS(s.table_slot + at, -1, slot);
    if (found == -1) {
      s.table_lane[at] = a;
      return true;
    }
    if (found == slot) {
      return false;
    }
    at = (at + 1) & ((1 << table_bits) - 1);
  }
}

// The write lane of a slot that at most one lane writes, or -1.
__device__ __forceinline__ int find_lane_of(const StepLanes& s, int table_bits, int slot) {
  int at = table_home(slot, table_bits);
  int found = s.table_slot[at];
#pragma unroll 1
  while (found != slot && found != -1) {
    at = (at + 1) & ((1 << table_bits) - 1);
    found = s.table_slot[at];
  }
  return found == slot ? s.table_lane[at] : -1;
}

// Completes read lane b, of slot and weight q, of a token whose written slots differ; true if it
// reads one of them.
__device__ __forceinline__ bool finish_read(
    const StepLanes& s, int table_bits, int b, int slot, float q
) {
  const int lane = slot >= 0 ? find_lane_of(s, table_bits, slot) : -1;
  s.overlap[b] = 0.0f;
  if (lane >= 0) {
    const float2 gate = s.gate[lane];
    s.read[b] = q * gate.y;
    s.overlap[b] = q * gate.x;
  }
  return lane >= 0;
}

// Completes lane x (write lanes first) of a token in which lanes share a slot: compares all.
__device__ __noinline__ bool finish_shared(
    unsigned char* memory, int2 rows, int table_bits, int W, int x
) {
  const StepLanes s = step_lanes(memory, rows.x, rows.y, table_bits);
  const bool write = x < W;
  const int slot = write ? s.write_slot[x] : s.read_slot[x - W];
  int owner = -1;    // the lowest lane that writes the slot
  float key = 0.0f;  // sum of k over the slot's lanes
  for (int a = 0; a < W && slot >= 0; ++a) {
    if (s.write_slot[a] == slot) {
      owner = owner < 0 ? a : owner;
      key += s.gate[a].x;
    }
  }
  const float decay = owner >= 0 ? s.gate[owner].y : 1.0f;
  if (write) {
    const float k = owner >= 0 ? s.gate[x].x : 0.0f;
    s.write[x] = make_float4(k * decay, decay, key, owner == x ? 1.0f : 0.0f);
    return false;
  }
  const float q = s.read[x - W];
  s.read[x - W] = q * decay;
  s.overlap[x - W] = owner >= 0 ? q * key : 0.0f;
  return owner >= 0;
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
