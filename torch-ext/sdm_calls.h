//! @file The two halves of an SDM op: prepare_* checks the arguments, allocates the results and
//! fills the parameters of the kernels; run_*, for each backend, adds where the integers lie and
//! launches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <tuple>

#include "sdm_kernels/sdm/sdm_params.h"
#include "torch-ext/backend.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

// The tensors of the tokens, in the schemas' order; of cu_seqlens only the shape is looked at.
struct SdmTokenArgs {
  const Tensor& write_idx;
  const Tensor& write_val;
  const Tensor& rows;  // v; in the backward d_out, which has its shape
  const Tensor& beta;
  const Tensor& g;
  const Tensor& read_idx;
  const Tensor& read_val;
  const std::optional<Tensor>& cu_seqlens;
};

struct SdmSaveArgs {
  int64_t mode;
  int64_t segment_chunks;
  bool logs_rows;  // SdmSave::kRows keeps a log of new rows rather than old ones

  bool log() const { return logs_rows && static_cast<SdmSave>(mode) == SdmSave::kRows; }
};

// What the forward has kept for the backward.
struct SdmSavedArgs {
  const Tensor& errors;
  const Tensor& rows;
  const Tensor& row_scales;
  const Tensor& row_links;
};

struct SdmFwdCall {
  SdmFwdParams params;
  Tensor out, final_state, errors, saved_rows, row_scales, row_links;

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {out, final_state, errors, saved_rows, row_scales, row_links};
  }
};

struct SdmBwdCall {
  SdmBwdParams params;
  Tensor d_write_val, d_v, d_beta, d_g, d_read_val, d_initial;

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {d_write_val, d_v, d_beta, d_g, d_read_val, d_initial};
  }
};

// In place: nothing is saved, only `out` is new.
struct SdmInPlaceCall {
  SdmFwdParams params;
  Tensor out;
};

SdmFwdCall prepare_sdm_fwd(
    const char* op,
    const SdmTokenArgs& tokens,
    const Tensor& initial_state,
    int64_t chunk_size,
    bool output_final_state,
    const SdmSaveArgs& save
);

SdmBwdCall prepare_sdm_bwd(
    const char* op,
    const SdmTokenArgs& tokens,
    const std::optional<Tensor>& d_final_state,
    const Tensor& bank,
    const SdmSavedArgs& saved,
    int64_t chunk_size,
    const SdmSaveArgs& save,
    bool shared_bank,
    bool need_state_grad
);

// Of state_indices only the shape is looked at.
SdmInPlaceCall prepare_sdm_in_place(
    const char* op,
    Tensor state,
    const SdmTokenArgs& tokens,
    const std::optional<Tensor>& state_indices,
    int64_t chunk_size
);

// Ids to check: int64 if wide, else int32; num_slots is where they must be below.
struct SdmIndices {
  const void* data;
  bool wide;
  int64_t count;
  int64_t num_slots;
};

// num_states: rows of the bank that state_indices, or else the sequences, choose from. first_bad:
// one number in the backend's memory.
void run_sdm_fwd(
    const Cpu& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
);
void run_sdm_bwd(
    const Cpu& backend, const char* op, SdmBwdParams params, const std::optional<Tensor>& cu_seqlens
);
void run_sdm_step(
    const Cpu& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
);
void run_sdm_check_indices(
    const Cpu& backend, const char* op, const SdmIndices& idx, int64_t* first_bad
);

#ifdef CUDA_KERNEL
void run_sdm_fwd(
    const Cuda& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
);
void run_sdm_bwd(
    const Cuda& backend,
    const char* op,
    SdmBwdParams params,
    const std::optional<Tensor>& cu_seqlens
);
void run_sdm_step(
    const Cuda& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
);
void run_sdm_check_indices(
    const Cuda& backend, const char* op, const SdmIndices& idx, int64_t* first_bad
);
#endif

}  // namespace sdm::ext
