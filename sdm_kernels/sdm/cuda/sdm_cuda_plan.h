// SPDX-License-Identifier: Apache-2.0
//! @file Work split and workspace of a CUDA call. Depends on the device only in how work is
//! divided, never in what is summed with what.
#pragma once

#include <algorithm>

#include <cuda_runtime.h>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "sdm_kernels/sdm/cuda/sdm_phase1.h"

namespace sdm::cuda {

// Entries whose records are held at a time: about 100 bytes each, however long the sequences are.
constexpr int64_t kWindowLanes = int64_t{4} << 20;

inline int64_t lanes_of_chunk(const SdmDims& dims) {
  return dims.C * (dims.W + dims.R);
}

// Chunks of the longest possible sequence.
inline int64_t most_chunks(const SdmDims& dims) {
  return std::max<int64_t>(1, ceil_div(dims.T, dims.C));
}

// A call with very many sequences works on some of them at a time: one chunk of all may be more
// than a card holds, as a sequence of few tokens has its matrices for a whole chunk too.
constexpr int64_t kGroupBytes = int64_t{4} << 30;

// `chunks` of each sequence are worked on at a time.
inline SdmDims group_dims(const SdmDims& dims, int64_t chunks = 1) {
  const int64_t rows = round_up(dims.C, 16);
  const int64_t bytes =
      chunks * dims.H * (lanes_of_chunk(dims) * 128 + rows * rows * 8 + rows * dims.D * 12);
  SdmDims group = dims;
  group.N = std::min(dims.N, std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, bytes)));
  return group;
}

inline int64_t window_chunks(const SdmDims& dims) {
  const int64_t lanes = std::max<int64_t>(1, dims.N * dims.H) * lanes_of_chunk(dims);
  return std::clamp<int64_t>(kWindowLanes / lanes, 1, most_chunks(dims));
}

// Slices of 128 bytes of columns.
inline int64_t num_slices(const SdmDims& dims, DType bank) {
  return ceil_div(dims.D, bank == DType::kF32 ? kSliceColumns<float> : kSliceColumns<__half>);
}

// What a call's launches need to know of the device.
struct CardLimits {
  int processors;
  int shared_memory;            // most a block may have
  int shared_memory_processor;  // of a multiprocessor
  bool overlap;                 // launches may overlap the one before them
};

inline cudaError_t card_limits(CardLimits* limits) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&limits->processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(
        &limits->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device
    );
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(
        &limits->shared_memory_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device
    );
  }
  limits->overlap = false;
  return error;
}

// Blocks that share the work of `blocks` others, so that each multiprocessor has one.
inline int parts_of(int64_t blocks, const CardLimits& card) {
  return static_cast<int>(std::max<int64_t>(1, card.processors / std::max<int64_t>(1, blocks)));
}

struct ChunkMemory {
  SdmSequence* sequences;  // all
  float* x;                // of a group: token rows between the stages of a chunk
  float* y;
};

inline ChunkMemory carve_chunk(
    DeviceCarver* carver, const SdmDims& dims, const SdmDims& group, bool readings
) {
  const int64_t rows = group.N * dims.H * round_up(dims.C, 16) * dims.D;
  ChunkMemory memory;
  memory.sequences = carver->take<SdmSequence>(dims.N);
  memory.x = carver->take<float>(rows);
  memory.y = readings ? carver->take<float>(rows) : nullptr;
  return memory;
}

// The last group of sequences, when it has fewer than the others.
inline SdmDims last_group(const SdmDims& dims, const SdmDims& group) {
  SdmDims last = group;
  last.N = group.N == 0 || dims.N % group.N == 0 ? group.N : dims.N % group.N;
  return last;
}

inline cudaError_t carve_phase1(
    DeviceCarver* carver,
    const SdmDims& dims,
    const SdmDims& group,
    const SdmWindow& window,
    void** memory
) {
  size_t bytes = 0, last = 0;
  cudaError_t error = sdm_phase1_workspace(group, window, true, &bytes);
  if (error == cudaSuccess) {
    error = sdm_phase1_workspace(last_group(dims, group), window, true, &last);
  }
  *memory = carver->take(static_cast<int64_t>(std::max(bytes, last)));
  return error;
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

// Shared memory that a block asks for beside what it has so that no multiprocessor takes more than
// its share of them: a launch that overlaps another comes in as multiprocessors get free, and a few
// early ones would take all.
inline int64_t spreading_memory(int64_t blocks, int64_t has, const CardLimits& card) {
  constexpr int64_t kOfSystem = 1024, kGrain = 512;
  const int64_t one_more = ceil_div(blocks, card.processors) + 1;
  const int64_t needed = card.shared_memory_processor / one_more - kOfSystem + kGrain;
  return std::clamp<int64_t>(needed - has, 0, card.shared_memory - has);
}

// Whether a kernel was compiled with the instruction that makes it wait (wait_for_previous()).
inline cudaError_t may_overlap(const void* kernel, bool* overlap) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  *overlap = error == cudaSuccess && attributes.ptxVersion >= 90;
  return error;
}

// One block of a kernel for each of `blocks`. `overlap`: blocks may come in before the launch
// before it in the stream has ended.
template <typename Params>
cudaError_t launch_blocks(
    void (*kernel)(Params),
    const Params& params,
    int64_t blocks,
    int threads,
    int64_t smem,
    cudaStream_t stream,
    bool overlap = false
) {
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (smem > 0) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem)
    );
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (overlap) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(smem);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, params);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, static_cast<size_t>(smem), stream>>>(params);
  return cudaGetLastError();
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
    DType dtype, const SdmDims& dims, const BankView& from, const BankView& to, cudaStream_t stream
);

// The bank at the start of `chunk`, a multiple of segment_chunks above 0, into the checkpoints of
// the sequences that have that chunk.
cudaError_t launch_keep_bank(
    DType dtype,
    const SdmDims& dims,
    const BankView& bank,
    cudaStream_t stream,
    const SdmSequence* sequences,
    void* checkpoints,
    int64_t chunk,
    int64_t segment_chunks
);

// sum [elements] = parts [N, elements] added in sequence order.
cudaError_t launch_sum_banks(
    DType dtype, const void* parts, void* sum, int64_t N, int64_t elements, cudaStream_t stream
);

// The part of a bank from sequence n on.
inline BankView bank_from(const BankView& bank, int64_t n, DType dtype) {
  BankView part = bank;
  if (part.data != nullptr) {
    part.data = static_cast<char*>(bank.data) + n * bank.stride[0] * element_size(dtype);
  }
  return part;
}

// [N, H, S, D] contiguous.
inline BankView contiguous_bank(void* data, const SdmDims& dims) {
  return {data, {dims.H * dims.S * dims.D, dims.S * dims.D, dims.D}};
}

}  // namespace sdm::cuda
