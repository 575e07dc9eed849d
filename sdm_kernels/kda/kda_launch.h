// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the Kimi delta attention kernels on the CPU.
#pragma once

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/kda/kda_params.h"

namespace sdm::kda {

Status kda_fwd_cpu(const KdaFwdParams& params, const cpu::ParallelFor& parallel);

Status kda_bwd_cpu(const KdaBwdParams& params, const cpu::ParallelFor& parallel);

Status kda_step_cpu(const KdaStepParams& params, const cpu::ParallelFor& parallel);

}  // namespace sdm::kda
