// SPDX-License-Identifier: Apache-2.0
//! @file Everything of a tile that does not depend on the state: decayed scores, and the solutions
//! w and u of the triangular system. One block a tile and value head.
//!
//! Decays are products of factors exp(g), never differences of sums of g: a pair of tokens i > j
//! needs exp(g[j+1]) ... exp(g[i]), which grows by one factor a row. Nothing overflows whatever the
//! gate, and row i depends on rows up to i only. The system I + F diag(beta) is solved by
//! substitution; no inverse is formed.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_tile.cuh"

namespace sdm::kda::plain {

SDM_HD int64_t prep_shared_floats(int64_t K) {
  return 3 * kTile * K + 2 * kScores + kTile;
}

// scores[i][j] = scale sum_c q[i] k[j] decay, j <= i; scores[j][i] = the same of k and k, j < i.
// Thread (j, part) has column j for all rows and the channels of its part.
__device__ __forceinline__ void make_scores(
    const float* q, const float* k, const float* decay, int64_t K, float scale, float* scores
) {
  constexpr int kParts = kThreads / kTile;
  const int j = static_cast<int>(threadIdx.x) / kParts;
  const int part = static_cast<int>(threadIdx.x) % kParts;
  const int first = static_cast<int>(threadIdx.x) / 32 * (32 / kParts);  // of this warp's columns
  float sums[2 * kTile] = {};
  for (int64_t c = 4 * part; c < K; c += 4 * kParts) {
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // k[j] decayed to row i
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (i >= first) {
        const float4 ki = load4(k + i * K + c), qi = load4(q + i * K + c);
        const float4 a = load4(decay + i * K + c);
        y.x = i == j ? ki.x : y.x * a.x;
        y.y = i == j ? ki.y : y.y * a.y;
        y.z = i == j ? ki.z : y.z * a.z;
        y.w = i == j ? ki.w : y.w * a.w;
        sums[i] = dot4(ki, y, sums[i]);
        sums[kTile + i] = dot4(qi, y, sums[kTile + i]);
      }
    }
  }
  reduce_scatter<kParts, 2 * kTile>(sums, part);
  constexpr int kOwn = 2 * kTile / kParts;
#pragma unroll
  for (int m = 0; m < kOwn; ++m) {
    const int at = part * kOwn + m;
    const int i = at % kTile;
    if (at < kTile && i > j) {
      scores[j * kTile + i] = sums[m];
    } else if (at >= kTile && i >= j) {
      scores[i * kTile + j] = scale * sums[m];
    }
  }
}

// Solves (I + F diag(beta)) x = x in place; fb[i][j] = F[i][j] beta[j], j < i.
__device__ __forceinline__ void solve_column(const float* fb, float (&x)[kTile]) {
#pragma unroll
  for (int i = 1; i < kTile; ++i) {
#pragma unroll
    for (int j = 0; j < i; ++j) {
      x[i] = fmaf(-fb[i * kTile + j], x[j], x[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 3) kda_plain_prep_kernel(
    const __grid_constant__ PlainCall p
) {
  TilePlace place;
  if (!find_tile(p, 1, &place)) {
    return;
  }
  const int64_t K = p.dims.K, V = p.dims.V;
  const int thread = static_cast<int>(threadIdx.x);
  const float scale = static_cast<float>(p.options.scale);
  float* q = shared_floats();
  float* k = q + kTile * K;
  float* decay = k + kTile * K;
  float* scores = decay + kTile * K;
  float* fb = scores + kScores;
  float* beta = fb + kScores;

  load_tile(p, place, q, k, decay, beta);
  __syncthreads();
  make_scores(q, k, decay, K, scale, scores);
  __syncthreads();
  for (int e = thread; e < kScores; e += kThreads) {
    const int i = e / kTile, j = e % kTile;
    fb[e] = j < i ? scores[j * kTile + i] * beta[j] : 0.0f;
    p.records.scores[place.slot * kScores + e] = scores[e];
  }
  if (thread < kTile) {
    p.records.beta[place.slot * kTile + thread] = beta[thread];
  }
  __syncthreads();

  const int64_t key_record = place.slot * kTile * K;
  for (int64_t c = thread; c < K; c += kThreads) {
    float x[kTile];
    float product = 1.0f;  // decays up to and with row i
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      product *= decay[i * K + c];
      x[i] = k[i * K + c] * product;
      p.records.qd[key_record + i * K + c] = scale * q[i * K + c] * product;
    }
    p.records.gamma[place.slot * K + c] = product;
    solve_column(fb, x);
    product = 1.0f;  // decays after row i
#pragma unroll
    for (int i = kTile - 1; i >= 0; --i) {
      p.records.w[key_record + i * K + c] = x[i];
      p.records.kr[key_record + i * K + c] = k[i * K + c] * product;
      product *= decay[i * K + c];
    }
  }
  const KdaView& v = p.tokens.v;
  const int64_t from = row_of(v, place.batch, place.token, place.hv);
  for (int64_t c = thread; c < V; c += kThreads) {
    float x[kTile];
    uint32_t raw[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      raw[i] = i < place.rows ? load_raw(v.data, v.dtype, from + i * v.stride[1] + c) : 0u;
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      x[i] = from_raw(v.dtype, raw[i]);
    }
    solve_column(fb, x);
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      p.records.u[place.slot * kTile * V + i * V + c] = x[i];
    }
  }
}

}  // namespace sdm::kda::plain
