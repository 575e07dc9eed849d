// SPDX-License-Identifier: Apache-2.0
//! @file Product-key top-k on the CPU: the launches of the prepared calls.
#include "sdm_kernels/topk/topk_launch.h"
#include "torch-ext/results.h"
#include "torch-ext/topk_calls.h"

namespace sdm::ext {

void run_topk_fwd(const Cpu&, const char* op, const TopkFwdParams& params) {
  check_status(op, topk_fwd_cpu(params, torch_parallel_for()));
}

void run_topk_bwd(const Cpu&, const char* op, const TopkBwdParams& params) {
  check_status(op, topk_bwd_cpu(params, torch_parallel_for()));
}

}  // namespace sdm::ext
