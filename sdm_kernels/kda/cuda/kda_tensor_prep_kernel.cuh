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
#include "sdm_kernels/kda/cuda/kda_tensor_prep_rows.cuh"

namespace sdm::kda::cuda {

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
