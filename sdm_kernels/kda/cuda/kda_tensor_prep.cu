// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the token-parallel stage of the tensor path.
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include <cuda_runtime_api.h>

#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep_kernel.cuh"

namespace sdm::kda {
namespace {

// Blocks from one to that for which it fetches: about as many as run at a time on 132
// multiprocessors.
constexpr int64_t kAhead = 264;

template <DType kType, int kK, cuda::PrepVariant kVariant>
cudaError_t launch(const cuda::KdaPrepArgs& args, cudaStream_t stream, bool overlap) {
  const KdaPrepParams& p = args.params;
  const dim3 grid(
      static_cast<unsigned>(p.window.num_chunks),
      static_cast<unsigned>(p.dims.HV),
      static_cast<unsigned>(p.window.num_sequences)
  );
  return launch_kernel(
      cuda::kda_prep_kernel<kType, kK, kVariant>,
      grid,
      cuda::kPrepThreads,
      cuda::PrepShared<kK>::kBytes,
      stream,
      overlap,
      args
  );
}

template <DType kType, int kK>
cudaError_t launch(const cuda::KdaPrepArgs& args, cudaStream_t stream, bool overlap) {
  const KdaTokens& tokens = args.params.tokens;
  const auto near = [](const KdaView& view) {
    return std::abs(view.stride[1]) < (int64_t{1} << 30) / kTensorChunk;
  };
  if (tokens.g.dtype != kType || !args.whole_q || !args.whole_k || !args.whole_g ||
      !near(tokens.q) || !near(tokens.k) || !near(tokens.g)) {
    return launch<kType, kK, cuda::PrepVariant::kGeneral>(args, stream, overlap);
  }
  return args.params.cu_seqlens.data == nullptr
             ? launch<kType, kK, cuda::PrepVariant::kUsual>(args, stream, overlap)
             : launch<kType, kK, cuda::PrepVariant::kUsualPacked>(args, stream, overlap);
}

}  // namespace

int kda_tensor_prep_shared_bytes(int64_t K) {
  return K == 128 ? cuda::PrepShared<128>::kBytes : cuda::PrepShared<64>::kBytes;
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
  const int64_t piece = params.dims.K / 8;  // bytes of a lane's channels
  cuda::KdaPrepArgs args;
  args.params = params;
  args.group = static_cast<int>(params.dims.HV / params.dims.H);
  args.whole_q = kda_rows_aligned(params.tokens.q, piece);
  args.whole_k = kda_rows_aligned(params.tokens.k, piece);
  args.whole_g =
      kda_rows_aligned(params.tokens.g, params.tokens.g.dtype == DType::kF32 ? 16 : piece);
  args.whole_bias = reinterpret_cast<uintptr_t>(params.tokens.dt_bias) % 16 == 0;
  // No infinity, which 0 would turn into a NaN.
  args.inverse_bound =
      std::fmax(1.0f / (static_cast<float>(params.options.lower_bound) * cuda::kLog2e), -3.0e38f);
  args.ahead_chunks = static_cast<int>(kAhead % params.window.num_chunks);
  args.ahead_heads = static_cast<int>(kAhead / params.window.num_chunks);
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
