// SPDX-License-Identifier: Apache-2.0
//! @file The token-parallel stage of the tensor path: one block of eight warps makes the record of
//! one chunk and value head (kda_tensor_records.cuh).
//!
//! Warp w owns rows 8w to 8w + 7, a lane K / 32 neighbouring channels of all of them. Decays inside
//! eight rows are products of factors exp(g) <= 1; over longer spans exp2 of sums. Every score
//! k_i k_j exp(G_i - G_j) is split at the boundary of a block of rows between j and i, so that both
//! factors are at most exp(0): no gate overflows, and nothing that a row gets depends on later
//! rows.
//!   rows and columns in the same 8 rows: float, pair by pair
//!   the two halves of 16 rows, split in the middle: tensor cores
//!   16 rows (a strip) against all columns before them, split at the strip's start: tensor cores
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_inverse.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"

namespace sdm::kda::cuda {

constexpr int kPrepThreads = 256;

// What may be loaded whole (several channels at once) instead of element by element.
struct KdaPrepArgs {
  KdaPrepParams params;
  bool whole_q, whole_k, whole_g;
};

template <int kK>
struct PrepShared {
  // Operands in fp16, rows of K, the 16-byte pieces permuted by row % 8.
  static constexpr int kStripKeys = 0;      // 48 rows: strips 1 to 3, times exp from their start
  static constexpr int kStripQueries = 48;  // 48 rows
  static constexpr int kStripColumns = 96;  // 16 + 32 + 48 rows: keys to the start of each strip
  static constexpr int kHalfRows = 192;     // 4 x (8 keys, 8 queries): second half of 16 rows
  static constexpr int kHalfColumns = 256;  // 4 x 8 keys: first half of 16 rows
  static constexpr int kOperandRows = 288;
  // Bytes.
  static constexpr int kLower = kOperandRows * kK * 2;  // float [64][pitch]: diag(beta) F
  static constexpr int kScores = kLower + 64 * kInversePitch * 4;  // fp16 panel
  static constexpr int kSums = kScores + kPanelBytes;  // float [8][K]: log-decay of 8 rows
  static constexpr int kBeta = kSums + 8 * kK * 4;     // float [64]
  static constexpr int kKeyNorm = kBeta + 256;
  static constexpr int kQueryNorm = kKeyNorm + 256;
  static constexpr int kKeyScores = kQueryNorm + 256;  // fp16 panel, when wanted
  static constexpr int kBytes = kKeyScores;
  static constexpr int kBytesWithKeyScores = kKeyScores + kPanelBytes;
  // Over the operands, once they have been multiplied.
  static constexpr int kInverse = 0;  // float [64][pitch]
  static constexpr int kScratch = 64 * kInversePitch * 4;
  static_assert(kScratch + 8 * kMergeScratch * 4 <= kLower);

  __device__ __forceinline__ static int operand(int row, int col) {
    return row * kK + (((col >> 3) ^ (row & 7)) << 3) + (col & 7);
  }

  // First row of the columns of a strip (1 to 3).
  __device__ __forceinline__ static int columns_of(int strip) {
    return kStripColumns + 8 * strip * (strip - 1);
  }
};

// Sums kCount values over groups of 2 kCount lanes: of each value the lower or upper lanes keep a
// half, and the halves of the lanes that stay together are summed further.
template <int kCount>
__device__ __forceinline__ float sum_over_lanes(const float (&x)[kCount]) {
  const bool upper = (threadIdx.x & kCount) != 0;
  if constexpr (kCount == 1) {
    return x[0] + __shfl_xor_sync(0xffffffffu, x[0], 1);
  } else {
    constexpr int kHalf = kCount / 2;
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = x[i];
      const float high = x[i + kHalf];
      const float send = upper ? low : high;
      const float keep = upper ? high : low;
      half[i] = keep + __shfl_xor_sync(0xffffffffu, send, kCount);
    }
    return sum_over_lanes<kHalf>(half);
  }
}

// Sums 16 values over the lanes of a warp; lane l gets the sum of value l / 2.
__device__ __forceinline__ float sum_16(const float (&x)[16]) {
  return sum_over_lanes<16>(x);
}

template <int kPairs>
__device__ __forceinline__ void store_pairs(void* to, const uint32_t (&x)[kPairs]) {
  if constexpr (kPairs == 2) {
    *static_cast<uint2*>(to) = make_uint2(x[0], x[1]);
  } else {
    *static_cast<uint32_t*>(to) = x[0];
  }
}

template <int kPairs>
__device__ __forceinline__ void pack_pairs(uint32_t (&to)[kPairs], const float (&x)[2 * kPairs]) {
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    to[c] = pack_f16(x[2 * c], x[2 * c + 1]);
  }
}

// Stores products of neighbouring channels with a factor each.
template <int kPairs>
__device__ __forceinline__ void store_scaled(
    void* to, const uint32_t (&x)[kPairs], const uint32_t (&factor)[kPairs]
) {
  uint32_t scaled[kPairs];
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    scaled[c] = multiply_f16(x[c], factor[c]);
  }
  store_pairs(to, scaled);
}

// Log-decays of the warp's rows in log2 units; rows past the end get 0.
template <DType kType, KdaGate kGate, int kChannels>
__device__ __forceinline__ void load_gate(
    float (&decay)[8][kChannels],
    const KdaPrepArgs& args,
    int64_t offset,
    int rows,
    int hv,
    int channel
) {
  const KdaPrepParams& p = args.params;
  KdaGateChannel gate[kChannels];
  float rate = 1.0f;
  if (kGate != KdaGate::kActivated && p.tokens.A_log != nullptr) {
    rate = expf(p.tokens.A_log[hv]);
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    gate[c].rate = kGate == KdaGate::kLowerBound ? rate * kLog2e : rate;
    gate[c].bias = kGate != KdaGate::kActivated && p.tokens.dt_bias != nullptr
                       ? p.tokens.dt_bias[hv * p.dims.K + channel + c]
                       : 0.0f;
  }
  const float bound = static_cast<float>(p.options.lower_bound) * kLog2e;
  const int64_t stride = p.tokens.g.stride[1];
  if (args.whole_g) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(decay[i], p.tokens.g.data, offset + i * stride, true);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_floats<kType, kChannels>(decay[i], p.tokens.g.data, offset + i * stride, false);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      decay[i][c] = i < rows ? gate[c].template log2_decay<kGate>(decay[i][c], bound) : 0.0f;
    }
  }
}

template <KdaGate kGate, int kChannels>
__device__ __forceinline__ void load_gate_of_type(
    float (&decay)[8][kChannels],
    const KdaPrepArgs& args,
    int64_t offset,
    int rows,
    int hv,
    int channel
) {
  switch (args.params.tokens.g.dtype) {
    case DType::kBf16:
      load_gate<DType::kBf16, kGate>(decay, args, offset, rows, hv, channel);
      break;
    case DType::kF16:
      load_gate<DType::kF16, kGate>(decay, args, offset, rows, hv, channel);
      break;
    default:
      load_gate<DType::kF32, kGate>(decay, args, offset, rows, hv, channel);
  }
}

// Adds the log-decays of the rows of warps `begin` to `end` - 1.
template <int kChannels>
__device__ __forceinline__ void add_sums(
    float (&x)[kChannels], const float* sums, int begin, int end, int pitch
) {
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      x[c] += sums[w * pitch + c];
    }
  }
}

// The decay over the rows of warps `begin` to `end` - 1, in fp16.
template <int kPairs>
__device__ __forceinline__ void exp2_of_sums(
    uint32_t (&to)[kPairs], const float* sums, int begin, int end, int pitch
) {
  float x[2 * kPairs] = {};
  add_sums(x, sums, begin, end, pitch);
#pragma unroll
  for (int c = 0; c < 2 * kPairs; ++c) {
    x[c] = fast_exp2(x[c]);
  }
  pack_pairs(to, x);
}

// Sums 16 values, whose partial sums fp16 holds, over the lanes of a warp: over four lanes by a
// product with ones, which hands each of them four of the values, then in float. Lanes with bit 2
// clear get the sum of value 4 (lane % 4) + 2 (bit 4 of lane) + (bit 3 of lane).
__device__ __forceinline__ float sum_16_short(const float (&x)[16]) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const uint32_t a[4] = {
        pack_f16(x[8 * u], x[8 * u + 1]),
        pack_f16(x[8 * u + 2], x[8 * u + 3]),
        pack_f16(x[8 * u + 4], x[8 * u + 5]),
        pack_f16(x[8 * u + 6], x[8 * u + 7])
    };
    constexpr uint32_t kOne = 0x3c00;
    const uint32_t b0 = g == 4 * u ? kOne : (g == 4 * u + 1 ? kOne << 16 : 0);
    const uint32_t b1 = g == 4 * u + 2 ? kOne : (g == 4 * u + 3 ? kOne << 16 : 0);
    mma_f16(c, a, b0, b1);
  }
  const bool upper = (lane & 16) != 0;
  float first = upper ? c[2] : c[0];
  float second = upper ? c[3] : c[1];
  first += __shfl_xor_sync(0xffffffffu, upper ? c[0] : c[2], 16);
  second += __shfl_xor_sync(0xffffffffu, upper ? c[1] : c[3], 16);
  const bool odd = (lane & 8) != 0;
  float sum = odd ? second : first;
  sum += __shfl_xor_sync(0xffffffffu, odd ? first : second, 8);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 4);
}

// The scores of one batch of 16 pairs inside the warp's 8 rows: pair number n^2 + r belongs to row
// n; its first n are k_n k_j, the next n + 1 are q_n k_j.
__device__ __forceinline__ void put_pairs(
    const float (&x)[16],
    int batch,
    const float* beta,
    float* lower,
    uint16_t* scores,
    uint16_t* key_scores,
    int row0
) {
  const float sum = sum_16_short(x);
  const int lane = threadIdx.x % 32;
  if ((lane & 4) != 0) {
    return;
  }
  const int pair = batch * 16 + lane % 4 * 4 + lane / 16 * 2 + lane / 8 % 2;
  int n = 0;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    n += pair >= i * i ? 1 : 0;
  }
  const int r = pair - n * n;
  const uint16_t rounded = static_cast<uint16_t>(pack_f16(sum, 0.0f));
  const int row = row0 + n;
  if (r < n) {
    lower[row * kInversePitch + row0 + r] = beta[row] * sum;
    if (key_scores != nullptr) {
      key_scores[panel_offset(row, row0 + r)] = rounded;
    }
  } else {
    scores[panel_offset(row, row0 + r - n)] = rounded;
  }
}

// The warp's rows of q or k; zero past the end.
template <int kPairs>
__device__ __forceinline__ void load_rows(
    uint32_t (&out)[8][kPairs], const KdaView& view, int64_t offset, int rows, bool whole
) {
  const uint16_t* from = static_cast<const uint16_t*>(view.data) + offset;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      out[i][c] = 0;
    }
  }
  if (whole) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_pairs<kPairs>(out[i], from + i * view.stride[1], true);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < rows) {
        load_pairs<kPairs>(out[i], from + i * view.stride[1], false);
      }
    }
  }
}

template <DType kType, int kK>
__global__ void __launch_bounds__(kPrepThreads, 2) kda_prep_kernel(const KdaPrepArgs args) {
  using Shared = PrepShared<kK>;
  using Record = KdaRecord<kK>;
  constexpr int kChannels = kK / 32;
  constexpr int kPairs = kChannels / 2;
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  allow_next_kernel();
  const KdaPrepParams& p = args.params;
  const int64_t slot = blockIdx.x;
  const int hv = blockIdx.y;
  const KdaSpan span = kda_chunk_of_slot(p.cu_seqlens, p.window, slot, p.dims);
  if (!span.valid) {
    end_after_previous_kernel();
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int row0 = warp * 8;
  const int channel = lane * kChannels;
  const int64_t token = span.sequence.begin + span.first * kTensorChunk;
  const int64_t left = span.sequence.length - span.first * kTensorChunk;
  const int chunk_rows = static_cast<int>(left < kTensorChunk ? left : kTensorChunk);
  const int rows = chunk_rows - row0;  // of this warp; 8 or more: all
  const int64_t head = hv / (p.dims.HV / p.dims.H);
  char* record = p.records.data + (slot * p.dims.HV + hv) * p.records.stride;

  uint16_t* operands = reinterpret_cast<uint16_t*>(kda_shared);
  float* lower = reinterpret_cast<float*>(kda_shared + Shared::kLower);
  uint16_t* scores = reinterpret_cast<uint16_t*>(kda_shared + Shared::kScores);
  float* sums = reinterpret_cast<float*>(kda_shared + Shared::kSums);
  float* beta = reinterpret_cast<float*>(kda_shared + Shared::kBeta);
  float* key_norm = reinterpret_cast<float*>(kda_shared + Shared::kKeyNorm);
  float* query_norm = reinterpret_cast<float*>(kda_shared + Shared::kQueryNorm);
  uint16_t* key_scores =
      p.key_scores ? reinterpret_cast<uint16_t*>(kda_shared + Shared::kKeyScores) : nullptr;

  // Loads.
  uint32_t q_raw[8][kPairs], k_raw[8][kPairs];
  {
    const KdaView& q = p.tokens.q;
    const KdaView& k = p.tokens.k;
    const int64_t q_offset = span.sequence.batch * q.stride[0] + (token + row0) * q.stride[1] +
                             head * q.stride[2] + channel;
    const int64_t k_offset = span.sequence.batch * k.stride[0] + (token + row0) * k.stride[1] +
                             head * k.stride[2] + channel;
    load_rows(q_raw, q, q_offset, rows, args.whole_q);
    load_rows(k_raw, k, k_offset, rows, args.whole_k);
  }
  float decay[8][kChannels];  // log2 of the decay of each row, then the decay
  {
    const KdaView& g = p.tokens.g;
    const int64_t offset = span.sequence.batch * g.stride[0] + (token + row0) * g.stride[1] +
                           hv * g.stride[2] + channel;
    switch (p.options.gate) {
      case KdaGate::kActivated:
        load_gate_of_type<KdaGate::kActivated>(decay, args, offset, rows, hv, channel);
        break;
      case KdaGate::kSoftplus:
        load_gate_of_type<KdaGate::kSoftplus>(decay, args, offset, rows, hv, channel);
        break;
      default:
        load_gate_of_type<KdaGate::kLowerBound>(decay, args, offset, rows, hv, channel);
    }
  }
  if (threadIdx.x < kTensorChunk) {
    const int row = threadIdx.x;
    const KdaView& b = p.tokens.beta;
    beta[row] = row < chunk_rows ? kda_beta(
                                       load_float(
                                           b.data,
                                           b.dtype,
                                           span.sequence.batch * b.stride[0] +
                                               (token + row) * b.stride[1] + hv * b.stride[2]
                                       ),
                                       p.options.beta
                                   )
                                 : 0.0f;
  }
  // Above the diagonal the panels are zero.
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kPrepThreads) {
    reinterpret_cast<uint4*>(scores)[i] = make_uint4(0, 0, 0, 0);
    if (key_scores != nullptr) {
      reinterpret_cast<uint4*>(key_scores)[i] = make_uint4(0, 0, 0, 0);
    }
  }

  // Sums over 8 rows, norms.
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += decay[i][c];
      decay[i][c] = fast_exp2(decay[i][c]);
    }
    sums[warp * kK + channel + c] = sum;
  }
  float norm = 1.0f;  // of query row lane / 2, then key row lane / 2 - 8
  if (p.options.l2norm) {
    float squares[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float q_sum = 0.0f, k_sum = 0.0f;
#pragma unroll
      for (int c = 0; c < kPairs; ++c) {
        const float2 x = unpack_pair<kType>(q_raw[i][c]);
        const float2 y = unpack_pair<kType>(k_raw[i][c]);
        q_sum += x.x * x.x;
        q_sum += x.y * x.y;
        k_sum += y.x * y.x;
        k_sum += y.y * y.y;
      }
      squares[i] = q_sum;
      squares[i + 8] = k_sum;
    }
    norm = rsqrtf(sum_16(squares) + 1e-6f);
  }
  if (lane % 2 == 0) {
    (lane < 16 ? query_norm : key_norm)[row0 + lane / 2 % 8] = norm;
  }
  __syncthreads();

  // Decay from the chunk's start to the warp's rows, from them to the chunk's end, and, for the
  // second half of 16 rows, over the first.
  uint32_t before[kPairs], after[kPairs], over_half[kPairs];
  exp2_of_sums(before, sums + channel, 0, warp, kK);
  exp2_of_sums(after, sums + channel, warp + 1, 8, kK);
  exp2_of_sums(over_half, sums + channel, warp & ~1, warp, kK);
  if (warp == 0) {
    float* gamma = reinterpret_cast<float*>(record + Record::kGamma);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        sum += sums[w * kK + channel + c];
      }
      gamma[channel + c] = exp2f(sum);
    }
  }

  // Where the lane's channels of row 8 n + i lie (see panel_offset and Shared::operand): the start
  // of row 8 n, plus i rows, plus their permuted 16-byte piece.
  char* const record_rows = record + channel / 64 * kPanelBytes + row0 * 128 + channel % 8 * 2;
  unsigned char* const operand_rows = kda_shared + channel / 64 * 128 + channel % 8 * 2;
  const auto piece = [&](int i) { return (channel / 8 % 8 ^ i) * 16; };
  const auto record_row = [&](int i) { return record_rows + i * 128 + piece(i); };
  const auto operand_row = [&](int row8, int i) {
    return operand_rows + (row8 + i) * kK * 2 + piece(i);
  };

  // Rows in order: what meets earlier rows; `behind` decays the earlier keys up to the row.
  float behind[8][kChannels], from_start[kChannels], pairs[64];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float q_norm = __shfl_sync(0xffffffffu, norm, 2 * i);
    const float k_norm = __shfl_sync(0xffffffffu, norm, 2 * i + 16);
    float q[kChannels], k[kChannels];
#pragma unroll
    for (int c = 0; c < kPairs; ++c) {
      const float2 x = unpack_pair<kType>(q_raw[i][c]);
      const float2 y = unpack_pair<kType>(k_raw[i][c]);
      q[2 * c] = x.x * q_norm;
      q[2 * c + 1] = x.y * q_norm;
      k[2 * c] = y.x * k_norm;
      k[2 * c + 1] = y.y * k_norm;
    }
#pragma unroll
    for (int j = 0; j < i; ++j) {
      float kk = 0.0f, qk = 0.0f;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        behind[j][c] *= decay[i][c];
        kk += k[c] * behind[j][c];
        qk += q[c] * behind[j][c];
      }
      pairs[i * i + j] = kk;
      pairs[i * i + i + j] = qk;
    }
    float qk = 0.0f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      qk += q[c] * k[c];
      behind[i][c] = k[c];
      from_start[c] = i == 0 ? decay[i][c] : from_start[c] * decay[i][c];
      q[c] *= from_start[c];
      k[c] *= from_start[c];
    }
    pairs[i * i + 2 * i] = qk;
    uint32_t k_short[kPairs], q_short[kPairs];
    pack_pairs(k_short, k);
    pack_pairs(q_short, q);

    store_scaled(record_row(i) + Record::kKd, k_short, before);
    store_scaled(record_row(i) + Record::kQd, q_short, before);
    if (warp >= 2) {
      store_scaled(operand_row(Shared::kStripKeys + row0 - 16, i), k_short, over_half);
      store_scaled(operand_row(Shared::kStripQueries + row0 - 16, i), q_short, over_half);
    }
    if (warp % 2 != 0) {
      store_pairs(operand_row(Shared::kHalfRows + warp / 2 * 16, i), k_short);
      store_pairs(operand_row(Shared::kHalfRows + warp / 2 * 16 + 8, i), q_short);
    }
    if (i == 3 || i == 5 || i == 6 || i == 7) {
      const int number = i == 3 ? 0 : i - 4;
      float batch[16];
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        batch[n] = pairs[number * 16 + n];
      }
      put_pairs(batch, number, beta, lower, scores, key_scores, row0);
    }
  }

  // Keys decayed to the end of the warp's rows, and on to the chunk's end or a strip's start.
  uint32_t behind_short[8][kPairs];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pack_pairs(behind_short[i], behind[i]);
    store_scaled(record_row(i) + Record::kKr, behind_short[i], after);
    if (warp % 2 == 0) {
      store_pairs(operand_row(Shared::kHalfColumns + warp / 2 * 8, i), behind_short[i]);
    }
  }
  float between[kChannels] = {};  // log2 of the decay from the warp's end to the strip
#pragma unroll 1
  for (int strip = warp / 2 + 1, w = warp + 1; strip < 4; ++strip) {
    add_sums(between, sums + channel, w, 2 * strip, kK);
    w = 2 * strip;
    float factor[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      factor[c] = fast_exp2(between[c]);
    }
    uint32_t factor_short[kPairs];
    pack_pairs(factor_short, factor);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_scaled(operand_row(Shared::columns_of(strip) + row0, i), behind_short[i], factor_short);
    }
  }
  __syncthreads();

  // Scores by tensor cores: 12 pairs of tiles of the strips, 4 tiles between halves of 16 rows,
  // whose second tile of a pair is not used.
  const int g = lane / 4;
  const int t = lane % 4;
  const uint32_t a_lane = lane % 16 * (kK * 2) + ((lane / 16 ^ (lane & 7)) << 4);
  const uint32_t b_lane =
      (lane / 16 * 8 + lane % 8) * (kK * 2) + (((lane / 8 & 1) ^ (lane & 7)) << 4);
  for (int job = warp; job < 16; job += 8) {
    const bool half = job >= 12;
    const int queries = half ? 0 : job % 2;
    // Strip 3 has three pairs of tiles of keys and of queries, strip 2 has two, strip 1 has one.
    const int number = job / 2;
    const int strip = number < 3 ? 3 : (number < 5 ? 2 : 1);
    const int tile = 2 * (number < 3 ? number : (number < 5 ? number - 3 : 0));
    const int a_row =
        half ? Shared::kHalfRows + (job - 12) * 16
             : (queries != 0 ? Shared::kStripQueries : Shared::kStripKeys) + (strip - 1) * 16;
    const int b_row =
        half ? Shared::kHalfColumns + (job - 12) * 8 : Shared::columns_of(strip) + tile * 8;
    const uint32_t a_from = shared_address(operands) + a_row * (kK * 2);
    const uint32_t b_from = shared_address(operands) + b_row * (kK * 2);
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t a[4], b[4];
      load_matrices(a, a_from + (a_lane ^ (k * 32)));
      load_matrices(b, b_from + (b_lane ^ (k * 32)));
      mma_f16(c[0], a, b[0], b[1]);
      mma_f16(c[1], a, b[2], b[3]);
    }
    const auto put = [&](int row, int col, float x, float y, bool of_queries) {
      const uint32_t rounded = pack_f16(x, y);
      if (of_queries) {
        *reinterpret_cast<uint32_t*>(scores + panel_offset(row, col)) = rounded;
      } else {
        lower[row * kInversePitch + col] = beta[row] * x;
        lower[row * kInversePitch + col + 1] = beta[row] * y;
        if (key_scores != nullptr) {
          *reinterpret_cast<uint32_t*>(key_scores + panel_offset(row, col)) = rounded;
        }
      }
    };
    if (half) {
      const int row = (job - 12) * 16 + 8 + g;
      const int col = (job - 12) * 16 + 2 * t;
      put(row, col, c[0][0], c[0][1], false);
      put(row, col, c[0][2], c[0][3], true);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int col = (tile + n) * 8 + 2 * t;
        put(strip * 16 + g, col, c[n][0], c[n][1], queries != 0);
        put(strip * 16 + 8 + g, col, c[n][2], c[n][3], queries != 0);
      }
    }
  }
  __syncthreads();

  float* inverse = reinterpret_cast<float*>(kda_shared + Shared::kInverse);
  invert_unit_lower(lower, inverse, reinterpret_cast<float*>(kda_shared + Shared::kScratch));
  if (threadIdx.x < kTensorChunk) {
    reinterpret_cast<float*>(record + Record::kBeta)[threadIdx.x] = beta[threadIdx.x];
    reinterpret_cast<float*>(record + Record::kKeyNorm)[threadIdx.x] = key_norm[threadIdx.x];
    reinterpret_cast<float*>(record + Record::kQueryNorm)[threadIdx.x] = query_norm[threadIdx.x];
  }
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kPrepThreads) {
    reinterpret_cast<uint4*>(record + Record::kScores)[i] = reinterpret_cast<uint4*>(scores)[i];
    if (key_scores != nullptr) {
      reinterpret_cast<uint4*>(record + Record::kKeyScores)[i] =
          reinterpret_cast<uint4*>(key_scores)[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kPanelBytes / 16; i += kPrepThreads) {
    const int row = i / 8;
    const int col = i % 8 * 8;
    float x[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      x[c] = col + c <= row ? inverse[row * kInversePitch + col + c] : 0.0f;
    }
    *reinterpret_cast<uint4*>(record + Record::kInverse + panel_offset(row, col) * 2) = make_uint4(
        pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])
    );
  }
  end_after_previous_kernel();
}

}  // namespace sdm::kda::cuda
