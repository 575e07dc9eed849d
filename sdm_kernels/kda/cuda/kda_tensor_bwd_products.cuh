// SPDX-License-Identifier: Apache-2.0
//! @file First matrix products of the token stage of the tensor backward:
//!   U  = inverse diag(beta) (v - kd S)
//!   dL = -strictly lower part of y U^T          dM = scale * lower part of dO U^T
//! Warp w has rows 16 (w % 4), and a share w / 4 of the columns.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"

namespace sdm::kda::cuda {

template <int kK, int kV, DType kType>
struct TokenProducts {
  using Memory = TokenMemory<kK, kV>;
  using Keys = typename Memory::Keys;
  using Rows = typename Memory::Rows;
  using Square = typename Memory::Square;
  using State = KdaTile<kK, kV>;
  using StateVFirst = KdaTile<kV, kK>;
  static constexpr int kSplit = Memory::kSplit;
  static constexpr int kValueSplit = kSplit < kV / 16 ? kSplit : kV / 16;  // warps with columns
  static constexpr int kValueTiles = kV / 8 / kValueSplit;  // 8-column tiles of a warp
  static constexpr int kParts = kSplit / 2;  // warps that share 16 rows of dL or of dM

  const TokenBlock<kK, kV>& b;
  int block, share, g, t;

  __device__ __forceinline__ explicit TokenProducts(const TokenBlock<kK, kV>& in) : b(in) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    block = warp % 4;
    share = warp / 4;
    g = lane / 4;
    t = lane % 4;
  }

  __device__ __forceinline__ uint32_t tile(int offset) const {
    return b.base + static_cast<uint32_t>(offset);
  }

  // B[k, n] = S[row + k, col + n], and its transpose B[k, n] = S[row + n, col + k].
  __device__ __forceinline__ void load_state(uint32_t (&out)[4], int row, int col) const {
    if (b.p.chunk_states.v_first) {
      StateVFirst::load_b_transposed(out, tile(Memory::kState), col, row);
    } else {
      State::load_b(out, tile(Memory::kState), row, col);
    }
  }

  __device__ __forceinline__ void load_state_transposed(
      uint32_t (&out)[4], int row, int col
  ) const {
    if (b.p.chunk_states.v_first) {
      StateVFirst::load_b(out, tile(Memory::kState), col, row);
    } else {
      State::load_b_transposed(out, tile(Memory::kState), row, col);
    }
  }

  // beta (v - kd S) of the warp's rows and columns.
  __device__ __forceinline__ void make_writes(float (&e)[kValueTiles][4]) const {
    clear(e);
    const float top = *b.template at<float>(Memory::kStateTop);
    const uint2* share_of = b.template at<uint2>(Memory::kStateShare);
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t a[4], s[kValueTiles / 2][4];
      Keys::load_a(a, tile(Memory::kWork), block * 16, k * 16);
      const uint2 halves = share_of[k];
      a[0] = multiply_pair(a[0], halves.x);
      a[1] = multiply_pair(a[1], halves.x);
      a[2] = multiply_pair(a[2], halves.y);
      a[3] = multiply_pair(a[3], halves.y);
#pragma unroll
      for (int n = 0; n < kValueTiles / 2; ++n) {
        load_state(s[n], k * 16, share * kValueTiles * 8 + n * 16);
      }
      multiply_add(e, a, s);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block * 16 + half * 8 + g;
        const float2 v = widen_pair(
            *b.template at<uint32_t>(
                Memory::kValue + Rows::at(row, (share * kValueTiles + n) * 8 + t * 2)
            ),
            kType == DType::kBf16
        );
        const float beta = b.template at<float>(Memory::kBeta)[row];
        e[n][2 * half] = beta * (v.x - e[n][2 * half] * top);
        e[n][2 * half + 1] = beta * (v.y - e[n][2 * half + 1] * top);
      }
    }
  }

  // U = inverse beta (v - kd S) from the work buffer.
  __device__ __forceinline__ void apply_inverse(float (&u)[kValueTiles][4]) const {
    const float* units = b.template at<float>(Memory::kWriteUnit);
    float top = 0.0f;
    for (int i = 0; i <= block; ++i) {
      top = fmaxf(top, units[i * kSplit + share]);
    }
    clear(u);
    for (int i = 0; i <= block; ++i) {
      uint32_t a[4], w[kValueTiles / 2][4];
      Square::load_a(a, tile(Memory::kInverse), block * 16, i * 16);
      multiply_fragment(a, share_pair(units[i * kSplit + share], top));
#pragma unroll
      for (int n = 0; n < kValueTiles / 2; ++n) {
        Rows::load_b(w[n], tile(Memory::kWork), i * 16, share * kValueTiles * 8 + n * 16);
      }
      multiply_add(u, a, w);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        u[n][x] *= top;
      }
    }
  }

  __device__ __forceinline__ void store_work(const float (&c)[kValueTiles][4], float factor) const {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      Rows::store_c(
          b.memory + Memory::kWork, block * 16, (share * kValueTiles + n) * 8, c[n], factor
      );
    }
  }

  // beta (v - kd S), then U, both into the work buffer.
  __device__ __forceinline__ void make_updates() const {
    const bool works = share < kValueSplit;
    float c[kValueTiles][4];
    KdaUnit unit = {};
    if (works) {
      make_writes(c);
      unit = unit_of_warp(c);
      if (threadIdx.x % 32 == 0) {
        b.template at<float>(Memory::kWriteUnit)[block * kSplit + share] = unit.unit;
      }
    }
    __syncthreads();  // kd is no longer needed
    if (works) {
      store_work(c, unit.inverse);
    }
    __syncthreads();
    uint32_t* largest = b.template at<uint32_t>(Memory::kUMax) + block;
    if (works) {
      apply_inverse(c);
      raise(largest, largest_of(c));
    }
    __syncthreads();  // beta (v - kd S) is no longer needed
    if (works) {
      store_work(c, unit_of(*largest).inverse);
    }
    __syncthreads();
  }

  __device__ __forceinline__ float u_unit(int i) const {
    return unit_of(b.template at<uint32_t>(Memory::kUMax)[i]).unit;
  }

  __device__ __forceinline__ float out_unit() const {
    return unit_of(b.template at<uint32_t>(Memory::kOutMax)[block]).unit;
  }

  // Such that numbers divided by it do not overflow: the terms of the planes are below
  // 2^35 * (product of two units).
  __device__ __forceinline__ float least_unit() const {
    float out = 0.0f, y = 0.0f, u = 0.0f, state = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out = fmaxf(out, unit_of(b.template at<uint32_t>(Memory::kOutMax)[i]).unit);
      y = fmaxf(y, b.template at<float>(Memory::kYUnit)[i]);
      u = fmaxf(u, u_unit(i));
      state = fmaxf(state, b.template at<float>(Memory::kStateGradUnit)[i]);
    }
    out *= fabsf(static_cast<float>(b.p.common.options.scale));
    const float top = *b.template at<float>(Memory::kStateTop);
    return fmaxf(fmaxf(out, y) * top, u * state) * 0x1p-80f;
  }

  // Raises the unit of the warp's 16 rows of D to their largest magnitude, and those of all rows to
  // what keeps sums that go from one unit to another finite.
  __device__ __forceinline__ void raise_all(uint32_t largest, float least) const {
    const uint32_t most = __reduce_max_sync(kWarpMask, largest);
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane < 4) {
      const float floor = fmaxf(__uint_as_float(most) * 0x1p-80f, least * 0x1p13f);
      const uint32_t bits = __float_as_uint(floor);
      atomicMax(
          b.template at<uint32_t>(Memory::kGradMax) + lane,
          lane == block ? larger(most, bits) : bits
      );
    }
  }

  // dL and dM: blocks below the diagonal in fp16, diagonal blocks in float.
  __device__ __forceinline__ void make_score_grads() const {
    constexpr int kCount = 4 / kParts;
    const bool scores = share % 2 != 0;
    const int part = share / 2;
    float c[kCount][2][4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      clear(c[i]);
    }
#pragma unroll
    for (int k = 0; k < kV / 16; ++k) {
      uint32_t a[4], u[1][4];
      Rows::load_a(a, tile(scores ? Memory::kOut : Memory::kY), block * 16, k * 16);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = part + i * kParts;
        if (column <= block) {
          Rows::load_b_transposed(u[0], tile(Memory::kWork), column * 16, k * 16);
          multiply_add(c[i], a, u);
        }
      }
    }
    const float factor = scores ? static_cast<float>(b.p.common.options.scale) * out_unit()
                                : -b.template at<float>(Memory::kYUnit)[block];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = part + i * kParts;
      if (column <= block) {
        const float unit = factor * u_unit(column);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            c[i][n][x] *= unit;
          }
        }
        if (column < block) {
          largest = larger(largest, largest_of(c[i]));
        } else {
          // two diagonal blocks of 8 rows; the one between them is like those before
          largest = larger(largest, larger(magnitude(c[i][0][2]), magnitude(c[i][0][3])));
          float* diagonal = b.template at<float>(Memory::kDiagonal) + (scores ? kBlocks * 64 : 0) +
                            2 * block * 64;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
              const int col = t * 2 + x;
              const bool inside = scores ? col <= g : col < g;
              diagonal[half * 64 + g * 8 + col] = inside ? c[i][half][half * 2 + x] : 0.0f;
            }
          }
        }
      }
    }
    uint32_t* most = b.template at<uint32_t>(Memory::kGradMax) + block;
    raise_all(largest, least_unit());
    __syncthreads();
    const float inverse = unit_of(*most).inverse;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = part + i * kParts;
      if (column <= block) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Square::store_c(
              b.memory + (scores ? Memory::kScoreGrad : Memory::kKeyGrad),
              block * 16,
              column * 16 + n * 8,
              c[i][n],
              inverse
          );
        }
      }
    }
    __syncthreads();
  }
};

}  // namespace sdm::kda::cuda
