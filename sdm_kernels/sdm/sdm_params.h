// SPDX-License-Identifier: Apache-2.0
//! @file Arguments of the sparse delta memory kernels: sizes, pointers and strides, no ownership.
//!
//! Letters: B batch, T tokens, H heads, W writes and R reads a token, D columns, S slots a head,
//! N sequences, C chunk length. A stream is one (sequence, head). Strides count elements.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"

namespace sdm {

struct SdmDims {
  int64_t B, T, H, W, R, D, S, N, C;
  bool gate_per_write;  // g is [B, T, H, W] rather than [B, T, H]
};

struct FloatView {
  const void* data;
  DType dtype;
  int64_t stride[4];  // batch, token, head, last
};

struct IndexView {
  const void* data;
  bool is_int64;
  int64_t stride[4];
};

// [N or pool, H, S, D] with contiguous columns; stride[0] is 0 for a bank that all sequences share.
struct BankView {
  void* data;
  int64_t stride[3];  // sequence, head, slot
};

struct SdmTokens {
  IndexView write_idx;  // [B, T, H, W]
  IndexView read_idx;   // [B, T, H, R]
  FloatView write_val;  // [B, T, H, W]
  FloatView read_val;   // [B, T, H, R]
  FloatView v;          // [B, T, H, D], last stride 1; not used by the backward
  FloatView beta;       // [B, T, H]
  FloatView g;          // [B, T, H] or [B, T, H, W]
};

// What a training forward keeps for its backward; the values are those of the op schemas.
enum class SdmSave : int64_t { kNone, kReplay, kRows, kBf16, kFp8, kInt4 };

inline bool saves_rows(SdmSave save) {
  return save >= SdmSave::kRows;
}

struct SdmSaved {
  SdmSave mode;
  int64_t segment_chunks;    // replay: chunks between two bank checkpoints
  void* errors;              // [B, T, H, D] contiguous, compute type: e = v - r of every token
  void* rows;                // replay: bank checkpoints [K, H, S, D]; rows modes: [H, Q, row bytes]
  float* scales;             // fp8 and int4: [H, Q]
  int64_t rows_per_head;     // Q
  int64_t checkpoints;       // replay: K
  int32_t* links = nullptr;  // rows on CUDA: [H, Q] and [N, H, S], see cuda/sdm_sources.h
};

struct SdmFwdParams {
  SdmDims dims;
  SdmTokens tokens;
  DType bank_dtype;
  const int64_t* cu_seqlens;     // host, [N + 1]; null: sequence n is batch row n
  const int64_t* state_indices;  // host, [N]: row of `bank`, -1 skips the sequence; null: row n
  BankView initial;  // bank at the start; data null: `bank` holds it and is advanced in place
  BankView bank;     // bank at the end; data null: not wanted, a working copy is used
  void* out;         // [B, T, H, D] contiguous, v's dtype
  SdmSaved saved;
};

struct SdmBwdParams {
  SdmDims dims;
  SdmTokens tokens;
  DType bank_dtype;
  const int64_t* cu_seqlens;
  BankView bank;     // replay: bank at the start; rows modes: bank at the end
  FloatView d_out;   // [B, T, H, D], last stride 1
  BankView d_final;  // gradient of the bank at the end; data null: zero
  SdmSaved saved;
  void* d_write_val;  // contiguous, shapes and dtypes of the inputs
  void* d_v;          // d_out's dtype
  void* d_beta;
  void* d_g;
  void* d_read_val;
  void* d_initial;  // [H, S, D] when shared_bank, else [N, H, S, D]; null: not wanted
  bool shared_bank;
};

}  // namespace sdm
