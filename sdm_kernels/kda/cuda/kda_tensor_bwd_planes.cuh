// SPDX-License-Identifier: Apache-2.0
//! @file The other matrix products of the token stage of the tensor backward: for every row i and
//! the key channels of a pass (blocks and decays as in kda_tensor_bwd_tokens.cuh) the planes
//!   0: scale exp(start) dO S^T + sum over earlier blocks of dM Y         times Xq: into dG
//!   1: -exp(start) y S^T       + sum over earlier blocks of dL Y         times Xk: into dG
//!   2: exp(from the end) U dS^T + sum over later blocks of dM^T Xq + dL^T Xk    times -Y: into dG
//! in units of dL and dM. A warp has the strip of 16 rows that it had before and 16 key channels.
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
  using Result = float[kTiles][4];

  __device__ __forceinline__ explicit TokenPlanes(const TokenBlock<kK, kV>& in) : Base(in) {}

  // First channel in the pass of a lane's two in tile n.
  __device__ __forceinline__ int channel(int n) const { return half * 16 + n * 8 + t * 2; }

  // Decays over a block of rows or two of them (kBlockDecay, kPairDecay) as fragments have their
  // channels: two of a lane in a result, one in an operand.
  __device__ __forceinline__ float2 result_decay(int table, int i, int n) const {
    return *b.template at<float2>(table + i * Memory::kPassFloats + channel(n) * 4);
  }

  __device__ __forceinline__ float operand_decay(int table, int i, int n) const {
    return b.template at<float>(table + i * Memory::kPassFloats)[half * 16 + n * 8 + g];
  }

  // c *= m in the first (0) or second (1) eight rows.
  template <int kRows>
  __device__ __forceinline__ static void decay_rows(float (&c)[4], float2 m) {
    c[2 * kRows] *= m.x;
    c[2 * kRows + 1] *= m.y;
  }

  __device__ __forceinline__ static uint32_t both(float x) { return pack_f16(x, x); }

  // q += dM Y and k += dL Y over the strips in front of the warp's, whose Y decay to its start.
  __device__ __forceinline__ void add_earlier(Result& q, Result& k) const {
    float m[kTiles] = {1.0f, 1.0f};
#pragma unroll 1
    for (int i = block - 1; i >= 0; --i) {
      uint32_t dm[4], dl[4], y[4];
      Keys::load_b(y, tile(Memory::kYk), i * 16, half * 16);
      Square::load_a(dm, tile(Memory::kScoreGrad), block * 16, i * 16);
      Square::load_a(dl, tile(Memory::kKeyGrad), block * 16, i * 16);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float third = operand_decay(Memory::kBlockDecay, i * 4 + 3, n);
        const float first = operand_decay(Memory::kBlockDecay, i * 4 + 1, n);
        const float high = t < 2 ? m[n] * third : m[n];
        const float middle = m[n] * operand_decay(Memory::kPairDecay, i * 2 + 1, n);
        const float low = t < 2 ? middle * first : middle;
        m[n] = middle * operand_decay(Memory::kPairDecay, i * 2, n);
        y[2 * n] = multiply_f16(y[2 * n], both(low));
        y[2 * n + 1] = multiply_f16(y[2 * n + 1], both(high));
        mma_f16(q[n], dm, y[2 * n], y[2 * n + 1]);
        mma_f16(k[n], dl, y[2 * n], y[2 * n + 1]);
      }
    }
  }

  // r += dM^T Xq + dL^T Xk over the strips behind the warp's, whose X decay from its end.
  __device__ __forceinline__ void add_later(Result& r) const {
    float m[kTiles] = {1.0f, 1.0f};
#pragma unroll 1
    for (int i = block + 1; i < 4; ++i) {
      uint32_t dm[4], dl[4], xq[4], xk[4];
      Keys::load_b(xq, tile(Memory::kXq), i * 16, half * 16);
      Keys::load_b(xk, tile(Memory::kXk), i * 16, half * 16);
      Square::load_a_transposed(dm, tile(Memory::kScoreGrad), i * 16, block * 16);
      Square::load_a_transposed(dl, tile(Memory::kKeyGrad), i * 16, block * 16);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float zeroth = operand_decay(Memory::kBlockDecay, i * 4, n);
        const float second = operand_decay(Memory::kBlockDecay, i * 4 + 2, n);
        const uint32_t low = both(t < 2 ? m[n] : m[n] * zeroth);
        const float middle = m[n] * operand_decay(Memory::kPairDecay, i * 2, n);
        const uint32_t high = both(t < 2 ? middle : middle * second);
        m[n] = middle * operand_decay(Memory::kPairDecay, i * 2 + 1, n);
        mma_f16(r[n], dm, multiply_f16(xq[2 * n], low), multiply_f16(xq[2 * n + 1], high));
        mma_f16(r[n], dl, multiply_f16(xk[2 * n], low), multiply_f16(xk[2 * n + 1], high));
      }
    }
  }

  // The same inside the strip. Its D are zero but for pairs of different blocks, the row's behind
  // the column's. First the second eight rows with the first, then in both the second four with the
  // first; results decay in between.
  __device__ __forceinline__ void add_inside(Result& q, Result& k, Result& r) const {
    uint32_t dm[4], dl[4], y[4];
    Keys::load_b(y, tile(Memory::kYk), block * 16, half * 16);
    Square::load_a(dm, tile(Memory::kScoreGrad), block * 16, block * 16);
    Square::load_a(dl, tile(Memory::kKeyGrad), block * 16, block * 16);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 m = result_decay(Memory::kPairDecay, 2 * block, n);
      decay_rows<1>(q[n], m);
      decay_rows<1>(k[n], m);
      const float first = operand_decay(Memory::kBlockDecay, block * 4 + 1, n);
      const uint32_t low = multiply_f16(y[2 * n], both(t < 2 ? first : 1.0f));
      mma_f16_8(q[n], 0, dm[1], low);
      mma_f16_8(k[n], 0, dl[1], low);
    }
    if (g >= 4) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 low = result_decay(Memory::kBlockDecay, block * 4, n);
        const float2 high = result_decay(Memory::kBlockDecay, block * 4 + 2, n);
        decay_rows<0>(q[n], low);
        decay_rows<0>(k[n], low);
        decay_rows<1>(q[n], high);
        decay_rows<1>(k[n], high);
      }
    }
    dm[1] = dl[1] = dm[2] = dl[2] = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_f16(q[n], dm, y[2 * n], y[2 * n + 1]);
      mma_f16(k[n], dl, y[2 * n], y[2 * n + 1]);
    }

    uint32_t xq[4], xk[4];
    Keys::load_b(xq, tile(Memory::kXq), block * 16, half * 16);
    Keys::load_b(xk, tile(Memory::kXk), block * 16, half * 16);
    Square::load_a_transposed(dm, tile(Memory::kScoreGrad), block * 16, block * 16);
    Square::load_a_transposed(dl, tile(Memory::kKeyGrad), block * 16, block * 16);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      decay_rows<0>(r[n], result_decay(Memory::kPairDecay, 2 * block + 1, n));
      const float second = operand_decay(Memory::kBlockDecay, block * 4 + 2, n);
      const uint32_t high = both(t < 2 ? 1.0f : second);
      mma_f16_8(r[n], dm[2], 0, multiply_f16(xq[2 * n + 1], high));
      mma_f16_8(r[n], dl[2], 0, multiply_f16(xk[2 * n + 1], high));
    }
    if (g < 4) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        decay_rows<0>(r[n], result_decay(Memory::kBlockDecay, block * 4 + 1, n));
        decay_rows<1>(r[n], result_decay(Memory::kBlockDecay, block * 4 + 3, n));
      }
    }
    dm[1] = dl[1] = dm[2] = dl[2] = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      mma_f16(r[n], dm, xq[2 * n], xq[2 * n + 1]);
      mma_f16(r[n], dl, xk[2 * n], xk[2 * n + 1]);
    }
  }

  // Keeps the sums of S dS over the warp's share of the value columns: the diagonal of a product.
  __device__ __forceinline__ void keep_state_grads(int first, float inverse) const {
    Result c;
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
      sum *= inverse;
      b.template at<float>(Memory::kEndGrad)[block * kPass + i] = sum;
    }
  }

  // Keeps the sums of Y times what plane 2 begins with over the strip, `r`.
  __device__ __forceinline__ void keep_end_sums(const Result& r) const {
    uint32_t y[4];
    Keys::load_c(y, tile(Memory::kYk), block * 16, half * 16);
    float low[kTiles][2], high[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 m = result_decay(Memory::kPairDecay, 2 * block + 1, n);
      low[n][0] = r[n][0] * m.x;
      low[n][1] = r[n][1] * m.y;
      high[n][0] = r[n][2];
      high[n][1] = r[n][3];
    }
    if (g < 4) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 first = result_decay(Memory::kBlockDecay, block * 4 + 1, n);
        const float2 third = result_decay(Memory::kBlockDecay, block * 4 + 3, n);
        low[n][0] *= first.x;
        low[n][1] *= first.y;
        high[n][0] *= third.x;
        high[n][1] *= third.y;
      }
    }
    float sum[4];  // of (tile, channel): over g
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 y_low = unpack_f16(y[2 * n]), y_high = unpack_f16(y[2 * n + 1]);
      sum[2 * n] = y_low.x * low[n][0] + y_high.x * high[n][0];
      sum[2 * n + 1] = y_low.y * low[n][1] + y_high.y * high[n][1];
    }
    int mask = 16;
#pragma unroll
    for (int count = 2; count > 0; count /= 2) {
      const bool upper = (threadIdx.x & static_cast<unsigned>(mask)) != 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float send = upper ? sum[i] : sum[i + count];
        const float keep = upper ? sum[i + count] : sum[i];
        sum[i] = keep + __shfl_xor_sync(kWarpMask, send, mask);
      }
      mask /= 2;
    }
    // lane groups g and g + 1, g even, now have the halves of sum number g / 2
    sum[0] += __shfl_xor_sync(kWarpMask, sum[0], mask);
    const int col = half * 16 + g / 4 * 8 + t * 2 + g / 2 % 2;
    if (g % 2 == 0) {
      b.template at<float>(Memory::kEndSums)[block * kPass + col] = sum[0];
    }
  }

  // Decays from the start of the chunk to that of the strip, and from its end to that of the chunk:
  // of one channel by each lane, then of those that it has in a result.
  __device__ __forceinline__ void load_outside(
      float2 (&from_start)[kTiles], float2 (&to_end)[kTiles]
  ) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const bool before = lane < 16;
    const int count = before ? 2 * block : kTokenWarps - 2 - 2 * block;
    const float* from = b.template at<float>(Memory::kPairDecay) + half * 16 + lane % 16 +
                        (before ? 0 : 2 * block + 2) * kPass;
    float own = 1.0f;
#pragma unroll
    for (int i = 0; i < kTokenWarps - 2; ++i) {
      if (i < count) {
        own *= from[i * kPass];
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int at = n * 8 + t * 2;
      from_start[n].x = __shfl_sync(kWarpMask, own, at);
      from_start[n].y = __shfl_sync(kWarpMask, own, at + 1);
      to_end[n].x = __shfl_sync(kWarpMask, own, at + 16);
      to_end[n].y = __shfl_sync(kWarpMask, own, at + 17);
    }
  }

  // The three planes of the channels from `first` on.
  __device__ __forceinline__ void make_planes(int first) const {
    // What the compiler can't tell from the pass before it does not keep in registers until the
    // next.
    TokenPlanes present(*this);
    asm volatile("" : "+r"(present.block), "+r"(present.half), "+r"(present.g), "+r"(present.t));
    present.make_present_planes(first);
  }

  __device__ __forceinline__ void make_present_planes(int first) const {
    const float inverse = inverse_power(grad_unit());
    Result q, k, r;
#if KDA_WARPGROUP_PRODUCTS
    {
      constexpr int kPanel = kPass * 128;
      // The same in all lanes, which the compiler can't see; and it would keep the addresses of all
      // steps from pass to pass.
      const uint32_t base = __shfl_sync(kWarpMask, b.base, 0);
      const uint32_t rows = __shfl_sync(kWarpMask, b.base + half * (16 * 128), 0);
      begin_products();
      start_group_product<kV, kPanel>(q, base + Memory::kOut, rows + Memory::kState);
      start_group_product<kV, kPanel>(k, base + Memory::kY, rows + Memory::kState);
      start_group_product<kV, kPanel>(r, base + Memory::kWork, rows + Memory::kPassGrad);
      end_products();
      keep_state_grads(first, inverse);
      wait_products<0>();
      settle(q);
      settle(k);
      settle(r);
    }
#else
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
      keep_state_grads(first, inverse);
    }
#endif
    float2 from_start[kTiles], to_end[kTiles];
    load_outside(from_start, to_end);
    // products of two units first, which the unit of dL and dM bounds
    const float scale = static_cast<float>(b.p.common.options.scale);
    const float q_unit[2] = {scale * out_unit(0), scale * out_unit(1)};
    const float k_unit = -y_unit(), r_unit = u_unit(block);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int at = first + channel(n);
      const float of_state = b.state_unit(at);
      const float of_grad = b.template at<float>(Memory::kStateGradUnit)[at / (kK / 4)];
      const float unit_q[2] = {q_unit[0] * of_state * inverse, q_unit[1] * of_state * inverse};
      const float unit_k = k_unit * of_state * inverse, unit_r = r_unit * of_grad * inverse;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float decay = x % 2 == 0 ? from_start[n].x : from_start[n].y;
        q[n][x] *= unit_q[x / 2] * decay;
        k[n][x] *= unit_k * decay;
        r[n][x] *= unit_r * (x % 2 == 0 ? to_end[n].x : to_end[n].y);
      }
    }
    keep_end_sums(r);
    add_earlier(q, k);
    add_later(r);
    add_inside(q, k, r);
    __syncthreads();  // the planes go over the states
    store_plane(0, q);
    store_plane(1, k);
    store_plane(2, r);
  }

  __device__ __forceinline__ void store_plane(int which, const Result& c) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *b.template at<float2>(Memory::plane(which, block * 16 + i * 8 + g, channel(n))) =
            make_float2(c[n][2 * i], c[n][2 * i + 1]);
      }
    }
  }
};

}  // namespace sdm::kda::cuda
