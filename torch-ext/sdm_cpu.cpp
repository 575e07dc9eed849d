//! @file Sparse delta memory on the CPU: the launches of the prepared calls.
// SPDX-License-Identifier: Apache-2.0
#include "sdm_kernels/sdm/sdm_launch.h"
#include "torch-ext/results.h"
#include "torch-ext/sdm_calls.h"

namespace sdm::ext {

void run_sdm_fwd(
    const Cpu&,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
) {
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  const std::vector<int64_t> rows = host_integers(op, "state_indices", state_indices);
  params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  params.state_indices = data_or_null(rows, state_indices);
  check_status(op, sdm_fwd_cpu(params, num_states, torch_parallel_for()));
}

void run_sdm_bwd(
    const Cpu&, const char* op, SdmBwdParams params, const std::optional<Tensor>& cu_seqlens
) {
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, sdm_bwd_cpu(params, torch_parallel_for()));
}

// A chunk of one token is the token recurrence itself.
void run_sdm_step(
    const Cpu& backend,
    const char* op,
    SdmFwdParams params,
    const std::optional<Tensor>& state_indices,
    int64_t num_states
) {
  run_sdm_fwd(backend, op, params, std::nullopt, state_indices, num_states);
}

void run_sdm_check_indices(const Cpu&, const char*, const SdmIndices& idx, int64_t* first_bad) {
  *first_bad = -1;
  for (int64_t i = 0; i < idx.count && *first_bad < 0; ++i) {
    const int64_t slot = idx.wide ? static_cast<const int64_t*>(idx.data)[i]
                                  : static_cast<const int32_t*>(idx.data)[i];
    if (slot < 0 || slot >= idx.num_slots) {
      *first_bad = i;
    }
  }
}

}  // namespace sdm::ext
