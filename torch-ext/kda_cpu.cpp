//! @file Kimi delta attention on the CPU: the launches of the prepared calls.
// SPDX-License-Identifier: Apache-2.0
#include "sdm_kernels/kda/kda_launch.h"
#include "torch-ext/kda_calls.h"
#include "torch-ext/results.h"

namespace sdm::ext {

void run_kda_fwd(
    const Cpu&, const char* op, kda::KdaFwdParams params, const std::optional<Tensor>& cu_seqlens
) {
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, kda::kda_fwd_cpu(params, torch_parallel_for()));
}

void run_kda_bwd(
    const Cpu&, const char* op, kda::KdaBwdParams params, const std::optional<Tensor>& cu_seqlens
) {
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  check_status(op, kda::kda_bwd_cpu(params, torch_parallel_for()));
}

void run_kda_step(
    const Cpu&,
    const char* op,
    kda::KdaStepParams params,
    const std::optional<Tensor>& cu_seqlens,
    const std::optional<Tensor>& state_indices
) {
  const std::vector<int64_t> offsets = host_integers(op, "cu_seqlens", cu_seqlens);
  const std::vector<int64_t> rows = host_integers(op, "state_indices", state_indices);
  params.cu_seqlens = data_or_null(offsets, cu_seqlens);
  params.state_indices = data_or_null(rows, state_indices);
  check_status(op, kda::kda_step_cpu(params, torch_parallel_for()));
}

}  // namespace sdm::ext
