// SPDX-License-Identifier: Apache-2.0
//! @file Launches of the stages that find the states of segments.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segment_chain.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segment_scan.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.h"

namespace sdm::kda {
namespace {

template <int kK, int kGroups, bool kAny>
cudaError_t launch_scan(cuda::KdaSegmentScanArgs args, cudaStream_t stream) {
  using Ring = cuda::SegmentRing<kK, kGroups>;
  args.buffers = Ring::bytes(3) <= shared_limit() ? 3 : 2;
  return launch_blocks(
      &cuda::kda_segment_scan_kernel<kK, kGroups, kAny>,
      args,
      (args.dims.V + kK - args.first_columns) / (64 * kGroups),
      args.dims.HV,
      args.window.num_sequences * args.window.segment_slots(),
      128 * kGroups,
      Ring::bytes(args.buffers),
      stream,
      kernels_overlap()
  );
}

template <int kK, int kGroups>
cudaError_t launch_scan(const cuda::KdaSegmentScanArgs& args, cudaStream_t stream) {
  return args.whole_v ? launch_scan<kK, kGroups, false>(args, stream)
                      : launch_scan<kK, kGroups, true>(args, stream);
}

template <int kK, bool kReverse>
cudaError_t launch_chain(cuda::KdaSegmentChainArgs args, bool packed, cudaStream_t stream) {
  using Ring = cuda::TransitionRing<kK>;
  args.buffers = Ring::bytes(3) <= shared_limit() ? 3 : 2;
  return launch_blocks(
      &cuda::kda_segment_chain_kernel<kK, kReverse>,
      args,
      args.dims.V / 64,
      args.dims.HV,
      args.window.max_spans(packed, args.dims.N),
      128,
      Ring::bytes(args.buffers),
      stream,
      kernels_overlap()
  );
}

}  // namespace

cudaError_t launch_kda_segment_scan(const KdaSegmentParams& p, bool offsets, cudaStream_t stream) {
  const cuda::KdaSegmentScanArgs args = {
      p.dims,
      p.window,
      p.cu_seqlens,
      p.v,
      p.initial,
      p.records,
      p.segments,
      offsets ? 0 : p.dims.V,
      2,
      kda_rows_aligned(p.v, 8),
      p.options.l2norm && p.options.gate != KdaGate::kActivated
  };
  if (p.dims.K == 64) {
    return launch_scan<64, 1>(args, stream);
  }
  // Two groups share what they read.
  return p.dims.V == 128 ? launch_scan<128, 2>(args, stream) : launch_scan<128, 1>(args, stream);
}

cudaError_t launch_kda_segment_chain(const KdaSegmentParams& p, bool reverse, cudaStream_t stream) {
  const cuda::KdaSegmentChainArgs args = {p.dims, p.window, p.cu_seqlens, p.segments, 2};
  const bool packed = p.cu_seqlens.data != nullptr;
  if (p.dims.K == 128) {
    return reverse ? launch_chain<128, true>(args, packed, stream)
                   : launch_chain<128, false>(args, packed, stream);
  }
  return reverse ? launch_chain<64, true>(args, packed, stream)
                 : launch_chain<64, false>(args, packed, stream);
}

}  // namespace sdm::kda
