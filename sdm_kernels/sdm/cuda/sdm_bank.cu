// SPDX-License-Identifier: Apache-2.0
//! @file Launchers of whole-bank work, and the check of indices.

#include "sdm_kernels/sdm/cuda/sdm_bank.cuh"
#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"

namespace sdm {
namespace cuda {

namespace {

cudaError_t launch_bank_copy(const BankCopy& p, DType dtype, bool aligned, cudaStream_t stream) {
  const int64_t vec = aligned ? 16 / element_size(dtype) : 1;
  const int64_t total = p.N * p.H * p.S * (p.D / vec);
  if (total == 0) {
    return cudaSuccess;
  }
  constexpr int64_t kMostBlocks = 1 << 16;
  const unsigned blocks =
      static_cast<unsigned>(std::min(ceil_div(total, kBankThreads), kMostBlocks));
  if (element_size(dtype) == 4) {
    if (aligned) {
      sdm_copy_bank_kernel<uint32_t, 4><<<blocks, kBankThreads, 0, stream>>>(p);
    } else {
      sdm_copy_bank_kernel<uint32_t, 1><<<blocks, kBankThreads, 0, stream>>>(p);
    }
  } else if (aligned) {
    sdm_copy_bank_kernel<uint16_t, 8><<<blocks, kBankThreads, 0, stream>>>(p);
  } else {
    sdm_copy_bank_kernel<uint16_t, 1><<<blocks, kBankThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_copy_bank(
    DType dtype,
    const SdmDims& dims,
    const BankView& from,
    const BankView& to,
    cudaStream_t stream,
    const SdmSequence* sequences,
    const void* checkpoints,
    int64_t first_chunk,
    int64_t segment_chunks
) {
  const BankCopy p{
      from,
      to,
      dims.N,
      dims.H,
      dims.S,
      dims.D,
      sequences,
      const_cast<void*>(checkpoints),
      false,
      first_chunk,
      segment_chunks
  };
  const bool aligned = aligned_bank(from, dtype, dims.D) && aligned_bank(to, dtype, dims.D) &&
                       reinterpret_cast<uintptr_t>(checkpoints) % 16 == 0;
  return launch_bank_copy(p, dtype, aligned, stream);
}

cudaError_t launch_keep_bank(
    DType dtype,
    const SdmDims& dims,
    const BankView& bank,
    cudaStream_t stream,
    const SdmSequence* sequences,
    void* checkpoints,
    int64_t chunk,
    int64_t segment_chunks
) {
  const BankCopy p{
      bank,
      bank,
      dims.N,
      dims.H,
      dims.S,
      dims.D,
      sequences,
      checkpoints,
      true,
      chunk,
      segment_chunks
  };
  const bool aligned =
      aligned_bank(bank, dtype, dims.D) && reinterpret_cast<uintptr_t>(checkpoints) % 16 == 0;
  return launch_bank_copy(p, dtype, aligned, stream);
}

cudaError_t launch_sum_banks(
    DType dtype, const void* parts, void* sum, int64_t N, int64_t elements, cudaStream_t stream
) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const unsigned blocks =
      static_cast<unsigned>(std::clamp<int64_t>(ceil_div(elements, kBankThreads), 1, kMostBlocks));
  return dispatch_bank(dtype, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    sdm_sum_banks_kernel<S><<<blocks, kBankThreads, 0, stream>>>(
        static_cast<const S*>(parts), static_cast<S*>(sum), N, elements
    );
    return cudaGetLastError();
  });
}

// The first bad position of a block's stride, then the smallest of all: an integer minimum.
__global__ void sdm_check_indices_kernel(
    DeviceIntegers ids, int64_t count, int64_t num_slots, unsigned long long* result
) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count;
       at += step) {
    const int64_t slot = ids.is_int64 ? static_cast<const int64_t*>(ids.data)[at]
                                      : static_cast<const int32_t*>(ids.data)[at];
    if (slot < 0 || slot >= num_slots) {
      atomicMin(result, static_cast<unsigned long long>(at));
      return;
    }
  }
}

}  // namespace cuda

cudaError_t launch_sdm_check_indices(
    DeviceIntegers ids, int64_t count, int64_t num_slots, int64_t* result, cudaStream_t stream
) {
  // all ones: -1 as a signed number, the largest as an unsigned one
  SDM_RETURN_IF_ERROR(cudaMemsetAsync(result, 0xff, sizeof(int64_t), stream));
  if (count == 0) {
    return cudaSuccess;
  }
  constexpr int64_t kMostBlocks = 1 << 12;
  const unsigned blocks =
      static_cast<unsigned>(std::min(ceil_div(count, cuda::kBankThreads), kMostBlocks));
  cuda::sdm_check_indices_kernel<<<blocks, cuda::kBankThreads, 0, stream>>>(
      ids, count, num_slots, reinterpret_cast<unsigned long long*>(result)
  );
  return cudaGetLastError();
}

}  // namespace sdm
