// SPDX-License-Identifier: Apache-2.0
//! @file The C++ entry points of the ops: one declaration per op and backend.
//! Name = schema name + backend (a trailing underscore of the schema serves as the separator).
//! Shapes and meanings: docs/semantics.md; they are checked by the functions themselves.
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

}  // namespace sdm::ext
