// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the sparse delta memory kernels.
#pragma once

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/sdm/sdm_params.h"

namespace sdm {

// Chunked forward, prefill in place, and (with C = 1) the decode step. `pool` is the number of rows
// of the bank that state_indices may name.
Status sdm_fwd_cpu(const SdmFwdParams& params, int64_t pool, const cpu::ParallelFor& parallel);

Status sdm_bwd_cpu(const SdmBwdParams& params, const cpu::ParallelFor& parallel);

}  // namespace sdm
