// SPDX-License-Identifier: Apache-2.0
//! @file What a segment does to the state at its start, S' = P S + B (kda_tensor_segments.cuh).
//!
//! The scan of the forward (kda_tensor_scan.cuh) without outputs. B is what it makes of a state of
//! zeros, P what it makes of the identity where v is zero: K more value columns. The first segment
//! of a sequence starts from the initial state, and its B is the state at its end.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_ring.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_rows.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_state.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.cuh"

namespace sdm::kda::cuda {

struct KdaSegmentScanArgs {
  KdaDims dims;
  KdaWindow window;
  DeviceIntegers cu_seqlens;
  KdaView v;
  KdaStateView initial;
  KdaRecords records;
  KdaSegments segments;
  int64_t first_columns;  // value columns left out at the start: V where only P is wanted
  int buffers;            // of the ring
  bool whole_v;           // four columns of v can be loaded at once
  bool bounded;           // keys are normalised and gates decay
};

// Of a record all that U and the state need.
template <int kK>
struct SegmentRecord {
  static constexpr int kBegin = KdaRecord<kK>::kKd;
  static constexpr int kKd = 0;
  static constexpr int kInverse = KdaRecord<kK>::kInverse - kBegin;
  static constexpr int kKr = KdaRecord<kK>::kKr - kBegin;
  static constexpr int kGamma = KdaRecord<kK>::kGamma - kBegin;
  static constexpr int kBeta = KdaRecord<kK>::kBeta - kBegin;
  static constexpr int kBytes = KdaRecord<kK>::kKeyNorm - kBegin;
  static_assert(kInverse > 0 && kKr > 0 && kGamma > 0 && kBeta > 0 && kInverse % 1024 == 0);
};

template <int kK, int kGroups>
using SegmentRing = RecordRing<SegmentRecord<kK>::kBytes, 128 * kGroups>;

template <int kK>
__device__ __forceinline__ void load_identity(ScanState<kK>& state, int column0) {
  constexpr int64_t kStride[4] = {0, 0, 1, 0};
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t key = ScanState<kK>::offset(kStride, 0, 0, 0, n, i);
      const int column = column0 + column_of_row(threadIdx.x % 32 / 4 + (i >= 2 ? 8 : 0));
      state.s[n][i] = key == column ? 1.0f : 0.0f;
    }
  }
}

// Columns of P as rows of P^T, each number as the sum of two in bfloat16.
template <int kK>
__device__ __forceinline__ void store_transition(
    const ScanState<kK>& state, char* to, int column0
) {
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  uint16_t* const high = reinterpret_cast<uint16_t*>(to);
  uint16_t* const low = high + kK * kK;
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column0 + column_of_row(g + 8 * i);
      const int at =
          column / 64 * (kK / 64 * kPanelElements) + panel_offset(column % 64, 8 * n + 2 * t);
      const float x = state.s[n][2 * i], y = state.s[n][2 * i + 1];
      const uint32_t top = pack_bf16(x, y);
      const float2 rounded = unpack_bf16(top);
      *reinterpret_cast<uint32_t*>(high + at) = top;
      *reinterpret_cast<uint32_t*>(low + at) = pack_bf16(x - rounded.x, y - rounded.y);
    }
  }
}

// Grid: groups of columns, those of V, then those of P; HV; slots of the window.
template <int kK, int kGroups, bool kAny>
__global__ void __launch_bounds__(128 * kGroups, 1) kda_segment_scan_kernel(
    const __grid_constant__ KdaSegmentScanArgs args
) {
  using Record = SegmentRecord<kK>;
  using Ring = SegmentRing<kK, kGroups>;
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  const int64_t hv = blockIdx.y;
  KdaSegmentRow row;
  const KdaPiece piece =
      kda_segment_of_slot(row, args.cu_seqlens, args.window, blockIdx.z, args.dims);
  const KdaSpan& span = piece.span;
  const int64_t columns = args.first_columns + blockIdx.x * kGroups * 64;
  const bool transition = columns >= args.dims.V;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (!span.valid || (transition && span.first == 0)) {
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int column0 = static_cast<int>(columns - (transition ? args.dims.V : 0)) + warp * 16;
  const int chunks = static_cast<int>(span.last - span.first);
  Ring ring(
      kda_shared,
      args.buffers,
      args.records.data + (span.slot * args.dims.HV + hv) * args.records.stride + Record::kBegin,
      args.dims.HV * args.records.stride,
      chunks
  );

  // All chunks are whole: another segment follows.
  const bool bf16 = args.v.dtype == DType::kBf16;
  const int rows = transition ? 0 : chunks * 64 - g;
  const int64_t token = span.sequence.begin + span.first * kTensorChunk + g;
  const uint16_t* v_from = static_cast<const uint16_t*>(args.v.data) +
                           span.sequence.batch * args.v.stride[0] + token * args.v.stride[1] +
                           hv * args.v.stride[2] + column0 + t * 4;
  const int64_t v_step = 8 * args.v.stride[1];
  uint32_t v[8][2];
  load_rows<kAny>(v, v_from, v_step, rows, args.whole_v);
  const auto prefetch_v = [&](int ahead, int chunk) {
    if (!transition) {
      prefetch_rows(
          v_from - g * args.v.stride[1] - t * 4 + ahead * kTensorChunk * args.v.stride[1],
          args.v.stride[1],
          rows + g - (chunk + ahead) * 64
      );
    }
  };
  prefetch_v(1, 0);
  prefetch_v(2, 0);

  ScanState<kK> state;
  if (transition) {
    load_identity(state, column0);
  } else if (span.first == 0) {
    load_state(state, args.initial, span.sequence.index, hv, column0);
  } else {
    state.clear();
  }
  ColumnPeaks peaks = state.peaks();  // of the chunk before
  ring.fill();

  ColumnScales scale;       // of the chunk whose v is there
  ColumnPeaks value_peaks;  // of that v
  const auto choose_scale = [&] {
    transpose_rows(v);
    value_peaks = peaks_of_rows(v, bf16);
    peaks.include(value_peaks);
    peaks.share();
    scale = peaks.scales();
  };
  choose_scale();

  float e[8][4];
  uint32_t s_operand[kK / 16][4];
  PanelPlace record = {0};
  const unsigned char* memory = kda_shared;
  // Takes v, which belongs to the chunk, and starts S^T kd^T.
  const auto start_chunk = [&] {
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      state.rescale(scale);
      pack_operands(s_operand, state.s);
      if (args.bounded || turn > 0 || !near_overflow(s_operand)) {
        break;
      }
      ColumnPeaks now = state.peaks();
      now.include(value_peaks);
      now.share();
      scale = now.scales();
    }
    // The products subtract: -E is what they add to.
    const float low = -state.scale.low.factor;
    const float high = -state.scale.high.factor;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = widen_pair(v[n][0], bf16);
      const float2 y = widen_pair(v[n][1], bf16);
      e[n][0] = x.x * low;
      e[n][1] = x.y * low;
      e[n][2] = y.x * high;
      e[n][3] = y.y * high;
    }
    const int offset = ring.wait();
    record = PanelPlace::at(ring.memory + offset);
    memory = kda_shared + offset;
    settle(e);
    settle(s_operand);
    begin_products();
#pragma unroll
    for (int p = 0; p < kK / 64; ++p) {
      add_panel_product(e, s_operand + 4 * p, record + Record::kKd + p * kPanelBytes);
    }
    end_products();
  };
  // While they run: the next v, the decay of the state.
  const auto begin_chunk = [&](int chunk) {
    v_from += kTensorChunk * args.v.stride[1];
    load_rows<kAny>(v, v_from, v_step, rows - (chunk + 1) * 64, args.whole_v);
    prefetch_v(2, chunk + 1);
    state.decay(reinterpret_cast<const float2*>(memory + Record::kGamma) + t);
  };

  start_chunk();
  begin_chunk(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    uint32_t operand[4][4];
    const float2* beta = reinterpret_cast<const float2*>(memory + Record::kBeta) + t;
    wait_products<0>();
    settle(e);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 b = beta[n * 4];
      e[n][0] *= -b.x;
      e[n][1] *= -b.y;
      e[n][2] *= -b.x;
      e[n][3] *= -b.y;
    }
    pack_operands(operand, e);
    settle(e);
    settle(operand);
    begin_products();
    add_triangular_product<true>(e, operand, record + Record::kInverse);  // E becomes U
    end_products();
    peaks = value_peaks;
    peaks.include(state.peaks(s_operand));
    wait_products<0>();
    settle(e);
    pack_operands(operand, e);
    settle(operand);
    settle(state.s);
    begin_products();
    add_panel_rows_product<0>(state.s, operand, record + Record::kKr);
    if constexpr (kK == 128) {
      add_panel_rows_product<8>(state.s, operand, record + Record::kKr + kPanelBytes);
    }
    end_products();
    choose_scale();  // of the next chunk
    wait_products<0>();
    settle(state.s);
    if (chunk + 1 < chunks) {
      start_chunk();
    }
    ring.replace();
    if (chunk + 1 < chunks) {
      begin_chunk(chunk + 1);
    }
  }

  state.unscale();
  if (transition) {
    store_transition(state, args.segments.transition(args.dims, piece.slot, hv), column0);
  } else {
    state.put_carry(
        KdaSegments::part(args.segments.offsets, args.dims, piece.slot, hv, column0), peaks
    );
  }
}

}  // namespace sdm::kda::cuda
