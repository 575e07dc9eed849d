// SPDX-License-Identifier: Apache-2.0
//! @file The sequential stage of the forward: a block carries the state of one sequence and head
//! for one or two groups of 64 value columns through the chunks of a window, or of a segment whose
//! state is known (kda_tensor_segments.cuh).
//!
//! A warp owns 16 value columns and works on transposed matrices, S^T [16, K], so that every
//! product of the chain hands its result to the next in registers, and warps never wait for each
//! other's results:
//!   E^T = v^T - S^T kd^T    U^T = (E^T diag(beta)) inverse^T    S^T = S^T diag(gamma) + U^T kr
//!   o^T = scale (S^T qd^T + U^T scores^T)
//! Only the records come through shared memory. Products of the output and everything that is not
//! part of the chain are put behind the three products that are, to run while the next of these
//! waits for its operands.
//!
//! Sums are float, operands fp16. A value column is scaled by a power of two that brings the
//! largest element of S and v near 1, so that no input overflows or loses bits in fp16; each column
//! is a problem of its own and everything is linear in it. The scale of a chunk comes from v and
//! from the state one chunk earlier, so that nothing waits for it: where keys are normalised and
//! gates decay, S grows by less than 2^8 in a chunk; elsewhere its size is looked at in time.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_records.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_ring.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_rows.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_state.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.cuh"

namespace sdm::kda::cuda {

constexpr int kGroupColumns = 64;  // value columns of four warps

struct KdaScanArgs {
  KdaDims dims;
  KdaWindow window;
  DeviceIntegers cu_seqlens;
  KdaView v;
  KdaStateView initial, final_state;
  KdaChunkStates chunk_states;
  KdaRecords records;
  KdaSegments segments;  // without segments carry and carry_rows alone
  void* out;
  float scale;
  int buffers;   // of the ring
  bool overlap;  // with the preparation
  bool whole_v;  // four columns of v can be loaded at once
  bool bounded;  // keys are normalised and gates decay
};

template <int kK, int kGroups>
using ScanRing = RecordRing<KdaRecord<kK>::kKeyNorm, 128 * kGroups>;

// Code that is in the way of the usual calls is in kernels of its own.
enum class ScanKind {
  kNoStates,  // v can be loaded whole
  kStates,    // and chunk states are 16-bit, [K, V]
  kAny,
};

template <DType kType, int kK, int kGroups, ScanKind kKind>
__global__ void __launch_bounds__(128 * kGroups, 1) kda_scan_kernel(
    const __grid_constant__ KdaScanArgs args
) {
  using Record = KdaRecord<kK>;
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  const int64_t hv = blockIdx.y;
  const KdaPiece piece = kda_piece(args.cu_seqlens, args.window, blockIdx.z, args.dims);
  const KdaSpan& span = piece.span;
  // Records and v of a segment are there long before its state. The next kernel may not begin
  // before the wait: it writes where this one's predecessor read.
  const bool waits_late = args.window.segment > 0;
  if (!waits_late) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }
  if (!span.valid) {
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t column0 = (blockIdx.x * kGroups * 4 + warp) * 16;
  const int chunks = static_cast<int>(span.last - span.first);
  ScanRing<kK, kGroups> ring(
      kda_shared,
      args.buffers,
      args.records.data + (span.slot * args.dims.HV + hv) * args.records.stride,
      args.dims.HV * args.records.stride,
      chunks
  );

  // Rows of the window's part of the sequence; the lane's place in v and in out.
  const int64_t token = span.sequence.begin + span.first * kTensorChunk + g;
  const int64_t rows_left = span.sequence.length - span.first * kTensorChunk;
  const int rows = static_cast<int>(rows_left < chunks * 64 ? rows_left : chunks * 64) - g;
  const uint16_t* v_from = static_cast<const uint16_t*>(args.v.data) +
                           span.sequence.batch * args.v.stride[0] + token * args.v.stride[1] +
                           hv * args.v.stride[2] + column0 + t * 4;
  uint16_t* out = static_cast<uint16_t*>(args.out) +
                  ((span.sequence.batch * args.dims.T + token) * args.dims.HV + hv) * args.dims.V +
                  column0 + t * 4;
  const int64_t v_step = 8 * args.v.stride[1];
  const int64_t out_step = 8 * args.dims.HV * args.dims.V;
  uint32_t v[8][2], next_v[8][2];
  load_rows<kKind == ScanKind::kAny>(v, v_from, v_step, rows, args.whole_v);
  v_from += kTensorChunk * args.v.stride[1];
  load_rows<kKind == ScanKind::kAny>(next_v, v_from, v_step, rows - 64, args.whole_v);

  // So many chunks behind the place in v, which is `chunk` of the window.
  const auto prefetch_v = [&](int ahead, int chunk) {
    prefetch_rows(
        v_from - g * args.v.stride[1] - t * 4 + ahead * kTensorChunk * args.v.stride[1],
        args.v.stride[1],
        rows + g - (chunk + ahead) * 64
    );
  };
  prefetch_v(1, 1);
  prefetch_v(2, 1);
  if (waits_late) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }

  ScanState<kK> state;
  ColumnPeaks peaks;  // of the chunk before
  const auto carry = [&](int64_t parity) {
    return args.segments.carried(args.dims, args.window, parity, span.sequence.index, hv, column0);
  };
  if (span.first > 0) {
    peaks = state.take_carry(
        piece.before < 0
            ? carry(args.window.parity)
            : KdaSegments::part(args.segments.states, args.dims, piece.before, hv, column0)
    );
  } else {
    load_state(state, args.initial, span.sequence.index, hv, column0);
    peaks = state.peaks();
  }
  ring.fill();

  ColumnScales scale;       // of the chunk whose v is there
  ColumnPeaks value_peaks;  // of that v
  const auto choose_scale = [&] {
    transpose_rows(v);
    value_peaks = peaks_of_rows(v, kType == DType::kBf16);
    peaks.include(value_peaks);
    peaks.share();
    scale = peaks.scales();
  };
  choose_scale();

  const int64_t states_row = span.sequence.first_row(args.dims.T) + span.first;
  float e[8][4], o[8][4];
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
      const float2 x = unpack_pair<kType>(v[n][0]);
      const float2 y = unpack_pair<kType>(v[n][1]);
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
  // While they run: the decay of the state and the loads of v come before stores, which keep
  // registers busy.
  const auto begin_chunk = [&](int chunk) {
    if constexpr (kKind == ScanKind::kAny) {
      if (args.chunk_states.data != nullptr && args.chunk_states.dtype == DType::kF32) {
        store_float_state(state, args.chunk_states, args.dims, states_row + chunk, hv, column0);
      }
    }
    state.decay(reinterpret_cast<const float2*>(memory + Record::kGamma) + t);
    copy_rows(v, next_v);
    v_from += kTensorChunk * args.v.stride[1];
    load_rows<kKind == ScanKind::kAny>(
        next_v, v_from, v_step, rows - (chunk + 2) * 64, args.whole_v
    );
    prefetch_v(2, chunk + 2);
  };
  const auto leave_state = [&](int chunk) {
    if constexpr (kKind != ScanKind::kNoStates) {
      if (args.chunk_states.data != nullptr && args.chunk_states.dtype != DType::kF32) {
        store_operand_state<kKind == ScanKind::kAny, kK>(
            s_operand, state.scale, args.chunk_states, args.dims, states_row + chunk, hv, column0
        );
      }
    }
  };

  if (chunks > 0) {
    start_chunk();
    begin_chunk(0);
    leave_state(0);
  }
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
    begin_products();
    add_panel_product<true>(o, s_operand, record + Record::kQd);
    if constexpr (kK == 128) {
      add_panel_product(o, s_operand + 4, record + Record::kQd + kPanelBytes);
    }
    end_products();
    peaks = value_peaks;
    peaks.include(state.peaks(s_operand));
    wait_products<1>();
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
    begin_products();
    add_triangular_product(o, operand, record + Record::kScores);
    end_products();
    const float o_low = args.scale * state.scale.low.inverse;
    const float o_high = args.scale * state.scale.high.inverse;
    choose_scale();  // of the next chunk
    wait_products<0>();
    settle(state.s);
    settle(o);
    if (chunk + 1 < chunks) {
      start_chunk();
    }
    ring.replace();
    if (chunk + 1 < chunks) {
      begin_chunk(chunk + 1);
    }
    uint32_t packed[8][2];
    pack_rows<kType>(packed, o, o_low, o_high);
    store_rows(out, packed, out_step, rows - chunk * 64);
    out += kTensorChunk * args.dims.HV * args.dims.V;
    if (chunk + 1 < chunks) {
      leave_state(chunk + 1);
    }
  }

  state.unscale();
  if (span.ends) {
    store_state(state, args.final_state, span.sequence.index, hv, column0);
  } else if (args.window.segment == 0) {
    state.put_carry(carry(args.window.parity ^ 1), peaks);
  }
}

}  // namespace sdm::kda::cuda
