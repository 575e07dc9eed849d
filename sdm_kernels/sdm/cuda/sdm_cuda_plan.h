// SPDX-License-Identifier: Apache-2.0
//! @file Work split and workspace of a CUDA call. Depends on the device only in how work is
//! divided, never in what is summed with what.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "sdm_kernels/sdm/cuda/sdm_loop.cuh"
#include "sdm_kernels/sdm/cuda/sdm_phase1.h"

namespace sdm::cuda {

// Hands out 256-byte aligned pieces of the workspace; with a null block it only counts.
class DeviceCarver {
 public:
  explicit DeviceCarver(void* block) : block_(static_cast<char*>(block)) {}

  void* take(int64_t bytes) {
    const int64_t begin = used_;
    used_ += round_up(bytes, 256);
    return block_ == nullptr ? nullptr : block_ + begin;
  }

  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take(count * static_cast<int64_t>(sizeof(T))));
  }

  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

// Entries whose records are held at a time: about 100 bytes each, however long the sequences are.
constexpr int64_t kWindowLanes = int64_t{4} << 20;

inline int64_t lanes_of_chunk(const SdmDims& dims) {
  return dims.C * (dims.W + dims.R);
}

// Chunks of the longest possible sequence.
inline int64_t most_chunks(const SdmDims& dims) {
  return std::max<int64_t>(1, ceil_div(dims.T, dims.C));
}

inline int64_t window_chunks(const SdmDims& dims) {
  const int64_t lanes = std::max<int64_t>(1, dims.N * dims.H) * lanes_of_chunk(dims);
  return std::clamp<int64_t>(kWindowLanes / lanes, 1, most_chunks(dims));
}

inline int64_t slice_columns(DType bank) {
  return bank == DType::kF32 ? kSliceColumns<float> : kSliceColumns<__half>;
}

struct LoopShape {
  int64_t num_slices;
  int64_t items;
  int group_blocks;
  int own_rows;  // most token rows that one block owns
};

// Enough blocks an item to fill the device, one block a multiprocessor, all resident.
inline cudaError_t choose_loop(const SdmDims& dims, DType bank, LoopShape* shape) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    return error;
  }
  error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t blocks = ceil_div(dims.C, 16);
  shape->num_slices = ceil_div(dims.D, slice_columns(bank));
  shape->items = dims.N * dims.H * shape->num_slices;
  const int64_t most = std::min<int64_t>(blocks, 8);
  shape->group_blocks = static_cast<int>(
      shape->items == 0 ? 1 : std::clamp<int64_t>(processors / shape->items, 1, most)
  );
  shape->own_rows = static_cast<int>(ceil_div(blocks, shape->group_blocks) * 16);
  return error;
}

struct LoopMemory {
  SdmSequence* sequences;
  float* exchange;
  unsigned* counters;
  int64_t counter_bytes;
};

inline LoopMemory carve_loop(
    DeviceCarver* carver, const SdmDims& dims, DType bank, const LoopShape& shape
) {
  LoopMemory memory;
  memory.sequences = carver->take<SdmSequence>(dims.N);
  const int64_t rows = round_up(dims.C, 16);
  memory.exchange = shape.group_blocks == 1
                        ? nullptr
                        : carver->take<float>(shape.items * 2 * rows * slice_columns(bank));
  memory.counter_bytes = shape.items * static_cast<int64_t>(sizeof(unsigned));
  memory.counters = carver->take<unsigned>(shape.items);
  return memory;
}

// Whether 16-byte pieces and 32-bit row strides may be used for a bank or its rows.
inline bool aligned_bank(const BankView& bank, DType dtype, int64_t D) {
  const int64_t vec = 16 / element_size(dtype);
  return bank.stride[2] >= 0 && bank.stride[2] * element_size(dtype) <= UINT32_MAX &&
         reinterpret_cast<uintptr_t>(bank.data) % 16 == 0 && bank.stride[0] % vec == 0 &&
         bank.stride[1] % vec == 0 && bank.stride[2] % vec == 0 && D % vec == 0;
}

inline bool aligned_tokens(const FloatView& view, int64_t D) {
  const int64_t vec = 16 / element_size(view.dtype);
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride[0] % vec == 0 &&
         view.stride[1] % vec == 0 && view.stride[2] % vec == 0 && D % 8 == 0;
}

// One block of a kernel for each of `blocks`, cooperative when the blocks wait for each other.
template <typename Params>
cudaError_t launch_loop(
    void (*kernel)(Params),
    Params params,
    int64_t blocks,
    int threads,
    int64_t smem,
    bool cooperative,
    cudaStream_t stream
) {
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)
  );
  if (error != cudaSuccess) {
    return error;
  }
  void* arguments[] = {&params};
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
  error = cooperative
              ? cudaLaunchCooperativeKernel(
                    reinterpret_cast<const void*>(kernel), grid, block, arguments, smem, stream
                )
              : cudaLaunchKernel(
                    reinterpret_cast<const void*>(kernel), grid, block, arguments, smem, stream
                );
  return error != cudaSuccess ? error : cudaGetLastError();
}

// Calls f with a null pointer of the device type of a bank: f(static_cast<T*>(nullptr)).
template <typename F>
cudaError_t dispatch_bank(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(static_cast<float*>(nullptr));
    case DType::kBf16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kF16:
      return f(static_cast<__half*>(nullptr));
    default:
      return cudaErrorNotSupported;
  }
}

#define SDM_RETURN_IF_ERROR(expression)     \
  do {                                      \
    const cudaError_t error = (expression); \
    if (error != cudaSuccess) {             \
      return error;                         \
    }                                       \
  } while (false)

cudaError_t launch_copy_bank(
    DType dtype,
    const SdmDims& dims,
    const BankView& from,
    const BankView& to,
    cudaStream_t stream,
    const SdmSequence* sequences = nullptr,
    const void* checkpoints = nullptr,
    int64_t first_chunk = 0,
    int64_t segment_chunks = 1
);

// sum [elements] = parts [N, elements] added in sequence order.
cudaError_t launch_sum_banks(
    DType dtype, const void* parts, void* sum, int64_t N, int64_t elements, cudaStream_t stream
);

// [N, H, S, D] contiguous.
inline BankView contiguous_bank(void* data, const SdmDims& dims) {
  return {data, {dims.H * dims.S * dims.D, dims.S * dims.D, dims.D}};
}

}  // namespace sdm::cuda
