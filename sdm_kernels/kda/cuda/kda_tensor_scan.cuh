// SPDX-License-Identifier: Apache-2.0
//! @file The sequential stage of the forward: a block carries the state of one sequence and head
//! for a slice of value columns through the chunks of a window.
//!
//! A warp owns 16 value columns and works on transposed matrices, S^T [16, K], so that every
//! product of the chain hands its result to the next in registers, and warps never wait for each
//! other:
//!   E^T = v^T - S^T kd^T    U^T = (E^T diag(beta)) inverse^T    S^T = S^T diag(gamma) + U^T kr
//!   o^T = scale (S^T qd^T + U^T scores^T)
//! Only the records come through shared memory, in halves (kd, qd | inverse, scores, kr, gamma,
//! beta) through a ring of three. Sums are float, operands fp16. A value column whose largest
//! element of S or v leaves [2^-14, 2^7) is scaled by a power of two for the chunk, so that no
//! input overflows or loses bits in fp16; each column is a problem of its own and everything is
//! linear in it.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_records.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_ring.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan_state.cuh"

namespace sdm::kda::cuda {

constexpr int kScanWarps = 4;
constexpr int kScanThreads = kScanWarps * 32;
constexpr int kScanColumns = kScanWarps * 16;

struct KdaScanArgs {
  KdaDims dims;
  KdaWindow window;
  DeviceIntegers cu_seqlens;
  KdaView v;
  KdaStateView initial, final_state;
  KdaChunkStates chunk_states;
  KdaRecords records;
  float* carry;        // [2][carry_rows][HV][V / 16][K / 2][32]: states between windows
  int64_t carry_rows;  // sequences of a window that may go on in the next
  void* out;
  float scale;
  bool overlap;  // with the preparation
  bool whole_v;  // four columns of v can be loaded at once
};

template <int kK>
struct ScanShared {
  using Record = KdaRecord<kK>;
  static constexpr int kFirst = Record::kInverse;                      // bytes of kd, qd
  static constexpr int kSecond = Record::kKeyNorm - Record::kInverse;  // bytes of the rest
  // Panels start at multiples of 1024 bytes, as their swizzle wants.
  static constexpr int kSlot = ((kFirst > kSecond ? kFirst : kSecond) + 1023) / 1024 * 1024;
  using Ring = PieceRing<kSlot, kScanThreads>;
  static constexpr int kBytes = Ring::kBytes;
  static_assert(Record::kKd == 0 && kPanelBytes % 1024 == 0);
};

// A operand of 16 columns of accumulator tiles 2 k and 2 k + 1.
__device__ __forceinline__ void pack_operand(
    uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]
) {
  a[0] = pack_f16(left[0], left[1]);
  a[1] = pack_f16(left[2], left[3]);
  a[2] = pack_f16(right[0], right[1]);
  a[3] = pack_f16(right[2], right[3]);
}

// The chunk's rows of v for the warp: tile n, lane (g, t) holds row 8 n + g, columns 4 t to 4 t
// + 3. `from` is the lane's place in row g, `left` the rows from there on.
__device__ __forceinline__ void load_values(
    uint32_t (&v)[8][2], const KdaScanArgs& args, const uint16_t* from, int left
) {
  const int64_t step = 8 * args.v.stride[1];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    v[n][0] = 0;
    v[n][1] = 0;
  }
  if (args.whole_v) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (8 * n < left) {
        load_pairs<2>(v[n], from, true);
      }
      from += step;
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // registers have no index: every turn writes one of them
        if (i == n && 8 * n < left) {
          load_pairs<2>(v[i], from, false);
        }
      }
      from += step;
    }
  }
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kScanThreads, 2) kda_scan_kernel(const KdaScanArgs args) {
  using Shared = ScanShared<kK>;
  using Record = KdaRecord<kK>;
  constexpr int kTiles = kK / 8;
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  const int64_t hv = blockIdx.y;
  const KdaSpan span = kda_span(args.cu_seqlens, args.window, blockIdx.z, args.dims);
  wait_for_previous_kernel();
  allow_next_kernel();  // not before: the next one writes where this one's predecessor read
  if (!span.valid) {
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t column0 = blockIdx.x * kScanColumns + warp * 16;
  const int chunks = static_cast<int>(span.last - span.first);

  // Records: half h of the window's part of the sequence is piece h of the ring.
  const char* record = args.records.data + (span.slot * args.dims.HV + hv) * args.records.stride;
  typename Shared::Ring ring(kda_shared);
  ring.fetch(0, record, Shared::kFirst, chunks > 0);
  ring.fetch(1, record + Record::kInverse, Shared::kSecond, chunks > 0);

  ScanState<kK> state;
  state.low = {1.0f, 1.0f};
  state.high = {1.0f, 1.0f};
  const int64_t carry_row = args.cu_seqlens.data == nullptr ? blockIdx.z : 0;
  const auto carry = [&](int64_t parity) {
    const int64_t row = (parity * args.carry_rows + carry_row) * args.dims.HV + hv;
    return args.carry + ((row * (args.dims.V / 16) + column0 / 16) * kTiles * 4) * 32 + lane;
  };
  if (span.first > 0) {
    const float* from = carry(args.window.parity);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.s[n][i] = from[(n * 4 + i) * 32];
      }
    }
  } else if (args.initial.data == nullptr) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.s[n][i] = 0.0f;
      }
    }
  } else if (args.initial.dtype == DType::kF32) {
    load_initial<float>(state, args.initial, span.sequence.index, hv, column0);
  } else {
    load_initial<Bf16>(state, args.initial, span.sequence.index, hv, column0);
  }

  // Rows of the window's part of the sequence; the lane's place in v and, a chunk behind, in out.
  const int64_t token = span.sequence.begin + span.first * kTensorChunk + g;
  const int64_t rows_left = span.sequence.length - span.first * kTensorChunk;
  const int rows = static_cast<int>(rows_left < chunks * 64 ? rows_left : chunks * 64) - g;
  const uint16_t* v_from = static_cast<const uint16_t*>(args.v.data) +
                           span.sequence.batch * args.v.stride[0] + token * args.v.stride[1] +
                           hv * args.v.stride[2] + column0 + t * 4;
  uint16_t* out = static_cast<uint16_t*>(args.out) +
                  ((span.sequence.batch * args.dims.T + token - kTensorChunk) * args.dims.HV + hv) *
                      args.dims.V +
                  column0 + t * 4;
  uint32_t v[8][2];
  load_values(v, args, v_from, rows);
  const int64_t out_step = 8 * args.dims.HV * args.dims.V;
  const auto store_out = [&](const float (&o)[8][4], int left, float low, float high) {
    uint16_t* to = out;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint32_t x = transpose_matrix(pack_pair<kType>(o[n][0] * low, o[n][1] * low));
      const uint32_t y = transpose_matrix(pack_pair<kType>(o[n][2] * high, o[n][3] * high));
      if (8 * n < left) {
        *reinterpret_cast<uint2*>(to) = make_uint2(x, y);
      }
      to += out_step;
    }
  };

  float o[8][4] = {};
  float o_low = 1.0f, o_high = 1.0f;  // factors of the output that is being made
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    // v^T as accumulators; the scale of the columns.
    float e[8][4];
    float low_largest = 0.0f, high_largest = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 x = unpack_pair<kType>(transpose_matrix(v[n][0]));
      const float2 y = unpack_pair<kType>(transpose_matrix(v[n][1]));
      e[n][0] = x.x;
      e[n][1] = x.y;
      e[n][2] = y.x;
      e[n][3] = y.y;
      low_largest = fmaxf(low_largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      high_largest = fmaxf(high_largest, fmaxf(fabsf(y.x), fabsf(y.y)));
    }
    if (args.chunk_states.data != nullptr) {
      store_chunk_state(
          state,
          args.chunk_states,
          args.dims,
          span.sequence.first_row(args.dims.T) + span.first + chunk,
          hv,
          column0
      );
    }
    state.rescale(low_largest, high_largest);
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // the products subtract: -E is what accumulates
      e[n][0] *= -state.low.factor;
      e[n][1] *= -state.low.factor;
      e[n][2] *= -state.high.factor;
      e[n][3] *= -state.high.factor;
    }
    uint32_t s_operand[kK / 16][4];
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      pack_operand(s_operand[k], state.s[2 * k], state.s[2 * k + 1]);
    }

    // First half: S^T kd^T, and S^T qd^T meanwhile.
    ring.template wait<1>();
    copies_are_visible();
    __syncthreads();
    wait_products<0>();
    settle(o);
    const uint32_t first = ring.memory + ring.slot * Shared::kSlot;
    settle(e);
    settle(s_operand);
    begin_products();
#pragma unroll
    for (int p = 0; p < kK / 64; ++p) {
      add_panel_product(e, s_operand + 4 * p, first + Record::kKd + p * kPanelBytes);
    }
    end_products();
    if (chunk > 0) {
      store_out(o, rows - (chunk - 1) * 64, o_low, o_high);
    }
    out += kTensorChunk * args.dims.HV * args.dims.V;
    // Every warp is done with the second half of the chunk before: the next first half goes there.
    ring.next();
    ring.template wait<0>();
    copies_are_visible();
    __syncthreads();
    record += args.dims.HV * args.records.stride;
    ring.fetch(ring.slot_after(), record, Shared::kFirst, chunk + 1 < chunks);
    o_low = args.scale * state.low.inverse;
    o_high = args.scale * state.high.inverse;
    settle(o);
    begin_products();
    add_panel_product<true>(o, s_operand, first + Record::kQd);
    if constexpr (kK == 128) {
      add_panel_product(o, s_operand + 4, first + Record::kQd + kPanelBytes);
    }
    end_products();
    v_from += kTensorChunk * args.v.stride[1];
    load_values(v, args, v_from, rows - (chunk + 1) * 64);

    // Second half: U, the state, the output.
    const uint32_t second = ring.memory + ring.slot * Shared::kSlot;
    const unsigned char* memory = kda_shared + ring.slot * Shared::kSlot;
    const float2* beta =
        reinterpret_cast<const float2*>(memory + Record::kBeta - Record::kInverse) + t;
    const float2* gamma =
        reinterpret_cast<const float2*>(memory + Record::kGamma - Record::kInverse) + t;
    wait_products<1>();
    settle(e);
    uint32_t operand[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 b = beta[n * 4];
      e[n][0] *= -b.x;
      e[n][1] *= -b.y;
      e[n][2] *= -b.x;
      e[n][3] *= -b.y;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pack_operand(operand[k], e[2 * k], e[2 * k + 1]);
    }
    settle(e);
    settle(operand);
    begin_products();
    add_triangular_product<true>(e, operand, second);  // E becomes U
    end_products();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 x = gamma[n * 4];
      state.s[n][0] *= x.x;
      state.s[n][1] *= x.y;
      state.s[n][2] *= x.x;
      state.s[n][3] *= x.y;
    }
    wait_products<0>();
    settle(e);
    settle(o);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      pack_operand(operand[k], e[2 * k], e[2 * k + 1]);
    }
    settle(operand);
    settle(state.s);
    begin_products();
    add_panel_rows_product<0>(state.s, operand, second + Record::kKr - Record::kInverse);
    if constexpr (kK == 128) {
      add_panel_rows_product<8>(
          state.s, operand, second + Record::kKr - Record::kInverse + kPanelBytes
      );
    }
    end_products();
    begin_products();
    add_triangular_product(o, operand, second + Record::kScores - Record::kInverse);
    end_products();
    // Every warp is done with the first half of this chunk: the next second half goes there.
    __syncthreads();
    ring.fetch(ring.slot_before(), record + Record::kInverse, Shared::kSecond, chunk + 1 < chunks);
    wait_products<1>();
    settle(state.s);
    ring.next();
  }
  wait_products<0>();
  settle(o);
  if (chunks > 0) {
    store_out(o, rows - (chunks - 1) * 64, o_low, o_high);
  }

  state.unscale();
  if (!span.ends) {
    float* to = carry(args.window.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[(n * 4 + i) * 32] = state.s[n][i];
      }
    }
  } else if (args.final_state.data != nullptr) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at =
            ScanState<kK>::offset(args.final_state.stride, span.sequence.index, hv, column0, n, i);
        static_cast<float*>(args.final_state.data)[at] = state.s[n][i];
      }
    }
  }
}

}  // namespace sdm::kda::cuda
