// SPDX-License-Identifier: Apache-2.0
//! @file The ops of sparse delta memory, for every backend. Name = schema name (without a trailing
//! underscore). Shapes and meanings: docs/semantics.md; prepare_* checks them.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "torch-ext/sdm_calls.h"

namespace sdm::ext {

// Returns out, final_state, errors, saved_rows, row_scales, row_links.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_fwd(
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
  const Backend backend(v);
  const SdmFwdCall call = prepare_sdm_fwd(
      op,
      {write_idx, write_val, v, beta, g, read_idx, read_val, cu_seqlens},
      initial_state,
      chunk_size,
      output_final_state,
      {save_mode, segment_chunks, Backend::kLogsRows}
  );
  run_sdm_fwd(backend, op, call.params, cu_seqlens, std::nullopt, call.params.dims.N);
  return call.results();
}

// Returns d_write_val, d_v, d_beta, d_g, d_read_val, d_initial_state.
template <typename Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> sdm_chunk_bwd(
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
    const Tensor& row_links,
    int64_t chunk_size,
    int64_t save_mode,
    int64_t segment_chunks,
    bool shared_bank,
    bool need_state_grad
) {
  const char* op = "sdm_chunk_bwd";
  const Backend backend(d_out);
  const SdmBwdCall call = prepare_sdm_bwd(
      op,
      {write_idx, write_val, d_out, beta, g, read_idx, read_val, cu_seqlens},
      d_final_state,
      bank,
      {errors, saved_rows, row_scales, row_links},
      chunk_size,
      {save_mode, segment_chunks, Backend::kLogsRows},
      shared_bank,
      need_state_grad
  );
  run_sdm_bwd(backend, op, call.params, cu_seqlens);
  return call.results();
}

// Advances `state` in place; returns out.
template <typename Backend>
Tensor sdm_chunk(
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
  const Backend backend(v);
  const SdmInPlaceCall call = prepare_sdm_in_place(
      op,
      state,
      {write_idx, write_val, v, beta, g, read_idx, read_val, cu_seqlens},
      state_indices,
      chunk_size
  );
  run_sdm_fwd(backend, op, call.params, cu_seqlens, state_indices, state.size(0));
  return call.out;
}

// Advances `state` in place; returns out. The same as a chunk of one token.
template <typename Backend>
Tensor sdm_step(
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
  const char* op = "sdm_step_";
  const Backend backend(v);
  const SdmInPlaceCall call = prepare_sdm_in_place(
      op,
      state,
      {write_idx, write_val, v, beta, g, read_idx, read_val, std::nullopt},
      state_indices,
      1
  );
  run_sdm_step(backend, op, call.params, state_indices, state.size(0));
  return call.out;
}

// The linear position of the first id outside [0, num_slots), or -1, as a 0-d int64 tensor.
template <typename Backend>
Tensor sdm_check_indices(const Tensor& idx, int64_t num_slots) {
  const char* op = "sdm_check_indices";
  check_contiguous(op, "idx", idx);
  const bool wide = is_int64(op, "idx", idx);
  const Backend backend(idx);
  Tensor first_bad = new_empty(idx, std::vector<int64_t>{}, ScalarType::Long);
  run_sdm_check_indices(
      backend,
      op,
      {idx.const_data_ptr(), wide, idx.numel(), num_slots},
      static_cast<int64_t*>(first_bad.mutable_data_ptr())
  );
  return first_bad;
}

}  // namespace sdm::ext
