// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the reverse scan of Kimi delta attention on tensor cores.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_scan.cuh"

namespace sdm::kda {
namespace cuda {
namespace {

// Grid: slices of the value columns, HV, spans of the window.
template <int kK, int kV, int kGroups>
__global__ void __launch_bounds__(128 * kGroups, 2) kda_bwd_scan_kernel(
    const __grid_constant__ KdaBwdScanParams p
) {
  extern __shared__ __align__(128) char kda_shared[];
  using S = Scan<kK, kV, kGroups>;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int64_t index = blockIdx.z;
  const KdaSpan span = kda_span(p.common.cu_seqlens, p.common.window, index, p.common.dims);
  if (!span.valid) {
    return;
  }
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  S scan{
      p,
      kda_shared,
      shared_address(kda_shared),
      warp / 4,
      warp % 4,
      lane / 4,
      lane % 4,
      static_cast<int>(blockIdx.x),
      blockIdx.y,
      span,
      static_cast<float>(p.common.options.scale),
      {},
      false
  };
  scan.fast_out = p.d_out.dtype != DType::kF32 && p.d_out.stride[3] == 1 &&
                  reinterpret_cast<uintptr_t>(p.d_out.data) % 16 == 0 &&
                  p.d_out.stride[0] % 8 == 0 && p.d_out.stride[1] % 8 == 0 &&
                  p.d_out.stride[2] % 8 == 0;
  // Of packed sequences only one lasts from one window to the next.
  scan.run(p.common.cu_seqlens.data == nullptr ? index : 0);
}

template <int kK, int kV, int kGroups>
cudaError_t launch_groups(const KdaBwdScanParams& p, int64_t spans, cudaStream_t stream) {
  using S = Scan<kK, kV, kGroups>;
  return launch_blocks(
      &kda_bwd_scan_kernel<kK, kV, kGroups>,
      p,
      S::kSlices,
      p.common.dims.HV,
      spans,
      S::kThreads,
      ScanMemory<kK, kGroups>::kBytes,
      stream,
      true
  );
}

template <int kK, int kV>
cudaError_t launch_sizes(const KdaBwdScanParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  const KdaWindow& window = p.common.window;
  const bool packed = p.common.cu_seqlens.data != nullptr;
  const int64_t spans =
      packed ? (dims.N < window.num_chunks ? dims.N : window.num_chunks) : window.num_sequences;
  // Two groups share what they read; one gives more blocks where there are few.
  return spans * dims.HV * (kV / 64) > 128 ? launch_groups<kK, kV, 2>(p, spans, stream)
                                           : launch_groups<kK, kV, 1>(p, spans, stream);
}

}  // namespace
}  // namespace cuda

cudaError_t launch_kda_tensor_bwd_scan(const KdaBwdScanParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  if (dims.K == 128) {
    return dims.V == 128 ? cuda::launch_sizes<128, 128>(p, stream)
                         : cuda::launch_sizes<128, 64>(p, stream);
  }
  return dims.V == 128 ? cuda::launch_sizes<64, 128>(p, stream)
                       : cuda::launch_sizes<64, 64>(p, stream);
}

}  // namespace sdm::kda
