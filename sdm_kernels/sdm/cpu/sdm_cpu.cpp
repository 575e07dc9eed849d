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
namespace {

// Bytes of the rows that all tokens name and of the banks that are walked as a whole.
int64_t row_bytes(const SdmDims& dims, DType bank_dtype, bool whole_banks) {
  const int64_t token_rows = dims.B * dims.T * dims.H * (dims.W + dims.R);
  const int64_t bank_rows = whole_banks ? dims.N * dims.H * dims.S : 0;
  return (token_rows + bank_rows) * dims.D * element_size(bank_dtype);
}

}  // namespace

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
  const int64_t bytes = row_bytes(params.dims, params.bank_dtype, params.initial.data != nullptr);
  return SDM_ISA_DISPATCH(forward)(params, sequences, threads_for(parallel, bytes));
}

Status sdm_bwd_cpu(const SdmBwdParams& params, const cpu::ParallelFor& parallel) {
  std::vector<SdmSequence> sequences;
  const Status status = make_sdm_sequences(
      params.dims, params.cu_seqlens, nullptr, 0, params.saved.segment_chunks, &sequences
  );
  if (status != Status::kOk) {
    return status;
  }
  const int64_t bytes = row_bytes(params.dims, params.bank_dtype, true);
  return SDM_ISA_DISPATCH(backward)(params, sequences, threads_for(parallel, bytes));
}

}  // namespace sdm
