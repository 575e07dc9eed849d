// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of weights, strengths and gates of every chunk of a window, after its column
//! walk; the same quantities as sdm_pairs-inl.h on the CPU (docs/semantics.md).
//!
//! Four kernels, every one of them over all chunks at once, nothing written twice:
//!
//!   sum     one thread a place of a chunk: adds the slices of the three dots, in slice order;
//!           brings the weights into sorted order; tells every entry its group
//!   pull    one thread an entry, whatever the size of its group: walks the group's earlier writes
//!           and its later writes and reads. With x = -VE or GE, for a later entry r of token i and
//!           an earlier write p of token j, and decay = exp(L_r - L_p):
//!               row_r  = sum over p of x[i,j] decay beta_j k_p
//!               col_p  = sum over r of x[i,j] decay w_r               (w = k or q)
//!               dk = row + beta col - <dv, M> before + beta <e, G> after
//!               dq = row + <dy, M> before
//!               dbeta gets k (col + <e, G> after)
//!   gates   one thread a small group, one warp a larger one:
//!               dg(owner) = sum of d_before from it on + sum of d_after before it + decay <G, M>
//!               d_before = weight * (row - beta col + change through `before`)
//!               d_after  = weight * change through `after`
//!           where pairs without a gate in between are left out of row and col. Such pairs are
//!           a read and the last written token at or before it.
//!   finish  one warp a token: results to lane order, sums over the lanes for beta and the token's
//!           gate, exact zeros for lanes without an entry
//!
//! A pair adds x decay w_r (beta_j k_p) at one end and takes it off at the other; the float product
//! x decay is the same on both sides and everything after it is double, so that gates which do not
//! lie between the two see nothing but double rounding.
//!
//! Bytes an entry with s slices: 4 s (dots; 8 s for a write, 4 s more a group) and about 80 for
//! records, sums and results. Pairs cost about 40 instructions at each end.
#pragma once

#include <climits>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"
#include "sdm_kernels/sdm/cuda/sdm_token_dots.cuh"

namespace sdm::cuda::pairs {

constexpr int kThreads = 256;
constexpr int kSmallGroup = 12;  // entries that one thread walks; a warp's step pays above

struct SdmBwdPairsParams {
  SdmDims dims;
  SdmTokens tokens;
  const SdmSequence* sequences;
  SdmWindow window;
  SdmRecords records;
  SdmDots dots;
  // contiguous, shapes and dtypes of the inputs
  void* d_write_val;
  void* d_read_val;
  void* d_beta;
  void* d_g;
  // workspace
  const float* ve;       // [q][Cp][Cp], lower
  const float* ge;       // [q][Cp][Cp], lower
  int32_t* entry_group;  // [q][n] by sorted entry; -1 past the last one
  float* value;          // [q][n] by sorted entry: k or q
  float* row_sum;        // [q][n] by sorted entry; pull replaces it by the gradient of the weight
  float* error_sum;      // [q][C * W] by lane
  float* decay_sum;      // [q][C * W] by group with writes
  float2* write_part;    // [q][n] by sorted entry, writes: {part of d_beta, gradient of the gate}
  double2* changes;      // [q][n] by sorted entry: {d_before, d_after}, both times the weight
};

__device__ __forceinline__ void store_element(void* data, DType dtype, int64_t at, float x) {
  switch (dtype) {
    case DType::kBf16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(x);
      return;
    case DType::kF16:
      static_cast<__half*>(data)[at] = __float2half_rn(x);
      return;
    default:
      static_cast<float*>(data)[at] = x;
  }
}

__device__ __forceinline__ int64_t
view_offset(const FloatView& view, const ChunkPlace& place, int64_t token) {
  return place.batch * view.stride[0] + (place.token + token) * view.stride[1] +
         place.head * view.stride[2];
}

// The chunk of a block and its first item, for a grid of ceil(items / per_block) blocks a chunk.
struct BlockChunk {
  ChunkPlace place;
  int64_t q;
  int32_t first;
  bool found;
};

// By one thread for all: the divisions would cost every thread hundreds of instructions.
__device__ __forceinline__ bool find_block_chunk(
    const SdmBwdPairsParams& p, int64_t items, int32_t per_block, BlockChunk* s_chunk
) {
  if (threadIdx.x == 0) {
    const uint32_t blocks = static_cast<uint32_t>(ceil_div(items, per_block));
    const uint32_t q = blockIdx.x / blocks;
    s_chunk->q = q;
    s_chunk->first = static_cast<int32_t>(blockIdx.x - q * blocks) * per_block;
    s_chunk->found = find_chunk(p.dims, p.sequences, p.window, q, &s_chunk->place);
  }
  __syncthreads();  // everybody waits for the first thread's chunk
  return s_chunk->found;
}

__device__ __forceinline__ float sum_slices(
    const float* dots, int64_t at, int64_t plane, int64_t slices
) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t slice = 0; slice < slices; ++slice) {
    sum += static_cast<double>(dots[slice * plane + at]);
  }
  return static_cast<float>(sum);
}

__global__ void __launch_bounds__(kThreads) sdm_pairs_sum_kernel(const SdmBwdPairsParams p) {
  const SdmDims& dims = p.dims;
  const int64_t n = p.records.n, num_q = p.records.num_q, slices = p.dots.num_slices;
  __shared__ BlockChunk s_chunk;
  if (!find_block_chunk(p, n, kThreads, &s_chunk)) {
    return;
  }
  const ChunkPlace& place = s_chunk.place;
  const int64_t q = s_chunk.q;
  const int32_t i = s_chunk.first + static_cast<int32_t>(threadIdx.x);
  const int32_t writes = static_cast<int32_t>(dims.C * dims.W);
  const int2 counts = p.records.group_count[q];
  if (i < n) {
    // as a place of a sorted entry: past the last one this is unused memory, and stays unused
    p.row_sum[q * n + i] = sum_slices(p.dots.row, q * n + i, num_q * n, slices);
    // as a lane
    const bool write = i < writes;
    const int32_t width = static_cast<int32_t>(write ? dims.W : dims.R);
    const int32_t lane = write ? i : i - writes;
    const int32_t token = lane / width;
    const int32_t position = token < place.num_tokens ? p.records.position[q * n + i] : -1;
    if (position >= 0) {
      const FloatView& view = write ? p.tokens.write_val : p.tokens.read_val;
      const int64_t at = view_offset(view, place, token) + (lane - token * width) * view.stride[3];
      p.value[q * n + position] = load_element(view.data, view.dtype, at);
      if (write) {
        p.error_sum[q * writes + i] =
            sum_slices(p.dots.error_grad, q * writes + i, num_q * writes, slices);
      }
    }
  }
  // as a group
  int4 group = make_int4(0, 0, 0, 0);
  if (i < counts.y) {
    group = p.records.group[q * n + i];
    if (i < counts.x) {
      p.decay_sum[q * writes + i] = sum_slices(p.dots.decay, q * n + i, num_q * n, slices);
    }
  }
  const int size = group.z + group.w;
  int32_t* entry_group = p.entry_group + q * n;
  if (size <= kSmallGroup) {
    for (int k = 0; k < size; ++k) {
      entry_group[group.y + k] = i;
    }
  }
  const int lane = threadIdx.x % 32;
  unsigned large = __ballot_sync(0xffffffffu, size > kSmallGroup);
  while (large != 0) {
    const int owner = __ffs(static_cast<int>(large)) - 1;
    large &= large - 1;
    const int begin = __shfl_sync(0xffffffffu, group.y, owner);
    const int count = __shfl_sync(0xffffffffu, size, owner);
    for (int k = lane; k < count; k += 32) {
      entry_group[begin + k] = i - lane + owner;
    }
  }
}

// x times the decay between a later and an earlier entry; a vanished decay hides what x is.
__device__ __forceinline__ double through_pair(float x, double later, double earlier) {
  const float decay = expf(static_cast<float>(later - earlier));
  return decay == 0.0f ? 0.0 : static_cast<double>(x * decay);
}

// What a thread of the pull kernel needs of its chunk.
struct PullContext {
  const int4* entry;
  const double* log_decay;
  const float* value;
  const float* beta;
  const float* ve;
  const float* ge;
  int32_t C, Cp;

  __device__ __forceinline__ int row(int at) const { return entry[at].x & ~kOwnerBit; }
};

// Sum over the writes in [begin, end) that come before token `before`, of x decay beta k; `latest`
// gets the part of the last such token, which is not in the sum.
__device__ __forceinline__ double pull_earlier(
    const PullContext& c,
    const float* x_row,
    double log_decay,
    int begin,
    int end,
    int before,
    double* latest
) {
  double sum = 0.0, current = 0.0;
  int token = -1;
  for (int at = begin; at < end; ++at) {
    const int row = c.row(at);
    if (row >= before) {
      break;
    }
    if (row != token) {
      sum += current;
      current = 0.0;
      token = row;
    }
    const double through = through_pair(x_row[row], log_decay, c.log_decay[at]);
    current += through * (static_cast<double>(c.beta[row]) * static_cast<double>(c.value[at]));
  }
  *latest = current;
  return sum;
}

__global__ void __launch_bounds__(kThreads) sdm_pairs_pull_kernel(const SdmBwdPairsParams p) {
  const SdmDims& dims = p.dims;
  const int64_t n = p.records.n, writes = dims.C * dims.W;
  __shared__ BlockChunk s_chunk;
  if (!find_block_chunk(p, n, kThreads, &s_chunk)) {
    return;
  }
  const int64_t q = s_chunk.q;
  const int r = s_chunk.first + static_cast<int>(threadIdx.x);
  if (r >= n) {
    return;
  }
  const int group_at = p.entry_group[q * n + r];
  if (group_at < 0) {
    return;
  }
  const int64_t square = q * p.records.Cp * p.records.Cp;
  const PullContext c = {
      p.records.entry + q * n,
      p.records.log_decay + q * n,
      p.value + q * n,
      p.records.beta + q * dims.C,
      p.ve + square,
      p.ge + square,
      static_cast<int32_t>(dims.C),
      p.records.Cp,
  };
  const int4 group = p.records.group[q * n + group_at];
  const int begin = group.y, mid = begin + group.z, end = mid + group.w;
  const int4 own = c.entry[r];
  const int row = own.x & ~kOwnerBit;
  const double log_decay = c.log_decay[r];
  const double value = c.value[r];
  // a group without writes has no gates, whatever its log says
  const double before = group.z > 0 ? expf(static_cast<float>(log_decay)) : 1.0f;
  const double dot = p.row_sum[q * n + r];
  float* result = p.row_sum + q * n + r;

  if (r >= mid) {
    const int i = row - c.C;
    double latest;
    const double gated = pull_earlier(c, c.ge + i * c.Cp, log_decay, begin, mid, i + 1, &latest);
    const double change = dot * before;
    *result = static_cast<float>(gated + latest + change);
    if (group.z > 0) {
      p.changes[q * n + r] = make_double2(value * (gated + change), 0.0);
    }
    return;
  }

  const int i = row;
  double latest;
  double earlier = pull_earlier(c, c.ve + i * c.Cp, log_decay, begin, r, i, &latest);
  earlier = -(earlier + latest);  // an owner of token i lies between
  double gated = 0.0;
  int next = INT_MAX;  // the next token that writes the slot
  for (int at = mid - 1; at > r; --at) {
    const int later = c.row(at);
    if (later <= i) {
      break;
    }
    next = later;
    const double through = through_pair(c.ve[later * c.Cp + i], c.log_decay[at], log_decay);
    gated -= through * static_cast<double>(c.value[at]);
  }
  double ungated = 0.0;
  for (int at = end - 1; at >= mid; --at) {
    const int later = c.row(at) - c.C;
    if (later < i) {
      break;
    }
    const double through = through_pair(c.ge[later * c.Cp + i], c.log_decay[at], log_decay);
    const double term = through * static_cast<double>(c.value[at]);
    if (later >= next) {
      gated += term;
    } else {
      ungated += term;
    }
  }
  const double beta = c.beta[i];
  const double after = expf(static_cast<float>(c.log_decay[mid - 1] - log_decay));
  const double error_grad = static_cast<double>(p.error_sum[q * writes + own.w]) * after;
  const double through_before = -dot * before;
  const double through_after = beta * error_grad;
  *result = static_cast<float>(earlier + beta * (gated + ungated) + through_before + through_after);
  const double d_before = value * (earlier - beta * gated + through_before);
  const float d_beta = static_cast<float>(value * (gated + ungated + error_grad));
  if (group.z + group.w == 1) {  // nothing for the gates kernel to add up
    const double d_decay = static_cast<double>(p.records.group_decay[q * n + group_at]) *
                           static_cast<double>(p.decay_sum[q * writes + group_at]);
    p.write_part[q * n + r] = make_float2(d_beta, static_cast<float>(d_before + d_decay));
  } else {
    p.write_part[q * n + r] = make_float2(d_beta, 0.0f);
    p.changes[q * n + r] = make_double2(d_before, value * through_after);
  }
}

// Sum over the lanes of a warp in a fixed order, in every lane.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

__global__ void __launch_bounds__(kThreads) sdm_pairs_finish_kernel(const SdmBwdPairsParams p) {
  const SdmDims& dims = p.dims;
  const int64_t n = p.records.n, W = dims.W, R = dims.R;
  __shared__ BlockChunk s_chunk;
  if (!find_block_chunk(p, dims.C, kThreads / 32, &s_chunk)) {
    return;
  }
  const ChunkPlace& place = s_chunk.place;
  const int64_t q = s_chunk.q;
  const int64_t token = s_chunk.first + static_cast<int32_t>(threadIdx.x / 32);
  if (token >= place.num_tokens) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t out = (place.batch * dims.T + place.token + token) * dims.H + place.head;
  const int32_t* position = p.records.position + q * n;
  const float* result = p.row_sum + q * n;
  double d_beta = 0.0, d_gate = 0.0;
  for (int64_t a = lane; a < W; a += 32) {
    const int32_t at = position[token * W + a];
    const float d_k = at < 0 ? 0.0f : result[at];
    const float2 part = at < 0 ? make_float2(0.0f, 0.0f) : p.write_part[q * n + at];
    store_element(p.d_write_val, p.tokens.write_val.dtype, out * W + a, d_k);
    d_beta += static_cast<double>(part.x);
    if (dims.gate_per_write) {
      store_element(p.d_g, p.tokens.g.dtype, out * W + a, part.y);
    } else {
      d_gate += static_cast<double>(part.y);
    }
  }
  for (int64_t b = lane; b < R; b += 32) {
    const int32_t at = position[dims.C * W + token * R + b];
    store_element(p.d_read_val, p.tokens.read_val.dtype, out * R + b, at < 0 ? 0.0f : result[at]);
  }
  d_beta = warp_sum(d_beta);
  d_gate = warp_sum(d_gate);
  if (lane == 0) {
    store_element(p.d_beta, p.tokens.beta.dtype, out, static_cast<float>(d_beta));
    if (!dims.gate_per_write) {
      store_element(p.d_g, p.tokens.g.dtype, out, static_cast<float>(d_gate));
    }
  }
}

}  // namespace sdm::cuda::pairs
