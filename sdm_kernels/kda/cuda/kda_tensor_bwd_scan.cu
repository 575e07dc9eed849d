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

template <int kK, int kV, int kGroups, bool kAny>
cudaError_t launch_kind(cuda::KdaBwdScanArgs args, int64_t spans, cudaStream_t stream) {
  args.buffers = cuda::bwd_scan_shared_bytes<kK, kGroups>(3) <= shared_limit() ? 3 : 2;
  return launch_blocks(
      &cuda::kda_bwd_scan_kernel<kK, kV, kGroups, kAny>,
      args,
      kV / 64 / kGroups,
      args.params.common.dims.HV,
      spans,
      128 * kGroups,
      cuda::bwd_scan_shared_bytes<kK, kGroups>(args.buffers),
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
  const KdaOptions& options = p.common.options;
  const cuda::KdaBwdScanArgs args = {p, 2, options.l2norm && options.gate != KdaGate::kActivated};
  if (!loads_four(p.d_out)) {
    return launch_kind<kK, kV, 1, true>(args, spans, stream);
  }
  // Two groups share what they read; one gives more blocks where there are few.
  if constexpr (kK == 128 && kV == 128) {
    if (spans * dims.HV * 2 > kManyBlocks) {
      return launch_kind<kK, kV, 2, false>(args, spans, stream);
    }
  }
  return launch_kind<kK, kV, 1, false>(args, spans, stream);
}

}  // namespace

cudaError_t launch_kda_tensor_bwd_scan(const KdaBwdScanParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  if (dims.K == 128) {
    return dims.V == 128 ? launch_sizes<128, 128>(p, stream) : launch_sizes<128, 64>(p, stream);
  }
  return dims.V == 128 ? launch_sizes<64, 128>(p, stream) : launch_sizes<64, 64>(p, stream);
}

}  // namespace sdm::kda
