//! @file Kimi delta attention for torch on CUDA: the tensors' device, its current stream, a
//! workspace from torch's allocator.
// SPDX-License-Identifier: Apache-2.0
#ifdef CUDA_KERNEL
#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "torch-ext/kda_calls.h"
#include "torch-ext/results_cuda.h"
#include "torch-ext/torch_binding.h"

namespace sdm::ext {

std::tuple<Tensor, Tensor, Tensor> kda_chunk_fwd_cuda(
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
  const DeviceGuard guard(q.get_device_index());
  const KdaFwdCall call = prepare_kda_fwd(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      chunk_size,
      output_final_state,
      output_chunk_states
  );
  const kda::KdaCudaFwdParams params{call.params, device_integers(op, "cu_seqlens", cu_seqlens, q)};
  size_t bytes = 0;
  check_cuda(op, kda::kda_fwd_cuda_workspace(params, &bytes));
  Tensor workspace = new_workspace(q, bytes);
  check_cuda(op, kda::launch_kda_fwd(params, workspace.mutable_data_ptr(), current_stream(q)));
  return call.results();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> kda_chunk_bwd_cuda(
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
  const DeviceGuard guard(q.get_device_index());
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
  const kda::KdaCudaBwdParams params{call.params, device_integers(op, "cu_seqlens", cu_seqlens, q)};
  size_t bytes = 0;
  check_cuda(op, kda::kda_bwd_cuda_workspace(params, &bytes));
  Tensor workspace = new_workspace(q, bytes);
  check_cuda(op, kda::launch_kda_bwd(params, workspace.mutable_data_ptr(), current_stream(q)));
  return call.results();
}

std::tuple<Tensor, Tensor> kda_recurrent_fwd_cuda(
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
  const DeviceGuard guard(q.get_device_index());
  const KdaStepCall call = prepare_kda_recurrent(
      op,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      initial_state,
      output_final_state
  );
  const kda::KdaCudaStepParams params{
      call.params, device_integers(op, "cu_seqlens", cu_seqlens, q), {nullptr, false}
  };
  check_cuda(op, kda::launch_kda_step(params, current_stream(q)));
  return {call.out, call.final_state};
}

Tensor kda_step_cuda(
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
  const DeviceGuard guard(q.get_device_index());
  const KdaStepCall call = prepare_kda_step(
      op,
      state,
      {q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
      {scale, l2norm, gate, lower_bound, beta_mode, v_first},
      state_indices
  );
  const kda::KdaCudaStepParams params{
      call.params,
      device_integers(op, "cu_seqlens", cu_seqlens, q),
      device_integers(op, "state_indices", state_indices, q)
  };
  check_cuda(op, kda::launch_kda_step(params, current_stream(q)));
  return call.out;
}

}  // namespace sdm::ext
#endif
