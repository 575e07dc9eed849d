// SPDX-License-Identifier: Apache-2.0
//! @file Forward of Kimi delta attention in plain float32: for each window of chunks all that does
//! not depend on the state, then the recurrence.

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_plain_plan.h"
#include "sdm_kernels/kda/cuda/kda_plain_stages.h"

namespace sdm::kda {
namespace plain {
namespace {

struct FwdMemory {
  PlainPlan plan;
  int64_t* offsets;
  PlainRecords records;
  float* carry[2];  // states between windows, from an even and from an odd one
};

FwdMemory carve_fwd(const KdaCudaFwdParams& params, DeviceCarver* carver) {
  const KdaDims& dims = params.base.dims;
  FwdMemory memory{};
  const bool packed = params.cu_seqlens.data != nullptr;
  memory.plan = make_plan(dims, packed, false);
  memory.offsets = packed ? carver->take<int64_t>(dims.N + 1) : nullptr;
  const PlainPlan& plan = memory.plan;
  memory.records = carve_records(carver, dims, plan.sequences * plan.chunks, false);
  if (plan.windows > 1) {
    for (float*& carry : memory.carry) {
      carry = carver->take<float>(plan.lanes() * dims.HV * dims.K * dims.V);
    }
  }
  return memory;
}

}  // namespace
}  // namespace plain

size_t kda_plain_fwd_workspace(const KdaCudaFwdParams& params) {
  DeviceCarver carver(nullptr);
  plain::carve_fwd(params, &carver);
  return static_cast<size_t>(carver.used());
}

cudaError_t launch_kda_plain_fwd(
    const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream
) {
  using namespace plain;
  const KdaFwdParams& base = params.base;
  const KdaDims& dims = base.dims;
  DeviceCarver carver(workspace);
  const FwdMemory memory = carve_fwd(params, &carver);
  const PlainPlan& plan = memory.plan;
  if (plan.packed) {
    // tokens that malformed offsets leave out
    const int64_t bytes = dims.B * dims.T * dims.HV * dims.V * element_size(base.tokens.q.dtype);
    KDA_PLAIN_RETURN_IF_ERROR(cudaMemsetAsync(base.out, 0, static_cast<size_t>(bytes), stream));
  }
  if (dims.N == 0 || dims.HV == 0) {
    return cudaSuccess;
  }
  if (plan.packed) {
    KDA_PLAIN_RETURN_IF_ERROR(
        launch_plain_offsets(params.cu_seqlens, dims, memory.offsets, stream)
    );
  }
  ForwardScanParams scan{};
  scan.call = {dims, base.options, base.tokens, memory.offsets, {}, memory.records};
  scan.initial = base.initial;
  scan.final_state = base.final_state;
  scan.chunk_states = base.chunk_states;
  scan.out = base.out;
  scan.out_dtype = base.tokens.q.dtype;
  for (int64_t group = 0; group < plan.groups; ++group) {
    for (int64_t window = 0; window < plan.windows; ++window) {
      scan.call.window = plan.window(dims, group, window);
      scan.carry_in = memory.carry[(window + 1) % 2];
      scan.carry_out = memory.carry[window % 2];
      KDA_PLAIN_RETURN_IF_ERROR(launch_plain_prep(scan.call, stream));
      KDA_PLAIN_RETURN_IF_ERROR(launch_plain_forward_scan(scan, stream));
    }
  }
  return cudaSuccess;
}

}  // namespace sdm::kda
