// SPDX-License-Identifier: Apache-2.0
//! @file Launcher of the decode step.

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_step.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_early.cuh"

namespace sdm {
namespace {

using cuda::SdmStepParams;
using cuda::StepRows;
using cuda::StepStrides;

template <typename View>
void fill_type(const IndexView& from, View* view) {
  view->data = static_cast<const char*>(from.data);
  view->high = from.is_int64 ? 4 : 0;
}

template <typename View>
void fill_type(const FloatView& from, View* view) {
  view->data = static_cast<const char*>(from.data);
  view->high = from.dtype == DType::kF32 ? 2 : 0;
  view->is_half = from.dtype == DType::kF16;
}

int64_t size_of(const IndexView& view) {
  return view.is_int64 ? 8 : 4;
}

int64_t size_of(const FloatView& view) {
  return element_size(view.dtype);
}

// Distance of the rows of a tensor with `last` elements a row, false if it is not one distance or
// too far.
template <typename View>
bool row_distance(const View& view, const SdmDims& dims, int64_t last, int64_t* distance) {
  constexpr int64_t kMost = INT32_MAX / 8;
  const int64_t (&stride)[4] = view.stride;
  *distance = dims.H > 1 ? stride[2] : dims.T > 1 ? stride[1] : dims.N > 1 ? stride[0] : 0;
  return std::abs(*distance) <= kMost &&
         std::abs(stride[3]) <= kMost / std::max<int64_t>(last, 1) &&
         (dims.T <= 1 || stride[1] == *distance * dims.H) &&
         (dims.N <= 1 || stride[0] == *distance * dims.H * dims.T);
}

bool have_rows(const SdmTokens& in, const SdmDims& dims) {
  int64_t distance = 0;
  return row_distance(in.write_idx, dims, dims.W, &distance) &&
         row_distance(in.read_idx, dims, dims.R, &distance) &&
         row_distance(in.write_val, dims, dims.W, &distance) &&
         row_distance(in.read_val, dims, dims.R, &distance) &&
         row_distance(in.v, dims, dims.D, &distance) && row_distance(in.beta, dims, 1, &distance) &&
         row_distance(in.g, dims, dims.gate_per_write ? dims.W : 1, &distance) &&
         dims.N * dims.T * dims.H <= INT32_MAX;
}

template <typename From>
void make_view(const From& from, const SdmDims& dims, StepRows* view) {
  *view = StepRows{};
  fill_type(from, view);
  int64_t distance = 0;
  static_cast<void>(row_distance(from, dims, 1, &distance));
  view->row_stride = static_cast<int32_t>(distance * size_of(from));
  view->lane_stride = static_cast<int32_t>(from.stride[3] * size_of(from));
}

template <typename From>
void make_view(const From& from, const SdmDims&, StepStrides* view) {
  *view = StepStrides{};
  fill_type(from, view);
  for (int i = 0; i < 4; ++i) {
    view->stride[i] = from.stride[i] * size_of(from);
  }
}

// A device of compute capability 9 starts the blocks of a step while the kernel before it ends.
cudaError_t starts_early(bool* early) {
  int device = 0, major = 0;
  SDM_RETURN_IF_ERROR(cudaGetDevice(&device));
  SDM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  *early = major >= 9;
  return cudaSuccess;
}

template <
    typename S,
    typename View,
    bool kAligned,
    int kLanes,
    int kSets,
    int kHeld,
    bool kMore,
    bool kEarly = false>
cudaError_t launch(const SdmCudaFwdParams& params, bool early, cudaStream_t stream) {
  const SdmFwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  const SdmTokens& in = base.tokens;
  const int64_t size = element_size(base.bank_dtype);
  SdmStepParams<View> p{};
  p.T = static_cast<int32_t>(dims.T);
  p.W = static_cast<int32_t>(dims.W);
  p.R = static_cast<int32_t>(dims.R);
  p.S = static_cast<int32_t>(dims.S);
  p.D = static_cast<int32_t>(dims.D);
  p.table_bits = cuda::step_table_bits(dims.W);
  p.num_heads = static_cast<int32_t>(dims.H);
  p.gate_per_write = dims.gate_per_write;
  make_view(in.write_idx, dims, &p.write_idx);
  make_view(in.read_idx, dims, &p.read_idx);
  p.bank = static_cast<char*>(base.bank.data);
  p.bank_stride[0] = base.bank.stride[0] * size;
  p.bank_stride[1] = base.bank.stride[1] * size;
  p.slot_stride = static_cast<typename View::Stride>(base.bank.stride[2] * size);
  p.pool = static_cast<int32_t>(std::min<int64_t>(params.pool, INT32_MAX));
  p.state_indices = static_cast<const char*>(params.state_indices.data);
  p.state_high = p.state_indices != nullptr && params.state_indices.is_int64 ? 4 : 0;
  make_view(in.write_val, dims, &p.write_val);
  make_view(in.read_val, dims, &p.read_val);
  make_view(in.g, dims, &p.g);
  make_view(in.beta, dims, &p.beta);
  make_view(in.v, dims, &p.v);
  p.out = base.out;
  const auto kernel = [] {
    if constexpr (kEarly) {
      return &cuda::sdm_step_early_kernel<S, View, kLanes, kSets, kHeld>;
    } else {
      return &cuda::sdm_step_kernel<S, View, kAligned, kLanes, kSets, kHeld, kMore>;
    }
  }();
  const int64_t smem = cuda::step_smem<S, kLanes, kSets, kHeld>(dims.W, dims.R);
  if (smem > 48 * 1024) {  // beyond what needs no permission
    SDM_RETURN_IF_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)
    ));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(cuda::StepShape<S, kLanes, kSets>::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  constexpr int64_t kMost = 65535;  // of the grid's second and third dimension
  const int64_t slices = ceil_div(dims.D, cuda::StepShape<S, kLanes, kSets>::kColumns);
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
  const bool aligned = cuda::aligned_bank(base.bank, base.bank_dtype, dims.D);
  const bool rows = have_rows(base.tokens, dims) && base.bank.stride[2] >= 0 &&
                    base.bank.stride[2] <= INT32_MAX / 8;
  bool early = false;
  SDM_RETURN_IF_ERROR(starts_early(&early));
  double blocks = 0;
  SDM_RETURN_IF_ERROR(blocks_each(dims, 16 / element_size(base.bank_dtype), 8, &blocks));
  const int64_t lanes = std::max(dims.W, dims.R);
  return cuda::dispatch_bank(base.bank_dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    if (!aligned) {
      return launch<S, StepStrides, false, 8, 1, 2, true>(params, early, stream);
    }
    if (!rows || lanes > 4 * cuda::kStepGroups) {
      return launch<S, StepStrides, true, 8, 1, 4, true>(params, early, stream);
    }
    // Narrow slices while there are too few blocks for the device, wide ones when it is full. What
    // starts early costs a full device more than it saves.
    if (lanes > 2 * cuda::kStepGroups) {
      if (blocks >= 0.75) {
        return launch<S, StepRows, true, 8, 1, 4, false>(params, early, stream);
      }
      return early ? launch<S, StepRows, true, 4, 1, 4, false, true>(params, early, stream)
                   : launch<S, StepRows, true, 4, 1, 4, false>(params, early, stream);
    }
    if (blocks >= 3.0) {
      return launch<S, StepRows, true, 16, 4, 2, false>(params, early, stream);
    }
    if (!early) {
      return launch<S, StepRows, true, 8, 2, 2, false>(params, early, stream);
    }
    return blocks < 1.0 ? launch<S, StepRows, true, 8, 2, 2, false, true>(params, early, stream)
                        : launch<S, StepRows, true, 16, 4, 2, false, true>(params, early, stream);
  });
}

}  // namespace sdm
