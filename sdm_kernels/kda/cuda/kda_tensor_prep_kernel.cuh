// SPDX-License-Identifier: Apache-2.0
//! @file The token-parallel stage of the tensor path: one block of eight warps makes the record of
//! one chunk and value head (kda_tensor_records.cuh).
//!
//! Every score k_i k_j exp(G_i - G_j) is split at the boundary of a block of rows between j and i,
//! so that both factors are at most exp(0): no gate overflows, and nothing that a row gets depends
//! on later rows. The blocks are those of a binary tree: at level l, in each block of 2^(l+1) rows,
//! the rows of the second half meet the columns of the first. A lane keeps four rows of K / 16
//! channels, and of each row
//!   k and q times the decay from the start of the row's block of 2^l rows
//!   k       times the decay to its end
//! in fp16. These are the operands of level l; the decay of the other half of the block makes them
//! those of level l + 1, and after the last level they are the record's kd, qd and kr. All decays
//! are products of factors exp(g) <= 1.
//!
//! Warp w owns rows 8w to 8w + 7, the lanes of its halves four each.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_inverse.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_rows.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_scores.cuh"

namespace sdm::kda::cuda {

// Products over warps [begin, end) of the decays of their rows, for the lane's channels.
template <int kCount>
__device__ __forceinline__ void multiply_totals(
    float (&x)[kCount], const float* totals, int pitch, int first, int count
) {
#pragma unroll
  for (int w = 0; w < count; ++w) {
    const float* from = totals + (first + w) * pitch;
#pragma unroll
    for (int c = 0; c < kCount; c += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + c);
      x[c] = w == 0 ? y.x : x[c] * y.x;
      x[c + 1] = w == 0 ? y.y : x[c + 1] * y.y;
      x[c + 2] = w == 0 ? y.z : x[c + 2] * y.z;
      x[c + 3] = w == 0 ? y.w : x[c + 3] * y.w;
    }
  }
}

// kUsual: the queries, keys and gates have the same type, and a lane's channels are loaded at once.
template <DType kType, int kK, bool kUsual>
__global__ void __launch_bounds__(kPrepThreads, 2) kda_prep_kernel(const KdaPrepArgs args) {
  using Shared = PrepShared<kK>;
  using Record = KdaRecord<kK>;
  constexpr int kCount = kK / 16;  // channels of a lane
  constexpr int kPairs = kCount / 2;
  constexpr int kSteps = kK / 16;  // of products
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  allow_next_kernel();
  const KdaPrepParams& p = args.params;
  const int64_t slot = blockIdx.z * p.window.num_chunks + blockIdx.x;
  const int hv = blockIdx.y;
  const KdaSpan span = kda_chunk_of_window(p.cu_seqlens, p.window, blockIdx.z, blockIdx.x, p.dims);
  if (!span.valid) {
    end_after_previous_kernel();
    return;
  }
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int half = lane / 16;
  const int row0 = warp * 8;
  const int lane_row = row0 + half * kLaneRows;  // first of the lane's
  const int channel = lane % 16 * kCount;        // first of the lane's
  const int64_t token = span.sequence.begin + span.first * kTensorChunk;
  const int64_t rows_left = span.sequence.length - span.first * kTensorChunk;
  const int chunk_rows = static_cast<int>(rows_left < kTensorChunk ? rows_left : kTensorChunk);
  const int left = chunk_rows - lane_row;
  const int head = args.group == 1 ? hv : hv / args.group;
  char* record = p.records.data + (slot * p.dims.HV + hv) * p.records.stride;

  float* totals = reinterpret_cast<float*>(kda_shared + Shared::kTotals) + channel;
  float* beta = reinterpret_cast<float*>(kda_shared + Shared::kBeta);
  float* q_norms = reinterpret_cast<float*>(kda_shared + Shared::kQueryNorm);
  float* k_norms = reinterpret_cast<float*>(kda_shared + Shared::kKeyNorm);
  const ScoreOutput output = {
      reinterpret_cast<uint16_t*>(kda_shared + Shared::kScores),
      reinterpret_cast<float*>(kda_shared + Shared::kDiagonal),
      kda_shared + Shared::kFarHeads,
      kda_shared + Shared::kFarTails,
      beta
  };
  unsigned char* region = kda_shared + warp * Shared::kRegionBytes;
  const auto put_rows = [&](unsigned char* to, const uint32_t (&x)[kLaneRows][kPairs]) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      store_words(to + r * Shared::kRowBytes, x[r]);
    }
  };

  // Loads.
  uint32_t q[kLaneRows][kPairs], k[kLaneRows][kPairs], raw_g[kLaneRows][kPairs];
  const auto address = [&](const KdaView& view, int h) {
    return span.sequence.batch * view.stride[0] + (token + lane_row) * view.stride[1] +
           h * view.stride[2] + channel;
  };
  load_rows(
      q,
      static_cast<const uint16_t*>(p.tokens.q.data) + address(p.tokens.q, head),
      p.tokens.q.stride[1],
      left,
      kUsual || args.whole_q
  );
  load_rows(
      k,
      static_cast<const uint16_t*>(p.tokens.k.data) + address(p.tokens.k, head),
      p.tokens.k.stride[1],
      left,
      kUsual || args.whole_k
  );
  const int64_t from_g = address(p.tokens.g, hv);
  load_rows(
      raw_g,
      static_cast<const uint16_t*>(p.tokens.g.data) + from_g,
      p.tokens.g.stride[1],
      kUsual || p.tokens.g.dtype != DType::kF32 ? left : 0,
      kUsual || args.whole_g
  );
  GateConstants<kCount> gate;
  gate.load(args, hv, channel);
  if (warp < 2) {
    const int row = threadIdx.x;
    const KdaView& b = p.tokens.beta;
    float x = 0.0f;
    if (row < chunk_rows) {
      x = kda_beta(
          load_float(
              b.data,
              b.dtype,
              span.sequence.batch * b.stride[0] + (token + row) * b.stride[1] + hv * b.stride[2]
          ),
          p.options.beta
      );
    }
    beta[row] = x;
    reinterpret_cast<float*>(record + Record::kBeta)[row] = x;
  }
  // Above the diagonal the panel of scores is zero.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(output.scores)[row0 * 8 + i * 32 + lane] = make_uint4(0, 0, 0, 0);
  }

  // Norms, and the scores of the diagonal.
  // The lane's channels in row 4 of each half, and in row 2.
  unsigned char* const fours = region + half * 4 * Shared::kRowBytes + channel * 2;
  unsigned char* const twos = fours - half * 2 * Shared::kRowBytes;
  put_rows(fours + Shared::kRaw * Shared::kRowBytes, q);
  put_rows(fours + (Shared::kRaw + 8) * Shared::kRowBytes, k);
  __syncwarp();
  const OperandLanes<kK> lanes;
  const uint32_t base = shared_address(kda_shared);
  const uint32_t region_base = base + warp * Shared::kRegionBytes;
  {
    float with_q[4], with_k[4];
    multiply_raw<kType, kSteps>(
        with_q,
        with_k,
        region_base + Shared::kRaw * Shared::kRowBytes + lanes.rows16,
        region_base + Shared::kRaw * Shared::kRowBytes + lanes.columns16
    );
    const int g = lane / 4;
    if (lane % 4 == g / 2) {
      const bool odd = g % 2 != 0;
      const float qq = odd ? with_q[1] : with_q[0];
      const float kq = odd ? with_q[3] : with_q[2];
      const float kk = odd ? with_k[3] : with_k[2];
      const float q_norm = p.options.l2norm ? rsqrtf(qq + 1e-6f) : 1.0f;
      const float k_norm = p.options.l2norm ? rsqrtf(kk + 1e-6f) : 1.0f;
      const int row = row0 + g;
      q_norms[row] = q_norm;
      k_norms[row] = k_norm;
      reinterpret_cast<float*>(record + Record::kQueryNorm)[row] = q_norm;
      reinterpret_cast<float*>(record + Record::kKeyNorm)[row] = k_norm;
      output.scores[panel_offset(row, row)] =
          static_cast<uint16_t>(pack_f16(kq * q_norm * k_norm, 0.0f));
    }
  }

  // Decays: of each row in fp16, and over 2, 4 and 8 rows.
  uint32_t decay[kLaneRows][kPairs], first[kPairs], second[kPairs], other[kPairs];
  {
    float d[kLaneRows][kCount];
    make_decays<kUsual ? kType : DType::kF32>(d, raw_g, gate, args, from_g, left);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      pack_pairs(decay[r], d[r]);
    }
    float four[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      d[0][c] *= d[1][c];
      d[2][c] *= d[3][c];
      four[c] = d[0][c] * d[2][c];
    }
    pack_pairs(first, d[0]);
    pack_pairs(second, d[2]);
    float four_other[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      four_other[c] = __shfl_xor_sync(0xffffffffu, four[c], 16);
      four[c] *= four_other[c];
    }
    pack_pairs(other, four_other);
    if (half == 0) {
#pragma unroll
      for (int c = 0; c < kCount; c += 4) {
        *reinterpret_cast<float4*>(totals + warp * kK + c) =
            make_float4(four[c], four[c + 1], four[c + 2], four[c + 3]);
      }
    }
  }
  __syncwarp();
  {
    const float4 x = *reinterpret_cast<const float4*>(q_norms + lane_row);
    const float4 y = *reinterpret_cast<const float4*>(k_norms + lane_row);
    const float q_norm[4] = {x.x, x.y, x.z, x.w};
    const float k_norm[4] = {y.x, y.y, y.z, y.w};
    normalise_rows<kType>(q, q_norm);
    normalise_rows<kType>(k, k_norm);
  }

  // Levels 0 and 1 inside the lane's rows, level 2 between the halves.
  uint32_t to_end[kLaneRows][kPairs];
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      to_end[r][i] = k[r][i];
    }
    multiply_by(k[r], decay[r]);
    multiply_by(q[r], decay[r]);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    store_words(twos + (Shared::kNear + u) * Shared::kRowBytes, k[2 * u + 1]);
    store_words(twos + (Shared::kNear + 4 + u) * Shared::kRowBytes, q[2 * u + 1]);
    store_words(twos + (Shared::kNear + 16 + u) * Shared::kRowBytes, to_end[2 * u]);
    multiply_by(k[2 * u + 1], decay[2 * u]);
    multiply_by(q[2 * u + 1], decay[2 * u]);
    multiply_by(to_end[2 * u], decay[2 * u + 1]);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    store_words(twos + (Shared::kNear + 8 + u) * Shared::kRowBytes, k[2 + u]);
    store_words(twos + (Shared::kNear + 12 + u) * Shared::kRowBytes, q[2 + u]);
    store_words(twos + (Shared::kNear + 20 + u) * Shared::kRowBytes, to_end[u]);
    multiply_by(k[2 + u], first);
    multiply_by(q[2 + u], first);
    multiply_by(to_end[u], second);
  }
  if (half != 0) {
    unsigned char* const to = region + Shared::kFours * Shared::kRowBytes + channel * 2;
    put_rows(to, k);
    put_rows(to + 4 * Shared::kRowBytes, q);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      multiply_by(k[r], other);
      multiply_by(q[r], other);
    }
  } else {
    put_rows(region + (Shared::kFours + 8) * Shared::kRowBytes + channel * 2, to_end);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      multiply_by(to_end[r], other);
    }
  }
  __syncwarp();
  {
    const uint32_t from = region_base + Shared::kNear * Shared::kRowBytes;
    const uint32_t fours_from = region_base + Shared::kFours * Shared::kRowBytes;
    float c[4], f[4];
    multiply_near<kSteps>(
        c,
        f,
        from + lanes.rows16,
        from + 16 * Shared::kRowBytes + lanes.rows8,
        fours_from + lanes.rows16,
        fours_from + 8 * Shared::kRowBytes + lanes.rows8
    );
    output.put_near(row0, c, f);
  }
  __syncwarp();

  // Levels 3 to 5 between warps.
  if (warp % 2 != 0) {
    put_rows(fours + Shared::kEights * Shared::kRowBytes, k);
    put_rows(fours + (Shared::kEights + 8) * Shared::kRowBytes, q);
  } else {
    put_rows(fours + Shared::kEights * Shared::kRowBytes, to_end);
  }
  __syncthreads();
  float gamma[kCount], x[kCount];
  const auto climb = [&](bool upper) {
    uint32_t factor[kPairs];
    pack_pairs(factor, x);
    if (warp == 0) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        gamma[c] *= x[c];
      }
    }
    if (upper) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(k[r], factor);
        multiply_by(q[r], factor);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(to_end[r], factor);
      }
    }
  };
  const auto put_far = [&](int block, bool upper) {
    unsigned char* const to = fours + (block - warp) * Shared::kRegionBytes;
    if (upper) {
      put_rows(to + Shared::kFar * Shared::kRowBytes, k);
      put_rows(to + (Shared::kFar + 8) * Shared::kRowBytes, q);
    } else {
      put_rows(to + (Shared::kFar + 16) * Shared::kRowBytes, to_end);
    }
  };
  if (warp == 0) {
    multiply_totals(gamma, totals, kK, 0, 1);
  }
  multiply_totals(x, totals, kK, warp ^ 1, 1);
  climb((warp & 1) != 0);
  put_far(warp / 4 * 2 + warp % 2, (warp & 2) != 0);
  multiply_totals(x, totals, kK, (warp ^ 2) & 6, 2);
  climb((warp & 2) != 0);
  put_far(4 + warp % 4, (warp & 4) != 0);
  multiply_totals(x, totals, kK, (warp ^ 4) & 4, 4);
  climb((warp & 4) != 0);
  {
    const int at = panel_offset(lane_row, channel) * 2;  // rows after it flip bits of the piece
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      char* row = record + r * 128 + (at ^ (r << 4));
      store_words(row + Record::kKd, k[r]);
      store_words(row + Record::kQd, q[r]);
      store_words(row + Record::kKr, to_end[r]);
    }
    if (threadIdx.x < 16) {
#pragma unroll
      for (int c = 0; c < kCount; c += 4) {
        *reinterpret_cast<float4*>(record + Record::kGamma + (channel + c) * 4) =
            make_float4(gamma[c], gamma[c + 1], gamma[c + 2], gamma[c + 3]);
      }
    }
  }
  __syncthreads();

  {
    constexpr int kFarBytes = Shared::kFar * Shared::kRowBytes;
    constexpr int kColumns = 16 * Shared::kRowBytes;
    const int g = lane / 4;
    const int t = lane % 4;
    float c[2][4] = {};
    multiply_sixteen<kSteps>(
        c,
        base + (4 + warp / 2) * Shared::kRegionBytes + kFarBytes + lanes.rows16,
        base + (4 + warp % 2 * 2) * Shared::kRegionBytes + kFarBytes + kColumns + lanes.apart
    );
    float d[4] = {};
    multiply_eight<kSteps>(
        d,
        base + warp / 2 * Shared::kRegionBytes + kFarBytes + lanes.rows16,
        base + (warp / 4 * 2 + warp % 2) * Shared::kRegionBytes + kFarBytes + kColumns + lanes.rows8
    );
    const int row = 32 + warp / 2 * 8 + g;
    const int col = warp % 2 * 16 + 2 * t;
    output.put_far(row, col, row - 16, col, c[0]);
    output.put_far(row, col + 8, row - 16, col + 8, c[1]);
    const int near_row = 16 + warp / 2 % 2 * 8 + g;
    const int near_col = warp % 2 * 8 + 2 * t;
    const int block = warp / 4;
    output.put_far(
        block * 32 + near_row, block * 32 + near_col, near_row - 16, block * 16 + near_col, d
    );
    if (warp < 4) {
      float e[4] = {};
      multiply_eight<kSteps>(
          e,
          base + (2 * warp + 1) * Shared::kRegionBytes + Shared::kEights * Shared::kRowBytes +
              lanes.rows16,
          base + 2 * warp * Shared::kRegionBytes + Shared::kEights * Shared::kRowBytes + lanes.rows8
      );
      output.put(warp * 16 + 8 + g, warp * 16 + 2 * t, e);
    }
  }
  __syncthreads();

  unsigned char* inverse = kda_shared + Shared::kInverse;
  invert_unit_lower(
      output.diagonal,
      beta,
      {base + Shared::kFarHeads, base + Shared::kFarTails},
      inverse,
      kda_shared + Shared::kTails
  );
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * kPrepThreads + threadIdx.x;
    reinterpret_cast<uint4*>(record + Record::kScores)[at] =
        reinterpret_cast<const uint4*>(output.scores)[at];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = i * kPrepThreads + threadIdx.x;
    const int row = at / 8;
    const int col = (at ^ row) % 8 * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (col / 16 <= row / 16) {
      x = reinterpret_cast<const uint4*>(inverse)[at];
    }
    reinterpret_cast<uint4*>(record + Record::kInverse)[at] = x;
  }
  end_after_previous_kernel();
}

}  // namespace sdm::kda::cuda
