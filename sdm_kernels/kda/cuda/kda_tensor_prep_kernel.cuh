// SPDX-License-Identifier: Apache-2.0
//! @file The token-parallel stage of the tensor path: one block of eight warps makes the record of
//! one chunk and value head (kda_tensor_records.cuh).
//!
//! Warp w owns rows 8w to 8w + 7. First a lane takes K / 32 neighbouring channels of all of them:
//! gates, their sums, and products of decays inside the eight rows, which go through shared memory.
//! Then it takes one row and a quarter of the channels: keys, queries and all operands. Decays
//! inside eight rows are products of factors exp(g) <= 1; over longer spans exp2 of sums. Every
//! score k_i k_j exp(G_i - G_j) is split at the boundary of a block of rows between j and i, so
//! that both factors are at most exp(0): no gate overflows, and nothing that a row gets depends on
//! later rows.
//!   rows and columns in the same 8 rows: a binary tree, split in the middle of 8, 4 and 2 rows
//!   the two halves of 16 rows: split in the middle
//!   16 rows (a strip) against all columns before them: split at the strip's start
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
  using Part = RowPart<kK>;
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
  const int channel = lane * kChannels;  // first of the lane's in the first layout
  const int g = lane / 4;                // row in the second
  const int t = lane % 4;
  const int64_t token = span.sequence.begin + span.first * kTensorChunk;
  const int64_t left = span.sequence.length - span.first * kTensorChunk;
  const int chunk_rows = static_cast<int>(left < kTensorChunk ? left : kTensorChunk);
  const int rows = chunk_rows - row0;  // of this warp; 8 or more: all
  const int64_t head = hv / (p.dims.HV / p.dims.H);
  char* record = p.records.data + (slot * p.dims.HV + hv) * p.records.stride;

  float* lower = reinterpret_cast<float*>(kda_shared + Shared::kLower);
  uint16_t* scores = reinterpret_cast<uint16_t*>(kda_shared + Shared::kScores);
  float* sums = reinterpret_cast<float*>(kda_shared + Shared::kSums);
  float* beta = reinterpret_cast<float*>(kda_shared + Shared::kBeta);
  uint16_t* key_scores =
      p.key_scores ? reinterpret_cast<uint16_t*>(kda_shared + Shared::kKeyScores) : nullptr;

  // Loads.
  Part q, k;
  {
    const KdaView& from_q = p.tokens.q;
    const KdaView& from_k = p.tokens.k;
    q.load_global(
        static_cast<const uint16_t*>(from_q.data) + span.sequence.batch * from_q.stride[0] +
            (token + row0 + g) * from_q.stride[1] + head * from_q.stride[2],
        args.whole_q,
        g < rows
    );
    k.load_global(
        static_cast<const uint16_t*>(from_k.data) + span.sequence.batch * from_k.stride[0] +
            (token + row0 + g) * from_k.stride[1] + head * from_k.stride[2],
        args.whole_k,
        g < rows
    );
  }
  float decay[8][kChannels];  // log2 of the decay of each row, then the decay
  {
    const KdaView& gate = p.tokens.g;
    const int64_t offset = span.sequence.batch * gate.stride[0] + (token + row0) * gate.stride[1] +
                           hv * gate.stride[2] + channel;
    load_decays(decay, args, offset, rows, hv, channel);
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

  // Sums over 8 rows; decays inside them.
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
  {
    const auto put = [&](int table, int row, const float (&x)[kChannels]) {
      uint32_t packed[kPairs];
      pack_pairs(packed, x);
      store_pairs(
          kda_shared + Shared::row_offset(table + row, channel / 8) + channel % 8 * 2, packed
      );
    };
    float prefix[8][kChannels], suffix[8][kChannels], level4[8][kChannels], level2[8][kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      level4[3][c] = 1.0f;
      level4[2][c] = decay[3][c];
      level4[1][c] = decay[2][c] * decay[3][c];
      level4[0][c] = decay[1][c] * level4[1][c];
      level4[4][c] = decay[4][c];
      level4[5][c] = level4[4][c] * decay[5][c];
      level4[6][c] = level4[5][c] * decay[6][c];
      level4[7][c] = level4[6][c] * decay[7][c];
      prefix[0][c] = decay[0][c];
      suffix[7][c] = 1.0f;
      suffix[6][c] = decay[7][c];
      suffix[5][c] = decay[6][c] * decay[7][c];
      suffix[4][c] = decay[5][c] * suffix[5][c];
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        prefix[i][c] = prefix[i - 1][c] * decay[i][c];
      }
#pragma unroll
      for (int i = 4; i < 8; ++i) {
        prefix[i][c] = prefix[3][c] * level4[i][c];
        suffix[i - 4][c] = level4[i - 4][c] * level4[7][c];
      }
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        level2[i][c] = decay[i + 1][c];
        level2[i + 1][c] = 1.0f;
        level2[i + 2][c] = decay[i + 2][c];
        level2[i + 3][c] = decay[i + 2][c] * decay[i + 3][c];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      put(Shared::kPrefix, row0 + i, prefix[i]);
      put(Shared::kSuffix, row0 + i, suffix[i]);
      put(Shared::kLevel4, row0 + i, level4[i]);
      put(Shared::kLevel2, row0 + i, level2[i]);
      if (i % 2 != 0) {
        put(Shared::kLevel1, warp * 4 + i / 2, decay[i]);
      }
    }
  }
  __syncthreads();
  if (warp == 0) {
    float* gamma = reinterpret_cast<float*>(record + Record::kGamma);
    float sum[kChannels] = {};
    add_sums(sum, sums + channel, 0, 8, kK);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      gamma[channel + c] = exp2f(sum[c]);
    }
  }

  // Keys and queries; scores inside the 8 rows.
  const int row = row0 + g;
  {
    const float q_norm = q.template normalise<kType>(p.options.l2norm);
    const float k_norm = k.template normalise<kType>(p.options.l2norm);
    if (t == 0) {
      reinterpret_cast<float*>(record + Record::kQueryNorm)[row] = q_norm;
      reinterpret_cast<float*>(record + Record::kKeyNorm)[row] = k_norm;
    }
  }
  {
    float key[2] = {0.0f, 0.0f}, query[2];  // scores of row g with columns 2 t and 2 t + 1
    float c[4];
    multiply_rows<kK>(c, k, q, k);
    query[0] = c[2];
    query[1] = c[3];
#pragma unroll 1
    for (int level = 1; level < 8; level *= 2) {
      Part factor;
      const int table =
          level == 1 ? Shared::kLevel1 : (level == 2 ? Shared::kLevel2 : Shared::kLevel4);
      const int at = level == 1 ? warp * 4 + g / 2 : row;
      factor.load_shared(kda_shared, Shared::row_offset(table + at, t));
      if (level == 1 && g % 2 == 0) {
#pragma unroll
        for (int i = 0; i < Part::kPieces * 4; ++i) {
          factor.x[i] = 0x3c003c00u;  // 1, 1
        }
      }
      const Part keys = k * factor;
      multiply_rows<kK>(c, keys, q * factor, keys);
      // The level of a pair is the highest bit in which row and column differ.
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int differ = g ^ (2 * t + n);
        if (differ >= level && differ < 2 * level) {
          key[n] = c[n];
          query[n] = c[2 + n];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = 2 * t + n;
      key[n] = column < g ? key[n] : 0.0f;
      query[n] = column <= g ? query[n] : 0.0f;
      lower[row * kInversePitch + row0 + column] = beta[row] * key[n];
    }
    const int at = panel_offset(row, row0 + 2 * t);
    *reinterpret_cast<uint32_t*>(scores + at) = pack_f16(query[0], query[1]);
    if (key_scores != nullptr) {
      *reinterpret_cast<uint32_t*>(key_scores + at) = pack_f16(key[0], key[1]);
    }
  }

  // Decays between blocks of rows, from the first layout to the second.
  constexpr int kRow = Shared::kRowBytes;
  const int before = (Shared::kLevel2 + row0) * kRow;  // the warp is done with its rows there
  __syncwarp();
  {
    const auto put = [&](int at, int begin, int end) {
      uint32_t packed[kPairs];
      exp2_of_sums(packed, sums + channel, begin, end, kK);
      store_pairs(kda_shared + at + channel * 2, packed);
    };
    put(before, 0, warp);
    put(before + kRow, warp + 1, 8);
    if (warp % 2 != 0 && warp > 1) {
      put(Shared::factor_over(warp), warp - 1, warp);
    }
#pragma unroll 1
    for (int strip = warp / 2 + 1; strip < 4; ++strip) {
      put(Shared::factor_to(strip, warp), warp + 1, 2 * strip);
    }
  }
  __syncwarp();

  // The record's matrices; keys and queries from the start of the 8 rows, keys to their end.
  const int record_row = row * 128 + ((t ^ g) << 4);
  Part columns, factor;
  factor.load_shared(kda_shared, Shared::row_offset(Shared::kSuffix + row, t));
  columns = k * factor;
  factor.load_shared(kda_shared, Shared::row_offset(Shared::kPrefix + row, t));
  k = k * factor;
  q = q * factor;
  factor.load_shared(kda_shared, before + t * 16);
  (k * factor).store_record(record + Record::kKd, record_row);
  (q * factor).store_record(record + Record::kQd, record_row);
  factor.load_shared(kda_shared, before + kRow + t * 16);
  (columns * factor).store_record(record + Record::kKr, record_row);
  __syncthreads();

  // The operands of products between warps' rows.
  const auto put = [&](const Part& part, int at) {
    part.store_shared(kda_shared, Shared::row_offset(at + g, t));
  };
  if (warp % 2 == 0) {
    put(columns, Shared::kHalfColumns + warp / 2 * 8);
  } else {
    put(k, Shared::kHalfRows + warp / 2 * 16);
    put(q, Shared::kHalfRows + warp / 2 * 16 + 8);
    if (warp > 1) {
      factor.load_shared(kda_shared, Shared::factor_over(warp) + t * 16);
      k = k * factor;
      q = q * factor;
    }
  }
  if (warp > 1) {
    put(k, Shared::kStripKeys + row0 - 16);
    put(q, Shared::kStripQueries + row0 - 16);
  }
#pragma unroll 1
  for (int strip = warp / 2 + 1; strip < 4; ++strip) {
    factor.load_shared(kda_shared, Shared::factor_to(strip, warp) + t * 16);
    put(columns * factor, Shared::columns_of(strip) + row0);
  }
  __syncthreads();

  // Scores by tensor cores: 12 pairs of tiles of the strips, 4 tiles between halves of 16 rows,
  // whose second tile of a pair is not used.
  const int swizzle = Shared::swizzle(lane);
  const uint32_t a_lane = lane % 16 * kRow + ((lane / 16 ^ swizzle) << 4);
  const uint32_t b_lane = (lane / 16 * 8 + lane % 8) * kRow + (((lane / 8 & 1) ^ swizzle) << 4);
#pragma unroll 1
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
    const uint32_t a_from = shared_address(kda_shared) + a_row * kRow;
    // There is nothing of its own behind the last half: the second tile repeats the first.
    const uint32_t b_from =
        shared_address(kda_shared) + (b_row - (half ? lane / 16 * 8 : 0)) * kRow;
    float c[2][4] = {};
#pragma unroll
    for (int k = 0; k < kK / 16; ++k) {
      uint32_t a[4], b[4];
      load_matrices(a, a_from + (a_lane ^ (k * 32)));
      load_matrices(b, b_from + (b_lane ^ (k * 32)));
      mma_f16(c[0], a, b[0], b[1]);
      mma_f16(c[1], a, b[2], b[3]);
    }
    const auto put_scores = [&](int row, int col, float x, float y, bool of_queries) {
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
      put_scores(row, col, c[0][0], c[0][1], false);
      put_scores(row, col, c[0][2], c[0][3], true);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int col = (tile + n) * 8 + 2 * t;
        put_scores(strip * 16 + g, col, c[n][0], c[n][1], queries != 0);
        put_scores(strip * 16 + 8 + g, col, c[n][2], c[n][3], queries != 0);
      }
    }
  }
  __syncthreads();

  float* inverse = reinterpret_cast<float*>(kda_shared + Shared::kInverse);
  invert_unit_lower(lower, inverse, reinterpret_cast<float*>(kda_shared + Shared::kScratch));
  if (threadIdx.x < kTensorChunk) {
    reinterpret_cast<float*>(record + Record::kBeta)[threadIdx.x] = beta[threadIdx.x];
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
