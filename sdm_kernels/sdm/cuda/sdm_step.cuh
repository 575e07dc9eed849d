// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the token recurrence of one stream and one slice of columns in one block, in
//! place.
//!
//! Bound by latency: a token touches W + R rows of 128 bytes a block. So the rows that are written
//! and the rows that are read are fetched at the same time and kept in registers; a row that is
//! both read and written is not read back but computed by its reader, decay * old + k * delta,
//! before rounding, as the chunked op has it. One memory round trip, two block-wide sums a token.
//! Slots that come strictly ascending (product keys give them so) need no search for repeats and a
//! binary search for reads of written slots; other orders are searched in full.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

struct SdmStepParams {
  SdmDims dims;
  SdmTokens tokens;
  DeviceIntegers state_indices;
  int64_t pool;
  BankView bank;
  void* out;
  int64_t num_slices;
  bool token_vectors;  // v and out rows are on 16-byte boundaries
};

// Rows of a group that stay in registers between the two passes; further ones are fetched again.
constexpr int kStepHeld = 4;

// What all threads need of the token, in shared memory; W write lanes, then R read lanes.
struct StepLanes {
  int* slot;      // [W + R], -1 unused
  float* weight;  // [W + R], k * decay of the slot, or q
  float* decay;   // [W], of the lane's slot
  float* key;     // [W], sum of k over the slot's lanes, at its lowest lane; k elsewhere
  int* owner;     // [W] lowest lane of the same slot; [R] that of the slot read, -1 if not written
};

__host__ __device__ constexpr int64_t step_smem(int64_t W, int64_t R, int threads, int columns) {
  const int64_t parts = static_cast<int64_t>(threads) / 32 * columns;
  return (5 * W + 3 * R + (parts > W ? parts : W)) * 4 + 16;
}

__device__ __forceinline__ int load_slot(const IndexView& view, int64_t offset, int64_t num_slots) {
  const int64_t slot = view.is_int64 ? __ldg(static_cast<const long long*>(view.data) + offset)
                                     : __ldg(static_cast<const int*>(view.data) + offset);
  return slot >= 0 && slot < num_slots ? static_cast<int>(slot) : -1;
}

// A value as it lies in memory: converting it waits for the load, so that is left for later.
__device__ __forceinline__ unsigned load_raw(const FloatView& view, int64_t offset) {
  return view.dtype == DType::kF32 ? __ldg(static_cast<const unsigned*>(view.data) + offset)
                                   : __ldg(static_cast<const unsigned short*>(view.data) + offset);
}

__device__ __forceinline__ float raw_value(const FloatView& view, unsigned raw) {
  return view.dtype == DType::kF32 ? __uint_as_float(raw)
         : view.dtype == DType::kBf16
             ? __uint_as_float(raw << 16)
             : __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
}

__device__ __forceinline__ float load_value(const FloatView& view, int64_t offset) {
  return raw_value(view, load_raw(view, offset));
}

// Sums x over all groups of the block, in a fixed order; every group gets its columns' sums.
template <int kWarps, int kCount>
__device__ __forceinline__ void block_sum(float (&x)[kCount], float* parts) {
  constexpr int kColumns = kRowLanes * kCount;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] += __shfl_xor_sync(0xffffffffu, x[i], 8);
    x[i] += __shfl_xor_sync(0xffffffffu, x[i], 16);
  }
  __syncthreads();  // the last sum has been read
  // a lane's columns in fours, 32 floats apart: eight lanes touch 128 consecutive bytes
  if (lane < kRowLanes) {
#pragma unroll
    for (int four = 0; four < kCount / 4; ++four) {
      *reinterpret_cast<float4*>(parts + warp * kColumns + four * 32 + lane * 4) =
          make_float4(x[four * 4], x[four * 4 + 1], x[four * 4 + 2], x[four * 4 + 3]);
    }
  }
  __syncthreads();  // all parts are there
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = 0.0f;
  }
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int four = 0; four < kCount / 4; ++four) {
      const float4 part =
          *reinterpret_cast<const float4*>(parts + w * kColumns + four * 32 + lane % kRowLanes * 4);
      x[four * 4] += part.x;
      x[four * 4 + 1] += part.y;
      x[four * 4 + 2] += part.z;
      x[four * 4 + 3] += part.w;
    }
  }
}

template <typename S, bool kAligned, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == 256 ? 4 : 1) sdm_step_kernel(
    const __grid_constant__ SdmStepParams p
) {
  extern __shared__ __align__(16) unsigned char step_memory[];
  const SdmDims& dims = p.dims;
  const int W = static_cast<int>(dims.W), R = static_cast<int>(dims.R);
  constexpr int threads = kThreads;
  constexpr int kWarps = kThreads / 32;
  StepLanes s;
  s.slot = reinterpret_cast<int*>(step_memory);
  s.weight = reinterpret_cast<float*>(s.slot + W + R);
  s.owner = reinterpret_cast<int*>(s.weight + W + R);
  s.decay = reinterpret_cast<float*>(s.owner + W + R);
  s.key = s.decay + W;
  // 16-byte aligned
  float* parts = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(s.key + W) + 15) / 16 * 16);

  // 32-bit divisions: 64-bit ones take longer than the sums
  const unsigned num_slices = static_cast<unsigned>(p.num_slices);
  const unsigned stream = blockIdx.x / num_slices, heads = static_cast<unsigned>(dims.H);
  const int64_t slice = blockIdx.x % num_slices;
  const int64_t n = stream / heads, head = stream % heads;
  int64_t row_of_pool = n;
  if (p.state_indices.data != nullptr) {
    row_of_pool = p.state_indices.is_int64 ? static_cast<const int64_t*>(p.state_indices.data)[n]
                                           : static_cast<const int32_t*>(p.state_indices.data)[n];
  }
  const LaneColumns at = lane_columns<S>(slice, dims.D);
  const int group = threadIdx.x / kRowLanes;
  const int groups = threads / kRowLanes;
  if (row_of_pool < 0 || row_of_pool >= p.pool) {
    const float zero[kVec<S>] = {};
    for (int64_t t = group; t < dims.T; t += groups) {
      const int64_t offset = ((n * dims.T + t) * dims.H + head) * dims.D + at.first;
      store_any(p.out, p.tokens.v.dtype, offset, at.count, zero);
    }
    return;
  }
  S* bank = static_cast<S*>(p.bank.data) + row_of_pool * p.bank.stride[0] + head * p.bank.stride[1];
  const int64_t stride = p.bank.stride[2];
  const SdmTokens& in = p.tokens;
  const auto offset_of = [&](const auto& view, int64_t t) {
    return n * view.stride[0] + t * view.stride[1] + head * view.stride[2];
  };

  for (int64_t t = 0; t < dims.T; ++t) {
    __syncthreads();  // the last token's rows are stored and its lanes no longer needed
    // each group reads the slots of its own rows, so that the rows need not wait for a barrier
    Piece<S> held[kStepHeld];
    int held_slot[kStepHeld];
#pragma unroll
    for (int u = 0; u < kStepHeld; ++u) {
      const int a = group + u * groups;
      const bool write = a < W;
      const IndexView& index = write ? in.write_idx : in.read_idx;
      const int64_t lane = write ? a : a - W;
      held_slot[u] =
          a < W + R ? load_slot(index, offset_of(index, t) + lane * index.stride[3], dims.S) : -1;
    }
    // loads whose values are needed late, started early and looked at late
    const int own = static_cast<int>(threadIdx.x);
    const FloatView& own_view = own < W ? in.write_val : in.read_val;
    const int64_t own_lane = own < W ? own : own < W + R ? own - W : 0;
    const unsigned raw_weight =
        load_raw(own_view, offset_of(own_view, t) + own_lane * own_view.stride[3]);
    const unsigned raw_gate = load_raw(
        in.g, offset_of(in.g, t) + (dims.gate_per_write && own < W ? own * in.g.stride[3] : 0)
    );
    const unsigned raw_beta = load_raw(in.beta, offset_of(in.beta, t));
    uint4 raw_v[2] = {};
    const int64_t v_row = offset_of(in.v, t) + at.first;
    const bool v_vectors = p.token_vectors && at.count == kVec<S>;
    if (v_vectors && in.v.dtype == DType::kF32) {
      const uint4* from =
          reinterpret_cast<const uint4*>(static_cast<const float*>(in.v.data) + v_row);
#pragma unroll
      for (int part = 0; part < kVec<S> / 4; ++part) {
        raw_v[part] = __ldg(from + part);
      }
    } else if (v_vectors && kVec<S> == 8) {
      raw_v[0] =
          __ldg(reinterpret_cast<const uint4*>(static_cast<const __half*>(in.v.data) + v_row));
    }
#pragma unroll
    for (int u = 0; u < kStepHeld; ++u) {
      if (held_slot[u] >= 0) {
        held[u] = load_piece<S, kAligned>(bank + held_slot[u] * stride, at);
      }
    }
#pragma unroll
    for (int u = 0; u < kStepHeld; ++u) {
      const int a = group + u * groups;
      if (a < W + R && threadIdx.x % kRowLanes == 0) {
        s.slot[a] = held_slot[u];
      }
    }
    for (int a = kStepHeld * groups + own; a < W + R; a += threads) {
      const bool write = a < W;
      const IndexView& index = write ? in.write_idx : in.read_idx;
      const int64_t lane = write ? a : a - W;
      s.slot[a] = load_slot(index, offset_of(index, t) + lane * index.stride[3], dims.S);
    }
    __syncthreads();  // all slots are there

    // while the rows come: weights, owners, decays
    bool ascending = true;
    for (int a = threadIdx.x; a < W; a += threads) {
      ascending = ascending && s.slot[a] >= 0 && (a == 0 || s.slot[a - 1] < s.slot[a]);
    }
    ascending = __syncthreads_and(ascending);
    for (int a = threadIdx.x; a < W; a += threads) {
      const int64_t at_k = offset_of(in.write_val, t) + a * in.write_val.stride[3];
      const float k =
          a < threads ? raw_value(in.write_val, raw_weight) : load_value(in.write_val, at_k);
      int owner = a;
      if (!ascending && s.slot[a] >= 0) {
        for (owner = 0; s.slot[owner] != s.slot[a]; ++owner) {
        }
      }
      const int64_t at_g = offset_of(in.g, t) + (dims.gate_per_write ? owner * in.g.stride[3] : 0);
      s.owner[a] = owner;
      s.decay[a] =
          expf(a < threads && owner == a ? raw_value(in.g, raw_gate) : load_value(in.g, at_g));
      s.key[a] = k;
      s.weight[a] = k * s.decay[a];
    }
    __syncthreads();  // owners and keys are there
    if (!ascending) {
      float total = 0.0f;
      for (int a = threadIdx.x; a < W; a += threads) {
        if (s.owner[a] == a && s.slot[a] >= 0) {
          total = 0.0f;
          for (int b = a; b < W; ++b) {
            total += s.owner[b] == a && s.slot[b] == s.slot[a] ? s.key[b] : 0.0f;
          }
          parts[a] = total;  // parts is free here; at least W floats
        }
      }
      __syncthreads();  // sums were made of unchanged keys
      for (int a = threadIdx.x; a < W; a += threads) {
        if (s.owner[a] == a && s.slot[a] >= 0) {
          s.key[a] = parts[a];
        }
      }
    }
    for (int lane = threadIdx.x; lane < W + R; lane += threads) {
      const int b = lane - W;
      if (b < 0) {
        continue;
      }
      const int64_t at_q = offset_of(in.read_val, t) + b * in.read_val.stride[3];
      s.weight[lane] =
          lane < threads ? raw_value(in.read_val, raw_weight) : load_value(in.read_val, at_q);
      const int slot = s.slot[lane];
      int found = -1;
      if (ascending) {
        int low = 0, high = W;
        while (low < high) {
          const int middle = (low + high) / 2;
          if (s.slot[middle] < slot) {
            low = middle + 1;
          } else {
            high = middle;
          }
        }
        found = low < W && s.slot[low] == slot ? low : -1;
      } else if (slot >= 0) {
        for (int a = 0; a < W && found < 0; ++a) {
          found = s.slot[a] == slot ? a : -1;
        }
      }
      s.owner[lane] = slot < 0 ? -1 : found;
    }
    __syncthreads();  // lanes are complete

    float sum[kVec<S>] = {};
    const auto row_of = [&](int u, int a, float (&x)[kVec<S>]) {
      // held rows are indexed by constants only, so that they stay in registers
      Piece<S> piece;
      if (u < kStepHeld) {
#pragma unroll
        for (int v = 0; v < kStepHeld; ++v) {
          if (v == u) {
            piece = held[v];
          }
        }
      } else if (s.slot[a] >= 0) {
        piece = load_piece<S, kAligned>(bank + s.slot[a] * stride, at);
      }
      unpack(piece, x);
    };
    for (int u = 0, a = group; a < W; ++u, a += groups) {
      float x[kVec<S>];
      row_of(u, a, x);
      const float weight = s.slot[a] >= 0 ? s.weight[a] : 0.0f;
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        sum[i] = fmaf(weight, x[i], sum[i]);
      }
    }
    block_sum<kWarps>(sum, parts);
    const float beta = raw_value(in.beta, raw_beta);
    float delta[kVec<S>];
    if (v_vectors && in.v.dtype == DType::kF32) {
      const unsigned* raw = reinterpret_cast<const unsigned*>(raw_v);
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        delta[i] = __uint_as_float(raw[i]);
      }
    } else if (v_vectors && kVec<S> == 8) {
      const unsigned* raw = reinterpret_cast<const unsigned*>(raw_v);
#pragma unroll
      for (int i = 0; i < kVec<S>; ++i) {
        delta[i] = raw_value(in.v, raw[i / 2] >> (i % 2 * 16) & 0xffffu);
      }
    } else {
      load_any(in.v.data, in.v.dtype, v_row, at.count, delta);
    }
#pragma unroll
    for (int i = 0; i < kVec<S>; ++i) {
      delta[i] = beta * (delta[i] - sum[i]);
      sum[i] = 0.0f;
    }
    // a row after this token, before rounding; false if the lane has none
    const auto new_row = [&](int u, int a, float (&x)[kVec<S>]) {
      if (s.slot[a] < 0 || (a < W && s.owner[a] != a)) {
        return false;
      }
      row_of(u, a, x);
      const int owner = s.owner[a];
      if (owner >= 0) {
        const float decay = s.decay[owner], key = s.key[owner];
#pragma unroll
        for (int i = 0; i < kVec<S>; ++i) {
          x[i] = fmaf(key, delta[i], decay * x[i]);
        }
      }
      return true;
    };
    for (int u = 0, a = group; a < W + R; ++u, a += groups) {
      float x[kVec<S>];
      if (a >= W && new_row(u, a, x)) {
        const float q = s.weight[a];
#pragma unroll
        for (int i = 0; i < kVec<S>; ++i) {
          sum[i] = fmaf(q, x[i], sum[i]);
        }
      }
    }
    block_sum<kWarps>(sum, parts);  // and with its barriers every reader has the old rows it wants
    for (int u = 0, a = group; a < W; ++u, a += groups) {
      float x[kVec<S>];
      if (new_row(u, a, x)) {
        store_piece<S, kAligned>(bank + s.slot[a] * stride, at, pack<S>(x));
      }
    }
    if (group == 0) {
      const int64_t row = ((n * dims.T + t) * dims.H + head) * dims.D;
      store_token_columns<S>(p.out, in.v.dtype, row, at, p.token_vectors, sum);
    }
  }
}

}  // namespace sdm::cuda
