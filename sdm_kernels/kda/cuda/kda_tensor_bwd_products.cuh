// SPDX-License-Identifier: Apache-2.0
//! @file Matrix products of the token stage of the tensor backward.
//!
//!   U  = inverse diag(beta) (v - kd S)
//!   dL = -strictly lower part of y U^T          dM = scale * lower part of dO U^T
//! and for every row i (blocks of 16 rows, decays as in kda_tensor_bwd_tokens.cuh) the planes
//!   0: scale exp(start) dO S^T + sum over earlier blocks of dM Y         times Xq: into dG
//!   1: -exp(start) y S^T       + sum over earlier blocks of dL Y         times Xk: into dG
//!   2: exp(from the end) U dS^T + sum over later blocks of dM^T Xq + dL^T Xk    times -Y: into dG
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
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < kK / 8; ++i) {
      top = fmaxf(top, b.state_unit(i));
    }
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t a[4], s[kValueTiles / 2][4];
      Keys::load_a(a, tile(Memory::kWork), block * 16, k * 16);
      const uint32_t low = factor_pair(b.state_unit(2 * k) / top);
      const uint32_t high = factor_pair(b.state_unit(2 * k + 1) / top);
      a[0] = multiply_pair(a[0], low);
      a[1] = multiply_pair(a[1], low);
      a[2] = multiply_pair(a[2], high);
      a[3] = multiply_pair(a[3], high);
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
      multiply_fragment(a, factor_pair(units[i * kSplit + share] / top));
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
          float* diagonal =
              b.template at<float>(Memory::kDiagonal) + (scores ? 4 * 256 : 0) + block * 256;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
              const int row = x / 2 * 8 + g, col = n * 8 + t * 2 + x % 2;
              const bool inside = scores ? col <= row : col < row;
              diagonal[row * 16 + col] = inside ? c[i][n][x] : 0.0f;
            }
          }
        }
      }
    }
    uint32_t* most = b.template at<uint32_t>(Memory::kGradMax) + block;
    raise(most, largest);
    __syncthreads();
    const float inverse = unit_of(*most).inverse;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = part + i * kParts;
      if (column < block) {
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

  // c = c * decay of block i + unit * (16 rows of D) Y of block i.
  __device__ __forceinline__ void add_earlier(
      float (&c)[kKeyTiles][4], const uint32_t (&a)[4], const uint32_t (&y)[2][4], int i, float unit
  ) const {
    float d[kKeyTiles][4];
    clear(d);
    multiply_add(d, a, y);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 m = decay(i, n);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        c[n][x] = c[n][x] * (x % 2 == 0 ? m.x : m.y) + d[n][x] * unit;
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

    const float q_unit = static_cast<float>(b.p.common.options.scale) * out_unit();
    const float k_unit = -b.template at<float>(Memory::kYUnit)[block];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float s_unit = b.state_unit(share * 4 + n);
      const float r_unit =
          u_unit(block) * b.template at<float>(Memory::kStateGradUnit)[channel(n) / (kK / 4)];
      float2 to_end = make_float2(1.0f, 1.0f);
      for (int i = block + 1; i < 4; ++i) {
        const float2 m = decay(i, n);
        to_end.x *= m.x;
        to_end.y *= m.y;
      }
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        q[n][x] *= q_unit * s_unit;
        k[n][x] *= k_unit * s_unit;
        r[n][x] *= r_unit * (x % 2 == 0 ? to_end.x : to_end.y);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 y = unpack_f16(
            *b.template at<uint32_t>(Memory::kYk + Keys::at(block * 16 + half * 8 + g, channel(n)))
        );
        sum.x += y.x * r[n][2 * half];
        sum.y += y.y * r[n][2 * half + 1];
      }
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        sum.x += __shfl_xor_sync(kWarpMask, sum.x, mask);
        sum.y += __shfl_xor_sync(kWarpMask, sum.y, mask);
      }
      if (g == 0) {
        *b.template at<float2>(Memory::kEndSums + (block * kK + channel(n)) * 4) = sum;
      }
    }

    for (int i = 0; i < block; ++i) {
      uint32_t a[4], y[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Keys::load_b(y[n], tile(Memory::kYk), i * 16, share * 32 + n * 16);
      }
      Square::load_a(a, tile(Memory::kScoreGrad), block * 16, i * 16);
      add_earlier(q, a, y, i, grad_unit(block));
      Square::load_a(a, tile(Memory::kKeyGrad), block * 16, i * 16);
      add_earlier(k, a, y, i, grad_unit(block));
    }

    float2 between[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      between[n] = make_float2(1.0f, 1.0f);
    }
    for (int i = block + 1; i < 4; ++i) {
      uint32_t a[4], x[2][4];
      float d[kKeyTiles][4];
      clear(d);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Keys::load_b(x[n], tile(Memory::kXq), i * 16, share * 32 + n * 16);
      }
      Square::load_a_transposed(a, tile(Memory::kScoreGrad), i * 16, block * 16);
      multiply_add(d, a, x);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        Keys::load_b(x[n], tile(Memory::kXk), i * 16, share * 32 + n * 16);
      }
      Square::load_a_transposed(a, tile(Memory::kKeyGrad), i * 16, block * 16);
      multiply_add(d, a, x);
      const float unit = grad_unit(i);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          r[n][e] += d[n][e] * (unit * (e % 2 == 0 ? between[n].x : between[n].y));
        }
        const float2 m = decay(i, n);
        between[n].x *= m.x;
        between[n].y *= m.y;
      }
    }
    __syncthreads();  // the planes go over the operands of the products
    store_plane(0, q);
    store_plane(1, k);
    store_plane(2, r);
    __syncthreads();
  }

  __device__ __forceinline__ void store_plane(int plane, const float (&c)[kKeyTiles][4]) const {
    float* to = b.template at<float>(Memory::kPlanes) + plane * kChunkRows * Memory::kPitch;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(to + (block * 16 + half * 8 + g) * Memory::kPitch + channel(n)) =
            make_float2(c[n][2 * half], c[n][2 * half + 1]);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
