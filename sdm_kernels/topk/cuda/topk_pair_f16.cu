// SPDX-License-Identifier: Apache-2.0
//! @file The warp-per-row top-k kernels for float16 scores.

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/topk/cuda/topk_device.cuh"
#include "sdm_kernels/topk/cuda/topk_pair_launch.cuh"

namespace sdm::topk {

cudaError_t launch_topk_pair_f16(const DeviceFwdParams& params, cudaStream_t stream) {
  return launch_pair_width<F16>(params, stream);
}

}  // namespace sdm::topk
