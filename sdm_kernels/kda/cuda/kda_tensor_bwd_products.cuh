// SPDX-License-Identifier: Apache-2.0
//! @file First matrix products of the token stage of the tensor backward:
//!   U  = inverse diag(beta) (v - kd S)
//!   dL = -strictly lower part of y U^T          dM = scale * lower part of dO U^T
//! Warp w has rows 16 (w % 4), and half w / 4 of the columns, or dL or dM.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_access.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_tokens.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_warpgroup.cuh"

namespace sdm::kda::cuda {

template <int kK, int kV, DType kType>
struct TokenProducts {
  using Memory = TokenMemory<kK, kV>;
  using Keys = typename Memory::Keys;
  using Rows = typename Memory::Rows;
  using Square = typename Memory::Square;
  using State = typename Memory::State;
  static constexpr int kValueTiles = kV / 16;  // 8-column tiles of a warp

  const TokenBlock<kK, kV>& b;
  int block, half, g, t;

  __device__ __forceinline__ explicit TokenProducts(const TokenBlock<kK, kV>& in) : b(in) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    block = warp % 4;
    half = warp / 4;
    g = lane / 4;
    t = lane % 4;
  }

  __device__ __forceinline__ uint32_t tile(int offset) const {
    return b.base + static_cast<uint32_t>(offset);
  }

  // Addresses of the lane in fragments at (row, 16 i) of a tile, i = 0 to 3, that the compiler does
  // not take apart again: everything else is a constant offset.
  __device__ __forceinline__ static void lane_addresses(
      uint32_t (&out)[4], uint32_t tile, int row, int lane
  ) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = tile + static_cast<uint32_t>(row * 128 + (lane ^ (i * 32)));
      asm("" : "+r"(out[i]));
    }
  }

  __device__ __forceinline__ int value_column(int n) const {
    return (half * kValueTiles + n) * 8 + t * 2;
  }

  // The warp's rows and columns of v.
  __device__ __forceinline__ void load_values(uint32_t (&v)[2][kValueTiles]) const {
    const KdaView& view = b.p.common.tokens.v;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = block * 16 + i * 8 + g;
      const uint16_t* from = b.row_pointer(view, row, b.hv) + value_column(0);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        if (b.p.aligned_v) {
          v[i][n] = load_pair_or_zero(from + n * 8, row < b.rows);
        } else {
          v[i][n] = row < b.rows ? from[n * 8] | static_cast<uint32_t>(from[n * 8 + 1]) << 16 : 0;
        }
      }
    }
  }

  // c = the warp's rows of kd times 64 columns of S, from step kStep of the products on.
  template <int kStep>
  __device__ __forceinline__ static void add_state_products(
      float (&c)[8][4], const uint32_t (&a)[kK / 16][4], PanelPlace columns
  ) {
    add_row_product<kStep, 0, 4, kStep == 0>(c, a[kStep], columns);
    if constexpr (kStep + 1 < kK / 16) {
      add_state_products<kStep + 1>(c, a, columns);
    }
  }

  // beta (v - kd S) of the warp's rows and columns.
  __device__ __forceinline__ void make_writes(float (&e)[kValueTiles][4]) const {
    constexpr int kUnits = kK / kUnitKeys;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const float unit = lane < kUnits ? b.template at<float>(Memory::kStateUnit)[lane] : 0.0f;
    // units are positive, so that their bits have their order
    const float top = __uint_as_float(__reduce_max_sync(kWarpMask, __float_as_uint(unit)));
    const uint32_t own = lane < kUnits ? share_pair(unit, top) : 0;
    uint32_t values[2][kValueTiles];
    load_values(values);
    const auto load_keys = [&](uint32_t (&a)[4], int k) {
      Keys::load_a(a, tile(Memory::kWork), block * 16, k * 16);
      const uint32_t low = __shfl_sync(kWarpMask, own, 4 * k + t / 2);
      const uint32_t high = __shfl_sync(kWarpMask, own, 4 * k + 2 + t / 2);
      a[0] = multiply_pair(a[0], low);
      a[1] = multiply_pair(a[1], low);
      a[2] = multiply_pair(a[2], high);
      a[3] = multiply_pair(a[3], high);
    };
    if constexpr (KDA_WARPGROUP_PRODUCTS && kV == 128) {
      uint32_t a[kK / 16][4];
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
        load_keys(a[k], k);
      }
      begin_products();
      // the half is the same in all lanes, which the compiler can't see
      const uint32_t columns = __shfl_sync(kWarpMask, tile(Memory::kState) + half * (kK * 128), 0);
      add_state_products<0>(e, a, PanelPlace::at(columns));
      end_products();
      wait_products<0>();
      settle(e);
    } else {
      clear(e);
#pragma unroll 2
      for (int k = 0; k < kK / 16; ++k) {
        uint32_t a[4], s[kValueTiles / 2][4];
        load_keys(a, k);
#pragma unroll
        for (int n = 0; n < kValueTiles / 2; ++n) {
          State::load_b(s[n], tile(Memory::kState), k * 16, half * kValueTiles * 8 + n * 16);
        }
        multiply_add(e, a, s);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = block * 16 + i * 8 + g;
      const float beta = b.template at<float>(Memory::kBeta)[row];
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        const float2 v = widen_pair(values[i][n], kType == DType::kBf16);
        e[n][2 * i] = beta * (v.x - e[n][2 * i] * top);
        e[n][2 * i + 1] = beta * (v.y - e[n][2 * i + 1] * top);
      }
    }
  }

  // U = inverse beta (v - kd S) from the work buffer.
  __device__ __forceinline__ void apply_inverse(float (&u)[kValueTiles][4]) const {
    const float* units = b.template at<float>(Memory::kWriteUnit);
    float top = 0.0f;
    for (int i = 0; i <= block; ++i) {
      top = fmaxf(top, units[i * 2 + half]);
    }
    clear(u);
#pragma unroll 1
    for (int i = 0; i <= block; ++i) {
      uint32_t a[4], w[kValueTiles / 2][4];
      Square::load_a(a, tile(Memory::kInverse), block * 16, i * 16);
      multiply_fragment(a, share_pair(units[i * 2 + half], top));
#pragma unroll
      for (int n = 0; n < kValueTiles / 2; ++n) {
        Rows::load_b(w[n], tile(Memory::kWork), i * 16, half * kValueTiles * 8 + n * 16);
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
          b.memory + Memory::kWork, block * 16, (half * kValueTiles + n) * 8, c[n], factor
      );
    }
  }

  // beta (v - kd S), then U, both into the work buffer.
  __device__ __forceinline__ void make_updates() const {
    const bool first = threadIdx.x % 32 == 0;
    float c[kValueTiles][4];
    make_writes(c);
    const KdaUnit unit = unit_of_warp(c);
    if (first) {
      b.template at<float>(Memory::kWriteUnit)[block * 2 + half] = unit.unit;
    }
    __syncthreads();  // kd is no longer needed
    store_work(c, unit.inverse);
    __syncthreads();
    apply_inverse(c);
    const uint32_t largest = __reduce_max_sync(kWarpMask, largest_of(c));
    if (first) {
      b.template at<uint32_t>(Memory::kUMax)[block * 2 + half] = largest;
    }
    __syncthreads();  // beta (v - kd S) is no longer needed
    store_work(c, inverse_power(u_unit(block)));
    publish_operands();
    __syncthreads();
  }

  // Of U in 16 rows.
  __device__ __forceinline__ float u_unit(int i) const {
    const uint32_t* largest = b.template at<uint32_t>(Memory::kUMax) + 2 * i;
    return unit_of(larger(largest[0], largest[1])).unit;
  }

  // Of dO in the warp's first or second eight rows.
  __device__ __forceinline__ float out_unit(int i) const {
    return b.template at<float>(Memory::kOutUnit)[block * 2 + i];
  }

  __device__ __forceinline__ float y_unit() const {
    return b.template at<float>(Memory::kYUnit)[block];
  }

  // Such that numbers divided by it do not overflow: the terms of the planes are below
  // 2^35 * (product of two units).
  __device__ __forceinline__ float least_unit() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float out = 0.0f, y = 0.0f, u = 0.0f, grad = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out = fmaxf(out, b.template at<float>(Memory::kOutUnit)[2 * i]);
      out = fmaxf(out, b.template at<float>(Memory::kOutUnit)[2 * i + 1]);
      y = fmaxf(y, b.template at<float>(Memory::kYUnit)[i]);
      u = fmaxf(u, u_unit(i));
      grad = fmaxf(grad, b.template at<float>(Memory::kStateGradUnit)[i]);
    }
    out *= fabsf(static_cast<float>(b.p.common.options.scale));
    const float own = lane < kK / kUnitKeys ? b.template at<float>(Memory::kStateUnit)[lane] : 0.0f;
    const float state = __uint_as_float(__reduce_max_sync(kWarpMask, __float_as_uint(own)));
    return fmaxf(fmaxf(fmaxf(out, y), grad) * state, u * grad) * 0x1p-80f;
  }

  // Raises the unit of D to the largest magnitude in the warp, and to what keeps finite whatever is
  // summed in that unit.
  __device__ __forceinline__ void raise_unit(uint32_t largest) const {
    uint32_t most = __reduce_max_sync(kWarpMask, largest);
    if (threadIdx.x / 32 == 0) {
      most = larger(most, __float_as_uint(least_unit() * 0x1p13f));
    }
    if (threadIdx.x % 32 == 0) {
      atomicMax(b.template at<uint32_t>(Memory::kGradMax), most);
    }
  }

  // dL and dM, in units of their largest element: what is outside the diagonal blocks of 4 rows in
  // fp16, those in float. Also the sums of k dk over the channels: a row of kd or F is linear in
  // its key and gives beta (dbeta - y v), where beta dbeta = y U; as a key that is written it gives
  // y U once more.
  __device__ __forceinline__ void make_score_grads() const {
    const bool scores = half != 0;
    float c[4][2][4];
#if KDA_WARPGROUP_PRODUCTS
    // the same in all lanes, which the compiler can't see
    const int rows = __shfl_sync(kWarpMask, scores ? Memory::kOut : Memory::kY, 0);
    begin_products();
    start_group_product<kV, kChunkRows * 128>(c, tile(rows), tile(Memory::kWork));
    end_products();
    wait_products<0>();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      settle(c[i]);
    }
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      clear(c[i]);
    }
    constexpr int kPanel = kChunkRows * 128;
    uint32_t at_a[4], at_u[4];
    lane_addresses(at_a, tile(scores ? Memory::kOut : Memory::kY), block * 16, Rows::lane_direct());
    lane_addresses(at_u, tile(Memory::kWork), 0, Rows::lane_crossed());
#pragma unroll
    for (int k = 0; k < kV / 16; ++k) {
      uint32_t a[4], u[1][4];
      load_matrices(a, at_a[k % 4] + k / 4 * kPanel);
      // those above the diagonal are not used; branches would cost more
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices(u[0], at_u[k % 4] + k / 4 * kPanel + i * 16 * 128);
        multiply_add(c[i], a, u);
      }
    }
#endif
    const float scale = static_cast<float>(b.p.common.options.scale);
    const float factor[2] = {
        scores ? scale * out_unit(0) : -y_unit(), scores ? scale * out_unit(1) : -y_unit()
    };
    // rows and columns 4 to 7 of eight; `below`: of the block under the diagonal
    const bool below = g >= 4 && t < 2, inside = (g >= 4) == (t >= 2);
    float* diagonal = b.template at<float>(Memory::kDiagonal) + (scores ? kBlocks * 16 : 0) +
                      (block * 4 + g / 4) * 16 + g % 4 * 4 + t % 2 * 2;
    uint32_t largest = 0;
    float own[2][4];  // of the diagonal block of 16 rows
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float unit = u_unit(i);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          c[i][n][x] *= factor[x / 2] * unit;
          own[n][x] = i == 0 || i == block ? c[i][n][x] : own[n][x];
        }
      }
      const uint32_t of_block = largest_of(c[i]);
      largest = i < block ? larger(largest, of_block) : largest;
    }
    // y U of rows g and g + 8, in the lane with their elements
    const float y_u[2] = {g % 2 == 0 ? own[0][0] : own[0][1], g % 2 == 0 ? own[1][2] : own[1][3]};
    float on_diagonal[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int col = t % 2 * 2 + x;
        const bool lower = inside && (scores ? col <= g % 4 : col < g % 4);
        on_diagonal[n][x] = lower ? own[n][2 * n + x] : 0.0f;
        own[n][2 * n + x] = below ? own[n][2 * n + x] : 0.0f;
        largest = larger(largest, magnitude(on_diagonal[n][x]));
      }
    }
    own[1][0] = own[1][1] = 0.0f;
    largest = larger(largest, largest_of(own));
    raise_unit(largest);
    __syncthreads();
    const float inverse = inverse_power(grad_unit());
    if (inside) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        *reinterpret_cast<float2*>(diagonal + n * 32) =
            make_float2(on_diagonal[n][0] * inverse, on_diagonal[n][1] * inverse);
      }
    }
    if (!scores && t == g / 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = block * 16 + i * 8 + g;
        const float of_row = b.template at<float>(Memory::kBeta)[row] *
                             b.template at<float>(Memory::kValueSums)[row];
        b.template at<float>(Memory::kKeyDot)[row] =
            b.p.common.options.l2norm ? (-2.0f * y_u[i] - of_row) * inverse : 0.0f;
      }
    }
    char* const to = b.memory + (scores ? Memory::kScoreGrad : Memory::kKeyGrad);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < block) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Square::store_c(to, block * 16, i * 16 + n * 8, c[i][n], inverse);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      Square::store_c(to, block * 16, block * 16 + n * 8, own[n], inverse);
    }
  }

  // Of dL and dM.
  __device__ __forceinline__ float grad_unit() const {
    return unit_of(*b.template at<uint32_t>(Memory::kGradMax)).unit;
  }
};

}  // namespace sdm::kda::cuda
