// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of weights, strengths and gates of every chunk of a window, after its column
//! walk; the same quantities as sdm_pairs-inl.h on the CPU (docs/semantics.md).
//!
//! Four kernels, every one of them over all chunks at once, nothing written twice:
//!
//!   sum     one thread a write lane: adds the slices of <e, G>, in slice order
//!   pull    one thread an entry, whatever the size of its group: walks the group's earlier writes
//!           and its later writes and reads. With x = -VE or GE, for a later entry r of token i and
//!           an earlier write p of token j, and decay = exp(L_r - L_p):
//!               row_r  = sum over p of x[i,j] decay beta_j k_p
//!               col_p  = sum over r of x[i,j] decay w_r               (w = k or q)
//!               dk = row + beta col - <dv, M> before + beta <e, G> after
//!               dq = row + <dy, M> before
//!               dbeta gets k (col + <e, G> after)
//!           then, for small groups that lie in the block's entries, the gates:
//!               dg(owner) = sum of d_before from it on + sum of d_after before it + decay <G, M>
//!               d_before = weight * (row - beta col + change through `before`)
//!               d_after  = weight * change through `after`
//!           where pairs without a gate in between are left out of row and col. Such pairs are
//!           a read and the last written token at or before it.
//!   gates   the gates of the other groups: one thread a small group, one warp a larger one
//!   finish  one warp a token: results to lane order, sums over the lanes for beta and the token's
//!           gate, exact zeros for lanes without an entry
//!
//! A pair adds x decay w_r (beta_j k_p) at one end and takes it off at the other; the float product
//! x decay is the same on both sides and everything after it is double, so that gates which do not
//! lie between the two see nothing but double rounding.
//!
//! Bytes an entry with s slices: 4 s (dots; 8 s for a write, 4 s more a group) and about 70 for
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
constexpr int kMostTokens = 256;
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
  const float* ve;     // [q][Cp][Cp], lower
  const float* ge;     // [q][Cp][Cp], lower
  float* error_sum;    // [q][C * W] by lane
  float* result;       // [q][n] by sorted entry: gradient of the weight
  float2* write_part;  // [q][n] by sorted entry, writes: {part of d_beta, gradient of the gate}
  // for the gates kernel, of its groups alone
  float* decay_sum;  // [q][C * W] by group with writes
  double2* changes;  // [q][n] by sorted entry: {d_before, d_after}, both times the weight
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

// Four slices are added in float, their sums in double.
__device__ __forceinline__ float sum_slices(
    const float* dots, int64_t at, int64_t plane, int64_t slices
) {
  const float* own = dots + at;
  const int count = static_cast<int>(slices);
  double sum = 0.0;
  int slice = 0;
#pragma unroll 2
  for (; slice + 4 <= count; slice += 4) {
    const float *second = own + plane, *third = second + plane, *fourth = third + plane;
    sum += static_cast<double>((*own + *second) + (*third + *fourth));
    own = fourth + plane;
  }
  for (; slice < count; ++slice) {
    sum += static_cast<double>(*own);
    own += plane;
  }
  return static_cast<float>(sum);
}

__global__ void __launch_bounds__(kThreads) sdm_pairs_sum_kernel(const SdmBwdPairsParams p) {
  const SdmDims& dims = p.dims;
  const int64_t writes = dims.C * dims.W;
  __shared__ BlockChunk s_chunk;
  if (!find_block_chunk(p, writes, kThreads, &s_chunk)) {
    return;
  }
  const int64_t i = s_chunk.first + static_cast<int32_t>(threadIdx.x);
  if (i < s_chunk.place.num_tokens * dims.W) {
    const int64_t at = s_chunk.q * writes + i;
    p.error_sum[at] =
        sum_slices(p.dots.error_grad, at, p.records.num_q * writes, p.dots.num_slices);
  }
}

// Whether the pull kernel leaves the gates of a group of two or more to the gates kernel.
__device__ __forceinline__ bool gates_left(int begin, int end) {
  return end - begin > kSmallGroup || begin / kThreads != (end - 1) / kThreads;
}

// x times the decay between a later and an earlier entry; a vanished decay hides what x is.
__device__ __forceinline__ double through_pair(float x, double later, double earlier) {
  const float decay = expf(static_cast<float>(later - earlier));
  return decay == 0.0f ? 0.0 : static_cast<double>(x * decay);
}

struct PullStorage {
  BlockChunk chunk;
  float beta[kMostTokens];
  SdmPair pair[kThreads];
  double2 changes[kThreads];
  int32_t row[kThreads];  // as in SdmRecords::entry
  float gate[kThreads];
};

__device__ __forceinline__ int token_of(const SdmPair& pair) {
  return static_cast<int>(pair.info & ((1u << kPairTokenBits) - 1));
}

// What a thread of the pull kernel needs of its chunk.
struct PullContext {
  const PullStorage& s;
  const SdmPair* pairs;
  const float* ve;
  const float* ge;
  int32_t Cp;
  int first;  // the block's first entry

  __device__ __forceinline__ SdmPair pair(int at) const {
    const unsigned own = static_cast<unsigned>(at - first);
    if (own < static_cast<unsigned>(kThreads)) {
      return s.pair[own];
    }
    const uint4 raw = *reinterpret_cast<const uint4*>(pairs + at);
    SdmPair pair;
    *reinterpret_cast<uint4*>(&pair) = raw;
    return pair;
  }
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
    const SdmPair earlier = c.pair(at);
    const int row = token_of(earlier);
    if (row >= before) {
      break;
    }
    if (row != token) {
      sum += current;
      current = 0.0;
      token = row;
    }
    const double through = through_pair(x_row[row], log_decay, earlier.log_decay);
    current += through * (static_cast<double>(c.s.beta[row]) * static_cast<double>(earlier.value));
  }
  *latest = current;
  return sum;
}

// An entry's gradients, and what they do to gates.
struct PullResult {
  float weight;
  float beta;
  double before, after;  // changes, times the weight
};

__device__ __forceinline__ PullResult
pull_read(const PullContext& c, const SdmPair& own, double dot, double before, int begin, int mid) {
  const int i = token_of(own);
  double latest;
  const double gated = pull_earlier(c, c.ge + i * c.Cp, own.log_decay, begin, mid, i + 1, &latest);
  const double change = dot * before;
  return {
      static_cast<float>(gated + latest + change),
      0.0f,
      static_cast<double>(own.value) * (gated + change),
      0.0
  };
}

__device__ __forceinline__ PullResult pull_write(
    const PullContext& c,
    const SdmPair& own,
    double dot,
    double before,
    double error_sum,
    int r,
    int begin,
    int mid,
    int end
) {
  const int i = token_of(own);
  double latest;
  double earlier = pull_earlier(c, c.ve + i * c.Cp, own.log_decay, begin, r, i, &latest);
  earlier = -(earlier + latest);  // an owner of token i lies between
  double gated = 0.0;
  int next = INT_MAX;  // the next token that writes the slot
  double total = own.log_decay;
  for (int at = mid - 1; at > r; --at) {
    const SdmPair later = c.pair(at);
    if (at == mid - 1) {
      total = later.log_decay;
    }
    const int token = token_of(later);
    if (token <= i) {
      break;
    }
    next = token;
    const double through = through_pair(c.ve[token * c.Cp + i], later.log_decay, own.log_decay);
    gated -= through * static_cast<double>(later.value);
  }
  double ungated = 0.0;
  for (int at = end - 1; at >= mid; --at) {
    const SdmPair later = c.pair(at);
    const int token = token_of(later);
    if (token < i) {
      break;
    }
    const double through = through_pair(c.ge[token * c.Cp + i], later.log_decay, own.log_decay);
    const double term = through * static_cast<double>(later.value);
    if (token >= next) {
      gated += term;
    } else {
      ungated += term;
    }
  }
  const double beta = c.s.beta[i], value = own.value;
  const double after = expf(static_cast<float>(total - own.log_decay));
  const double error_grad = error_sum * after;
  const double through_before = -dot * before;
  const double through_after = beta * error_grad;
  return {
      static_cast<float>(earlier + beta * (gated + ungated) + through_before + through_after),
      static_cast<float>(value * (gated + ungated + error_grad)),
      value * (earlier - beta * gated + through_before),
      value * through_after
  };
}

// One chunk as those see it who add up gates, and one of its groups. Places count from `first`.
struct GateGroup {
  const int32_t* row;
  double2* changes;
  int row_stride;  // in integers
  int32_t C;
  int begin, mid, end;
  double d_decay;
};

// Serial, as the CPU does it. The sum over earlier writes goes down as the walk goes back, from
// prefix sums put in place first. store(w, gradient) for owners.
template <typename Store>
__device__ __forceinline__ void walk_gates(const GateGroup& s, const Store& store) {
  double earlier = 0.0;
  for (int w = s.begin; w < s.mid; ++w) {
    const double own = s.changes[w].y;
    s.changes[w].y = earlier;
    earlier += own;
  }
  double later = 0.0;
  int read = s.end - 1;
  for (int w = s.mid - 1; w >= s.begin; --w) {
    const int row = s.row[w * s.row_stride];
    for (; read >= s.mid && s.row[read * s.row_stride] - s.C >= (row & ~kOwnerBit); --read) {
      later += s.changes[read].x;
    }
    const double2 change = s.changes[w];
    later += change.x;
    if ((row & kOwnerBit) != 0) {
      store(w, static_cast<float>(later + change.y + s.d_decay));
    }
  }
}

// Grid: a block for every kThreads places of a chunk.
__global__ void __launch_bounds__(kThreads, 4) sdm_pairs_pull_kernel(
    const __grid_constant__ SdmBwdPairsParams p
) {
  __shared__ PullStorage s;
  const SdmDims& dims = p.dims;
  const SdmRecords& records = p.records;
  const int64_t n = records.n, writes = dims.C * dims.W;
  if (!find_block_chunk(p, n, kThreads, &s.chunk)) {
    return;
  }
  const int64_t q = s.chunk.q;
  const int count = records.entry_count[q];
  const int first = s.chunk.first, thread = static_cast<int>(threadIdx.x), r = first + thread;
  if (first >= count) {
    return;
  }
  const bool live = r < count;
  const int64_t square = q * records.Cp * records.Cp, at = q * n + r;
  const PullContext c = {s, records.pair + q * n, p.ve + square, p.ge + square, records.Cp, first};
  SdmPair own{0.0f, 0, 0.0};
  int4 entry = make_int4(0, 0, 0, 0), group = entry;
  int group_at = 0;
  float dot = 0.0f;
  if (live) {
    const uint4 raw = *reinterpret_cast<const uint4*>(c.pairs + r);
    group_at = records.entry_group[at];
    entry = records.entry[at];
    group = records.group[q * n + group_at];
    *reinterpret_cast<uint4*>(&own) = raw;
    dot = sum_slices(p.dots.row, at, records.num_q * n, p.dots.row_slices);
  }
  s.pair[thread] = own;
  s.row[thread] = entry.x;
  for (int i = thread; i < dims.C; i += kThreads) {
    s.beta[i] = records.beta[q * dims.C + i];
  }
  __syncthreads();  // pairs and strengths are there
  const int begin = group.y, mid = begin + group.z, end = mid + group.w;
  const bool write = r < mid, head = live && write && r == begin;
  const bool left = gates_left(begin, end);
  double d_decay = 0.0;
  if (head) {
    const float sum =
        sum_slices(p.dots.decay, q * n + group_at, records.num_q * n, p.dots.row_slices);
    d_decay = static_cast<double>(records.group_decay[q * n + group_at]) * static_cast<double>(sum);
    if (left) {
      p.decay_sum[q * writes + group_at] = sum;
    }
  }
  PullResult result = {0.0f, 0.0f, 0.0, 0.0};
  if (live) {
    // a group without writes has no gates, whatever its log says
    const double before = mid > begin ? expf(static_cast<float>(own.log_decay)) : 1.0f;
    result = write ? pull_write(
                         c,
                         own,
                         dot,
                         before,
                         static_cast<double>(p.error_sum[q * writes + (entry.w & kLaneMask)]),
                         r,
                         begin,
                         mid,
                         end
                     )
                   : pull_read(c, own, dot, before, begin, mid);
    p.result[at] = result.weight;
    if (left && mid > begin) {
      p.changes[at] = make_double2(result.before, result.after);
    }
  }
  s.changes[thread] = make_double2(result.before, result.after);
  s.gate[thread] = 0.0f;
  __syncthreads();  // changes are there, and gates are zero
  if (head && !left) {
    walk_gates(
        {s.row,
         s.changes,
         1,
         static_cast<int32_t>(dims.C),
         begin - first,
         mid - first,
         end - first,
         d_decay},
        [&](int w, float gate) { s.gate[w] = gate; }
    );
  }
  __syncthreads();  // gates are there
  if (live) {       // reads too, so that whole sectors are written
    p.write_part[at] = make_float2(result.beta, s.gate[thread]);
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
  const float* result = p.result + q * n;
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
