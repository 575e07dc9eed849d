// SPDX-License-Identifier: Apache-2.0
//! @file Building blocks of the plain kernels: sums over the lanes of a warp in a fixed order, and
//! the tokens of a tile with norm, gate and strength applied.
#pragma once

#include "sdm_kernels/kda/cuda/kda_plain_gate.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_window.cuh"

namespace sdm::kda::plain {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Sums each x[i] over groups of kLanes neighbouring lanes. Lane l of its group gets the sums of
// x[l * kCount / kLanes ...] in x[0 ...]. Half of what is left goes to the other half of the lanes
// in each step, so it costs about kCount shuffles and not kCount * log2(kLanes).
template <int kLanes, int kCount>
__device__ __forceinline__ void reduce_scatter(float* x, int lane) {
  if constexpr (kLanes > 1) {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & (kLanes / 2)) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sent = upper ? x[i] : x[i + kHalf];
      const float kept = upper ? x[i + kHalf] : x[i];
      x[i] = kept + __shfl_xor_sync(kAllLanes, sent, kLanes / 2);
    }
    reduce_scatter<kLanes / 2, kHalf>(x, lane);
  }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, step);
  }
  return x;
}

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

__device__ __forceinline__ float4 load4(const float* x) {
  return *reinterpret_cast<const float4*>(x);
}

__device__ __forceinline__ void store4(float* to, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}

// 4 elements, `stride` apart.
template <typename T>
__device__ __forceinline__ void store_run(
    T* at, int64_t stride, float a, float b, float c, float d
) {
  struct alignas(4 * sizeof(T)) Run {
    T x[4];
  };

  if (stride == 1 && reinterpret_cast<uintptr_t>(at) % sizeof(Run) == 0) {
    *reinterpret_cast<Run*>(at) = Run{{narrow<T>(a), narrow<T>(b), narrow<T>(c), narrow<T>(d)}};
  } else {
    at[0] = narrow<T>(a);
    at[stride] = narrow<T>(b);
    at[2 * stride] = narrow<T>(c);
    at[3 * stride] = narrow<T>(d);
  }
}

// A tile of one value head.
struct TilePlace {
  int64_t batch, token;  // of its first row
  int64_t hv, h;         // value head and its key head
  int64_t slot;
  int rows;  // at most kTile
};

// Blocks count tiles of the window's rows and, fastest, groups of `group` value heads; the place is
// that of the first head of the group. False if the sequence has no such tile.
__device__ __forceinline__ bool find_tile(const PlainCall& p, int64_t group, TilePlace* place) {
  // in 32 bits: a grid has at most 2^31 blocks
  const unsigned tiles = static_cast<unsigned>(p.tiles()), HV = static_cast<unsigned>(p.dims.HV);
  const unsigned groups = HV / static_cast<unsigned>(group);
  const int64_t hv = blockIdx.x % groups * group;
  const int64_t tile = blockIdx.x / groups % tiles;
  const int64_t row = blockIdx.x / groups / tiles;
  PlainSequence sequence;
  int64_t chunk;
  if (!find_chunk(p, row, &sequence, &chunk)) {
    return false;
  }
  const int64_t first = chunk * p.dims.C + tile * kTile;
  if (first >= sequence.length) {
    return false;
  }
  place->batch = sequence.batch;
  place->token = sequence.begin + first;
  place->hv = hv;
  place->h = static_cast<unsigned>(hv) / (HV / static_cast<unsigned>(p.dims.H));
  place->slot = p.slot(row, tile, hv);
  place->rows = static_cast<int>(sequence.length - first < kTile ? sequence.length - first : kTile);
  return true;
}

constexpr int kLaneColumns = 8;  // key columns of a lane when a warp has a row; K <= 256

// A row of q or k from its raw columns lane + 32 m, normalised if asked for. Returns the factor.
__device__ __forceinline__ float make_row(
    DType dtype, const uint32_t (&raw)[kLaneColumns], bool l2norm, float (&x)[kLaneColumns]
) {
  float squares = 0.0f;
#pragma unroll
  for (int m = 0; m < kLaneColumns; ++m) {
    x[m] = from_raw(dtype, raw[m]);
    squares = fmaf(x[m], x[m], squares);
  }
  if (!l2norm) {
    return 1.0f;
  }
  const float factor = 1.0f / sqrtf(warp_sum(squares) + kNormEps);
#pragma unroll
  for (int m = 0; m < kLaneColumns; ++m) {
    x[m] *= factor;
  }
  return factor;
}

// A token of a value head as it is in memory, over the lanes of a warp.
struct RawToken {
  uint32_t q[kLaneColumns], k[kLaneColumns], g[kLaneColumns], beta;
};

__device__ __forceinline__ void load_token(
    const PlainCall& p, const TilePlace& place, int i, int lane, RawToken* token
) {
  const KdaTokens& in = p.tokens;
  const int64_t K = p.dims.K, batch = place.batch, t = place.token + i;
  load_raw_row(in.q, row_of(in.q, batch, t, place.h), lane, 32, K, token->q);
  load_raw_row(in.k, row_of(in.k, batch, t, place.h), lane, 32, K, token->k);
  load_raw_row(in.g, row_of(in.g, batch, t, place.hv), lane, 32, K, token->g);
  token->beta = load_raw(in.beta.data, in.beta.dtype, row_of(in.beta, batch, t, place.hv));
}

// q and k [16, K] normalised, decays exp(g) [16, K] and strengths [16] of a tile into shared
// memory. Rows past the end change nothing: q = k = 0, decay 1, strength 0.
__device__ __forceinline__ void load_tile(
    const PlainCall& p, const TilePlace& place, float* q, float* k, float* decay, float* beta
) {
  const KdaTokens& in = p.tokens;
  const int64_t K = p.dims.K;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Gate gate = make_gate(p.options, in, K, place.hv);
  int i = static_cast<int>(threadIdx.x) / 32;
  RawToken next{};
  if (i < place.rows) {
    load_token(p, place, i, lane, &next);
  }
#pragma unroll 1
  for (; i < kTile; i += kWarps) {
    const RawToken token = next;
    if (i + kWarps < place.rows) {
      load_token(p, place, i + kWarps, lane, &next);
    }
    const bool valid = i < place.rows;
    float xq[kLaneColumns] = {}, xk[kLaneColumns] = {};
    float strength = 0.0f;
    if (valid) {
      make_row(in.q.dtype, token.q, p.options.l2norm, xq);
      make_row(in.k.dtype, token.k, p.options.l2norm, xk);
      strength = beta_value(p.options.beta, from_raw(in.beta.dtype, token.beta));
    }
#pragma unroll
    for (int m = 0; m < kLaneColumns; ++m) {
      const int64_t c = lane + 32 * m;
      if (c < K) {
        q[i * K + c] = xq[m];
        k[i * K + c] = xk[m];
        decay[i * K + c] = from_raw(in.g.dtype, token.g[m]);
      }
    }
#pragma unroll 1
    for (int64_t c = lane; c < K; c += 32) {  // this lane's own
      decay[i * K + c] = valid ? expf(gate.value(decay[i * K + c], c)) : 1.0f;
    }
    if (lane == 0) {
      beta[i] = strength;
    }
  }
}

}  // namespace sdm::kda::plain
