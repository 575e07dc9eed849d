// SPDX-License-Identifier: Apache-2.0
//! @file Decode: parameters, shapes of blocks, and small helpers of the step kernel.
#pragma once

#include <cstdint>

#include "sdm_kernels/sdm/cuda/sdm_row.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_lanes.cuh"

namespace sdm::cuda {

constexpr int kStepGroups = 32;

// In the order in which a block needs it. View: StepRows or StepStrides.
template <typename View>
struct SdmStepParams {
  int32_t T, W, R, S, D;
  int32_t table_bits;
  int32_t first_sequence, first_head, num_heads;
  int32_t gate_per_write;
  View write_idx, read_idx;
  char* bank;
  int64_t bank_stride[2];  // sequence, head, in bytes
  typename View::Stride slot_stride;
  int32_t pool;
  const char* state_indices;  // null: sequence n uses bank row n
  int32_t state_high;         // as StepRows::high
  View write_val, read_val, g, beta, v;
  void* out;
};

// kSets: groups that a thread works for.
template <typename S, int kLanes, int kSets>
struct StepShape {
  static constexpr int kThreads = kStepGroups / kSets * kLanes;
  static constexpr int kWarps = kThreads / 32;
  // on a multiprocessor: with several groups a thread there are many, and loads on their way count
  static constexpr int kBlocks = kSets == 1 ? 1 : 1536 / kSets / kThreads;
  static constexpr int kEarlyBlocks = kSets == 1 ? 1 : (kSets == 2 ? 512 : 384) / kThreads;
  static constexpr int kColumns = kLanes * kVec<S>;
  static constexpr int kSums = 2 * kColumns;  // retrieval and reading
};

// Rows of a kind that the arrays by lane have room for; by fours, which keeps all arrays aligned.
template <int kHeld>
__host__ __device__ constexpr int64_t step_rows(int64_t lanes) {
  return lanes > kHeld * kStepGroups ? (lanes + 3) / 4 * 4 : kHeld * kStepGroups;
}

// Parts of the sums, delta or v, {sum of overlaps, whether lanes share a slot}.
template <typename S, int kLanes, int kSets, int kHeld>
__host__ __device__ constexpr int64_t step_smem(int64_t W, int64_t R) {
  using Shape = StepShape<S, kLanes, kSets>;
  return (Shape::kWarps * Shape::kSums + Shape::kColumns + 4) * 4 +
         step_lane_bytes(step_rows<kHeld>(W), step_rows<kHeld>(R), step_table_bits(W));
}

// Asks for a lane's part of a row to be brought into L2.
template <typename S>
__device__ __forceinline__ void prefetch_row_if(bool valid, const S* row, const LaneColumns& at) {
  if (valid && at.count > 0) {
    prefetch_step_value(row + at.first);
  }
}

// Writes down a row for all threads of the block; returns its weight, 0 where it is not used. Sets
// *shared where another lane writes its slot.
template <typename View>
__device__ __forceinline__ float share_step_row(
    const SdmStepParams<View>& p,
    const StepLanes& s,
    int* shared,
    bool write,
    int row,
    int slot,
    const RawFloat& weight,
    const RawFloat& gate
) {
  const bool used = slot >= 0;
  const float value = used ? raw_value(write ? p.write_val : p.read_val, weight) : 0.0f;
  if (!write) {
    s.read_slot[row] = slot;
    s.read[row] = value;
    return value;
  }
  const float decay = used ? expf(raw_value(p.g, gate)) : 0.0f;
  s.write_slot[row] = slot;
  s.gate[row] = make_float2(value, decay);
  s.write[row] = make_float4(value * decay, decay, value, used ? 1.0f : 0.0f);
  if (used && !insert_lane(s, p.table_bits, slot, row)) {
    *shared = 1;
  }
  return value;
}

// One element of a tensor of v's type.
template <typename View>
__device__ __forceinline__ void store_like(const View& v, void* data, int64_t at, float x) {
  if (v.high != 0) {
    static_cast<float*>(data)[at] = x;
  } else {
    static_cast<unsigned short*>(data)[at] = v.is_half
                                                 ? __half_as_ushort(__float2half_rn(x))
                                                 : __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
}

// Hides where a value comes from: what depends on it is computed where it stands in the code, not
// before the first loads.
template <typename T>
__device__ __forceinline__ T here(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

}  // namespace sdm::cuda
