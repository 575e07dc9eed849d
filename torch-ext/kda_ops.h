// SPDX-License-Identifier: Apache-2.0
//! @file The ops of Kimi delta attention, for every backend. Name = schema name (without a trailing
//! underscore). Shapes and meanings: docs/kda.md; prepare_* checks them. The values of `gate` and
//! `beta_mode`: kda_params.h.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "torch-ext/kda_calls.h"

namespace sdm::ext {

// Returns out, final_state, chunk_states.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor> kda_chunk_fwd(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& g,
    const Tensor& beta,
    const std::optional<Tensor>& A_log,
    const std::optional<Tensor>& dt_bias,
    const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    double scale,
    bool l2norm,
    int64_t gate,
    double lower_bound,
    int64_t beta_mode,
    bool v_first,
    int64_t chunk_size,
    bool output_final_state,
    bool output_chunk_states
) {
  const char* op = "kda_chunk_fwd";
  const Backend backend(q);
  const KdaFwdCall call = prepare_kda_fwd(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      chunk_size,
      output_final_state,
      output_chunk_states
  );
  run_kda_fwd(backend, op, call.params, cu_seqlens);
  return call.results();
}

// Returns d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial_state.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_chunk_bwd(
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& g,
    const Tensor& beta,
    const std::optional<Tensor>& A_log,
    const std::optional<Tensor>& dt_bias,
    const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& chunk_states,
    double scale,
    bool l2norm,
    int64_t gate,
    double lower_bound,
    int64_t beta_mode,
    bool v_first,
    int64_t chunk_size,
    bool need_gate_grad,
    bool need_state_grad
) {
  const char* op = "kda_chunk_bwd";
  const Backend backend(q);
  const KdaBwdCall call = prepare_kda_bwd(
      op,
      d_out,
      d_final_state,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      chunk_states,
      chunk_size,
      need_gate_grad,
      need_state_grad
  );
  run_kda_bwd(backend, op, call.params, cu_seqlens);
  return call.results();
}

// Token by token; returns out, final_state.
template <typename Backend>
std::tuple<Tensor, Tensor> kda_recurrent_fwd(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& g,
    const Tensor& beta,
    const std::optional<Tensor>& A_log,
    const std::optional<Tensor>& dt_bias,
    const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    double scale,
    bool l2norm,
    int64_t gate,
    double lower_bound,
    int64_t beta_mode,
    bool v_first,
    bool output_final_state
) {
  const char* op = "kda_recurrent_fwd";
  const Backend backend(q);
  const KdaStepCall call = prepare_kda_recurrent(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      output_final_state
  );
  run_kda_step(backend, op, call.params, cu_seqlens, std::nullopt);
  return {call.out, call.final_state};
}

// Advances `state` in place token by token; returns out.
template <typename Backend>
Tensor kda_step(
    Tensor state,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& g,
    const Tensor& beta,
    const std::optional<Tensor>& A_log,
    const std::optional<Tensor>& dt_bias,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    double scale,
    bool l2norm,
    int64_t gate,
    double lower_bound,
    int64_t beta_mode,
    bool v_first
) {
  const char* op = "kda_step_";
  const Backend backend(q);
  const KdaStepCall call = prepare_kda_step(
      op,
      state,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      state_indices
  );
  run_kda_step(backend, op, call.params, cu_seqlens, state_indices);
  return call.out;
}

}  // namespace sdm::ext
