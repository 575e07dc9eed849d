//! @file Sparse delta memory for torch on the CPU.
// SPDX-License-Identifier: Apache-2.0
#include "sdm_kernels/sdm/sdm_launch.h"
#include "torch-ext/results.h"
#include "torch-ext/sdm_calls.h"
#include "torch-ext/torch_binding.h"

namespace sdm::ext {

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
) {
  const char* op = "sdm_chunk_fwd";
  SdmFwdCall call = prepare_sdm_fwd(
      op,
      write_idx,
      write_val,
      v,
      beta,
      g,
      read_idx,
      read_val,
      initial_state,
      cu_seqlens,
      chunk_size,
      output_final_state,
      save_mode,
      segment_chunks
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, sdm_fwd_cpu(call.params, call.params.dims.N, torch_parallel_for()));
  return call.results();
}

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
) {
  const char* op = "sdm_chunk_bwd";
  SdmBwdCall call = prepare_sdm_bwd(
      op,
      d_out,
      d_final_state,
      write_idx,
      write_val,
      beta,
      g,
      read_idx,
      read_val,
      bank,
      cu_seqlens,
      errors,
      saved_rows,
      row_scales,
      chunk_size,
      save_mode,
      segment_chunks,
      shared_bank,
      need_state_grad
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, sdm_bwd_cpu(call.params, torch_parallel_for()));
  return call.results();
}

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
) {
  const char* op = "sdm_chunk_";
  SdmInPlaceCall call = prepare_sdm_in_place(
      op,
      state,
      write_idx,
      write_val,
      v,
      beta,
      g,
      read_idx,
      read_val,
      cu_seqlens,
      state_indices,
      chunk_size
  );
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  const std::vector<int64_t> rows = host_integers(op, "state_indices", state_indices);
  call.params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  call.params.state_indices = data_or_null(rows, state_indices);
  check_status(op, sdm_fwd_cpu(call.params, state.size(0), torch_parallel_for()));
  return call.out;
}

// A chunk of one token is the token recurrence itself.
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
) {
  return sdm_chunk_cpu(
      state, write_idx, write_val, v, beta, g, read_idx, read_val, std::nullopt, state_indices, 1
  );
}

Tensor sdm_check_indices_cpu(const Tensor& idx, int64_t num_slots) {
  const char* op = "sdm_check_indices";
  check_contiguous(op, "idx", idx);
  const bool wide = is_int64(op, "idx", idx);
  const void* data = idx.const_data_ptr();
  int64_t first_bad = -1;
  for (int64_t i = 0; i < idx.numel() && first_bad < 0; ++i) {
    const int64_t slot =
        wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    if (slot < 0 || slot >= num_slots) {
      first_bad = i;
    }
  }
  Tensor result = torch::stable::new_empty(idx, {}, ScalarType::Long);
  *static_cast<int64_t*>(result.mutable_data_ptr()) = first_bad;
  return result;
}

}  // namespace sdm::ext
