// SPDX-License-Identifier: Apache-2.0
//! @file The state, or in reverse its gradient, from segment to segment of a sequence:
//! S' = P S + B, dS = P^T dS' + R (kda_tensor_segments.cuh).
//!
//! A warp carries 16 value columns of S^T in float registers, as the scans do; a block has 64. Both
//! factors are sums of two bfloat16, whose three larger products leave errors of 2^-16 of a
//! product, and which have float's range, so that nothing is scaled.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_ring.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_state.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.cuh"

namespace sdm::kda::cuda {

struct KdaSegmentChainArgs {
  KdaDims dims;
  KdaWindow window;
  DeviceIntegers cu_seqlens;
  KdaSegments segments;
  int buffers;  // of the ring
};

template <int kK>
using TransitionRing = RecordRing<2 * kK * kK * 2, 128>;

// Accumulators as the sum of two operands.
template <int kK>
__device__ __forceinline__ void split_operands(
    uint32_t (&high)[kK / 16][4], uint32_t (&low)[kK / 16][4], const float (&c)[kK / 8][4]
) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = c[2 * k + i / 2][i % 2 * 2], y = c[2 * k + i / 2][i % 2 * 2 + 1];
      high[k][i] = pack_bf16(x, y);
      const float2 rounded = unpack_bf16(high[k][i]);
      low[k][i] = pack_bf16(x - rounded.x, y - rounded.y);
    }
  }
}

// c += a b with b [K, K] in panels. Forward b[k][n] is row k, column n of what lies there, reverse
// row n, column k.
template <int kK, bool kReverse>
__device__ __forceinline__ void add_transition_product(
    float (&c)[kK / 8][4], const uint32_t (&a)[kK / 16][4], PanelPlace panels
) {
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    add_bf16_product<kReverse, 0>(
        c, a[k], panels + (kReverse ? k / 4 : k / 4 * (kK / 64)) * kPanelBytes, k % 4
    );
    if constexpr (kK == 128) {
      add_bf16_product<kReverse, 8>(
          c, a[k], panels + (kReverse ? 2 + k / 4 : k / 4 * 2 + 1) * kPanelBytes, k % 4
      );
    }
  }
}

template <int kK>
__device__ __forceinline__ void load_part(float (&x)[kK / 8][4], const float* from) {
  from += threadIdx.x % 32 * 4;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float4 y = *reinterpret_cast<const float4*>(from + n * 128);
    x[n][0] = y.x;
    x[n][1] = y.y;
    x[n][2] = y.z;
    x[n][3] = y.w;
  }
}

template <int kK>
__device__ __forceinline__ void store_part(float* to, const float (&x)[kK / 8][4]) {
  to += threadIdx.x % 32 * 4;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    *reinterpret_cast<float4*>(to + n * 128) = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
  }
}

// Largest magnitudes of the lane's part of both columns, from the operand, as take_carry() wants
// them.
template <int kK>
__device__ __forceinline__ void store_peaks(float* to, const uint32_t (&operand)[kK / 16][4]) {
  uint32_t low = 0, high = 0;
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    low = largest_bf16(low, largest_bf16(operand[k][0], operand[k][2]));
    high = largest_bf16(high, largest_bf16(operand[k][1], operand[k][3]));
  }
  const float2 a = unpack_bf16(low);
  const float2 b = unpack_bf16(high);
  *reinterpret_cast<float2*>(to + kK * 16 + threadIdx.x % 32 * 2) =
      make_float2(fmaxf(a.x, a.y), fmaxf(b.x, b.y));
}

// Grid: 64 value columns, HV, sequences of the window.
template <int kK, bool kReverse>
__global__ void __launch_bounds__(128, 1) kda_segment_chain_kernel(
    const __grid_constant__ KdaSegmentChainArgs args
) {
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  const KdaDims& dims = args.dims;
  const KdaWindow& window = args.window;
  const KdaSegments& segments = args.segments;
  const int64_t hv = blockIdx.y;
  KdaSegmentRow row;
  const bool valid = kda_segment_row(row, args.cu_seqlens, window, blockIdx.z, dims);
  wait_for_previous_kernel();
  allow_next_kernel();
  if (!valid) {
    return;
  }
  const int64_t column0 = blockIdx.x * 64 + threadIdx.x / 32 * 16;
  const int64_t first = row.first_in_window(window);
  const int64_t slot = row.slot(window, first);  // of the first; the others follow it
  const int count = static_cast<int>(row.count(window, first));
  const bool ends = first + count == row.segments(window);
  // Those that another follows, and of these the ones with something in front.
  const int links = count - (ends ? 1 : 0);
  const int products = links - (first == 0 && links > 0 ? 1 : 0);
  if (count <= 0 || (links == 0 && (!kReverse || first == 0))) {
    return;
  }
  TransitionRing<kK> ring(
      kda_shared,
      args.buffers,
      segments.transition(dims, kReverse ? slot + links - 1 : slot + links - products, hv),
      (kReverse ? -1 : 1) * dims.HV * KdaSegments::transition_bytes(kK),
      products
  );

  const auto carry = [&](int64_t parity) {
    return segments.carried(dims, window, parity, row.sequence.index, hv, column0);
  };
  // Of segment `i` of those in the window.
  const auto offset = [&](int i) {
    const int64_t at = !kReverse ? slot + i : (i > 0 ? slot + i - 1 : segments.slots + row.index);
    return KdaSegments::part(segments.offsets, dims, at, hv, column0);
  };
  ScanState<kK> state;
  uint32_t high[kK / 16][4], low[kK / 16][4];
  // Forward the state behind segment `i`, reverse the gradient in front of it, where nothing of the
  // next window hangs on it. The peaks are those of the operand.
  const auto place = [&](int i) {
    if (kReverse ? i == 0 : i + 1 == count) {
      return carry(kReverse ? window.parity : window.parity ^ 1);
    }
    return KdaSegments::part(
        segments.states, dims, kReverse ? slot + i - 1 : slot + i, hv, column0
    );
  };

  int i;                // segment of the next product
  float* to = nullptr;  // where the state has to go
  if constexpr (kReverse) {
    i = links - 1;
    state.take_carry(ends ? offset(count - 1) : carry(1 - window.parity));
    to = place(ends ? count - 1 : count);
  } else {
    i = links - products;
    state.take_carry(first == 0 ? offset(0) : carry(window.parity));
    to = first == 0 ? place(0) : nullptr;
  }
  float next[kK / 8][4];
  if (products > 0) {
    load_part<kK>(next, offset(i));
  }
  ring.fill();
#pragma unroll 1
  for (int left = products; left > 0; --left) {
    split_operands<kK>(high, low, state.s);
    if (to != nullptr) {
      store_part<kK>(to, state.s);
    }
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        state.s[n][j] = next[n][j];
      }
    }
    const PanelPlace panels = PanelPlace::at(ring.memory + ring.wait());
    settle(high);
    settle(low);
    settle(state.s);
    begin_products();
    add_transition_product<kK, kReverse>(state.s, low, panels);
    add_transition_product<kK, kReverse>(state.s, high, panels + kK * kK * 2);
    add_transition_product<kK, kReverse>(state.s, high, panels);
    end_products();
    if (to != nullptr) {
      store_peaks<kK>(to, high);
    }
    to = place(i);
    i += kReverse ? -1 : 1;
    if (left > 1) {
      load_part<kK>(next, offset(i));
    }
    wait_products<0>();
    settle(state.s);
    ring.replace();
  }
  if (to != nullptr) {
    split_operands<kK>(high, low, state.s);
    store_part<kK>(to, state.s);
    store_peaks<kK>(to, high);
  }
}

}  // namespace sdm::kda::cuda
