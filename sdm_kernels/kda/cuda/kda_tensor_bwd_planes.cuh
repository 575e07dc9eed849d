// SPDX-License-Identifier: Apache-2.0
//! @file The other matrix products of the token stage of the tensor backward: for every row i and
//! the key channels of a pass (blocks and decays as in kda_tensor_bwd_tokens.cuh) the planes
//!   0: scale exp(start) dO S^T + sum over earlier blocks of dM Y         times Xq: into dG
//!   1: -exp(start) y S^T       + sum over earlier blocks of dL Y         times Xk: into dG
//!   2: exp(from the end) U dS^T + sum over later blocks of dM^T Xq + dL^T Xk    times -Y: into dG
//! A warp has the rows that it had before and 16 key channels.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_mma8.cuh"

namespace sdm::kda::cuda {

template <int kK, int kV, DType kType>
struct TokenPlanes : TokenProducts<kK, kV, kType> {
  using Base = TokenProducts<kK, kV, kType>;
  using Memory = TokenMemory<kK, kV>;
  using Base::b;
  using Base::block;
  using Base::g;
  using Base::grad_unit;
  using Base::half;
  using Base::out_unit;
  using Base::t;
  using Base::tile;
  using Base::u_unit;
  using Base::y_unit;
  using typename Base::Rows;
  using typename Base::Square;
  using Keys = typename Memory::PassKeys;
  using State = typename Memory::PassState;
  static constexpr int kTiles = 2;  // of 8 key channels

  __device__ __forceinline__ explicit TokenPlanes(const TokenBlock<kK, kV>& in) : Base(in) {}

  // First channel in the pass of a lane's two in tile n.
  __device__ __forceinline__ int channel(int n) const { return half * 16 + n * 8 + t * 2; }

  // c *= decay over block i, in the first or second eight rows or both.
  __device__ __forceinline__ void decay_rows(
      float (&c)[kTiles][4], const float2 (&m)[kTiles], bool first, bool second
  ) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (first) {
        c[n][0] *= m[n].x;
        c[n][1] *= m[n].y;
      }
      if (second) {
        c[n][2] *= m[n].x;
        c[n][3] *= m[n].y;
      }
    }
  }

  __device__ __forceinline__ void load_decay(float2 (&m)[kTiles], int at, int i) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      m[n] = *b.template at<float2>(at + (i * kPass + channel(n)) * 4);
    }
  }

  // c = c * decays + (16 rows of D) Y, block after block from the first to the one in front of each
  // row; c is in units of D. `decays`: over whole blocks.
  __device__ __forceinline__ void add_earlier(
      float (&q)[kTiles][4], float (&k)[kTiles][4], int decays
  ) const {
    uint32_t dm[4], dl[4], y[4];
    float2 m[kTiles];
#pragma unroll 1
    for (int i = 0; i < block; ++i) {
      Keys::load_b(y, tile(Memory::kYk), i * 16, half * 16);
      Square::load_a(dm, tile(Memory::kScoreGrad), block * 16, i * 16);
      Square::load_a(dl, tile(Memory::kKeyGrad), block * 16, i * 16);
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        load_decay(m, decays, 2 * i + eight);
        decay_rows(q, m, true, true);
        decay_rows(k, m, true, true);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_f16_8(q[n], dm[2 * eight], dm[2 * eight + 1], y[n * 2 + eight]);
          mma_f16_8(k[n], dl[2 * eight], dl[2 * eight + 1], y[n * 2 + eight]);
        }
      }
    }
    // only the second eight rows have the first ones in front of them
    Keys::load_b(y, tile(Memory::kYk), block * 16, half * 16);
    Square::load_a(dm, tile(Memory::kScoreGrad), block * 16, block * 16);
    Square::load_a(dl, tile(Memory::kKeyGrad), block * 16, block * 16);
    load_decay(m, decays, 2 * block);
    decay_rows(q, m, false, true);
    decay_rows(k, m, false, true);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_f16_8(q[n], 0, dm[1], y[n * 2]);
      mma_f16_8(k[n], 0, dl[1], y[n * 2]);
    }
  }

  // The same from the last block to the one behind each row, with D transposed; c comes in units of
  // D of the last rows and leaves in those of the warp's own.
  __device__ __forceinline__ void add_later(float (&r)[kTiles][4], int decays) const {
    uint32_t dm[4], dl[4], xq[4], xk[4];
    float2 m[kTiles];
    float unit = grad_unit(3);
#pragma unroll 1
    for (int i = 3; i > block; --i) {
      Keys::load_b(xq, tile(Memory::kXq), i * 16, half * 16);
      Keys::load_b(xk, tile(Memory::kXk), i * 16, half * 16);
      Square::load_a_transposed(dm, tile(Memory::kScoreGrad), i * 16, block * 16);
      Square::load_a_transposed(dl, tile(Memory::kKeyGrad), i * 16, block * 16);
      const float next = grad_unit(i);
      const float change = unit * inverse_power(next);
      unit = next;
#pragma unroll
      for (int eight = 1; eight >= 0; --eight) {
        load_decay(m, decays, 2 * i + eight);
        if (eight == 1) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            m[n].x *= change;
            m[n].y *= change;
          }
        }
        decay_rows(r, m, true, true);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_f16_8(r[n], dm[2 * eight], dm[2 * eight + 1], xq[n * 2 + eight]);
          mma_f16_8(r[n], dl[2 * eight], dl[2 * eight + 1], xk[n * 2 + eight]);
        }
      }
    }
    // only the first eight rows have the second ones behind them
    Keys::load_b(xq, tile(Memory::kXq), block * 16, half * 16);
    Keys::load_b(xk, tile(Memory::kXk), block * 16, half * 16);
    Square::load_a_transposed(dm, tile(Memory::kScoreGrad), block * 16, block * 16);
    Square::load_a_transposed(dl, tile(Memory::kKeyGrad), block * 16, block * 16);
    const float change = unit * inverse_power(grad_unit(block));
    load_decay(m, decays, 2 * block + 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        r[n][x] *= change;
      }
    }
    decay_rows(r, m, true, false);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_f16_8(r[n], dm[2], 0, xq[n * 2 + 1]);
      mma_f16_8(r[n], dl[2], 0, xk[n * 2 + 1]);
    }
  }

  // Keeps the sums of S dS over the warp's share of the value columns: the diagonal of a product.
  __device__ __forceinline__ void keep_state_grads(int first) const {
    float c[kTiles][4];
    clear(c);
#pragma unroll
    for (int i = 0; i < kV / 64; ++i) {
      const int col = (block * (kV / 64) + i) * 16;
      uint32_t s[4], d[1][4];
      State::load_a(s, tile(Memory::kState), half * 16, col);
      State::load_b_transposed(d[0], tile(Memory::kPassGrad), half * 16, col);
      multiply_add(c, s, d);
    }
    if (t != g / 2) {
      return;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int i = half * 16 + n * 8 + g;
      float sum = g % 2 == 0 ? c[n][2 * n] : c[n][2 * n + 1];
      sum *= b.state_unit(first + i);
      sum *= b.template at<float>(Memory::kStateGradUnit)[(first + i) / (kK / 4)];
      b.template at<float>(Memory::kEndGrad)[block * kPass + i] = sum;
    }
  }

  // Keeps the sums of Y times what plane 2 begins with over eight rows: r times `unit`.
  __device__ __forceinline__ void keep_end_sums(
      const float (&r)[kTiles][4], const float (&unit)[kTiles]
  ) const {
    float sum[8];  // of (tile, eight rows, channel): over g
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const float2 y = unpack_f16(
            *b.template at<uint32_t>(Memory::kYk + Keys::at(block * 16 + eight * 8 + g, channel(n)))
        );
        sum[n * 4 + eight * 2] = y.x * (r[n][2 * eight] * unit[n]);
        sum[n * 4 + eight * 2 + 1] = y.y * (r[n][2 * eight + 1] * unit[n]);
      }
    }
    int mask = 16;
#pragma unroll
    for (int count = 4; count > 0; count /= 2) {
      const bool upper = (threadIdx.x & static_cast<unsigned>(mask)) != 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float send = upper ? sum[i] : sum[i + count];
        const float keep = upper ? sum[i + count] : sum[i];
        sum[i] = keep + __shfl_xor_sync(kWarpMask, send, mask);
      }
      mask /= 2;
    }
    // lane group g now has sum number g
    const int col = half * 16 + g / 4 * 8 + t * 2 + g % 2;
    b.template at<float>(Memory::kEndSums)[(block * 2 + g / 2 % 2) * kPass + col] = sum[0];
  }

  // The three planes of the channels from `first` on.
  __device__ __forceinline__ void make_planes(int first, int decays) const {
    float q[kTiles][4], k[kTiles][4], r[kTiles][4];
    clear(q);
    clear(k);
    clear(r);
    {
      constexpr int kRowPanel = kChunkRows * 128, kStatePanel = kPass * 128;
      uint32_t at_a[4], at_s[4];
      Base::lane_addresses(at_a, tile(0), block * 16, Rows::lane_direct());
      Base::lane_addresses(at_s, tile(0), half * 16, State::lane_crossed());
#pragma unroll
      for (int v = 0; v < kV / 16; ++v) {
        const uint32_t rows = at_a[v % 4] + v / 4 * kRowPanel;
        const uint32_t states = at_s[v % 4] + v / 4 * kStatePanel;
        uint32_t a[4], s[1][4];
        load_matrices(s[0], states + Memory::kState);
        load_matrices(a, rows + Memory::kOut);
        multiply_add(q, a, s);
        load_matrices(a, rows + Memory::kY);
        multiply_add(k, a, s);
        load_matrices(s[0], states + Memory::kPassGrad);
        load_matrices(a, rows + Memory::kWork);
        multiply_add(r, a, s);
      }
      keep_state_grads(first);
    }
    const float own = grad_unit(block);
    const float from_own = inverse_power(own), from_last = inverse_power(grad_unit(3));
    const float scale = static_cast<float>(b.p.common.options.scale);
    const float q_unit[2] = {scale * out_unit(0), scale * out_unit(1)};
    const float k_unit = -y_unit();
    float r_unit[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int at = first + channel(n);
      r_unit[n] = u_unit(block) * b.template at<float>(Memory::kStateGradUnit)[at / (kK / 4)];
    }
    keep_end_sums(r, r_unit);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float s_unit = b.state_unit(first + channel(n));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        q[n][x] *= q_unit[x / 2] * s_unit * from_own;
        k[n][x] *= k_unit * s_unit * from_own;
        r[n][x] *= r_unit[n] * from_last;
      }
    }
    add_earlier(q, k, decays);
    add_later(r, decays);
    __syncthreads();  // the planes go over the states
    store_plane(0, q, own);
    store_plane(1, k, own);
    store_plane(2, r, own);
  }

  __device__ __forceinline__ void store_plane(
      int which, const float (&c)[kTiles][4], float unit
  ) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *b.template at<float2>(Memory::plane(which, block * 16 + i * 8 + g, channel(n))) =
            make_float2(c[n][2 * i] * unit, c[n][2 * i + 1] * unit);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
