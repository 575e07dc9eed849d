// SPDX-License-Identifier: Apache-2.0
//! @file Launch of the reverse scan of Kimi delta attention on tensor cores.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_scan.cuh"

namespace sdm::kda {
namespace {

// Blocks of 64 value columns that keep a card of 132 multiprocessors busy.
constexpr int64_t kManyBlocks = 128;

bool loads_four(const KdaView& view) {
  return view.dtype != DType::kF32 && view.stride[3] == 1 &&
         reinterpret_cast<uintptr_t>(view.data) % 8 == 0 && view.stride[0] % 4 == 0 &&
         view.stride[1] % 4 == 0 && view.stride[2] % 4 == 0;
}

template <int kK, int kV, int kGroups, bool kAny, cuda::BwdScanKind kKind>
cudaError_t launch_kind(cuda::KdaBwdScanArgs args, cudaStream_t stream) {
  const KdaBwdWindow& common = args.params.common;
  args.buffers = cuda::bwd_scan_shared_bytes<kK, kGroups>(3) <= shared_limit() ? 3 : 2;
  return launch_blocks(
      &cuda::kda_bwd_scan_kernel<kK, kV, kGroups, kAny, kKind>,
      args,
      kV / 64 / kGroups,
      common.dims.HV,
      common.window.max_pieces(common.cu_seqlens.data != nullptr, common.dims.N),
      128 * kGroups,
      cuda::bwd_scan_shared_bytes<kK, kGroups>(args.buffers),
      stream,
      true
  );
}

template <int kK, int kV, cuda::BwdScanKind kKind>
cudaError_t launch_sizes(const KdaBwdScanParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  const KdaWindow& window = p.common.window;
  const KdaOptions& options = p.common.options;
  const cuda::KdaBwdScanArgs args = {p, 2, options.l2norm && options.gate != KdaGate::kActivated};
  if (!loads_four(p.d_out)) {
    return launch_kind<kK, kV, 1, true, kKind>(args, stream);
  }
  // Two groups share what they read; one gives more blocks where there are few.
  if constexpr (kK == 128 && kV == 128) {
    const int64_t chains = window.segment > 0
                               ? window.num_sequences * window.segment_slots()
                               : window.max_spans(p.common.cu_seqlens.data != nullptr, dims.N);
    if (kKind == cuda::BwdScanKind::kSegment || chains * dims.HV * 2 > kManyBlocks) {
      return launch_kind<kK, kV, 2, false, kKind>(args, stream);
    }
  }
  if constexpr (kKind == cuda::BwdScanKind::kWhole || kV == 64 || kK == 64) {
    return launch_kind<kK, kV, 1, false, kKind>(args, stream);
  }
  return cudaErrorInvalidValue;
}

template <cuda::BwdScanKind kKind>
cudaError_t launch_sizes(const KdaBwdScanParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  if (dims.K == 128) {
    return dims.V == 128 ? launch_sizes<128, 128, kKind>(p, stream)
                         : launch_sizes<128, 64, kKind>(p, stream);
  }
  return dims.V == 128 ? launch_sizes<64, 128, kKind>(p, stream)
                       : launch_sizes<64, 64, kKind>(p, stream);
}

}  // namespace

cudaError_t launch_kda_tensor_bwd_scan(const KdaBwdScanParams& p, cudaStream_t stream) {
  return launch_sizes<cuda::BwdScanKind::kWhole>(p, stream);
}

cudaError_t launch_kda_tensor_bwd_segments(const KdaBwdScanParams& p, cudaStream_t stream) {
  return launch_sizes<cuda::BwdScanKind::kSegment>(p, stream);
}

}  // namespace sdm::kda
