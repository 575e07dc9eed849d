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
//! element of S or v leaves [2^-7, 2^7) is scaled by a power of two for the chunk, so that no input
//! overflows or loses bits in fp16; each column is a problem of its own and everything is linear in
//! it.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_products.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_records.cuh"

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
  bool whole_v;  // four columns of v can be loaded at once
};

template <int kK>
struct ScanShared {
  using Record = KdaRecord<kK>;
  static constexpr int kFirst = Record::kInverse;                      // bytes of kd, qd
  static constexpr int kSecond = Record::kKeyNorm - Record::kInverse;  // bytes of the rest
  // Panels start at multiples of 1024 bytes, as their swizzle wants.
  static constexpr int kSlot = ((kFirst > kSecond ? kFirst : kSecond) + 1023) / 1024 * 1024;
  static constexpr int kSlots = 3;
  static constexpr int kBytes = kSlots * kSlot;
  static_assert(Record::kKd == 0 && kPanelBytes % 1024 == 0);
};

// The value column of fragment row g or g + 8 within the warp's 16: so that a transposed pair of
// 8 x 8 fragments gives each lane four neighbouring columns.
__device__ __forceinline__ int column_of_row(int row) {
  return 4 * (row % 8 / 2) + row % 2 + (row >= 8 ? 2 : 0);
}

// A power of two and its inverse.
struct PowerOfTwo {
  float factor, inverse;
};

// Brings a largest magnitude near 1 unless it is well inside fp16 anyway.
__device__ __forceinline__ PowerOfTwo column_scale(float largest) {
  const bool inside = largest >= 0x1p-7f && largest < 0x1p7f;
  if (inside || !(largest > 0.0f) || largest > 3.0e38f) {
    return {1.0f, 1.0f};
  }
  int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
  exponent = exponent < 1 ? 1 : (exponent > 253 ? 253 : exponent);
  return {__uint_as_float((254u - exponent) << 23), __uint_as_float(unsigned(exponent) << 23)};
}

// The 16 value columns of a warp: S^T times the scales of its two rows, as accumulators.
template <int kK>
struct ScanState {
  float s[kK / 8][4];
  PowerOfTwo low, high;  // scale of fragment rows g and g + 8

  __device__ __forceinline__ void unscale() {
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      s[n][0] *= low.inverse;
      s[n][1] *= low.inverse;
      s[n][2] *= high.inverse;
      s[n][3] *= high.inverse;
    }
    low = {1.0f, 1.0f};
    high = {1.0f, 1.0f};
  }

  __device__ __forceinline__ void rescale(float low_largest, float high_largest) {
    float a = 0.0f, b = 0.0f;
#pragma unroll
    for (int n = 0; n < kK / 8; ++n) {
      a = fmaxf(a, fmaxf(fabsf(s[n][0]), fabsf(s[n][1])));
      b = fmaxf(b, fmaxf(fabsf(s[n][2]), fabsf(s[n][3])));
    }
    a = fmaxf(a * low.inverse, low_largest);
    b = fmaxf(b * high.inverse, high_largest);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      a = fmaxf(a, __shfl_xor_sync(0xffffffffu, a, lanes));
      b = fmaxf(b, __shfl_xor_sync(0xffffffffu, b, lanes));
    }
    const PowerOfTwo new_low = column_scale(a);
    const PowerOfTwo new_high = column_scale(b);
    const bool same = new_low.factor == low.factor && new_high.factor == high.factor;
    if (__any_sync(0xffffffffu, !same)) {
      unscale();
#pragma unroll
      for (int n = 0; n < kK / 8; ++n) {
        s[n][0] *= new_low.factor;
        s[n][1] *= new_low.factor;
        s[n][2] *= new_high.factor;
        s[n][3] *= new_high.factor;
      }
      low = new_low;
      high = new_high;
    }
  }

  // Offset of element `i` of tile n in a state with the given strides.
  __device__ __forceinline__ static int64_t offset(
      const int64_t (&stride)[4], int64_t row, int64_t head, int64_t column0, int n, int i
  ) {
    const int lane = threadIdx.x % 32;
    const int key = n * 8 + lane % 4 * 2 + i % 2;
    const int64_t value = column0 + column_of_row(lane / 4 + (i >= 2 ? 8 : 0));
    return row * stride[0] + head * stride[1] + key * stride[2] + value * stride[3];
  }
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
// + 3.
__device__ __forceinline__ void load_values(
    uint32_t (&v)[8][2], const KdaScanArgs& args, int64_t offset, int rows
) {
  const int lane = threadIdx.x % 32;
  const uint16_t* from = static_cast<const uint16_t*>(args.v.data) + offset +
                         lane / 4 * args.v.stride[1] + lane % 4 * 4;
  const int left = rows - lane / 4;
  const int64_t step = 8 * args.v.stride[1];
  if (args.whole_v) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      v[n][0] = 0;
      v[n][1] = 0;
      if (8 * n < left) {
        load_pairs<2>(v[n], from + n * step, true);
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      v[n][0] = 0;
      v[n][1] = 0;
      if (8 * n < left) {
        load_pairs<2>(v[n], from + n * step, false);
      }
    }
  }
}

template <typename Element, int kK>
__device__ __forceinline__ void load_initial(
    ScanState<kK>& state, const KdaStateView& initial, int64_t row, int64_t hv, int64_t column0
) {
  const Element* from = static_cast<const Element*>(initial.data);
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state.s[n][i] = to_f32(from[ScanState<kK>::offset(initial.stride, row, hv, column0, n, i)]);
    }
  }
}

template <int kK>
__device__ __forceinline__ void store_chunk_state(
    const ScanState<kK>& state, const KdaScanArgs& args, int64_t row, int64_t hv, int64_t column0
) {
  const int lane = threadIdx.x % 32;
  const int64_t K = kK;
  const int64_t V = args.dims.V;
  const int64_t base = (row * args.dims.HV + hv) * K * V;
  const bool v_first = args.chunk_states.v_first;
  const int64_t stride[4] = {0, 0, v_first ? 1 : V, v_first ? K : 1};
#pragma unroll
  for (int n = 0; n < kK / 8; ++n) {
    const float low[2] = {state.s[n][0] * state.low.inverse, state.s[n][1] * state.low.inverse};
    const float high[2] = {state.s[n][2] * state.high.inverse, state.s[n][3] * state.high.inverse};
    if (args.chunk_states.dtype == DType::kF32) {
      float* to = static_cast<float*>(args.chunk_states.data) + base;
      to[ScanState<kK>::offset(stride, 0, 0, column0, n, 0)] = low[0];
      to[ScanState<kK>::offset(stride, 0, 0, column0, n, 1)] = low[1];
      to[ScanState<kK>::offset(stride, 0, 0, column0, n, 2)] = high[0];
      to[ScanState<kK>::offset(stride, 0, 0, column0, n, 3)] = high[1];
    } else {
      uint16_t* to = static_cast<uint16_t*>(args.chunk_states.data) + base;
      const bool bf16 = args.chunk_states.dtype == DType::kBf16;
      uint32_t x = bf16 ? pack_bf16(low[0], low[1]) : pack_f16(low[0], low[1]);
      uint32_t y = bf16 ? pack_bf16(high[0], high[1]) : pack_f16(high[0], high[1]);
      if (v_first) {
        *reinterpret_cast<uint32_t*>(to + ScanState<kK>::offset(stride, 0, 0, column0, n, 0)) = x;
        *reinterpret_cast<uint32_t*>(to + ScanState<kK>::offset(stride, 0, 0, column0, n, 2)) = y;
      } else {
        x = transpose_matrix(x);
        y = transpose_matrix(y);
        *reinterpret_cast<uint2*>(to + (n * 8 + lane / 4) * V + column0 + lane % 4 * 4) =
            make_uint2(x, y);
      }
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
  const int64_t chunks = span.last - span.first;

  // Records: half h of the window's part of the sequence goes to slot h % 3.
  const char* records = args.records.data + (span.slot * args.dims.HV + hv) * args.records.stride;
  const int64_t record_step = args.dims.HV * args.records.stride;
  const uint32_t ring = shared_address(kda_shared);
  const auto fetch = [&](int64_t half, int slot) {
    if (half < 2 * chunks) {
      const bool second = half % 2 != 0;
      const char* from = records + half / 2 * record_step + (second ? Record::kInverse : 0);
      const int bytes = second ? Shared::kSecond : Shared::kFirst;
      const uint32_t to = ring + slot * Shared::kSlot;
      for (int i = threadIdx.x * 16; i < bytes; i += kScanThreads * 16) {
        copy_async(to + i, from + i);
      }
    }
    close_copies();  // also when there is nothing: groups are counted
  };
  fetch(0, 0);
  fetch(1, 1);

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

  const int64_t v_offset = span.sequence.batch * args.v.stride[0] +
                           span.sequence.begin * args.v.stride[1] + hv * args.v.stride[2] + column0;
  const auto rows_of = [&](int64_t chunk) {
    const int64_t left = span.sequence.length - chunk * kTensorChunk;
    return static_cast<int>(left < kTensorChunk ? left : kTensorChunk);
  };
  uint32_t v[8][2];
  if (chunks > 0) {
    load_values(
        v, args, v_offset + span.first * kTensorChunk * args.v.stride[1], rows_of(span.first)
    );
  }
  const auto store_out = [&](const float (&o)[8][4], int64_t chunk, float low, float high) {
    const int rows = rows_of(chunk);
    const int64_t token =
        span.sequence.batch * args.dims.T + span.sequence.begin + chunk * kTensorChunk + g;
    uint16_t* out = static_cast<uint16_t*>(args.out) + (token * args.dims.HV + hv) * args.dims.V +
                    column0 + t * 4;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const uint32_t x = transpose_matrix(pack_pair<kType>(o[n][0] * low, o[n][1] * low));
      const uint32_t y = transpose_matrix(pack_pair<kType>(o[n][2] * high, o[n][3] * high));
      if (8 * n + g < rows) {
        *reinterpret_cast<uint2*>(out + 8 * n * args.dims.HV * args.dims.V) = make_uint2(x, y);
      }
    }
  };

  float o[8][4] = {};
  float o_low = 1.0f, o_high = 1.0f;  // factors of the output that is being made
  int slot = 0;                       // of the half at hand
  for (int64_t chunk = span.first; chunk < span.last; ++chunk) {
    const int64_t half = 2 * (chunk - span.first);

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
      store_chunk_state(state, args, span.sequence.first_row(args.dims.T) + chunk, hv, column0);
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
    wait_copies<1>();
    copies_are_visible();
    __syncthreads();
    wait_products<0>();
    settle(o);
    const uint32_t first = ring + slot * Shared::kSlot;
    settle(e);
    settle(s_operand);
    begin_products();
#pragma unroll
    for (int p = 0; p < kK / 64; ++p) {
      add_panel_product(e, s_operand + 4 * p, first + Record::kKd + p * kPanelBytes);
    }
    end_products();
    if (chunk > span.first) {
      store_out(o, chunk - 1, o_low, o_high);
    }
    // Every warp is done with the second half of the chunk before: the next first half goes there.
    wait_copies<0>();
    copies_are_visible();
    __syncthreads();
    fetch(half + 2, slot == 0 ? 2 : slot - 1);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[n][i] = 0.0f;
      }
    }
    o_low = args.scale * state.low.inverse;
    o_high = args.scale * state.high.inverse;
    settle(o);
    begin_products();
#pragma unroll
    for (int p = 0; p < kK / 64; ++p) {
      add_panel_product(o, s_operand + 4 * p, first + Record::kQd + p * kPanelBytes);
    }
    end_products();
    if (chunk + 1 < span.last) {
      load_values(
          v, args, v_offset + (chunk + 1) * kTensorChunk * args.v.stride[1], rows_of(chunk + 1)
      );
    }

    // Second half: U, the state, the output.
    slot = slot == 2 ? 0 : slot + 1;
    const uint32_t second = ring + slot * Shared::kSlot;
    const unsigned char* memory = kda_shared + slot * Shared::kSlot;
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
#pragma unroll
    for (int n = 0; n < 8; ++n) {  // E becomes U
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[n][i] = 0.0f;
      }
    }
    settle(e);
    settle(operand);
    begin_products();
    add_triangular_product(e, operand, second);
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
    fetch(half + 3, slot == 0 ? 2 : slot - 1);
    wait_products<1>();
    settle(state.s);
    slot = slot == 2 ? 0 : slot + 1;
  }
  wait_products<0>();
  settle(o);
  if (chunks > 0) {
    store_out(o, span.last - 1, o_low, o_high);
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
