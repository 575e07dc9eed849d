// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the token recurrence of one stream and one slice of columns in one block, in
//! place.
//!
//! Bound by latency, so it is one chain: ids, rows, one sum, store. All rows of a token, written
//! and read, are fetched as soon as their ids are there, kLanes lanes of 16 bytes a row; while they
//! come, the block finds out which slots are named twice and which reads see the token's own write.
//! With k', q' the weights times the decay of the slot and c = sum of q key over the reads of
//! written slots (key: sum of k over the slot's lanes),
//!
//!     delta = beta (v - sum of k' old row)      out = sum of q' old row + c delta
//!
//! so one pass over the old rows gives both sums, and the new rows, decay old + key delta, are
//! stored and not read back.
//!
//! Row a belongs to group a % kGroups of lanes. A group adds its rows in order, the groups' sums
//! are added in pairs, always the same ones: bits do not depend on how wide a slice is, so that is
//! chosen to fill the device.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_lanes.cuh"

namespace sdm::cuda {

// In the order in which a block needs it. Strides are in bytes.
template <typename Stride>
struct SdmStepParams {
  int32_t T, W, R, S, D;
  int32_t first_sequence, first_head, num_heads;
  StepView<Stride> write_idx, read_idx;
  char* bank;
  int64_t bank_stride[2];  // sequence, head
  Stride slot_stride;
  int32_t gate_per_write;
  int64_t pool;
  const char* state_indices;  // null: sequence n uses bank row n
  int32_t state_high;         // as StepView::high
  StepView<Stride> write_val, read_val, g, beta, v;
  void* out;
};

template <typename S, int kGroups, int kLanes>
struct StepShape {
  static constexpr int kThreads = kGroups * kLanes;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kColumns = kLanes * kVec<S>;
  static constexpr int kSums = 2 * kColumns;  // retrieval and reading
};

// Parts of the sums, delta, and {sum of overlaps}.
template <typename S, int kGroups, int kLanes>
__host__ __device__ constexpr int64_t step_smem(int64_t W, int64_t R) {
  using Shape = StepShape<S, kGroups, kLanes>;
  return (Shape::kWarps * Shape::kSums + Shape::kColumns + 4) * 4 + step_lane_bytes(W, R);
}

// Adds up a warp's groups, kOffset lanes apart. x begins with the kCount sums of a lane; every step
// gives away half of what is left. Returns which of them the first one is that stays; the number
// that stays is step_sums_left().
template <int kOffset, int kCount>
__device__ __forceinline__ int add_groups(float* x) {
  if constexpr (kOffset == 32) {
    return 0;
  } else if constexpr (kCount == 1) {
    x[0] += __shfl_xor_sync(0xffffffffu, x[0], kOffset);
    return add_groups<2 * kOffset, 1>(x);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (threadIdx.x & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float give = upper ? x[i] : x[i + kHalf];
      const float keep = upper ? x[i + kHalf] : x[i];
      x[i] = keep + __shfl_xor_sync(0xffffffffu, give, kOffset);
    }
    return (upper ? kHalf : 0) + add_groups<2 * kOffset, kHalf>(x);
  }
}

__host__ __device__ constexpr int step_sums_left(int lanes, int count) {
  return count * lanes > 32 ? count * lanes / 32 : 1;
}

// sums = the warps' parts of one (kind, column), added in pairs.
template <int kCount, int kStride>
__device__ __forceinline__ float add_parts(const float* parts) {
  if constexpr (kCount == 1) {
    return parts[0];
  } else {
    return add_parts<kCount / 2, kStride>(parts) +
           add_parts<kCount / 2, kStride>(parts + kCount / 2 * kStride);
  }
}

// to[i] = x[i] for i < kCount; `to` is aligned to the largest of 4, 8 and 16 bytes that fits.
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float* x) {
  if constexpr (kCount == 1) {
    *to = x[0];
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  }
}

// Pieces of rows stay packed: as a union of 16-bit values the compiler gives each its own register.
template <typename S, bool kAligned>
__device__ __forceinline__ uint4 load_raw_row(const S* row, const LaneColumns& at) {
  return load_piece<S, kAligned>(row, at).raw;
}

// Without a branch where rows are aligned; *to keeps its value unless `valid`.
template <typename S, bool kAligned>
__device__ __forceinline__ void load_row_if(
    bool valid, const S* row, const LaneColumns& at, uint4* to
) {
  if constexpr (kAligned) {
    if (valid && at.count > 0) {
      *to = __ldcg(reinterpret_cast<const uint4*>(row + at.first));
    }
  } else if (valid) {
    *to = load_raw_row<S, false>(row, at);
  }
}

template <typename S>
__device__ __forceinline__ void unpack_raw(const uint4& raw, float (&x)[kVec<S>]) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      x[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i])));
      x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
}

template <typename S>
__device__ __forceinline__ uint4 pack_raw(const float (&x)[kVec<S>]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(S) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<S, __nv_bfloat16>) {
      words[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[2 * i])) |
                 static_cast<unsigned>(__bfloat16_as_ushort(__float2bfloat16_rn(x[2 * i + 1])))
                     << 16;
    } else {
      words[i] = __half_as_ushort(__float2half_rn(x[2 * i])) |
                 static_cast<unsigned>(__half_as_ushort(__float2half_rn(x[2 * i + 1]))) << 16;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename S, bool kAligned>
__device__ __forceinline__ void store_raw_row(S* row, const LaneColumns& at, const uint4& raw) {
  Piece<S> piece;
  piece.raw = raw;
  store_piece<S, kAligned>(row, at, piece);
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

// kHeld: rows of either kind that a lane keeps in registers; further ones are fetched twice.
// Grid: slices, heads, sequences.
template <typename S, typename Stride, bool kAligned, int kGroups, int kLanes, int kHeld>
__global__ void __launch_bounds__(kGroups* kLanes) sdm_step_kernel(
    const __grid_constant__ SdmStepParams<Stride> p
) {
  using Shape = StepShape<S, kGroups, kLanes>;
  constexpr int kThreads = Shape::kThreads;
  constexpr int kColumns = Shape::kColumns;
  constexpr int V = kVec<S>;
  // lanes of the token that a thread loads ahead
  constexpr int kOwn = 2 * kHeld * kGroups > kThreads ? 2 * kHeld * kGroups / kThreads : 1;
  extern __shared__ __align__(16) unsigned char step_memory[];
  float* s_parts = reinterpret_cast<float*>(step_memory);
  float* s_delta = s_parts + Shape::kWarps * Shape::kSums;
  float* s_overlap = s_delta + kColumns;
  const int W = p.W, R = p.R;
  const StepLanes s = step_lanes(reinterpret_cast<unsigned char*>(s_overlap + 4), W, R);

  const int thread = static_cast<int>(threadIdx.x);
  const int group = thread / kLanes;
  const int n = p.first_sequence + static_cast<int>(blockIdx.z);
  const int head = p.first_head + static_cast<int>(blockIdx.y);
  const int first_column = static_cast<int>(blockIdx.x) * kColumns;
  const int own_column = first_column + thread % kLanes * V;
  const LaneColumns at{own_column, max(0, min(V, p.D - own_column))};
  // the sum that this thread finishes: threads below kColumns a retrieval, the next ones a reading
  const int sum_column = first_column + thread % kColumns;
  const bool reads = thread >= kColumns;
  const bool sums = thread < Shape::kSums && sum_column < p.D;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // the next step's blocks may come and wait, as this one waits for all that was before it
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  RawId state{static_cast<unsigned>(n), 0};
  if (p.state_indices != nullptr) {
    state = load_id(p.state_indices + static_cast<int64_t>(n) * (p.state_high + 4), p.state_high);
  }

#pragma unroll 1
  for (int t = 0; t < p.T; ++t) {
    // slots of the rows that the lane's group fetches: straight from memory, so that no barrier
    // stands before the rows
    const char* write_ids = p.write_idx.at(n, t, head);
    const char* read_ids = p.read_idx.at(n, t, head);
    RawId write_id[kHeld], read_id[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int a = group + u * kGroups;
      write_id[u] = {~0u, ~0u};
      if (a < W) {
        write_id[u] = load_id(write_ids + p.write_idx.lane(a), p.write_idx.high);
      }
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int b = group + u * kGroups;
      read_id[u] = {~0u, ~0u};
      if (b < R) {
        read_id[u] = load_id(read_ids + p.read_idx.lane(b), p.read_idx.high);
      }
    }
    // what is needed later, one lane of the token a thread
    RawId own_id[kOwn];
    RawFloat own_weight[kOwn], own_gate[kOwn];
    const auto load_own = [&](int x, RawId* id, RawFloat* weight, RawFloat* gate) {
      const bool write = x < W;
      const int lane = write ? x : x - W;
      const StepView<Stride>& ids = write ? p.write_idx : p.read_idx;
      const StepView<Stride>& values = write ? p.write_val : p.read_val;
      *id = load_id(ids.at(n, t, head) + ids.lane(lane), ids.high);
      *weight = load_raw(values.at(n, t, head) + values.lane(lane), values.high);
      // a read lane takes the token's first gate and makes no use of it
      *gate =
          load_raw(p.g.at(n, t, head) + p.g.lane(p.gate_per_write && write ? lane : 0), p.g.high);
    };
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int x = thread + j * kThreads;
      if (x < W + R) {
        load_own(x, &own_id[j], &own_weight[j], &own_gate[j]);
      }
    }
    const RawFloat raw_beta = load_raw(p.beta.at(n, t, head), p.beta.high);
    RawFloat raw_v{0, 0};
    if (sums && !reads) {
      raw_v = load_raw(p.v.at(n, t, head) + p.v.lane(sum_column), p.v.high);
    }
    const int64_t out_at =
        ((static_cast<int64_t>(n) * p.T + t) * p.num_heads + head) * p.D + sum_column;
    const int64_t bank_row =
        p.state_high != 0 || p.state_indices == nullptr
            ? static_cast<int64_t>(static_cast<uint64_t>(state.high) << 32 | state.low)
            : static_cast<int>(state.low);
    if (bank_row < 0 || bank_row >= p.pool) {
      if (sums && reads) {
        store_like(p.v, p.out, out_at, 0.0f);
      }
      continue;
    }

    char* bank = p.bank + bank_row * p.bank_stride[0] + head * p.bank_stride[1];
    const auto row_at = [&](int slot) {
      return reinterpret_cast<S*>(bank + static_cast<int64_t>(slot) * p.slot_stride);
    };
    uint4 write_row[kHeld] = {}, read_row[kHeld] = {};
    int write_slot[kHeld];
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      write_slot[u] = slot_of_id(write_id[u], p.write_idx.high, p.S);
      load_row_if<S, kAligned>(
          write_slot[u] >= 0, row_at(max(write_slot[u], 0)), at, &write_row[u]
      );
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int slot = slot_of_id(read_id[u], p.read_idx.high, p.S);
      load_row_if<S, kAligned>(slot >= 0, row_at(max(slot, 0)), at, &read_row[u]);
    }

    // while the rows come
    const auto share_own =
        [&](int x, const RawId& id, const RawFloat& weight, const RawFloat& gate) {
          const bool write = x < W;
          const int slot = slot_of_id(id, write ? p.write_idx.high : p.read_idx.high, p.S);
          if (write) {
            s.write_slot[x] = slot;
            s.gate[x] = make_float2(raw_value(p.write_val, weight), expf(raw_value(p.g, gate)));
          } else {
            s.read_slot[x - W] = slot;
            s.read[x - W] = raw_value(p.read_val, weight);
          }
        };
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int x = thread + j * kThreads;
      if (x < W + R) {
        share_own(x, own_id[j], own_weight[j], own_gate[j]);
      }
    }
#pragma unroll 1
    for (int x = thread + kOwn * kThreads; x < W + R; x += kThreads) {
      RawId id;
      RawFloat weight, gate;
      load_own(x, &id, &weight, &gate);
      share_own(x, id, weight, gate);
    }
    if (thread < (W + 3) / 4 * 4 - W) {
      s.write_slot[W + thread] = -1;
    }
    __syncthreads();  // all lanes are there
    bool ascending = false;
    if (W > kStepCompared) {
      bool ascends = true;
#pragma unroll 1
      for (int a = thread; a < W; a += kThreads) {
        ascends =
            ascends && s.write_slot[a] >= 0 && (a == 0 || s.write_slot[a - 1] < s.write_slot[a]);
      }
      ascending = __syncthreads_and(ascends);
    }
    bool overlaps = false;
#pragma unroll 1
    for (int x = thread; x < W + R; x += kThreads) {
      overlaps = finish_lane(s, W, x, ascending) || overlaps;
    }
    const bool overlapped = __syncthreads_or(overlaps);  // the lanes are complete
    if (overlapped && thread < 32) {
      const float overlap = sum_overlap(s, R);
      if (thread == 0) {
        *s_overlap = overlap;
      }
    }

    float sum[2 * V] = {};
    const auto add_row = [&](const uint4& row, float weight, int first) {
      float x[V];
      unpack_raw<S>(row, x);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        sum[first + i] = fmaf(weight, x[i], sum[first + i]);
      }
    };
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int a = group + u * kGroups;
      add_row(write_row[u], a < W ? s.write[min(a, W - 1)].x : 0.0f, 0);
    }
#pragma unroll 1
    for (int a = group + kHeld * kGroups; a < W; a += kGroups) {
      if (s.write_slot[a] >= 0) {
        add_row(load_raw_row<S, kAligned>(row_at(s.write_slot[a]), at), s.write[a].x, 0);
      }
    }
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int b = group + u * kGroups;
      add_row(read_row[u], b < R ? s.read[min(b, R - 1)] : 0.0f, V);
    }
#pragma unroll 1
    for (int b = group + kHeld * kGroups; b < R; b += kGroups) {
      if (s.read_slot[b] >= 0) {
        add_row(load_raw_row<S, kAligned>(row_at(s.read_slot[b]), at), s.read[b], V);
      }
    }
    const int left = add_groups<kLanes, 2 * V>(sum);
    store_floats<step_sums_left(kLanes, 2 * V)>(
        s_parts + thread / 32 * Shape::kSums + left / V * kColumns + thread % kLanes * V + left % V,
        sum
    );
    __syncthreads();  // the parts are there, and every reader has the old rows it wants
    float total = 0.0f;
    if (thread < Shape::kSums) {
      total = add_parts<Shape::kWarps, Shape::kSums>(s_parts + thread);
    }
    if (!reads) {
      s_delta[thread] = raw_value(p.beta, raw_beta) * (raw_value(p.v, raw_v) - total);
    }
    __syncthreads();  // delta is there
    float delta[V];
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(s_delta + thread % kLanes * V + i);
      delta[i] = four.x;
      delta[i + 1] = four.y;
      delta[i + 2] = four.z;
      delta[i + 3] = four.w;
    }
    const auto new_row = [&](uint4 old, const float4& lane) {
      // else the compiler keeps the row as floats from the first pass on, in twice the registers
      asm volatile("" : "+r"(old.x), "+r"(old.y), "+r"(old.z), "+r"(old.w));
      float x[V];
      unpack_raw<S>(old, x);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        x[i] = fmaf(lane.z, delta[i], lane.y * x[i]);
      }
      return pack_raw<S>(x);
    };
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const int a = group + u * kGroups;
      const float4 lane = s.write[min(a, W - 1)];
      const uint4 row = new_row(write_row[u], lane);
      if (a < W && lane.w != 0.0f) {
        store_raw_row<S, kAligned>(row_at(write_slot[u]), at, row);
      }
    }
#pragma unroll 1
    for (int a = group + kHeld * kGroups; a < W; a += kGroups) {
      if (s.write[a].w != 0.0f) {
        S* row = row_at(s.write_slot[a]);
        store_raw_row<S, kAligned>(
            row, at, new_row(load_raw_row<S, kAligned>(row, at), s.write[a])
        );
      }
    }
    if (sums && reads) {
      if (overlapped) {
        total = fmaf(*s_overlap, s_delta[thread - kColumns], total);
      }
      store_like(p.v, p.out, out_at, total);
    }
    __syncthreads();  // the rows are stored, the lanes no longer needed
  }
}

}  // namespace sdm::cuda
