// SPDX-License-Identifier: Apache-2.0
//! @file Entry points of chunked Kimi delta attention on CUDA: which of the two paths serves a
//! call. The choice depends on sizes and types only, so the backward takes the forward's.

#include "sdm_kernels/kda/cuda/kda_paths.h"

namespace sdm::kda {
namespace {

bool is_16_bit(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kF16;
}

// What no path serves.
cudaError_t check_call(const KdaDims& dims, const KdaTokens& in) {
  if (in.q.dtype == DType::kF64 || in.k.dtype == DType::kF64 || in.v.dtype == DType::kF64 ||
      in.g.dtype == DType::kF64 || in.beta.dtype == DType::kF64) {
    return cudaErrorNotSupported;
  }
  return dims.C > 0 && dims.C % 16 == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

bool takes_tensor_path(const KdaDims& dims, const KdaTokens& in) {
  const DType dtype = in.q.dtype;
  return is_16_bit(dtype) && in.k.dtype == dtype && in.v.dtype == dtype && dims.C == kTensorChunk &&
         dims.T > 0 && dims.N > 0 && kda_tensor_supports(dims, dtype);
}

}  // namespace

cudaError_t kda_fwd_cuda_workspace(const KdaCudaFwdParams& params, size_t* bytes) {
  const KdaTokens& tokens = params.base.tokens;
  const cudaError_t error = check_call(params.base.dims, tokens);
  if (error != cudaSuccess) {
    return error;
  }
  *bytes = takes_tensor_path(params.base.dims, tokens) ? kda_tensor_fwd_workspace(params)
                                                       : kda_plain_fwd_workspace(params);
  return cudaSuccess;
}

cudaError_t launch_kda_fwd(const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream) {
  const KdaTokens& tokens = params.base.tokens;
  const cudaError_t error = check_call(params.base.dims, tokens);
  if (error != cudaSuccess) {
    return error;
  }
  return takes_tensor_path(params.base.dims, tokens)
             ? launch_kda_tensor_fwd(params, workspace, stream)
             : launch_kda_plain_fwd(params, workspace, stream);
}

cudaError_t kda_bwd_cuda_workspace(const KdaCudaBwdParams& params, size_t* bytes) {
  const KdaTokens& tokens = params.base.tokens;
  const cudaError_t error = check_call(params.base.dims, tokens);
  if (error != cudaSuccess) {
    return error;
  }
  *bytes = takes_tensor_path(params.base.dims, tokens) ? kda_tensor_bwd_workspace(params)
                                                       : kda_plain_bwd_workspace(params);
  return cudaSuccess;
}

cudaError_t launch_kda_bwd(const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream) {
  const KdaTokens& tokens = params.base.tokens;
  const cudaError_t error = check_call(params.base.dims, tokens);
  if (error != cudaSuccess) {
    return error;
  }
  return takes_tensor_path(params.base.dims, tokens)
             ? launch_kda_tensor_bwd(params, workspace, stream)
             : launch_kda_plain_bwd(params, workspace, stream);
}

}  // namespace sdm::kda
