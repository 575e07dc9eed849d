// SPDX-License-Identifier: Apache-2.0
//! @file Sequences of a call, made on the device from offsets that the host never sees.
//!
//! The twin of make_sdm_sequences, without its errors: offsets are clamped to [0, T] and replaced
//! by their running maximum, so the sequences never overlap and their rows and checkpoints fit the
//! saved tensors whatever cu_seqlens holds; a state index outside [0, pool) skips its sequence.
//!
//! One block walks the sequences 256 at a time: a running maximum of the ends, then running sums of
//! checkpoints and saved rows. About 72 bytes a sequence.
#pragma once

#include <cub/block/block_scan.cuh>
#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

struct SdmSequencesParams {
  SdmDims dims;
  const void* cu_seqlens;  // [N + 1]; null: sequence n is batch row n
  bool cu_seqlens_is_int64;
  const void* state_indices;  // [N]; null: bank row n
  bool state_indices_is_int64;
  int64_t pool;
  int64_t segment_chunks;
  SdmSequence* out;  // [N]
};

struct SdmMax {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};

__device__ __forceinline__ int64_t load_integer(const void* data, bool is_int64, int64_t at) {
  return is_int64 ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
}

__device__ __forceinline__ int64_t load_sequence_offset(const SdmSequencesParams& p, int64_t n) {
  const int64_t offset = load_integer(p.cu_seqlens, p.cu_seqlens_is_int64, n);
  return offset < 0 ? 0 : (offset > p.dims.T ? p.dims.T : offset);
}

constexpr int kSequenceThreads = 256;

__global__ void __launch_bounds__(kSequenceThreads) sdm_sequences_kernel(
    const __grid_constant__ SdmSequencesParams p
) {
  using Scan = cub::BlockScan<int64_t, kSequenceThreads>;
  __shared__ typename Scan::TempStorage s_scan;
  const SdmDims& dims = p.dims;
  const bool packed = p.cu_seqlens != nullptr;
  int64_t offset = packed ? load_sequence_offset(p, 0) : 0;  // running maximum of the offsets
  int64_t checkpoint = 0;
  int64_t row = 0;

  for (int64_t base = 0; base < dims.N; base += kSequenceThreads) {
    const int64_t n = base + threadIdx.x;
    const bool live = n < dims.N;
    SdmSequence sequence{n, 0, dims.T, n, 0, 0, 0};
    if (packed) {
      const int64_t end = live ? load_sequence_offset(p, n + 1) : 0;
      int64_t begin;
      int64_t last;
      Scan(s_scan).ExclusiveScan(end, begin, offset, SdmMax(), last);
      offset = SdmMax()(offset, last);
      sequence.batch = 0;
      sequence.begin = begin;
      sequence.length = end > begin ? end - begin : 0;
    }
    if (live && p.state_indices != nullptr) {
      const int64_t bank = load_integer(p.state_indices, p.state_indices_is_int64, n);
      sequence.bank = bank >= 0 && bank < p.pool ? bank : -1;
    }
    int64_t checkpoints = 0;
    int64_t rows = 0;
    if (live) {
      sequence.num_chunks = ceil_div(sequence.length, dims.C);
      checkpoints = num_checkpoints(sequence.num_chunks, p.segment_chunks);
      if (sequence.num_chunks > 0) {
        const int64_t full = sequence.num_chunks - 1;
        rows = full * rows_of_chunk(dims, dims.C) +
               rows_of_chunk(dims, sequence.length - full * dims.C);
      }
    }
    int64_t total;
    __syncthreads();  // the scans share s_scan
    Scan(s_scan).ExclusiveSum(checkpoints, sequence.first_checkpoint, total);
    sequence.first_checkpoint += checkpoint;
    checkpoint += total;
    __syncthreads();  // the scans share s_scan
    Scan(s_scan).ExclusiveSum(rows, sequence.first_row, total);
    sequence.first_row += row;
    row += total;
    __syncthreads();  // the next round's scan reuses s_scan
    if (live) {
      p.out[n] = sequence;
    }
  }
}

}  // namespace sdm::cuda
