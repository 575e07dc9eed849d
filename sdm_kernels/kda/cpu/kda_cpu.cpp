// SPDX-License-Identifier: Apache-2.0
//! @file CPU entry points: checks the sequences and picks the instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/cpu/intrinsics.h"
#include "sdm_kernels/cpu/isa.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/cpu/scratch.h"
#include "sdm_kernels/kda/cpu/kda_work.h"
#include "sdm_kernels/kda/kda_launch.h"
#include "sdm_kernels/kda/kda_plan.h"

#define SDM_ISA_SOURCE "sdm_kernels/kda/cpu/kda_cpu-inl.h"
#include "sdm_kernels/cpu/foreach_isa.h"

namespace sdm::kda {
namespace {

// Multiply-adds with the states.
int64_t state_work(const KdaDims& dims, int64_t per_element) {
  return per_element * dims.B * dims.T * dims.HV * dims.K * dims.V;
}

}  // namespace

Status kda_fwd_cpu(const KdaFwdParams& params, const cpu::ParallelFor& parallel) {
  std::vector<KdaSequence> sequences;
  const Status status = make_kda_sequences(params.dims, params.cu_seqlens, nullptr, 0, &sequences);
  if (status != Status::kOk) {
    return status;
  }
  return SDM_ISA_DISPATCH(kda::forward)(
      params, sequences, threads_for(parallel, state_work(params.dims, 3))
  );
}

Status kda_bwd_cpu(const KdaBwdParams& params, const cpu::ParallelFor& parallel) {
  std::vector<KdaSequence> sequences;
  const Status status = make_kda_sequences(params.dims, params.cu_seqlens, nullptr, 0, &sequences);
  if (status != Status::kOk) {
    return status;
  }
  return SDM_ISA_DISPATCH(kda::backward)(
      params, sequences, threads_for(parallel, state_work(params.dims, 8))
  );
}

Status kda_step_cpu(const KdaStepParams& params, const cpu::ParallelFor& parallel) {
  std::vector<KdaSequence> sequences;
  const Status status = make_kda_sequences(
      params.dims, params.cu_seqlens, params.state_indices, params.pool, &sequences
  );
  if (status != Status::kOk) {
    return status;
  }
  // a state moves once a call, however many tokens
  const int64_t moved = params.dims.N * params.dims.HV * params.dims.K * params.dims.V;
  return SDM_ISA_DISPATCH(kda::step)(
      params, sequences, threads_for(parallel, 3 * moved + state_work(params.dims, 3))
  );
}

}  // namespace sdm::kda
