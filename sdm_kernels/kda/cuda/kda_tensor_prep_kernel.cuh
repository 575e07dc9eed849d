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

// Products of neighbouring channels with a factor each, rounded.
template <int kChannels>
__device__ __forceinline__ void store_scaled(
    void* to, const float (&x)[kChannels], const float (&factor)[kChannels]
) {
  uint32_t packed[kChannels / 2];
#pragma unroll
  for (int c = 0; c < kChannels / 2; ++c) {
    packed[c] = pack_f16(x[2 * c] * factor[2 * c], x[2 * c + 1] * factor[2 * c + 1]);
  }
  store_pairs(to, packed);
}

template <int kChannels>
__device__ __forceinline__ void store_plain(void* to, const float (&x)[kChannels]) {
  uint32_t packed[kChannels / 2];
#pragma unroll
  for (int c = 0; c < kChannels / 2; ++c) {
    packed[c] = pack_f16(x[2 * c], x[2 * c + 1]);
  }
  store_pairs(to, packed);
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

// The scores of one batch of 16 pairs inside the warp's 8 rows: pair number n^2 + r belongs to row
// n; its first n are k_n k_j, the next n + 1 are q_n k_j.
__device__ __forceinline__ void put_pairs(
    float (&x)[16],
    int batch,
    const float* beta,
    float* lower,
    uint16_t* scores,
    uint16_t* key_scores,
    int row0
) {
  const float sum = sum_16(x);
  const int lane = threadIdx.x % 32;
  if (lane % 2 != 0) {
    return;
  }
  const int pair = batch * 16 + lane / 2;
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
    wait_for_previous_kernel();
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
  float before[kChannels] = {}, after[kChannels] = {}, over_half[kChannels] = {};
  add_sums(before, sums + channel, 0, warp, kK);
  add_sums(after, sums + channel, warp + 1, 8, kK);
  add_sums(over_half, sums + channel, warp & ~1, warp, kK);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    before[c] = exp2f(before[c]);
    after[c] = exp2f(after[c]);
    over_half[c] = exp2f(over_half[c]);
  }
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

    store_scaled(record_row(i) + Record::kKd, k, before);
    store_scaled(record_row(i) + Record::kQd, q, before);
    if (warp >= 2) {
      store_scaled(operand_row(Shared::kStripKeys + row0 - 16, i), k, over_half);
      store_scaled(operand_row(Shared::kStripQueries + row0 - 16, i), q, over_half);
    }
    if (warp % 2 != 0) {
      store_plain(operand_row(Shared::kHalfRows + warp / 2 * 16, i), k);
      store_plain(operand_row(Shared::kHalfRows + warp / 2 * 16 + 8, i), q);
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
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    store_scaled(record_row(i) + Record::kKr, behind[i], after);
    if (warp % 2 == 0) {
      store_plain(operand_row(Shared::kHalfColumns + warp / 2 * 8, i), behind[i]);
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
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      store_scaled(operand_row(Shared::columns_of(strip) + row0, i), behind[i], factor);
    }
  }
  __syncthreads();

  // Scores by tensor cores: 24 tiles of the strips, 4 between halves of 16 rows.
  const int g = lane / 4;
  const int t = lane % 4;
  for (int job = warp; job < 28; job += 8) {
    const bool half = job >= 24;
    int strip = 0, tile = 0, queries = 0, a_row, b_row;
    if (half) {
      const int block = job - 24;
      a_row = Shared::kHalfRows + block * 16;
      b_row = Shared::kHalfColumns + block * 8;
    } else {
      // Strip 3 has 6 tiles of keys and of queries, strip 2 has 4, strip 1 has 2.
      queries = job % 2;
      const int number = job / 2;
      strip = number < 6 ? 3 : (number < 10 ? 2 : 1);
      tile = number - (number < 6 ? 0 : (number < 10 ? 6 : 10));
      a_row = (queries != 0 ? Shared::kStripQueries : Shared::kStripKeys) + (strip - 1) * 16;
      b_row = Shared::columns_of(strip) + tile * 8;
    }
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < kK; k += 32) {
      uint32_t a[2][4], b[4];
      load_matrices(
          a[0], shared_address(operands + Shared::operand(a_row + lane % 16, k + lane / 16 * 8))
      );
      load_matrices(
          a[1],
          shared_address(operands + Shared::operand(a_row + lane % 16, k + 16 + lane / 16 * 8))
      );
      load_matrices(
          b, shared_address(operands + Shared::operand(b_row + lane % 8, k + lane / 8 * 8))
      );
      mma_f16(c, a[0], b[0], b[1]);
      mma_f16(c, a[1], b[2], b[3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // rows g and g + 8 of the tile
      const int row = half ? (job - 24) * 16 + 8 + g : strip * 16 + h * 8 + g;
      const int col = (half ? (job - 24) * 16 : tile * 8) + 2 * t;
      const bool of_queries = half ? h == 1 : queries != 0;
      const uint32_t rounded = pack_f16(c[2 * h], c[2 * h + 1]);
      if (of_queries) {
        *reinterpret_cast<uint32_t*>(scores + panel_offset(row, col)) = rounded;
      } else {
        lower[row * kInversePitch + col] = beta[row] * c[2 * h];
        lower[row * kInversePitch + col + 1] = beta[row] * c[2 * h + 1];
        if (key_scores != nullptr) {
          *reinterpret_cast<uint32_t*>(key_scores + panel_offset(row, col)) = rounded;
        }
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
  wait_for_previous_kernel();  // whoever waits for this kernel waits for that one too
}

}  // namespace sdm::kda::cuda
