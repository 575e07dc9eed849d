// SPDX-License-Identifier: Apache-2.0
//! @file The other matrix products of the token stage of the tensor backward: for every row i
//! (blocks and decays as in kda_tensor_bwd_tokens.cuh) the planes
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
  using Base::load_state_transposed;
  using Base::out_unit;
  using Base::share;
  using Base::t;
  using Base::tile;
  using Base::u_unit;
  using typename Base::Keys;
  using typename Base::Rows;
  using typename Base::Square;
  using typename Base::State;
  using typename Base::StateVFirst;
  static constexpr int kKeyTiles = 2;  // 16 key channels of a warp
  static constexpr int kKeys = kKeyTiles * 8;

  __device__ __forceinline__ explicit TokenPlanes(const TokenBlock<kK, kV>& in) : Base(in) {}

  __device__ __forceinline__ int channel(int n) const { return share * kKeys + n * 8 + t * 2; }

  // Decay over the whole block i of the two channels of tile n.
  __device__ __forceinline__ float2 decay(int i, int n) const {
    return *b.template at<float2>(Memory::kDecay + (i * kK + channel(n)) * 4);
  }

  __device__ __forceinline__ float grad_unit(int i) const {
    return unit_of(b.template at<uint32_t>(Memory::kGradMax)[i]).unit;
  }

  // c *= decay over block i, in the first or second eight rows or both.
  __device__ __forceinline__ void decay_rows(
      float (&c)[kKeyTiles][4], int i, float factor, bool first, bool second
  ) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float2 m = decay(i, n);
      m.x *= factor;
      m.y *= factor;
      if (first) {
        c[n][0] *= m.x;
        c[n][1] *= m.y;
      }
      if (second) {
        c[n][2] *= m.x;
        c[n][3] *= m.y;
      }
    }
  }

  // c = c * decays + (16 rows of D) Y, block after block from the first to the one in front of each
  // row; c is in units of D.
  __device__ __forceinline__ void add_earlier(
      float (&q)[kKeyTiles][4], float (&k)[kKeyTiles][4]
  ) const {
    for (int i = 0; i <= block; ++i) {
      uint32_t dm[4], dl[4], y[kKeyTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        Keys::load_b(y[n], tile(Memory::kYk), i * 16, share * kKeys + n * 16);
      }
      Square::load_a(dm, tile(Memory::kScoreGrad), block * 16, i * 16);
      Square::load_a(dl, tile(Memory::kKeyGrad), block * 16, i * 16);
      if (i == block) {
        // only the second eight rows have the first ones in front of them
        dm[0] = 0;
        dl[0] = 0;
      }
      decay_rows(q, 2 * i, 1.0f, i < block, true);
      decay_rows(k, 2 * i, 1.0f, i < block, true);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        mma_f16_8(q[n], dm[0], dm[1], y[n / 2][n % 2 * 2]);
        mma_f16_8(k[n], dl[0], dl[1], y[n / 2][n % 2 * 2]);
      }
      if (i < block) {
        decay_rows(q, 2 * i + 1, 1.0f, true, true);
        decay_rows(k, 2 * i + 1, 1.0f, true, true);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          mma_f16_8(q[n], dm[2], dm[3], y[n / 2][n % 2 * 2 + 1]);
          mma_f16_8(k[n], dl[2], dl[3], y[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

  // The same from the last block to the one behind each row, with D transposed; c comes in units of
  // D of the last rows and leaves in those of the warp's own.
  __device__ __forceinline__ void add_later(float (&r)[kKeyTiles][4]) const {
    float unit = grad_unit(3);
    for (int i = 3; i >= block; --i) {
      uint32_t dm[4], dl[4], xq[kKeyTiles / 2][4], xk[kKeyTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        Keys::load_b(xq[n], tile(Memory::kXq), i * 16, share * kKeys + n * 16);
        Keys::load_b(xk[n], tile(Memory::kXk), i * 16, share * kKeys + n * 16);
      }
      Square::load_a_transposed(dm, tile(Memory::kScoreGrad), i * 16, block * 16);
      Square::load_a_transposed(dl, tile(Memory::kKeyGrad), i * 16, block * 16);
      const float next = grad_unit(i);
      const float change = unit * inverse_power(next);
      unit = next;
      if (i == block) {
        // only the first eight rows have the second ones behind them
        dm[3] = 0;
        dl[3] = 0;
        if (change != 1.0f) {
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            r[n][2] *= change;
            r[n][3] *= change;
          }
        }
      }
      decay_rows(r, 2 * i + 1, change, true, i > block);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        mma_f16_8(r[n], dm[2], dm[3], xq[n / 2][n % 2 * 2 + 1]);
        mma_f16_8(r[n], dl[2], dl[3], xk[n / 2][n % 2 * 2 + 1]);
      }
      if (i > block) {
        decay_rows(r, 2 * i, 1.0f, true, true);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          mma_f16_8(r[n], dm[0], dm[1], xq[n / 2][n % 2 * 2]);
          mma_f16_8(r[n], dl[0], dl[1], xk[n / 2][n % 2 * 2]);
        }
      }
    }
  }

  // gamma times the sums of S dS over the value columns, one key channel per eight lanes.
  __device__ __forceinline__ void sum_state_grads() const {
    const int k = static_cast<int>(threadIdx.x) / 8, part = static_cast<int>(threadIdx.x) % 8;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kV / 64; ++i) {
      const int col = (part + 8 * i) * 8;
      float s[8], d[8];
      if (b.p.chunk_states.v_first) {
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          s[x] =
              unpack_f16(*b.template at<uint16_t>(Memory::kState + StateVFirst::at(col + x, k))).x;
        }
      } else {
        widen_piece(s, *b.template at<uint4>(Memory::kState + State::at(k, col)), false);
      }
      widen_piece(d, *b.template at<uint4>(Memory::kStateGrad + State::at(k, col)), false);
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        sum += s[x] * d[x];
      }
    }
    sum += __shfl_xor_sync(kWarpMask, sum, 1);
    sum += __shfl_xor_sync(kWarpMask, sum, 2);
    sum += __shfl_xor_sync(kWarpMask, sum, 4);
    if (part == 0) {
      const float* gamma = reinterpret_cast<const float*>(b.record() + KdaRecord<kK>::kGamma);
      sum *= b.state_unit(k / 8);
      sum *= b.template at<float>(Memory::kStateGradUnit)[k / (kK / 4)];
      b.template at<float>(Memory::kEndGrad)[k] = gamma[k] * sum;
    }
  }

  // The three planes.
  __device__ __forceinline__ void make_planes() const {
    float q[kKeyTiles][4], k[kKeyTiles][4], r[kKeyTiles][4];
    clear(q);
    clear(k);
    clear(r);
#pragma unroll 2
    for (int v = 0; v < kV / 16; ++v) {
      uint32_t a[4], s[kKeyTiles / 2][4];
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        load_state_transposed(s[n], share * kKeys + n * 16, v * 16);
      }
      Rows::load_a(a, tile(Memory::kOut), block * 16, v * 16);
      multiply_add(q, a, s);
      Rows::load_a(a, tile(Memory::kY), block * 16, v * 16);
      multiply_add(k, a, s);
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; ++n) {
        State::load_b_transposed(s[n], tile(Memory::kStateGrad), share * kKeys + n * 16, v * 16);
      }
      Rows::load_a(a, tile(Memory::kWork), block * 16, v * 16);
      multiply_add(r, a, s);
    }
    sum_state_grads();

    const float own = grad_unit(block);
    const float from_own = inverse_power(own), from_last = inverse_power(grad_unit(3));
    const float q_unit = static_cast<float>(b.p.common.options.scale) * out_unit();
    const float k_unit = -b.template at<float>(Memory::kYUnit)[block];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float s_unit = b.state_unit(share * kKeyTiles + n);
      const float r_unit =
          u_unit(block) * b.template at<float>(Memory::kStateGradUnit)[channel(n) / (kK / 4)];
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 to_end =
            *b.template at<float2>(Memory::kToEnd + ((2 * block + half) * kK + channel(n)) * 4);
        const float2 y = unpack_f16(
            *b.template at<uint32_t>(Memory::kYk + Keys::at(block * 16 + half * 8 + g, channel(n)))
        );
        sum.x += y.x * (r[n][2 * half] * r_unit * to_end.x);
        sum.y += y.y * (r[n][2 * half + 1] * r_unit * to_end.y);
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        sum.x += __shfl_xor_sync(kWarpMask, sum.x, mask);
        sum.y += __shfl_xor_sync(kWarpMask, sum.y, mask);
      }
      if (g == 0) {
        *b.template at<float2>(Memory::kEndSums + (block * kK + channel(n)) * 4) = sum;
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        q[n][x] *= q_unit * s_unit * from_own;
        k[n][x] *= k_unit * s_unit * from_own;
        r[n][x] *= r_unit * from_last;
      }
    }
    add_earlier(q, k);
    add_later(r);
    __syncthreads();  // the planes go over the operands of the products
    store_plane(0, q, own);
    store_plane(1, k, own);
    store_plane(2, r, own);
    __syncthreads();
  }

  __device__ __forceinline__ void store_plane(
      int plane, const float (&c)[kKeyTiles][4], float unit
  ) const {
    float* to = b.template at<float>(Memory::kPlanes) + plane * kChunkRows * Memory::kPitch;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + (block * 16 + half * 8 + g) * Memory::kPitch + channel(n)) =
            make_float2(c[n][2 * half] * unit, c[n][2 * half + 1] * unit);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
