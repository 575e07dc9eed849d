// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of the product-key top-k kernels.
#pragma once

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/topk/topk_params.h"

namespace sdm {

Status topk_fwd_cpu(const TopkFwdParams& params, const cpu::ParallelFor& parallel);
Status topk_bwd_cpu(const TopkBwdParams& params, const cpu::ParallelFor& parallel);

}  // namespace sdm
