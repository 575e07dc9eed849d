// SPDX-License-Identifier: Apache-2.0
//! @file Saved bank rows in exact and in lossy form (the codes of common/row_quant.h).
#pragma once

#include "sdm_kernels/common/row_quant.h"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

// A lane's columns of saved row `index`, as the bank would hold them.
template <typename S, bool kAligned>
__device__ __forceinline__ Piece<S> load_saved_piece(
    const SdmSaved& saved, int64_t row_bytes, int64_t index, const LaneColumns& at
) {
  const unsigned char* row = static_cast<const unsigned char*>(saved.rows) + index * row_bytes;
  if (saved.mode <= SdmSave::kRows) {
    return load_piece<S, kAligned>(reinterpret_cast<const S*>(row), at);
  }
  Piece<S> piece;
#pragma unroll
  for (int i = 0; i < kVec<S>; ++i) {
    const int64_t c = at.first + i;
    if (i < at.count) {
      float x;
      if (saved.mode == SdmSave::kBf16) {
        x = to_float(reinterpret_cast<const __nv_bfloat16*>(row)[c]);
      } else if (saved.mode == SdmSave::kFp8) {
        x = fp8_to_f32(row[c]) * saved.scales[index];
      } else {
        const uint8_t pair = row[c / 2];
        x = int4_to_f32(c % 2 == 0 ? pair >> 4 : pair & 0xfu) * saved.scales[index];
      }
      piece.x[i] = from_float<S>(x);
    }
  }
  return piece;
}

struct SdmQuantiseParams {
  SdmDims dims;
  SdmWindow window;
  const SdmSequence* sequences;
  SdmRecords records;
  BankView bank;
  SdmSaved saved;
  int64_t row_bytes;
  int64_t chunk;  // in the window
};

// Saves the rows that one chunk of every stream will write, before it does: one warp a row, since a
// row has one scale. Rows reserved but not used are zeroed.
template <typename S>
__global__ void sdm_quantise_rows_kernel(const __grid_constant__ SdmQuantiseParams p) {
  const SdmDims& dims = p.dims;
  const int64_t reserved_most = rows_of_chunk(dims, dims.C);
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  const int64_t stream = warp / reserved_most;
  const int64_t g = warp % reserved_most;
  if (stream >= dims.N * dims.H) {
    return;
  }
  const int64_t head = stream % dims.H;
  const int64_t q = (stream / dims.H * p.window.chunks + p.chunk) * dims.H + head;
  ChunkPlace place;
  if (!find_chunk(dims, p.sequences, p.window, q, &place) ||
      g >= rows_of_chunk(dims, place.num_tokens)) {
    return;
  }
  const SdmSequence& sequence = p.sequences[stream / dims.H];
  const int64_t index = head * p.saved.rows_per_head + sequence.first_row +
                        (p.window.first_chunk + p.chunk) * reserved_most + g;
  unsigned char* dst = static_cast<unsigned char*>(p.saved.rows) + index * p.row_bytes;
  const bool scaled = p.saved.mode != SdmSave::kBf16;
  if (g >= p.records.group_count[q].x) {
    for (int64_t c = lane; c < p.row_bytes; c += 32) {
      dst[c] = 0;
    }
    if (scaled && lane == 0) {
      p.saved.scales[index] = 0.0f;
    }
    return;
  }
  const S* row = static_cast<const S*>(p.bank.data) + sequence.bank * p.bank.stride[0] +
                 head * p.bank.stride[1] +
                 p.records.group[q * p.records.n + g].x * p.bank.stride[2];
  if (!scaled) {
    for (int64_t c = lane; c < dims.D; c += 32) {
      reinterpret_cast<__nv_bfloat16*>(dst)[c] = from_float<__nv_bfloat16>(to_float(row[c]));
    }
    return;
  }
  float amax = 0.0f;
  for (int64_t c = lane; c < dims.D; c += 32) {
    const float magnitude = fabsf(to_float(row[c]));
    amax = magnitude > amax ? magnitude : amax;
  }
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, amax, step);
    amax = other > amax ? other : amax;
  }
  const bool fp8 = p.saved.mode == SdmSave::kFp8;
  const float raw = amax * (1.0f / (fp8 ? kFp8Max : kInt4Max));
  const float scale = to_f32(from_f32<Bf16>(raw > 1e-12f ? raw : 1e-12f));
  const auto scaled_code = [&](int64_t c) {
    return to_f32(from_f32<Bf16>(__fdiv_rn(to_float(row[c]), scale)));
  };
  if (lane == 0) {
    p.saved.scales[index] = scale;
  }
  for (int64_t c = lane; c < p.row_bytes; c += 32) {
    if (fp8) {
      dst[c] = fp8_from_f32(scaled_code(c));
    } else {
      const uint8_t high = int4_from_f32(scaled_code(2 * c));
      const uint8_t low = 2 * c + 1 < dims.D ? int4_from_f32(scaled_code(2 * c + 1)) : 0;
      dst[c] = static_cast<uint8_t>(high << 4 | low);
    }
  }
}

}  // namespace sdm::cuda
