// SPDX-License-Identifier: Apache-2.0
//! @file Launchers of the stages that the forward and the backward of the plain path share.

#include "sdm_kernels/kda/cuda/kda_plain_offsets.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_stages.h"

namespace sdm::kda::plain {

cudaError_t launch_plain_offsets(
    const DeviceIntegers& cu_seqlens, const KdaDims& dims, int64_t* offsets, cudaStream_t stream
) {
  const OffsetsParams p{cu_seqlens, dims.N, dims.T, offsets};
  return launch(&kda_plain_offsets_kernel, p, 1, kOffsetThreads, 0, stream);
}

cudaError_t launch_plain_prep(const PlainCall& call, cudaStream_t stream) {
  const int64_t blocks = call.rows() * call.tiles() * call.dims.HV;
  const int64_t bytes = prep_shared_floats(call.dims.K) * static_cast<int64_t>(sizeof(float));
  return launch(&kda_plain_prep_kernel, call, blocks, kThreads, bytes, stream);
}

cudaError_t launch_plain_forward_scan(ForwardScanParams params, cudaStream_t stream) {
  const KdaDims& dims = params.call.dims;
  return with_scan_lanes(dims.K, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    params.slices = ceil_div(dims.V, int64_t{ScanShape<kLanes>::kSlice});
    const int64_t items = params.from_chunk_states ? params.call.rows() : window_items(params.call);
    return launch(
        &kda_plain_forward_scan_kernel<kLanes>,
        params,
        items * dims.HV * params.slices,
        kThreads,
        ForwardScanShared<kLanes>::kFloats * static_cast<int64_t>(sizeof(float)),
        stream
    );
  });
}

}  // namespace sdm::kda::plain
