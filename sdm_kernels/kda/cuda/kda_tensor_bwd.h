// SPDX-License-Identifier: Apache-2.0
//! @file Stages of the tensor backward of Kimi delta attention, each over one window of chunks.
//!
//! The reverse scan (kda_tensor_bwd_scan.cu) is the only part that is sequential in the chunks. It
//! leaves, for every chunk, the gradient of the state behind it and y, the gradient of
//! diag(beta) (v - kd S). The token stage (kda_tensor_bwd_tokens.cu) makes all gradients of the
//! tokens from them.
#pragma once

#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.cuh"

namespace sdm::kda {

// What the scan leaves for one chunk and value head, fp16 in row order, blocks times their units
// (kda_tensor_scale.cuh). Byte offsets.
template <int kK, int kV>
struct KdaBwdRecord {
  static constexpr int kGroups = kV / 32;              // units of 32 columns
  static constexpr int kStateGrad = 0;                 // [K, V]
  static constexpr int kY = kStateGrad + kK * kV * 2;  // [64, V]
  static constexpr int kStateUnit = kY + 64 * kV * 2;  // float [4, groups], K / 4 rows a block
  static constexpr int kYUnit = kStateUnit + 4 * kGroups * 4;  // float [4, groups], 16 rows a block
  static constexpr int kBytes = (kYUnit + 4 * kGroups * 4 + 255) / 256 * 256;
};

struct KdaBwdWindow {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  DeviceIntegers cu_seqlens;
  KdaWindow window;
  KdaRecords records;
  char* bwd_records;  // KdaBwdRecord [slots, HV]
};

struct KdaBwdScanParams {
  KdaBwdWindow common;
  KdaView d_out;
  KdaStateView d_final, d_initial;
  KdaSegments segments;  // gradients; without segments carry and carry_rows alone
};

struct KdaBwdTokenParams {
  KdaBwdWindow common;
  KdaView d_out;
  KdaChunkStates chunk_states;
  void *d_q, *d_k, *d_v, *d_g, *d_beta;
  float* group_grads;  // [slots, HV, 2, 64, K] gradients of the normalised q and k; HV > H only
  float* gate_sums;    // [rows of the call, HV, 2, K]: sums over a chunk for dt_bias and A_log
  // Rows begin at multiples of 16 bytes.
  bool aligned_v, aligned_out, aligned_qk, aligned_g;
};

struct KdaBwdSumParams {
  const float* gate_sums;
  int64_t rows, HV, K;
  bool has_rate;     // A_log is there
  float* d_A_log;    // null: not wanted
  float* d_dt_bias;  // null: not wanted
};

// The scan and the groups may be launched while the kernel in front of them runs; they wait for it
// before they do anything.
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_scan(
    const KdaBwdScanParams& p, cudaStream_t stream
);
// Of every segment but the first of a sequence the gradient at its start, from zeros, or from the
// final state's where it is the last. Runs beside the kernel in front of it, for whose predecessor
// that one has waited, and ends after it.
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_segments(
    const KdaBwdScanParams& p, cudaStream_t stream
);
// Shared memory that a block of the token stage needs.
int64_t kda_tensor_bwd_shared_bytes(const KdaDims& dims);
// With `overlap` it may begin before the kernel in front of it ends (kda_tensor_launch.cuh), so it
// must not touch what that one reads or writes; it ends after it in any case.
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_tokens(
    const KdaBwdTokenParams& p, cudaStream_t stream, bool overlap = false
);
// Gradients of q and k from those of their value heads.
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_groups(
    const KdaBwdTokenParams& p, cudaStream_t stream
);
// Zero gradients for the tokens that no packed sequence covers.
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_clear(
    const KdaBwdTokenParams& p, cudaStream_t stream
);
[[nodiscard]] cudaError_t launch_kda_tensor_bwd_sums(const KdaBwdSumParams& p, cudaStream_t stream);

}  // namespace sdm::kda
