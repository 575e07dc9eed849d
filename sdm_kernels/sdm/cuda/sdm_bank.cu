// SPDX-License-Identifier: Apache-2.0
//! @file Launchers of whole-bank work, and the check of indices.

#include "sdm_kernels/sdm/cuda/sdm_bank.cuh"
#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"

namespace sdm {
namespace cuda {

namespace {

// About 64 thousand blocks where there is work for so many.
dim3 bank_grid(int64_t pieces, int64_t streams) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t y = std::min<int64_t>(streams, 65535);
  const int64_t x =
      std::min(ceil_div(pieces, kBankThreads * kBankBatch), std::max<int64_t>(1, kMostBlocks / y));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

cudaError_t launch_bank_copy(const BankCopy& p, DType dtype, bool aligned, cudaStream_t stream) {
  const int64_t vec = aligned ? 16 / element_size(dtype) : 1;
  const int64_t pieces = p.S * (p.D / vec);
  const int64_t streams = shared_source(p) ? p.H : p.N * p.H;
  if (p.N * streams * pieces == 0) {
    return cudaSuccess;
  }
  const dim3 blocks = bank_grid(pieces, streams);
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
    DType dtype, const SdmDims& dims, const BankView& from, const BankView& to, cudaStream_t stream
) {
  const BankCopy p{from, to, dims.N, dims.H, dims.S, dims.D, nullptr, nullptr, 0, 1};
  const bool aligned = aligned_bank(from, dtype, dims.D) && aligned_bank(to, dtype, dims.D);
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
      bank, bank, dims.N, dims.H, dims.S, dims.D, sequences, checkpoints, chunk, segment_chunks
  };
  const bool aligned =
      aligned_bank(bank, dtype, dims.D) && reinterpret_cast<uintptr_t>(checkpoints) % 16 == 0;
  return launch_bank_copy(p, dtype, aligned, stream);
}

cudaError_t launch_sum_banks(
    DType dtype, const void* parts, void* sum, int64_t N, int64_t elements, cudaStream_t stream
) {
  const auto launch = [&](auto* type, auto aligned) {
    using S = std::remove_pointer_t<decltype(type)>;
    constexpr bool kAligned = decltype(aligned)::value;
    constexpr int64_t kMostBlocks = 1 << 16;
    const int64_t wanted = ceil_div(elements, kBankThreads * (kAligned ? kVec<S> : 1));
    const unsigned blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMostBlocks));
    const auto kernel = &sdm_sum_banks_kernel<S, kAligned>;
    kernel<<<blocks, kBankThreads, 0, stream>>>(
        static_cast<const S*>(parts), static_cast<S*>(sum), N, elements
    );
    return cudaGetLastError();
  };
  const bool aligned = elements * element_size(dtype) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(parts) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(sum) % 16 == 0;
  return dispatch_bank(dtype, [&](auto* type) {
    return aligned ? launch(type, std::true_type{}) : launch(type, std::false_type{});
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
