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
#include <type_traits>

#include "sdm_kernels/kda/cuda/kda_tensor_inverse.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_ahead.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_rows.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_scores.cuh"

namespace sdm::kda::cuda {

// Place of channel `c` of 16 lanes' within the decays of a warp's rows: groups of four channels, so
// that the lanes' float4 follow each other.
template <int kCount>
__device__ __forceinline__ int total_at(int lane, int c) {
  return c / 4 * 64 + lane % 16 * 4;
}

// Products over `count` warps of the decays of their rows, for the lane's channels.
template <int kCount>
__device__ __forceinline__ void multiply_totals(
    uint32_t (&factor)[kCount / 2], const float* totals, int pitch, int first, int count
) {
  float x[kCount];
#pragma unroll
  for (int w = 0; w < count; ++w) {
    const float* from = totals + (first + w) * pitch;
#pragma unroll
    for (int c = 0; c < kCount; c += 4) {
      const float4 y =
          *reinterpret_cast<const float4*>(from + total_at<kCount>(threadIdx.x % 32, c));
      x[c] = w == 0 ? y.x : x[c] * y.x;
      x[c + 1] = w == 0 ? y.y : x[c + 1] * y.y;
      x[c + 2] = w == 0 ? y.z : x[c + 2] * y.z;
      x[c + 3] = w == 0 ? y.w : x[c + 3] * y.w;
    }
  }
  pack_pairs(factor, x);
}

// What a kernel is compiled for. Usual: queries, keys and gates have the same type, a lane's
// channels are loaded at once, and 64 rows span less than 2^30 elements.
enum class PrepVariant { kGeneral, kUsual, kUsualPacked };

template <DType kType, int kK, PrepVariant kVariant>
__global__ void __launch_bounds__(kPrepThreads, 2) kda_prep_kernel(
    const __grid_constant__ KdaPrepArgs args
) {
  using Shared = PrepShared<kK>;
  using Record = KdaRecord<kK>;
  constexpr bool kUsual = kVariant != PrepVariant::kGeneral;
  constexpr int kCount = kK / 16;  // channels of a lane
  constexpr int kPairs = kCount / 2;
  constexpr int kSteps = kK / 16;  // of products
  extern __shared__ __align__(1024) unsigned char kda_shared[];
  allow_next_kernel();
  const KdaPrepParams& p = args.params;
  const int64_t slot = blockIdx.z * p.window.num_chunks + blockIdx.x;
  const int hv = blockIdx.y;
  const KdaSpan span = kda_chunk_of_window(
      kVariant == PrepVariant::kUsual ? DeviceIntegers{nullptr, false} : p.cu_seqlens,
      p.window,
      blockIdx.z,
      blockIdx.x,
      p.dims
  );
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

  float* totals = reinterpret_cast<float*>(kda_shared + Shared::kTotals);
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
  // Where the head's row `token` starts in each tensor: one by each lane.
  int64_t start;
  {
    const KdaView& view = (&p.tokens.q)[lane < 4 ? lane : 4];
    start =
        reinterpret_cast<int64_t>(view.data) +
        element_size(view.dtype) * (span.sequence.batch * view.stride[0] + token * view.stride[1] +
                                    (lane < 2 ? head : hv) * view.stride[2]);
  }
  const auto start_of = [&](int tensor) {
    const unsigned low = __shfl_sync(0xffffffffu, static_cast<unsigned>(start), tensor);
    const unsigned high = __shfl_sync(0xffffffffu, static_cast<unsigned>(start >> 32), tensor);
    return reinterpret_cast<const char*>(static_cast<int64_t>(high) << 32 | low);
  };
  using Stride = std::conditional_t<kUsual, int, int64_t>;
  const auto row_of = [&](const char* from, const KdaView& view) {
    return reinterpret_cast<const uint16_t*>(from) +
           (lane_row * static_cast<Stride>(view.stride[1]) + channel);
  };
  load_rows(q, row_of(start_of(0), p.tokens.q), p.tokens.q.stride[1], left, kUsual || args.whole_q);
  load_rows(k, row_of(start_of(1), p.tokens.k), p.tokens.k.stride[1], left, kUsual || args.whole_k);
  const char* const gates = start_of(3);
  if (kUsual || p.tokens.g.dtype != DType::kF32) {
    load_rows(raw_g, row_of(gates, p.tokens.g), p.tokens.g.stride[1], left, kUsual || args.whole_g);
  }
  GateConstants<kCount> gate;
  gate.load(args, hv, channel);
  uint32_t raw_beta = 0;
  {
    const char* const from = start_of(4);
    if (threadIdx.x < chunk_rows) {
      const int64_t at = threadIdx.x * p.tokens.beta.stride[1];
      raw_beta = p.tokens.beta.dtype == DType::kF32 ? reinterpret_cast<const uint32_t*>(from)[at]
                                                    : reinterpret_cast<const uint16_t*>(from)[at];
    }
  }
  // Above the diagonal the panel of scores is zero.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reinterpret_cast<uint4*>(output.scores)[row0 * 8 + i * 32 + lane] = make_uint4(0, 0, 0, 0);
  }

  // The lane's channels in the region's row 4 half, and in row 2 half.
  unsigned char* const fours = region + half * 4 * Shared::kRowBytes + channel * 2;
  unsigned char* const twos = fours - half * 2 * Shared::kRowBytes;
  // Norms, and the scores of the diagonal.
  put_rows(fours, q);
  put_rows(fours + Shared::kQueries, k);
  __syncwarp();
  const OperandLanes<kK> lanes;
  const uint32_t base = shared_address(kda_shared);
  const uint32_t region_base = base + warp * Shared::kRegionBytes;
  {
    float with_q[4], with_k[4];
    multiply_raw<kType, kSteps>(with_q, with_k, region_base + lanes.rows16);
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
  uint32_t decay[kLaneRows][kPairs], two[kPairs], other_two[kPairs], other[kPairs];
  {
    float d[kLaneRows][kCount];
    make_decays<kUsual ? kType : DType::kF32>(
        d,
        raw_g,
        gate,
        args,
        reinterpret_cast<const float*>(gates) + lane_row * p.tokens.g.stride[1] + channel,
        left
    );
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
    pack_pairs(two, d[0]);
    pack_pairs(other_two, d[2]);
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
        *reinterpret_cast<float4*>(totals + warp * kK + total_at<kCount>(lane, c)) =
            make_float4(four[c], four[c + 1], four[c + 2], four[c + 3]);
      }
    }
  }
  if (kVariant == PrepVariant::kUsual) {
    fetch_for_later<kK>(args, lane);
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
    store_words(twos + u * Shared::kRowBytes, k[2 * u + 1]);
    store_words(twos + (4 + u) * Shared::kRowBytes, q[2 * u + 1]);
    store_words(twos + (16 + u) * Shared::kRowBytes, to_end[2 * u]);
    multiply_by(k[2 * u + 1], decay[2 * u]);
    multiply_by(q[2 * u + 1], decay[2 * u]);
    multiply_by(to_end[2 * u], decay[2 * u + 1]);
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    store_words(twos + (8 + u) * Shared::kRowBytes, k[2 + u]);
    store_words(twos + (12 + u) * Shared::kRowBytes, q[2 + u]);
    store_words(twos + (20 + u) * Shared::kRowBytes, to_end[u]);
    multiply_by(k[2 + u], two);
    multiply_by(q[2 + u], two);
    multiply_by(to_end[u], other_two);
  }
  __syncwarp();
  {
    float c[4] = {};
    multiply_eight<kSteps>(
        c, region_base + lanes.rows16, region_base + Shared::kColumns + lanes.rows8
    );
    output.put_near(row0, c);
  }
  if (threadIdx.x < kTensorChunk) {
    float x = 0.0f;
    if (threadIdx.x < chunk_rows) {
      const DType type = p.tokens.beta.dtype;
      x = kda_beta(
          type == DType::kF32    ? __uint_as_float(raw_beta)
          : type == DType::kBf16 ? unpack_bf16(raw_beta).x
                                 : unpack_f16(raw_beta).x,
          p.options.beta
      );
    }
    beta[threadIdx.x] = x;
    reinterpret_cast<float*>(record + Record::kBeta)[threadIdx.x] = x;
  }

  // Level 2 in the region of the first of two warps, level 3 in that of the second.
  const bool odd = warp % 2 != 0;
  unsigned char* const of_pair = kda_shared + warp / 2 * 2 * Shared::kRegionBytes + channel * 2;
  synchronise_pair(warp / 2);
  {
    unsigned char* const to = of_pair + (odd ? Shared::kQueries : 0);
    if (half != 0) {
      put_rows(to, k);
      put_rows(to + 4 * Shared::kRowBytes, q);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(k[r], other);
        multiply_by(q[r], other);
      }
    } else {
      put_rows(of_pair + Shared::kColumns + (odd ? 4 * Shared::kRowBytes : 0), to_end);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(to_end[r], other);
      }
    }
  }
  // The operands of a level between warps, in region `block`.
  const auto put_far = [&](int block, bool upper) {
    unsigned char* const to = fours + (block - warp) * Shared::kRegionBytes;
    if (upper) {
      put_rows(to, k);
      put_rows(to + Shared::kQueries, q);
    } else {
      put_rows(to + Shared::kColumns, to_end);
    }
  };
  put_far(warp | 1, odd);
  synchronise_pair(warp / 2);
  {
    float c[4] = {};
    multiply_eight<kSteps>(
        c, region_base + lanes.rows16, region_base + Shared::kColumns + lanes.rows8
    );
    const int begin = warp / 2 * 16;
    if (odd) {
      output.put(begin + 8 + lane / 4, begin + lane % 4 * 2, c);
    } else {
      output.put_fours(begin, c);
    }
  }
  __syncthreads();

  // Levels 4 and 5.
  uint32_t factor[3][kPairs];
  multiply_totals<kCount>(factor[0], totals, kK, warp ^ 1, 1);
  multiply_totals<kCount>(factor[1], totals, kK, (warp ^ 2) & 6, 2);
  multiply_totals<kCount>(factor[2], totals, kK, (warp ^ 4) & 4, 4);
#pragma unroll
  for (int level = 3; level < 6; ++level) {
    if ((warp & (1 << (level - 3))) != 0) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(k[r], factor[level - 3]);
        multiply_by(q[r], factor[level - 3]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        multiply_by(to_end[r], factor[level - 3]);
      }
    }
    if (level == 3) {
      put_far(warp / 4 * 2 + warp % 2, (warp & 2) != 0);
    } else if (level == 4) {
      put_far(4 + warp % 4, (warp & 4) != 0);
    }
  }
  {
    const int at = panel_offset(lane_row, channel) * 2;  // rows after it flip bits of the piece
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      char* row = record + r * 128 + (at ^ (r << 4));
      store_words(row + Record::kKd, k[r]);
      store_words(row + Record::kQd, q[r]);
      store_words(row + Record::kKr, to_end[r]);
    }
  }
  if (threadIdx.x < kK) {
    const int c = threadIdx.x;
    const float* of_channel = totals + total_at<kCount>(c / kCount, c % kCount) + c % 4;
    float gamma = of_channel[0];
#pragma unroll
    for (int w = 1; w < 8; ++w) {
      gamma *= of_channel[w * kK];
    }
    reinterpret_cast<float*>(record + Record::kGamma)[threadIdx.x] = gamma;
  }
  __syncthreads();

  const TwoTerms far = {base + Shared::kFarHeads, base + Shared::kFarTails};
  const InverseOutput inverse = {
      kda_shared + Shared::kInverse, kda_shared + Shared::kTails, record + Record::kInverse
  };
  const int g = lane / 4;
  const int t = lane % 4;
  if (warp < 2) {
    const int block = warp * 2 + half;
    const DiagonalRow row(output.diagonal, beta, block);
    __syncthreads();
    row.store(inverse, block);
    __syncwarp();
    merge_sixteen(far, inverse, warp * 32, warp * 16);
  } else {
    if (warp < 6) {
      const int upper = warp - 2;
      float c[1][4][4] = {};
      multiply_far<kSteps>(
          c,
          base + (4 + upper) * Shared::kRegionBytes + lanes.rows16,
          base + 4 * Shared::kRegionBytes + Shared::kColumns + lanes.apart,
          Shared::kRegionBytes
      );
      const int row = 32 + upper * 8 + g;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int col = n * 8 + 2 * t;
        output.put_far(row, col, row - 16, col, c[0][n]);
      }
    } else {
      const int corner = warp - 6;
      float c[2][2][4] = {};
      multiply_far<kSteps>(
          c,
          base + 2 * corner * Shared::kRegionBytes + lanes.rows16,
          base + 2 * corner * Shared::kRegionBytes + Shared::kColumns + lanes.apart,
          Shared::kRegionBytes
      );
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = n / 2 * 8 + g;
        const int col = n % 2 * 8 + 2 * t;
        output.put_far(
            corner * 32 + 16 + row, corner * 32 + col, row, corner * 16 + col, c[n / 2][n % 2]
        );
      }
    }
    __syncthreads();
  }
  if (warp < 4) {
    synchronise<5, 128>();
    merge_thirty_two(far, inverse, warp);
  } else {
    const int index = threadIdx.x - 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = i * 128 + index;
      reinterpret_cast<uint4*>(record + Record::kScores)[at] =
          reinterpret_cast<const uint4*>(output.scores)[at];
      if ((at ^ (at / 8)) % 8 / 2 > at / 8 / 16) {  // column / 16 > row / 16
        reinterpret_cast<uint4*>(record + Record::kInverse)[at] = make_uint4(0, 0, 0, 0);
      }
    }
  }
  end_after_previous_kernel();
}

}  // namespace sdm::kda::cuda
