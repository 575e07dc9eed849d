// SPDX-License-Identifier: Apache-2.0
//! @file Arguments of the Kimi delta attention kernels: sizes, pointers and strides, no ownership.
//!
//! Letters: B batch, T tokens, H query and key heads, HV value heads (a multiple of H: value head
//! hv uses key head hv / (HV / H)), K key and V value columns, N sequences, C chunk length. Strides
//! count elements. Chunks start at the first token of their sequence.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/hd.h"

namespace sdm::kda {

struct KdaDims {
  int64_t B, T, H, HV, K, V, N, C;
};

// How `g` becomes the log-decay. The values are those of the op schemas.
enum class KdaGate : int64_t {
  kActivated,   // g is the log-decay
  kSoftplus,    // -exp(A_log) * softplus(g + dt_bias)
  kLowerBound,  // lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); no A_log: factor 1
};

enum class KdaBeta : int64_t { kActivated, kSigmoid, kTwoSigmoid };

struct KdaOptions {
  double scale;  // of the query side
  bool l2norm;   // normalise q and k
  KdaGate gate;
  double lower_bound;  // kLowerBound only
  KdaBeta beta;
};

struct KdaView {
  const void* data;
  DType dtype;
  int64_t stride[4];  // batch, token, head, last
};

// [rows, HV, K, V] or, with V first, [rows, HV, V, K]: the strides tell. data null: absent.
struct KdaStateView {
  void* data;
  DType dtype;
  int64_t stride[4];  // row, head, key column, value column
};

struct KdaTokens {
  KdaView q, k;  // [B, T, H, K], last stride 1
  KdaView v;     // [B, T, HV, V], last stride 1
  KdaView g;     // [B, T, HV, K], last stride 1
  KdaView beta;  // [B, T, HV]; stride[3] is not used
  // Contiguous; null: absent. float64 inputs: these point at doubles, as their gradients do.
  const float* A_log;    // [HV]
  const float* dt_bias;  // [HV, K]
};

// State at the start of every chunk. Row of chunk c of sequence n: chunk_state_row(). Layout
// [rows, HV, K, V] or V first, contiguous. data null: not wanted (forward), recompute (backward).
struct KdaChunkStates {
  void* data;
  DType dtype;
  bool v_first;
};

// A sequence has the rows of its chunks and at most one unused row behind them: no length needs to
// be known on the host, where T / C + N rows are enough for any division into sequences. Without
// cu_seqlens `first_token` is n * T.
SDM_HD int64_t chunk_state_row(int64_t sequence, int64_t first_token, int64_t chunk, int64_t C) {
  return first_token / C + sequence + chunk;
}

struct KdaFwdParams {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  const int64_t* cu_seqlens;  // host (CPU entry only), [N + 1]; null: sequence n is batch row n
  KdaStateView initial;       // float32, bfloat16 or (CPU) float64; data null: zero
  KdaStateView final_state;   // float32 (CPU: float64 with float64 inputs); data null: not wanted
  KdaChunkStates chunk_states;
  void* out;  // [B, T, HV, V] contiguous, q's dtype
};

struct KdaBwdParams {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  const int64_t* cu_seqlens;
  KdaStateView initial;
  KdaChunkStates chunk_states;  // as the forward left them; data null: recomputed
  KdaView d_out;                // [B, T, HV, V], last stride 1; any floating dtype
  KdaStateView d_final;         // data null: zero
  // Contiguous, in the shapes and dtypes of the inputs; never null.
  void* d_q;
  void* d_k;
  void* d_v;
  void* d_g;
  void* d_beta;
  float* d_A_log;          // [HV]; null: not wanted. float64 inputs: points at doubles
  float* d_dt_bias;        // [HV, K]; null: not wanted. float64 inputs: points at doubles
  KdaStateView d_initial;  // float32 (float64 with float64 inputs); data null: not wanted
};

// The exact token recurrence. `initial` and `final_state` may be the same memory (decode in a
// pool).
struct KdaStepParams {
  KdaDims dims;  // C is not used
  KdaOptions options;
  KdaTokens tokens;
  const int64_t* cu_seqlens;     // host (CPU entry only)
  const int64_t* state_indices;  // host (CPU entry only), [N]: row of both states, -1 skips
  int64_t pool;                  // rows that state_indices may name
  KdaStateView initial;          // data null: zero
  KdaStateView final_state;      // data null: not wanted
  void* out;                     // [B, T, HV, V] contiguous, q's dtype
};

}  // namespace sdm::kda
