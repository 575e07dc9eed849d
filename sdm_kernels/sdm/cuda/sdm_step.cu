// SPDX-License-Identifier: Apache-2.0
//! @file Launcher of the decode step.

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_step.cuh"

namespace sdm {
namespace {

using cuda::SdmStepParams;
using cuda::StepView;

// Whether distances in bytes fit: between tokens, and between the `count` elements of one.
bool fits_int32(const int64_t (&stride)[4], int64_t count) {
  constexpr int64_t kMost = INT32_MAX / 8;
  return std::all_of(stride, stride + 4, [](int64_t x) { return x >= -kMost && x <= kMost; }) &&
         std::abs(stride[3]) * count <= kMost;
}

bool fits_int32(const SdmTokens& tokens, const SdmDims& dims) {
  return fits_int32(tokens.write_idx.stride, dims.W) &&
         fits_int32(tokens.read_idx.stride, dims.R) &&
         fits_int32(tokens.write_val.stride, dims.W) &&
         fits_int32(tokens.read_val.stride, dims.R) && fits_int32(tokens.v.stride, dims.D) &&
         fits_int32(tokens.beta.stride, 1) && fits_int32(tokens.g.stride, dims.W);
}

template <typename Stride, typename View>
StepView<Stride> step_view(const View& view) {
  StepView<Stride> out{};
  int64_t size = 0;
  if constexpr (std::is_same_v<View, IndexView>) {
    size = view.is_int64 ? 8 : 4;
    out.high = view.is_int64 ? 4 : 0;
  } else {
    size = element_size(view.dtype);
    out.high = view.dtype == DType::kF32 ? 2 : 0;
    out.is_half = view.dtype == DType::kF16;
  }
  out.data = static_cast<const char*>(view.data);
  for (int i = 0; i < 4; ++i) {
    out.stride[i] = static_cast<Stride>(view.stride[i] * size);
  }
  return out;
}

// A device of compute capability 9 starts the blocks of a step while the kernel before it ends.
cudaError_t starts_early(bool* early) {
  int device = 0, major = 0;
  SDM_RETURN_IF_ERROR(cudaGetDevice(&device));
  SDM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  *early = major >= 9;
  return cudaSuccess;
}

template <typename S, typename Stride, bool kAligned, int kLanes, bool kTwice, int kHeld>
cudaError_t launch(const SdmCudaFwdParams& params, cudaStream_t stream) {
  const SdmFwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  const SdmTokens& in = base.tokens;
  const int64_t size = element_size(base.bank_dtype);
  SdmStepParams<Stride> p{
      static_cast<int32_t>(dims.T),
      static_cast<int32_t>(dims.W),
      static_cast<int32_t>(dims.R),
      static_cast<int32_t>(dims.S),
      static_cast<int32_t>(dims.D),
      cuda::step_table_bits(dims.W),
      0,
      0,
      static_cast<int32_t>(dims.H),
      step_view<Stride>(in.write_idx),
      step_view<Stride>(in.read_idx),
      static_cast<char*>(base.bank.data),
      {base.bank.stride[0] * size, base.bank.stride[1] * size},
      static_cast<Stride>(base.bank.stride[2] * size),
      dims.gate_per_write,
      static_cast<int32_t>(std::min<int64_t>(params.pool, INT32_MAX)),
      static_cast<const char*>(params.state_indices.data),
      params.state_indices.data != nullptr && params.state_indices.is_int64 ? 4 : 0,
      step_view<Stride>(in.write_val),
      step_view<Stride>(in.read_val),
      step_view<Stride>(in.g),
      step_view<Stride>(in.beta),
      step_view<Stride>(in.v),
      base.out
  };
  const auto kernel = &cuda::sdm_step_kernel<S, Stride, kAligned, kLanes, kTwice, kHeld>;
  const int64_t smem = cuda::step_smem<S, kLanes, kTwice>(dims.W, dims.R);
  if (smem > 48 * 1024) {  // beyond what needs no permission
    SDM_RETURN_IF_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)
    ));
  }
  bool early = false;
  SDM_RETURN_IF_ERROR(starts_early(&early));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(cuda::StepShape<S, kLanes, kTwice>::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  constexpr int64_t kMost = 65535;  // of the grid's second and third dimension
  const int64_t slices = ceil_div(dims.D, cuda::StepShape<S, kLanes, kTwice>::kColumns);
  for (int64_t n = 0; n < dims.N; n += kMost) {
    for (int64_t head = 0; head < dims.H; head += kMost) {
      p.first_sequence = static_cast<int32_t>(n);
      p.first_head = static_cast<int32_t>(head);
      config.gridDim = dim3(
          static_cast<unsigned>(slices),
          static_cast<unsigned>(std::min(kMost, dims.H - head)),
          static_cast<unsigned>(std::min(kMost, dims.N - n))
      );
      SDM_RETURN_IF_ERROR(cudaLaunchKernelEx(&config, kernel, p));
    }
  }
  return cudaSuccess;
}

// Blocks of slices of `lanes` lanes for every multiprocessor.
cudaError_t blocks_each(const SdmDims& dims, int64_t vec, int64_t lanes, double* blocks) {
  int device = 0, processors = 1;
  SDM_RETURN_IF_ERROR(cudaGetDevice(&device));
  SDM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  *blocks = static_cast<double>(dims.N * dims.H * ceil_div(dims.D, lanes * vec)) / processors;
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_sdm_step(const SdmCudaFwdParams& params, cudaStream_t stream) {
  const SdmFwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  if (dims.N * dims.H * dims.D == 0 || dims.T == 0) {
    return cudaSuccess;
  }
  if (dims.T > INT32_MAX || dims.W > INT32_MAX / 64 || dims.R > INT32_MAX / 64 ||
      dims.S > INT32_MAX || dims.D > INT32_MAX / 2 || dims.H > INT32_MAX || dims.N > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const bool usual = cuda::aligned_bank(base.bank, base.bank_dtype, dims.D) &&
                     fits_int32(base.tokens, dims) && base.bank.stride[2] >= 0 &&
                     base.bank.stride[2] <= INT32_MAX / 8;
  double blocks = 0;
  SDM_RETURN_IF_ERROR(blocks_each(dims, 16 / element_size(base.bank_dtype), 8, &blocks));
  const bool few = std::max(dims.W, dims.R) <= 2 * cuda::kStepGroups;
  return cuda::dispatch_bank(base.bank_dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    if (!usual) {
      return launch<S, int64_t, false, 8, false, 2>(params, stream);
    }
    // narrow slices while there are too few blocks for the device, wide ones when it is full
    if (few) {
      return blocks < 0.75  ? launch<S, int32_t, true, 4, false, 2>(params, stream)
             : blocks < 3.0 ? launch<S, int32_t, true, 8, false, 2>(params, stream)
                            : launch<S, int32_t, true, 16, true, 2>(params, stream);
    }
    return blocks < 0.75 ? launch<S, int32_t, true, 4, false, 4>(params, stream)
                         : launch<S, int32_t, true, 8, false, 4>(params, stream);
  });
}

}  // namespace sdm
