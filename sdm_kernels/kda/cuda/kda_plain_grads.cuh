// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of a tile from its state and the gradient of the state after it: one block a
//! tile and value head. Those of q and k are left for kda_plain_finish.cuh, which sums them over
//! the value heads of a key head.
//!
//! The gradient of a log-decay g[t] is the sum of what crosses it: pairs of tokens j < t <= i,
//! reads of the old state from rows i >= t, writes of rows j < t that reach the new state, and the
//! old state's own way to the new one. So nothing cancels that need not.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_tile.cuh"

namespace sdm::kda::plain {

struct TileGradParams {
  PlainCall call;
  KdaView d_out;
  void* d_v;
  void* d_g;
  void* d_beta;
};

struct TileGradShared {
  // [16, V + 4] d_out, beta y and U; later [16, K] q, k and decays
  float *d_out, *by, *u;
  float *q, *k, *decay;
  // [16, K] d_out S^T, -(beta y) S^T, U dS^T; before, sums of d_beta by warp
  float *read, *predict, *write;
  float* pairs;    // [16, 16] scores as prep left them; later their gradient
  float* through;  // [K] sum over V of S dS
  float* beta;     // [16]
  int64_t stride;  // V + 4: rows in different banks
};

SDM_HD int64_t tile_grad_shared_floats(int64_t K, int64_t V) {
  const int64_t wide = V + 4 > K ? V + 4 : K;
  return 3 * kTile * wide + 3 * kTile * K + kScores + K + kTile;
}

__device__ __forceinline__ TileGradShared tile_grad_shared(int64_t K, int64_t V) {
  TileGradShared s;
  const int64_t wide = V + 4 > K ? V + 4 : K;
  s.stride = V + 4;
  s.d_out = s.q = shared_floats();
  s.by = s.d_out + kTile * s.stride;
  s.u = s.by + kTile * s.stride;
  s.k = s.q + kTile * K;
  s.decay = s.k + kTile * K;
  s.read = s.q + 3 * kTile * wide;
  s.predict = s.read + kTile * K;
  s.write = s.predict + kTile * K;
  s.pairs = s.write + kTile * K;
  s.through = s.pairs + kScores;
  s.beta = s.through + K;
  return s;
}

// By value column: y = (I + diag(beta) F)^-T dU by substitution, d_v, and the sums of d_beta.
__device__ __forceinline__ void value_columns(
    const TileGradParams& p, const TilePlace& place, const TileGradShared& s
) {
  const int64_t V = p.call.dims.V, slot = place.slot;
  const int thread = static_cast<int>(threadIdx.x);
  const float* scores = s.pairs;
  const int64_t from = row_of(p.d_out, place.batch, place.token, place.hv);
  float d_beta[kTile] = {};
  for (int64_t c = thread; c < V; c += kThreads) {
    float y[kTile], by[kTile];
#pragma unroll 4
    for (int i = 0; i < kTile; ++i) {
      const int64_t at = from + i * p.d_out.stride[1] + c * p.d_out.stride[3];
      const uint32_t raw = i < place.rows ? load_raw(p.d_out.data, p.d_out.dtype, at) : 0u;
      s.d_out[i * s.stride + c] = from_raw(p.d_out.dtype, raw);
    }
#pragma unroll
    for (int i = kTile - 1; i >= 0; --i) {
      y[i] = p.call.records.du[(slot * kTile + i) * V + c];
#pragma unroll
      for (int l = i + 1; l < kTile; ++l) {
        y[i] = fmaf(-scores[i * kTile + l], by[l], y[i]);
      }
      by[i] = s.beta[i] * y[i];
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const float r = p.call.records.u[(slot * kTile + i) * V + c];
      d_beta[i] = fmaf(y[i], r, d_beta[i]);
      s.by[i * s.stride + c] = by[i];
      s.u[i * s.stride + c] = s.beta[i] * r;
    }
    const int64_t t = place.batch * p.call.dims.T + place.token;
#pragma unroll 1
    for (int i = 0; i < place.rows; ++i) {
      const int64_t to = ((t + i) * p.call.dims.HV + place.hv) * V + c;
      store_any(p.d_v, p.call.tokens.v.dtype, to, s.by[i * s.stride + c]);
    }
  }
  reduce_scatter<kTile, kTile>(d_beta, thread % 32);
  d_beta[0] += __shfl_xor_sync(kAllLanes, d_beta[0], kTile);
  if (thread % 32 < kTile) {
    s.read[thread / 32 * kTile + thread % 32] = d_beta[0];
  }
}

__device__ __forceinline__ void store_d_beta(
    const TileGradParams& p, const TilePlace& place, const float* sums
) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= place.rows) {
    return;
  }
  float d_beta = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    d_beta += sums[warp * kTile + i];
  }
  const KdaView& beta = p.call.tokens.beta;
  const int64_t t = place.token + i;
  const float raw = load_any(beta.data, beta.dtype, row_of(beta, place.batch, t, place.hv));
  store_any(
      p.d_beta,
      beta.dtype,
      (place.batch * p.call.dims.T + t) * p.call.dims.HV + place.hv,
      beta_gradient(p.call.options.beta, raw, d_beta)
  );
}

// pairs[i][j] = scale d_out[i] U[j], j <= i; pairs[j][i] = -(beta y)[i] U[j], j < i.
__device__ __forceinline__ void make_pairs(const TileGradShared& s, int64_t V, float scale) {
  for (int e = static_cast<int>(threadIdx.x); e < kScores; e += kThreads) {
    const int i = e / kTile, j = e % kTile;
    const bool reads = j <= i;
    const float* x = reads ? s.d_out + i * s.stride : s.by + j * s.stride;
    const float* y = reads ? s.u + j * s.stride : s.u + i * s.stride;
    float sum = 0.0f;
    for (int64_t c = 0; c < V; c += 4) {
      sum = dot4(load4(x + c), load4(y + c), sum);
    }
    s.pairs[e] = reads ? scale * sum : -sum;
  }
}

// The three products with the states, contracted over V. A thread has 4 key columns, K / 4 apart,
// of 8 rows; groups of K / 2 threads share out the value columns and add up in order.
__device__ __forceinline__ void state_products(
    const TileGradParams& p, const TilePlace& place, const TileGradShared& s
) {
  const int K = static_cast<int>(p.call.dims.K);
  const int64_t V = p.call.dims.V;
  const int thread = static_cast<int>(threadIdx.x);
  const int group_threads = K / 2, groups = kThreads / group_threads;
  const int group = thread / group_threads;
  const int column = thread % group_threads % (K / 4);
  const int first = thread % group_threads / (K / 4) * 8;  // row
  const float* states = p.call.records.states + place.slot * K * V;
  const float* d_states = p.call.records.d_states + place.slot * K * V;
  float read[8][4] = {}, predict[8][4] = {}, write[8][4] = {}, through[4] = {};
  if (group < groups) {
    for (int64_t quad = group; quad < V / 4; quad += groups) {
      float4 state[4], d_state[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int64_t at = (quad * K + column + K / 4 * b) * 4;
        state[b] = load4(states + at);
        d_state[b] = load4(d_states + at);
        through[b] = dot4(state[b], d_state[b], through[b]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int64_t at = (first + i) * s.stride + 4 * quad;
        const float4 d_out = load4(s.d_out + at), by = load4(s.by + at), u = load4(s.u + at);
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          read[i][b] = dot4(d_out, state[b], read[i][b]);
          predict[i][b] = dot4(by, state[b], predict[i][b]);
          write[i][b] = dot4(u, d_state[b], write[i][b]);
        }
      }
    }
  }
  for (int turn = 0; turn < groups; ++turn) {
    __syncthreads();  // the groups before are done
    if (turn == group) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int c = column + K / 4 * b;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int at = (first + i) * K + c;
          s.read[at] = turn == 0 ? read[i][b] : s.read[at] + read[i][b];
          s.predict[at] = turn == 0 ? predict[i][b] : s.predict[at] + predict[i][b];
          s.write[at] = turn == 0 ? write[i][b] : s.write[at] + write[i][b];
        }
        if (first == 0) {
          s.through[c] = turn == 0 ? through[b] : s.through[c] + through[b];
        }
      }
    }
  }
}

// By key column, in place: gradients of q, k and g of the tile into read, predict and write.
//
// The state before the tile and each token j put something into the decayed sum: 1 and k[j]. It is
// y[i] at row i, and at the last row it enters the state after the tile. Down the rows it gives
// what they read; up the rows comes its gradient dy, and dy y is what crosses g[i].
__device__ __forceinline__ void key_columns(const TileGradParams& p, const TileGradShared& s) {
  const int64_t K = p.call.dims.K;
  const float scale = static_cast<float>(p.call.options.scale);
  for (int64_t c = static_cast<int64_t>(threadIdx.x); c < K; c += kThreads) {
    float q[kTile], k[kTile], decay[kTile], y[kTile];
    float dq[kTile], dk[kTile], dg[kTile];
    float product = 1.0f;
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      q[i] = s.q[i * K + c];
      k[i] = s.k[i * K + c];
      decay[i] = s.decay[i * K + c];
      product *= decay[i];
      y[i] = product;
    }
    float dy = s.through[c];
#pragma unroll
    for (int i = kTile - 1; i >= 0; --i) {
      const float read = scale * s.read[i * K + c], predict = -s.predict[i * K + c];
      dq[i] = y[i] * read;
      dk[i] = y[i] * predict;
      dy = fmaf(k[i], predict, fmaf(q[i], read, dy));
      dg[i] = dy * y[i];
      dy *= decay[i];
    }
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      y[j] = k[j];
      dq[j] = fmaf(s.pairs[j * kTile + j], y[j], dq[j]);
#pragma unroll
      for (int i = j + 1; i < kTile; ++i) {
        y[i] = y[i - 1] * decay[i];
        dq[i] = fmaf(s.pairs[i * kTile + j], y[i], dq[i]);
        dk[i] = fmaf(s.pairs[j * kTile + i], y[i], dk[i]);
      }
      dy = s.write[j * K + c];
#pragma unroll
      for (int i = kTile - 1; i > j; --i) {
        dy = fmaf(s.pairs[i * kTile + j], q[i], dy);
        dy = fmaf(s.pairs[j * kTile + i], k[i], dy);
        dg[i] = fmaf(dy, y[i], dg[i]);
        dy *= decay[i];
      }
      dk[j] += fmaf(s.pairs[j * kTile + j], q[j], dy);
      s.read[j * K + c] = dq[j];
      s.predict[j * K + c] = dk[j];
      s.write[j * K + c] = dg[j];
    }
  }
}

// Hands on the gradients of q and k and takes that of g through the gate. Returns this thread's
// part of d_A_log.
__device__ __forceinline__ float store_keys(
    const TileGradParams& p, const TilePlace& place, const TileGradShared& s
) {
  const int64_t K = p.call.dims.K, slot = place.slot;
  const KdaView& g = p.call.tokens.g;
  const Gate gate = make_gate(p.call.options, p.call.tokens, K, place.hv);
  const int64_t t = place.batch * p.call.dims.T + place.token;
  float d_rate = 0.0f;
  for (int64_t c = static_cast<int64_t>(threadIdx.x); c < K; c += kThreads) {
    float d_bias = 0.0f;
    for (int i = 0; i < place.rows; ++i) {
      p.call.records.qd[(slot * kTile + i) * K + c] = s.read[i * K + c];
      p.call.records.kr[(slot * kTile + i) * K + c] = s.predict[i * K + c];
      const int64_t at = row_of(g, place.batch, place.token + i, place.hv) + c;
      const float raw = load_any(g.data, g.dtype, at);
      const float d_raw = gate.gradient(raw, c, s.write[i * K + c], &d_rate);
      store_any(p.d_g, g.dtype, ((t + i) * p.call.dims.HV + place.hv) * K + c, d_raw);
      d_bias += d_raw;
    }
    p.call.records.d_bias[slot * K + c] = d_bias;
  }
  return d_rate;
}

__global__ void __launch_bounds__(kThreads, 3) kda_plain_tile_grad_kernel(
    const __grid_constant__ TileGradParams p
) {
  TilePlace place;
  if (!find_tile(p.call, 1, &place)) {
    return;
  }
  const int64_t K = p.call.dims.K, V = p.call.dims.V;
  const int thread = static_cast<int>(threadIdx.x);
  const TileGradShared s = tile_grad_shared(K, V);
  if (thread < kTile) {
    s.beta[thread] = p.call.records.beta[place.slot * kTile + thread];
  }
  for (int e = thread; e < kScores; e += kThreads) {
    s.pairs[e] = p.call.records.scores[place.slot * kScores + e];
  }
  __syncthreads();
  value_columns(p, place, s);
  __syncthreads();
  store_d_beta(p, place, s.read);
  make_pairs(s, V, static_cast<float>(p.call.options.scale));
  state_products(p, place, s);
  __syncthreads();
  load_tile(p.call, place, s.q, s.k, s.decay, s.beta);
  __syncthreads();
  key_columns(p, s);
  const float d_rate = warp_sum(store_keys(p, place, s));  // each thread has its own columns
  __syncthreads();                                         // the pairs are free
  if (thread % 32 == 0) {
    s.pairs[thread / 32] = d_rate;
  }
  __syncthreads();
  if (thread == 0) {
    float sum = 0.0f;
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += s.pairs[warp];
    }
    p.call.records.d_rate[place.slot] = sum;
  }
}

}  // namespace sdm::kda::plain
