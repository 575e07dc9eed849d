// SPDX-License-Identifier: Apache-2.0
//! @file Reverse scan of Kimi delta attention over the chunks of a window, or of a segment
//! (kda_tensor_segments.cuh), on tensor cores.
//!
//! With dS the gradient of the state behind the chunk:
//!   dU = scale scores^T dO + kr dS
//!   y  = inverse^T dU
//!   dS = gamma dS + scale qd^T dO - kd^T (beta y)
//! The forward scan's form (kda_tensor_scan.cuh): a warp owns 16 value columns and carries dS^T in
//! float registers; every product takes transposed matrices from registers and leaves them there,
//!   dU^T = dO^T scores + dS^T kr^T    y^T = dU^T inverse    dS^T = dS^T diag(gamma) + dO^T qd
//!          - (y^T diag(beta)) kd
//! with `scale` in dO. 32 value columns, those of two warps, are scaled by one power of two, which
//! is the unit of what is left for the token stage.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_ring.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_rows.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_state.cuh"

namespace sdm::kda::cuda {

struct KdaBwdScanArgs {
  KdaBwdScanParams params;
  int buffers;   // of the ring
  bool bounded;  // keys are normalised and gates decay
};

template <int kK, int kGroups>
using BwdScanRing = RecordRing<KdaRecord<kK>::kKeyNorm, 128 * kGroups>;

// Ring, then float [2][warps]: peaks on their way between the two warps of a unit.
template <int kK, int kGroups>
constexpr int bwd_scan_shared_bytes(int buffers) {
  return BwdScanRing<kK, kGroups>::bytes(buffers) + kGroups * 32;
}

// dO of a chunk in transposed order, an element at a time: rows of any type and distance.
__device__ __forceinline__ void load_transposed(
    float (&x)[8][4], const KdaView& view, int64_t from, int left
) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * n + 2 * t + i % 2;
      const int column = column_of_row(threadIdx.x % 32 / 4 + (i >= 2 ? 8 : 0));
      x[n][i] =
          row < left
              ? load_element(
                    view.data, view.dtype, from + row * view.stride[1] + column * view.stride[3]
                )
              : 0.0f;
    }
  }
}

// kWhole: everything that the token stage needs. kSegment: R of a segment alone.
enum class BwdScanKind { kWhole, kSegment };

// kAny: rows of d_out are not 16-bit elements that can be loaded four at a time.
template <int kK, int kV, int kGroups, bool kAny, BwdScanKind kKind>
__global__ void __launch_bounds__(128 * kGroups, 1) kda_bwd_scan_kernel(
    const __grid_constant__ KdaBwdScanArgs args
) {
  using Record = KdaRecord<kK>;
  using Out = KdaBwdRecord<kK, kV>;
  using Ring = BwdScanRing<kK, kGroups>;
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  const KdaBwdScanParams& p = args.params;
  const KdaDims& dims = p.common.dims;
  constexpr bool kWhole = kKind == BwdScanKind::kWhole;
  // Records and dO of a segment are there long before the gradient behind it.
  const bool waits_late = kWhole && p.common.window.segment > 0;
  if constexpr (kWhole) {
    if (!waits_late) {
      wait_for_previous_kernel();
    }
  }
  if (!waits_late) {
    allow_next_kernel();
  }
  const KdaPiece piece = kda_piece(p.common.cu_seqlens, p.common.window, blockIdx.z, dims);
  const KdaSpan& span = piece.span;
  if (!span.valid || (!kWhole && span.first == 0)) {
    if constexpr (!kWhole) {
      end_after_previous_kernel();
    }
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t hv = blockIdx.y;
  const int column0 = (static_cast<int>(blockIdx.x) * kGroups * 4 + warp) * 16;
  const int chunks = static_cast<int>(span.last - span.first);
  const int64_t entry = (span.slot + chunks - 1) * dims.HV + hv;
  Ring ring(
      kda_shared,
      args.buffers,
      p.common.records.data + entry * p.common.records.stride,
      -dims.HV * p.common.records.stride,
      chunks
  );
  float* shared_peaks = reinterpret_cast<float*>(kda_shared + Ring::bytes(args.buffers));
  char* out = p.common.bwd_records + entry * Out::kBytes;

  // dO of the chunk that comes next, which is one before the one that runs.
  const bool bf16 = p.d_out.dtype == DType::kBf16;
  const float scale = static_cast<float>(p.common.options.scale);
  int left = static_cast<int>(span.sequence.length - (span.last - 1) * kTensorChunk);
  int64_t out_from =
      element_of(
          p.d_out, span.sequence.batch, span.sequence.begin + (span.last - 1) * kTensorChunk, hv
      ) +
      column0 * p.d_out.stride[3];
  const int64_t chunk_step = kTensorChunk * p.d_out.stride[1];
  uint32_t d_out[8][2];
  const auto fetch_out = [&](bool there) {
    if constexpr (!kAny) {
      load_rows<false>(
          d_out,
          static_cast<const uint16_t*>(p.d_out.data) + out_from + g * p.d_out.stride[1] + t * 4,
          8 * p.d_out.stride[1],
          there ? left - g : 0,
          true
      );
    }
  };
  // Of so many chunks before that chunk, if there are.
  const auto prefetch_out = [&](int before, bool there) {
    if constexpr (!kAny) {
      prefetch_rows(
          static_cast<const uint16_t*>(p.d_out.data) + out_from - before * chunk_step,
          p.d_out.stride[1],
          there ? kTensorChunk : 0
      );
    }
  };
  fetch_out(chunks > 0);
  prefetch_out(1, chunks > 1);
  prefetch_out(2, chunks > 2);
  if (waits_late) {
    wait_for_previous_kernel();
    allow_next_kernel();
  }

  ScanState<kK> state;
  ColumnPeaks peaks;  // of the chunk behind
  const KdaWindow& window = p.common.window;
  const auto carry = [&](int64_t parity) {
    return p.segments.carried(dims, window, parity, span.sequence.index, hv, column0);
  };
  if (span.ends) {
    load_state(state, p.d_final, span.sequence.index, hv, column0);
    peaks = state.peaks();
  } else if constexpr (!kWhole) {
    state.clear();
    peaks = {0.0f, 0.0f};
  } else {
    peaks = state.take_carry(
        window.segment == 0 ? carry(1 - window.parity)
                            : KdaSegments::part(p.segments.states, dims, piece.slot, hv, column0)
    );
  }
  ring.fill();

  ColumnPeaks out_peaks = {0.0f, 0.0f};  // of dO
  ColumnScales next_scale = state.scale;
  uint32_t next_operand[4][4];  // dO of the chunk that comes next, scaled
  // What the other of two warps has given here: they share scales. The next call writes elsewhere,
  // and the one behind it finds that this has been read.
  int turn = 0;
  const auto exchange = [&](float x) {
    float* const to = shared_peaks + turn * kGroups * 4;
    turn ^= 1;
    if (lane == 0) {
      to[warp] = x;
    }
    if constexpr (kGroups == 1) {
      __syncthreads();  // the four warps multiply together anyway
    } else {
      synchronise_pair(warp / 2);
    }
    return to[warp ^ 1];
  };
  // Of the chunk whose dO has been fetched, which is none below 0; fetches the dO before it.
  const auto choose_scale = [&](int chunk) {
    float x[kAny ? 8 : 1][4];
    if constexpr (kAny) {
      load_transposed(x, p.d_out, out_from, chunk >= 0 ? left : 0);
      out_peaks = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        out_peaks.include(
            {fmaxf(fabsf(x[n][0]), fabsf(x[n][1])), fmaxf(fabsf(x[n][2]), fabsf(x[n][3]))}
        );
      }
    } else {
      transpose_rows(d_out);
      out_peaks = peaks_of_rows(d_out, bf16);
    }
    out_peaks.low *= fabsf(scale);
    out_peaks.high *= fabsf(scale);
    peaks.include(out_peaks);
    peaks.share_all();
    peaks.low = peaks.high = fmaxf(peaks.low, exchange(peaks.low));
    next_scale = peaks.scales();
    const float factor = scale * next_scale.low.factor;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 low, high;
      if constexpr (kAny) {
        low = make_float2(x[n][0], x[n][1]);
        high = make_float2(x[n][2], x[n][3]);
      } else {
        low = widen_pair(d_out[n][0], bf16);
        high = widen_pair(d_out[n][1], bf16);
      }
      next_operand[n / 2][n % 2 * 2] = pack_f16(low.x * factor, low.y * factor);
      next_operand[n / 2][n % 2 * 2 + 1] = pack_f16(high.x * factor, high.y * factor);
    }
    left = kTensorChunk;
    out_from -= chunk_step;
    fetch_out(chunk > 0);
    prefetch_out(2, chunk > 2);
  };
  choose_scale(chunks - 1);

  float u[8][4];
  uint32_t s_operand[kK / 16][4], out_operand[4][4];
  PanelPlace record = {0};
  const unsigned char* memory = kda_shared;
  // dU of the chunk that comes next.
  const auto start_chunk = [&] {
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      state.rescale(next_scale);
      pack_operands(s_operand, state.s);
      if (args.bounded || attempt > 0) {
        break;
      }
      const float over = near_overflow(s_operand) ? 1.0f : 0.0f;
      if (fmaxf(over, exchange(over)) == 0.0f) {
        break;
      }
      ColumnPeaks now = state.peaks();
      now.include(out_peaks);
      now.share_all();
      now.low = now.high = fmaxf(now.low, exchange(now.low));
      next_scale = now.scales();
      const float factor = state.scale.low.inverse * next_scale.low.factor;
      const uint32_t pair = pack_f16(factor, factor);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          next_operand[k][i] = multiply_f16(next_operand[k][i], pair);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out_operand[k][i] = next_operand[k][i];
      }
    }
    const int offset = ring.wait();
    record = PanelPlace::at(ring.memory + offset);
    memory = kda_shared + offset;
    settle(u);
    settle(s_operand);
    settle(out_operand);
    begin_products();
    triangular_rows_product(u, out_operand, record + Record::kScores);
#pragma unroll
    for (int k = 0; k < kK / 64; ++k) {
      add_panel_product(u, s_operand + 4 * k, record + Record::kKr + k * kPanelBytes);
    }
    end_products();
  };
  // While it runs: the decay of dS, and dS behind the chunk goes out. Stores keep registers busy.
  const auto begin_chunk = [&] {
    state.decay(reinterpret_cast<const float2*>(memory + Record::kGamma) + t);
    if constexpr (kWhole) {
      uint16_t* to = reinterpret_cast<uint16_t*>(out + Out::kStateGrad) + g * kV + column0 + t * 4;
#pragma unroll
      for (int k = 0; k < kK / 16; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<uint2*>(to + (2 * k + half) * 8 * kV) = make_uint2(
              transpose_matrix(s_operand[k][2 * half]), transpose_matrix(s_operand[k][2 * half + 1])
          );
        }
      }
      if (warp % 2 == 0 && lane < 8) {
        reinterpret_cast<float*>(
            out + (lane < 4 ? Out::kStateUnit : Out::kYUnit)
        )[lane % 4 * Out::kGroups + column0 / 32] = state.scale.low.inverse;
      }
    }
  };

  if (chunks > 0) {
    start_chunk();
    begin_chunk();
  }
#pragma unroll 1
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    uint32_t operand[4][4], packed[8][2];
    const float2* beta = reinterpret_cast<const float2*>(memory + Record::kBeta) + t;
    wait_products<0>();
    settle(u);
    pack_operands(operand, u);
    settle(u);
    settle(operand);
    settle(state.s);
    begin_products();
    triangular_rows_product(u, operand, record + Record::kInverse);  // dU becomes y
    end_products();
    begin_products();
    add_panel_rows_product<0>(state.s, out_operand, record + Record::kQd);
    if constexpr (kK == 128) {
      add_panel_rows_product<8>(state.s, out_operand, record + Record::kQd + kPanelBytes);
    }
    end_products();
    peaks = out_peaks;
    peaks.include(state.peaks(s_operand));
    wait_products<1>();
    settle(u);
    if constexpr (kWhole) {
      pack_rows<DType::kF16>(packed, u, 1.0f, 1.0f);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 b = beta[n * 4];
      operand[n / 2][n % 2 * 2] = pack_f16(u[n][0] * -b.x, u[n][1] * -b.y);
      operand[n / 2][n % 2 * 2 + 1] = pack_f16(u[n][2] * -b.x, u[n][3] * -b.y);
    }
    settle(operand);
    begin_products();
    add_panel_rows_product<0>(state.s, operand, record + Record::kKd);
    if constexpr (kK == 128) {
      add_panel_rows_product<8>(state.s, operand, record + Record::kKd + kPanelBytes);
    }
    end_products();
    if constexpr (kWhole) {
      store_rows(
          reinterpret_cast<uint16_t*>(out + Out::kY) + g * kV + column0 + t * 4, packed, 8 * kV, 64
      );
      out -= dims.HV * Out::kBytes;
    }
    choose_scale(chunk - 1);
    wait_products<0>();
    settle(state.s);
    if (chunk > 0) {
      start_chunk();
    }
    ring.replace();
    if (chunk > 0) {
      begin_chunk();
    }
  }

  state.unscale();
  if constexpr (!kWhole) {
    const int64_t row = piece.before >= 0
                            ? piece.before
                            : p.segments.slots + p.segments.carry_row(window, span.sequence.index);
    state.put_carry(KdaSegments::part(p.segments.offsets, dims, row, hv, column0), peaks);
    end_after_previous_kernel();
  } else if (span.first == 0) {
    store_state(state, p.d_initial, span.sequence.index, hv, column0);
  } else if (window.segment == 0) {
    state.put_carry(carry(window.parity), peaks);
  }
}

}  // namespace sdm::kda::cuda
