// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the token-parallel stage of the tensor path.
#include <cstdint>

#include <cuda_runtime_api.h>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_kernel.cuh"

namespace sdm::kda {
namespace {

template <DType kType, int kK>
cudaError_t launch(const cuda::KdaPrepArgs& args, cudaStream_t stream, bool overlap) {
  using Shared = cuda::PrepShared<kK>;
  const KdaPrepParams& p = args.params;
  const int bytes = p.key_scores ? Shared::kBytesWithKeyScores : Shared::kBytes;
  const dim3 grid(static_cast<unsigned>(p.window.slots()), static_cast<unsigned>(p.dims.HV));
  return launch_kernel(
      cuda::kda_prep_kernel<kType, kK>, grid, cuda::kPrepThreads, bytes, stream, overlap, args
  );
}

}  // namespace

int kda_tensor_prep_shared_bytes(int64_t K) {
  return K == 128 ? cuda::PrepShared<128>::kBytesWithKeyScores
                  : cuda::PrepShared<64>::kBytesWithKeyScores;
}

bool kda_rows_aligned(const KdaView& view, int64_t bytes) {
  const int64_t size = element_size(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % bytes == 0 &&
         view.stride[0] * size % bytes == 0 && view.stride[1] * size % bytes == 0 &&
         view.stride[2] * size % bytes == 0;
}

cudaError_t launch_kda_tensor_prep(const KdaPrepParams& params, cudaStream_t stream, bool overlap) {
  if (params.window.slots() <= 0 || params.dims.HV <= 0) {
    return cudaSuccess;
  }
  const int64_t channels = params.dims.K / 32;
  cuda::KdaPrepArgs args;
  args.params = params;
  args.whole_q = kda_rows_aligned(params.tokens.q, 16);
  args.whole_k = kda_rows_aligned(params.tokens.k, 16);
  args.whole_g = kda_rows_aligned(params.tokens.g, element_size(params.tokens.g.dtype) * channels);
  const bool bf16 = params.tokens.q.dtype == DType::kBf16;
  if (params.dims.K == 128) {
    return bf16 ? launch<DType::kBf16, 128>(args, stream, overlap)
                : launch<DType::kF16, 128>(args, stream, overlap);
  }
  if (params.dims.K == 64) {
    return bf16 ? launch<DType::kBf16, 64>(args, stream, overlap)
                : launch<DType::kF16, 64>(args, stream, overlap);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sdm::kda
