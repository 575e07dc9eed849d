// SPDX-License-Identifier: Apache-2.0
//! @file Matrix products of the token stage of the tensor backward.
//!
//!   U  = inverse diag(beta) (v - kd S)
//!   dL = -strictly lower part of y U^T          dM = scale * lower part of dO U^T
//! and for every row i (blocks and decays as in kda_tensor_bwd_tokens.cuh) the planes
//!   0: scale exp(start) dO S^T + sum over earlier blocks of dM Y         times Xq: into dG
//!   1: -exp(start) y S^T       + sum over earlier blocks of dL Y         times Xk: into dG
//!   2: exp(from the end) U dS^T + sum over later blocks of dM^T Xq + dL^T Xk    times -Y: into dG
//! Warp w has rows 16 (w % 4), and a share w / 4 of the columns.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_mma8.cuh"

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
  static constexpr int kValueTiles = kV / 8 / kSplit;  // 8-column tiles of a warp
  static constexpr int kKeyTiles = 4;                  // 32 key channels of a warp
  static constexpr int kParts = kSplit / 2;            // warps that share 16 rows of dL or of dM

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

  // beta (v - kd S), then U, both into the work buffer.
  __device__ __forceinline__ void make_updates() const {
    float e[kValueTiles][4];
    clear(e);
    float top = *b.template at<float>(Memory::kStateTop);
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
    const KdaUnit unit = unit_of_warp(e);
    float* units = b.template at<float>(Memory::kWriteUnit);
    if (threadIdx.x % 32 == 0) {
      units[block * kSplit + share] = unit.unit;
    }
    __syncthreads();  // kd is no longer needed
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      Rows::store_c(
          b.memory + Memory::kWork, block * 16, (share * kValueTiles + n) * 8, e[n], unit.inverse
      );
    }
    __syncthreads();

    top = 0.0f;
    for (int i = 0; i <= block; ++i) {
      top = fmaxf(top, units[i * kSplit + share]);
    }
    clear(e);
    for (int i = 0; i <= block; ++i) {
      uint32_t a[4], w[kValueTiles / 2][4];
      Square::load_a(a, tile(Memory::kInverse), block * 16, i * 16);
      multiply_fragment(a, share_pair(units[i * kSplit + share], top));
#pragma unroll
      for (int n = 0; n < kValueTiles / 2; ++n) {
        Rows::load_b(w[n], tile(Memory::kWork), i * 16, share * kValueTiles * 8 + n * 16);
      }
      multiply_add(e, a, w);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        e[n][x] *= top;
      }
    }
    uint32_t* largest = b.template at<uint32_t>(Memory::kUMax) + block;
    raise(largest, largest_of(e));
    __syncthreads();  // beta e is no longer needed
    const float inverse = unit_of(*largest).inverse;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      Rows::store_c(
          b.memory + Memory::kWork, block * 16, (share * kValueTiles + n) * 8, e[n], inverse
      );
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

  __device__ __forceinline__ int channel(int n) const { return share * 32 + n * 8 + t * 2; }

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
      uint32_t dm[4], dl[4], y[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Keys::load_b(y[n], tile(Memory::kYk), i * 16, share * 32 + n * 16);
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
      uint32_t dm[4], dl[4], xq[2][4], xk[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Keys::load_b(xq[n], tile(Memory::kXq), i * 16, share * 32 + n * 16);
        Keys::load_b(xk[n], tile(Memory::kXk), i * 16, share * 32 + n * 16);
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

  // gamma times the sums of S dS over the value columns, one key channel per four lanes.
  __device__ __forceinline__ void sum_state_grads() const {
    const int k = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kV / 32; ++i) {
      const int col = (part + 4 * i) * 8;
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
      uint32_t a[4], s[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        load_state_transposed(s[n], share * 32 + n * 16, v * 16);
      }
      Rows::load_a(a, tile(Memory::kOut), block * 16, v * 16);
      multiply_add(q, a, s);
      Rows::load_a(a, tile(Memory::kY), block * 16, v * 16);
      multiply_add(k, a, s);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        State::load_b_transposed(s[n], tile(Memory::kStateGrad), share * 32 + n * 16, v * 16);
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
      const float s_unit = b.state_unit(share * 4 + n);
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
