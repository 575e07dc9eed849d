// SPDX-License-Identifier: Apache-2.0
//! @file CPU entry points: plans the call and picks the instruction set.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/row_quant.h"
#include "sdm_kernels/cpu/intrinsics.h"
#include "sdm_kernels/cpu/isa.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/cpu/scratch.h"
#include "sdm_kernels/sdm/cpu/sdm_work.h"
#include "sdm_kernels/sdm/sdm_launch.h"
#include "sdm_kernels/sdm/sdm_plan.h"

#define SDM_ISA_SOURCE "sdm_kernels/sdm/cpu/sdm_cpu-inl.h"
#include "sdm_kernels/cpu/foreach_isa.h"

namespace sdm {

Status sdm_fwd_cpu(const SdmFwdParams& params, int64_t pool, const cpu::ParallelFor& parallel) {
  std::vector<SdmSequence> sequences;
  const Status status = make_sdm_sequences(
      params.dims,
      params.cu_seqlens,
      params.state_indices,
      pool,
      params.saved.segment_chunks,
      &sequences
  );
  if (status != Status::kOk) {
    return status;
  }
  return SDM_ISA_DISPATCH(forward)(params, sequences, parallel);
}

Status sdm_bwd_cpu(const SdmBwdParams& params, const cpu::ParallelFor& parallel) {
  std::vector<SdmSequence> sequences;
  const Status status = make_sdm_sequences(
      params.dims, params.cu_seqlens, nullptr, 0, params.saved.segment_chunks, &sequences
  );
  if (status != Status::kOk) {
    return status;
  }
  return SDM_ISA_DISPATCH(backward)(params, sequences, parallel);
}

}  // namespace sdm
