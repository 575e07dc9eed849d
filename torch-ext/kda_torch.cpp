//! @file Kimi delta attention for torch on the CPU.
// SPDX-License-Identifier: Apache-2.0
#include "sdm_kernels/kda/kda_launch.h"
#include "torch-ext/kda_calls.h"
#include "torch-ext/results.h"
#include "torch-ext/torch_binding.h"

namespace sdm::ext {

std::tuple<Tensor, Tensor, Tensor> kda_chunk_fwd_cpu(
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
  KdaFwdCall call = prepare_kda_fwd(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      chunk_size,
      output_final_state,
      output_chunk_states
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, kda::kda_fwd_cpu(call.params, torch_parallel_for()));
  return call.results();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_chunk_bwd_cpu(
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
  KdaBwdCall call = prepare_kda_bwd(
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
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, kda::kda_bwd_cpu(call.params, torch_parallel_for()));
  return call.results();
}

std::tuple<Tensor, Tensor> kda_recurrent_fwd_cpu(
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
  KdaStepCall call = prepare_kda_recurrent(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      output_final_state
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, kda::kda_step_cpu(call.params, torch_parallel_for()));
  return {call.out, call.final_state};
}

Tensor kda_step_cpu(
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
  KdaStepCall call = prepare_kda_step(
      op,
      state,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      state_indices
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  const std::vector<int64_t> rows = host_integers(op, "state_indices", state_indices);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  call.params.state_indices = data_or_null(rows, state_indices);
  check_status(op, kda::kda_step_cpu(call.params, torch_parallel_for()));
  return call.out;
}

}  // namespace sdm::ext
