// SPDX-License-Identifier: Apache-2.0
//! @file Forward, first stage of a chunk: what its tokens retrieve and read from the bank as it was
//! before the chunk.
//!
//! Eight lanes a token and slice; the groups of a warp take neighbouring slices of one token, so
//! that a row is touched in runs of up to 512 bytes. Both kinds of lanes are added up in the same
//! rounds, 8 rows in flight a group; lanes come in ascending slot order, so the tokens sweep the
//! bank together. Bytes per chunk and stream: C (W + R) rows. Blocks of 256 threads and 64
//! registers fill a multiprocessor with 128 KB in flight; random reads of 512 bytes reach 4.5 TB/s
//! on an H200.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"

namespace sdm::cuda {

constexpr int kGatherThreads = 256;
constexpr int kGatherGroups = kGatherThreads / kRowLanes;
using GatherRing = RowRing<kRingDepth, kGatherThreads>;

// How the groups of a block share tokens: neighbouring slices of one token together, so that a row
// is touched in longer runs, and each slice in parts, which take turns with the token's lanes.
struct GatherShape {
  int together, parts;

  __host__ __device__ int tokens() const { return kGatherGroups / together / parts; }
};

// Many lanes are dealt to four parts: fewer tokens are under way, and those sweep the bank four
// times as fast, so that a row is more often still in L2 when another token wants it. What is added
// to what depends on the number of lanes alone.
__host__ __device__ inline GatherShape gather_shape(int64_t num_slices, int64_t lanes) {
  constexpr int64_t kManyLanes = 128;
  return {num_slices >= 4 ? 4 : num_slices >= 2 ? 2 : 1, lanes >= kManyLanes ? 4 : 1};
}

// The same for any number of lanes in one part.
__host__ __device__ inline GatherShape gather_shape(int64_t num_slices) {
  return gather_shape(num_slices, 0);
}

// Which token and slice a group has, and which part of its lanes.
struct GatherPlace {
  int64_t stream, slice;
  int token, part;

  __device__ __forceinline__ explicit GatherPlace(const SdmChunkParams& p)
      : GatherPlace(p, gather_shape(p.num_slices)) {}

  __device__ __forceinline__ GatherPlace(const SdmChunkParams& p, const GatherShape& shape) {
    const int together = shape.together, parts = shape.parts, tokens = shape.tokens();
    const int slice_groups = quotient(p.num_slices + together - 1, together);
    const int token_blocks = quotient(p.dims.C + tokens - 1, tokens);
    const int group = static_cast<int>(threadIdx.x) / kRowLanes;
    part = group / together % parts;
    const int tokens_done = quotient(blockIdx.x, token_blocks);
    token = remainder(blockIdx.x, token_blocks) * tokens + group / together / parts;
    slice = remainder(tokens_done, slice_groups) * together + group % together;
    stream = quotient(tokens_done, slice_groups);
  }
};

inline int64_t gather_blocks(const SdmDims& dims, int64_t num_slices, const GatherShape& shape) {
  return dims.N * dims.H * ceil_div(num_slices, shape.together) * ceil_div(dims.C, shape.tokens());
}

inline int64_t gather_blocks(const SdmDims& dims, int64_t num_slices) {
  return gather_blocks(dims, num_slices, gather_shape(num_slices));
}

// Brings the triangles that the next stage multiplies with into L2, a share by each block: they
// were made for a whole window and may have left it.
__device__ __forceinline__ void prefetch_matrices(const SdmChunkParams& p, const StreamChunk& c) {
  constexpr int kLine = 32;  // floats
  const int blocks = quotient(gridDim.x, p.dims.N * p.dims.H);
  const int block = remainder(blockIdx.x, blocks);
  const int Cp = p.records.Cp;
  const int lines = ceil_div(Cp, kLine);  // of a row
  for (int at = block * kGatherThreads + static_cast<int>(threadIdx.x); at < 2 * Cp * lines;
       at += blocks * kGatherThreads) {
    const int row = at / lines % Cp, column = at % lines * kLine;
    if (column <= row) {
      const float* m = at < Cp * lines ? p.records.inverse : p.product;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(m + (c.q * Cp + row) * Cp + column));
    }
  }
}

// Lanes of a kind in a round, and rounds of records at hand: in use, next, arriving.
constexpr int kGatherLanes = kRingDepth / 2;
constexpr int kRecordRounds = 3;

// Bytes of shared memory of a block of the forward.
constexpr int64_t gather_smem() {
  return int64_t{kRingDepth} * kGatherThreads * int64_t{sizeof(uint4)} +
         int64_t{kRecordRounds} * kGatherGroups * kRingDepth * int64_t{sizeof(int2)};
}

__host__ __device__ inline GatherShape fwd_gather_shape(const SdmChunkParams& p) {
  return gather_shape(p.num_slices, p.dims.W > p.dims.R ? p.dims.W : p.dims.R);
}

// kLog: rows come from the bank at the start or from the log, as launch_lane_sources() left it.
template <typename S, bool kAligned, bool kLog>
__global__ void __launch_bounds__(kGatherThreads, 4) sdm_gather_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  static_assert(kRingDepth == kRowLanes);
  __shared__ uint4 ring_memory[kRingDepth * kGatherThreads];
  __shared__ int2 record_memory[kRecordRounds][kGatherGroups][kRingDepth];
  const GatherShape shape = fwd_gather_shape(p);
  const GatherPlace at_place(p, shape);
  const StreamChunk c(p, at_place.stream);
  if (!c.exists) {
    wait_for_previous();
    return;
  }
  prefetch_matrices(p, c);
  const SdmDims& dims = p.dims;
  const int W = static_cast<int>(dims.W), R = static_cast<int>(dims.R);
  const int i = at_place.token;
  const bool live = i < c.place.num_tokens;
  const GatherRing ring(ring_memory);
  LaneColumns at = lane_columns<S>(at_place.slice, dims.D);
  const S* bank = static_cast<const S*>(p.bank.data) +
                  p.sequences[c.sequence].bank * p.bank.stride[0] + c.head * p.bank.stride[1];
  const LaneRows<S, kAligned> rows(bank, p.bank.stride[2], at);
  const LaneRows<S, kAligned> log(kLog ? log_rows<S>(p, c) : nullptr, dims.D, at);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const int group = static_cast<int>(threadIdx.x) / kRowLanes;
  // Piece j of a round: kind j % 2, lane j / 2. What this lane fetches for its own piece:
  const int width = lane % 2 == 0 ? W : R;
  const int2* lane_records = p.records.lane + c.q * p.records.n +
                             (lane % 2 == 0 ? 0 : static_cast<int>(dims.C) * W) + i * width;
  const auto fetch_record = [&](int round) {
    const int a = (round * shape.parts + at_place.part) * kGatherLanes + lane / 2;
    int2* to = &record_memory[round % kRecordRounds][group][lane];
    if (live && a < width) {
      start_copy<8>(to, lane_records + a);
    } else {
      *to = make_int2(-1, 0);
    }
  };
  float sum[2][kVec<S>] = {};
  float weight[kRingDepth];
  const auto start = [&](int j, const int2* round_records) {
    const int2 record = round_records[j];
    const bool valid = kLog ? record.x != -1 : record.x >= 0;
    const bool logged = kLog && record.x < -1;
    const int row = logged ? -2 - record.x : valid ? record.x : 0;
    fetch_lane<S, kAligned>(ring, j, logged ? log.at(row) : rows.at(row), at.count, valid);
    weight[j] = __int_as_float(record.y);
  };
  const int most = W > R ? W : R, step = kGatherLanes * shape.parts;
  const int rounds = (most + step - 1) / step;
  fetch_record(0);
  fetch_record(1);
  GatherRing::close();
  GatherRing::wait<0>();
  __syncwarp();  // records of the first two rounds
  wait_for_previous();
#pragma unroll
  for (int j = 0; j < kRingDepth; ++j) {
    start(j, record_memory[0][group]);
    if (j == 0) {
      fetch_record(2);
    }
    GatherRing::close();
  }
  for (int round = 0; round < rounds; ++round) {
    const int2* ahead = record_memory[(round + 1) % kRecordRounds][group];
#pragma unroll
    for (int j = 0; j < kRingDepth; ++j) {
      GatherRing::wait<kRingDepth - 1>();
      if (j == 0) {
        __syncwarp();  // records of round + 2 came with the first row; those of round are used up
      }
      float v[kVec<S>];
      unpack(fetched_piece<S>(ring, j), v);
#pragma unroll
      for (int column = 0; column < kVec<S>; ++column) {
        sum[j % 2][column] = fmaf(weight[j], v[column], sum[j % 2][column]);
      }
      start(j, ahead);
      if (j == 0) {
        fetch_record(round + 3);
      }
      GatherRing::close();
    }
  }
  GatherRing::wait<0>();
  if (shape.parts > 1) {
    // every thread leaves its sums in its own slots of the ring
    float4* own = reinterpret_cast<float4*>(ring.slots);
    constexpr int kFours = kVec<S> / 4;
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
      for (int four = 0; four < kFours; ++four) {
        const float* x = sum[kind] + 4 * four;
        own[(kind * kFours + four) * kGatherThreads] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
    __syncthreads();  // the sums of all parts
    if (at_place.part != 0) {
      return;
    }
    const int stride = shape.together * kRowLanes;  // threads from part to part
    for (int part = 1; part < shape.parts; ++part) {
#pragma unroll
      for (int kind = 0; kind < 2; ++kind) {
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
          const float4 x = own[(kind * kFours + four) * kGatherThreads + part * stride];
          float* y = sum[kind] + 4 * four;
          y[0] += x.x;
          y[1] += x.y;
          y[2] += x.z;
          y[3] += x.w;
        }
      }
    }
  }
  if (!live) {
    return;
  }
  float v[kVec<S>];
  load_token_columns<S>(p.v, view_row(p.v, c.place, i), at, p.token_vectors, v);
#pragma unroll
  for (int column = 0; column < kVec<S>; ++column) {
    v[column] -= sum[0][column];
  }
  const int64_t row = c.scratch(p) + i * dims.D;
  store_token_columns<S>(p.x, DType::kF32, row, at, kAligned, v);
  store_token_columns<S>(p.y, DType::kF32, row, at, kAligned, sum[1]);
}

}  // namespace sdm::cuda
