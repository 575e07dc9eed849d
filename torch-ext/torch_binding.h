// SPDX-License-Identifier: Apache-2.0
//! @file The C++ entry points of the ops: one declaration per op and backend.
//! Name = schema name + backend (a trailing underscore of the schema serves as the separator).
//! Shapes and meanings: docs/semantics.md and docs/kda.md; they are checked by the functions
//! themselves.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/tensor.h>

namespace sdm::ext {

using torch::stable::Tensor;

// Product-key top-k (topk_torch.cpp).

std::tuple<Tensor, Tensor> product_key_topk_fwd_cpu(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
);

Tensor product_key_topk_bwd_cpu(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
);

#ifdef CUDA_KERNEL
// The same on CUDA (topk_torch_cuda.cpp).

std::tuple<Tensor, Tensor> product_key_topk_fwd_cuda(
    const Tensor& scores, const std::vector<int64_t>& factor_dims, int64_t k
);

Tensor product_key_topk_bwd_cuda(
    const Tensor& d_values, const Tensor& indices, const std::vector<int64_t>& factor_dims
);
#endif

// Sparse delta memory (sdm_torch.cpp).

// Returns out, final_state, errors, saved_rows, row_scales.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_fwd_cpu(
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    int64_t chunk_size,
    bool output_final_state,
    int64_t save_mode,
    int64_t segment_chunks
);

// Returns d_write_val, d_v, d_beta, d_g, d_read_val, d_initial_state.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_bwd_cpu(
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& bank,
    const std::optional<Tensor>& cu_seqlens,
    const Tensor& errors,
    const Tensor& saved_rows,
    const Tensor& row_scales,
    int64_t chunk_size,
    int64_t save_mode,
    int64_t segment_chunks,
    bool shared_bank,
    bool need_state_grad
);

// Advances `state` in place; returns out.
Tensor sdm_chunk_cpu(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t chunk_size
);

// Advances `state` in place; returns out.
Tensor sdm_step_cpu(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& state_indices
);

// The linear position of the first id outside [0, num_slots), or -1, as a 0-d int64 tensor.
Tensor sdm_check_indices_cpu(const Tensor& idx, int64_t num_slots);

#ifdef CUDA_KERNEL
// The same on CUDA (sdm_torch_cuda.cpp).

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_fwd_cuda(
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& initial_state,
    const std::optional<Tensor>& cu_seqlens,
    int64_t chunk_size,
    bool output_final_state,
    int64_t save_mode,
    int64_t segment_chunks
);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_bwd_cuda(
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const Tensor& bank,
    const std::optional<Tensor>& cu_seqlens,
    const Tensor& errors,
    const Tensor& saved_rows,
    const Tensor& row_scales,
    int64_t chunk_size,
    int64_t save_mode,
    int64_t segment_chunks,
    bool shared_bank,
    bool need_state_grad
);

Tensor sdm_chunk_cuda(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t chunk_size
);

Tensor sdm_step_cuda(
    Tensor state,
    const Tensor& write_idx,
    const Tensor& write_val,
    const Tensor& v,
    const Tensor& beta,
    const Tensor& g,
    const Tensor& read_idx,
    const Tensor& read_val,
    const std::optional<Tensor>& state_indices
);

Tensor sdm_check_indices_cuda(const Tensor& idx, int64_t num_slots);
#endif

// Kimi delta attention (kda_torch.cpp). The values of `gate` and `beta_mode`: kda_params.h.

// Returns out, final_state, chunk_states.
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
);

// Returns d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial_state.
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
);

// Token by token; returns out, final_state.
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
);

// Advances `state` in place token by token; returns out.
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
);

#ifdef CUDA_KERNEL
// The same on CUDA (kda_torch_cuda.cpp).

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
);

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
);

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
);

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
);
#endif

}  // namespace sdm::ext
