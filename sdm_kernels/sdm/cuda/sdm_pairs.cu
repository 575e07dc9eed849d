// SPDX-License-Identifier: Apache-2.0
//! @file Workspace and launches of the pair stage (sdm_token_dots.cuh, sdm_bwd_pairs.cuh,
//! sdm_pair_gates.cuh).

#include <cstdint>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/sdm/cuda/sdm_bwd_pairs.cuh"
#include "sdm_kernels/sdm/cuda/sdm_pair_gates.cuh"
#include "sdm_kernels/sdm/cuda/sdm_pairs.h"
#include "sdm_kernels/sdm/cuda/sdm_token_dots.cuh"

namespace sdm {
namespace cuda::pairs {
namespace {

struct PairsWorkspace {
  float* ve;
  float* ge;
  float* ve_planes;  // partial sums, where the columns are split
  float* ge_planes;
  float* error_sum;
  float* result;
  float2* write_part;
  float* decay_sum;
  double2* changes;
  size_t bytes;
};

struct DotsSplit {
  int64_t columns, segments;
  bool split;
};

DotsSplit split_dots(const SdmDims& dims, int64_t num_q) {
  const int64_t columns = segment_columns(dims.D);
  const int64_t segments = ceil_div(dims.D, columns);
  return {columns, segments, segments > 1 && num_q * lower_tiles(dims.C) < kFewTiles};
}

PairsWorkspace carve_workspace(const SdmDims& dims, const SdmWindow& window, void* workspace) {
  const int64_t num_q = dims.N * window.chunks * dims.H;
  const int64_t n = num_q * dims.C * (dims.W + dims.R);
  const int64_t writes = num_q * dims.C * dims.W;
  const int64_t Cp = round_up(dims.C, 16);
  const int64_t square = num_q * Cp * Cp;
  const DotsSplit dots = split_dots(dims, num_q);
  const int64_t planes = dots.split ? dots.segments * square : 0;
  PairsWorkspace w = {};
  DeviceCarver carver(workspace);
  carver.take(square, &w.ve);
  carver.take(square, &w.ge);
  carver.take(planes, &w.ve_planes);
  carver.take(planes, &w.ge_planes);
  carver.take(writes, &w.error_sum);
  carver.take(n, &w.result);
  carver.take(n, &w.write_part);
  carver.take(writes, &w.decay_sum);
  carver.take(n, &w.changes);
  w.bytes = static_cast<size_t>(carver.used());
  return w;
}

bool aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

template <int kTerms, typename Dy>
cudaError_t launch_dots_of(const SdmTokenDotsParams& p, int64_t blocks, cudaStream_t stream) {
  constexpr int kBytes = kStages * static_cast<int>(sizeof(DotsStage<Dy>));
  const auto kernel = &sdm_token_dots_kernel<kTerms, Dy>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) {
    return error;
  }
  kernel<<<static_cast<unsigned>(blocks), kDotThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <int kTerms>
cudaError_t launch_dots(const SdmTokenDotsParams& p, int64_t blocks, cudaStream_t stream) {
  switch (p.d_out.dtype) {
    case DType::kBf16:
      return launch_dots_of<kTerms, __nv_bfloat16>(p, blocks, stream);
    case DType::kF16:
      return launch_dots_of<kTerms, __half>(p, blocks, stream);
    default:
      return launch_dots_of<kTerms, float>(p, blocks, stream);
  }
}

cudaError_t launch_token_dots(
    const SdmCudaInputs& inputs,
    const SdmWindow& window,
    int64_t num_q,
    const float* d_v,
    const float* errors,
    const FloatView& d_out,
    const PairsWorkspace& w,
    cudaStream_t stream
) {
  const SdmDims& dims = inputs.dims;
  const DotsSplit dots = split_dots(dims, num_q);
  SdmTokenDotsParams p = {};
  p.dims = dims;
  p.sequences = inputs.sequences;
  p.window = window;
  p.num_q = num_q;
  p.Cp = static_cast<int32_t>(round_up(dims.C, 16));
  p.tiles = static_cast<int32_t>(lower_tiles(dims.C));
  p.columns = dots.columns;
  p.segments = static_cast<int32_t>(dots.segments);
  p.split = dots.split;
  p.vector_rows = dims.D % 4 == 0 && aligned(d_v, 16) && aligned(errors, 16);
  // strides of single elements of an axis are never used
  const int64_t strides = (dims.B > 1 ? d_out.stride[0] : 0) | (dims.T > 1 ? d_out.stride[1] : 0) |
                          (dims.H > 1 ? d_out.stride[2] : 0);
  p.vector_d_out = dims.D % 4 == 0 && strides % 4 == 0 &&
                   aligned(d_out.data, static_cast<size_t>(4 * element_size(d_out.dtype)));
  p.d_v = d_v;
  p.errors = errors;
  p.d_out = d_out;
  p.ve = dots.split ? w.ve_planes : w.ve;
  p.ge = dots.split ? w.ge_planes : w.ge;
  const int64_t blocks = num_q * p.tiles * (dots.split ? dots.segments : 1);
  const cudaError_t launched = inputs.bank_dtype == DType::kF32 ? launch_dots<3>(p, blocks, stream)
                                                                : launch_dots<1>(p, blocks, stream);
  if (launched != cudaSuccess) {
    return launched;
  }
  if (dots.split) {
    const unsigned rows = static_cast<unsigned>(num_q * dims.C);
    sdm_token_dots_sum_kernel<<<rows, 256, 0, stream>>>(p, w.ve, w.ge);
  }
  return cudaGetLastError();
}

unsigned grid_of(int64_t num_q, int64_t items, int64_t per_block) {
  return static_cast<unsigned>(num_q * ceil_div(items, per_block));
}

}  // namespace
}  // namespace cuda::pairs

size_t sdm_pairs_workspace(const SdmDims& dims, const SdmWindow& window) {
  return cuda::pairs::carve_workspace(dims, window, nullptr).bytes;
}

cudaError_t launch_sdm_pairs(
    const SdmCudaInputs& inputs,
    const SdmWindow& window,
    const SdmRecords& records,
    const SdmDots& dots,
    const float* errors,
    const FloatView& d_out,
    const SdmPairGrads& grads,
    void* workspace,
    cudaStream_t stream
) {
  using namespace cuda::pairs;
  const SdmDims& dims = inputs.dims;
  const int64_t num_q = records.num_q;
  const int64_t lanes = dims.C * (dims.W + dims.R);
  if (num_q == 0 || dims.C == 0) {
    return cudaSuccess;
  }
  const PairsWorkspace w = carve_workspace(dims, window, workspace);
  cudaError_t error = launch_token_dots(inputs, window, num_q, dots.d_v, errors, d_out, w, stream);
  if (error != cudaSuccess) {
    return error;
  }
  SdmBwdPairsParams p = {};
  p.dims = dims;
  p.tokens = inputs.tokens;
  p.sequences = inputs.sequences;
  p.window = window;
  p.records = records;
  p.dots = dots;
  p.d_write_val = grads.d_write_val;
  p.d_read_val = grads.d_read_val;
  p.d_beta = grads.d_beta;
  p.d_g = grads.d_g;
  p.ve = w.ve;
  p.ge = w.ge;
  p.error_sum = w.error_sum;
  p.result = w.result;
  p.write_part = w.write_part;
  p.decay_sum = w.decay_sum;
  p.changes = w.changes;
  const auto launch = [&](void (*kernel)(SdmBwdPairsParams), unsigned blocks) {
    kernel<<<blocks, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  error = launch(sdm_pairs_sum_kernel, grid_of(num_q, dims.C * dims.W, kThreads));
  if (error == cudaSuccess) {
    error = launch(sdm_pairs_pull_kernel, grid_of(num_q, lanes, kThreads));
  }
  if (error == cudaSuccess) {
    error = launch(sdm_pairs_gates_kernel, grid_of(num_q, dims.C * dims.W, kThreads));
  }
  if (error == cudaSuccess) {
    error = launch(sdm_pairs_finish_kernel, grid_of(num_q, dims.C, kThreads / 32));
  }
  return error;
}

}  // namespace sdm
