// SPDX-License-Identifier: Apache-2.0
//! @file Launcher of the decode step.

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_step.cuh"

namespace sdm {
namespace {

using cuda::SdmStepParams;
using cuda::StepView;

constexpr int kGroups = 16;

// In bytes.
bool fits_int32(const int64_t (&stride)[4]) {
  return std::all_of(stride, stride + 4, [](int64_t x) {
    return x >= INT32_MIN / 8 && x <= INT32_MAX / 8;
  });
}

bool fits_int32(const SdmTokens& tokens) {
  return fits_int32(tokens.write_idx.stride) && fits_int32(tokens.read_idx.stride) &&
         fits_int32(tokens.write_val.stride) && fits_int32(tokens.read_val.stride) &&
         fits_int32(tokens.v.stride) && fits_int32(tokens.beta.stride) &&
         fits_int32(tokens.g.stride);
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

template <typename S, typename Stride, bool kAligned, int kLanes, int kHeld>
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
      0,
      0,
      static_cast<int32_t>(dims.H),
      step_view<Stride>(in.write_idx),
      step_view<Stride>(in.read_idx),
      static_cast<char*>(base.bank.data),
      {base.bank.stride[0] * size, base.bank.stride[1] * size},
      static_cast<Stride>(base.bank.stride[2] * size),
      dims.gate_per_write,
      params.pool,
      static_cast<const char*>(params.state_indices.data),
      params.state_indices.is_int64 ? 4 : 0,
      step_view<Stride>(in.write_val),
      step_view<Stride>(in.read_val),
      step_view<Stride>(in.g),
      step_view<Stride>(in.beta),
      step_view<Stride>(in.v),
      base.out
  };
  const auto kernel = &cuda::sdm_step_kernel<S, Stride, kAligned, kGroups, kLanes, kHeld>;
  const int64_t smem = cuda::step_smem<S, kGroups, kLanes>(dims.W, dims.R);
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
  config.blockDim = dim3(cuda::StepShape<S, kGroups, kLanes>::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  constexpr int64_t kMost = 65535;  // of the grid's second and third dimension
  const int64_t slices = ceil_div(dims.D, cuda::StepShape<S, kGroups, kLanes>::kColumns);
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

// The widest slices that still give about every multiprocessor a block.
cudaError_t choose_lanes(const SdmDims& dims, int64_t vec, int* lanes) {
  int device = 0, processors = 0;
  SDM_RETURN_IF_ERROR(cudaGetDevice(&device));
  SDM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const auto blocks = [&](int64_t width) {
    return dims.N * dims.H * ceil_div(dims.D, width * vec);
  };
  *lanes = blocks(8) * 4 >= processors * 3 ? 8 : blocks(4) * 4 >= processors * 3 ? 4 : 2;
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
                     fits_int32(base.tokens) && base.bank.stride[2] <= INT32_MAX / 8;
  int lanes = 8;
  SDM_RETURN_IF_ERROR(choose_lanes(dims, 16 / element_size(base.bank_dtype), &lanes));
  const bool few = std::max(dims.W, dims.R) <= 4 * kGroups;
  return cuda::dispatch_bank(base.bank_dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    if (!usual) {
      return launch<S, int64_t, false, 8, 4>(params, stream);
    }
    if (few) {
      return lanes == 8   ? launch<S, int32_t, true, 8, 4>(params, stream)
             : lanes == 4 ? launch<S, int32_t, true, 4, 4>(params, stream)
                          : launch<S, int32_t, true, 2, 4>(params, stream);
    }
    return lanes == 8   ? launch<S, int32_t, true, 8, 8>(params, stream)
           : lanes == 4 ? launch<S, int32_t, true, 4, 8>(params, stream)
                        : launch<S, int32_t, true, 2, 8>(params, stream);
  });
}

}  // namespace sdm
