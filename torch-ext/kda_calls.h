//! @file The two halves of a KDA op: prepare_* checks the arguments, allocates the results and
//! fills the parameters of the kernels; run_*, for each backend, adds where the integers lie and
//! launches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <tuple>

#include "sdm_kernels/kda/kda_params.h"
#include "torch-ext/backend.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

// The arguments that every op has, in the schemas' order; of cu_seqlens only the shape is looked
// at.
struct KdaTokenArgs {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& g;
  const Tensor& beta;
  const std::optional<Tensor>& A_log;
  const std::optional<Tensor>& dt_bias;
  const std::optional<Tensor>& cu_seqlens;
};

struct KdaOptionArgs {
  double scale;
  bool l2norm;
  int64_t gate;
  double lower_bound;
  int64_t beta_mode;
  bool v_first;  // layout of every state: [.., V, K] instead of [.., K, V]
};

struct KdaFwdCall {
  kda::KdaFwdParams params;
  Tensor out, final_state, chunk_states;

  std::tuple<Tensor, Tensor, Tensor> results() const { return {out, final_state, chunk_states}; }
};

struct KdaBwdCall {
  kda::KdaBwdParams params;
  Tensor d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial;

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial};
  }
};

struct KdaStepCall {
  kda::KdaStepParams params;
  Tensor out, final_state;
};

KdaFwdCall prepare_kda_fwd(
    const char* op,
    const KdaTokenArgs& tokens,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    int64_t chunk_size,
    bool output_final_state,
    bool output_chunk_states
);

KdaBwdCall prepare_kda_bwd(
    const char* op,
    const Tensor& d_out,
    const std::optional<Tensor>& d_final_state,
    const KdaTokenArgs& tokens,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    const std::optional<Tensor>& chunk_states,
    int64_t chunk_size,
    bool need_gate_grad,
    bool need_state_grad
);

// Out of place, token by token.
KdaStepCall prepare_kda_recurrent(
    const char* op,
    const KdaTokenArgs& tokens,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& initial_state,
    bool output_final_state
);

// In place: `state` is where the sequences start and where they end. Of state_indices only the
// shape is looked at.
KdaStepCall prepare_kda_step(
    const char* op,
    Tensor state,
    const KdaTokenArgs& tokens,
    const KdaOptionArgs& options,
    const std::optional<Tensor>& state_indices
);

void run_kda_fwd(
    const Cpu& backend,
    const char* op,
    kda::KdaFwdParams params,
    const std::optional<Tensor>& cu_seqlens
);
void run_kda_bwd(
    const Cpu& backend,
    const char* op,
    kda::KdaBwdParams params,
    const std::optional<Tensor>& cu_seqlens
);
void run_kda_step(
    const Cpu& backend,
    const char* op,
    kda::KdaStepParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices
);

#ifdef CUDA_KERNEL
void run_kda_fwd(
    const Cuda& backend,
    const char* op,
    kda::KdaFwdParams params,
    const std::optional<Tensor>& cu_seqlens
);
void run_kda_bwd(
    const Cuda& backend,
    const char* op,
    kda::KdaBwdParams params,
    const std::optional<Tensor>& cu_seqlens
);
void run_kda_step(
    const Cuda& backend,
    const char* op,
    kda::KdaStepParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices
);
#endif

}  // namespace sdm::ext
