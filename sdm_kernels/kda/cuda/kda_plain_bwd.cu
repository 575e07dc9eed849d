// SPDX-License-Identifier: Apache-2.0
//! @file Backward of Kimi delta attention in plain float32: windows of chunks from the last to the
//! first, in each the forward recurrence again, that of the gradient, then the gradients of all
//! tiles at once.

#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_plain_finish.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_grads.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_plan.h"
#include "sdm_kernels/kda/cuda/kda_plain_reverse.cuh"
#include "sdm_kernels/kda/cuda/kda_plain_stages.h"

namespace sdm::kda {
namespace plain {
namespace {

struct BwdMemory {
  PlainPlan plan;
  int64_t* offsets;
  PlainRecords records;
  float* states;    // at the start of each window but the first, without chunk states
  float* carry[2];  // gradients of states between windows
  int64_t lanes;    // of the sums for the gate's parameters
  double* bias;
  double* rate;
};

// Floats of the states of all lanes.
int64_t lane_floats(const KdaDims& dims, const PlainPlan& plan) {
  return plan.lanes() * dims.HV * dims.K * dims.V;
}

bool wants_gate_sums(const KdaBwdParams& base) {
  return base.d_A_log != nullptr || base.d_dt_bias != nullptr;
}

BwdMemory carve_bwd(const KdaCudaBwdParams& params, DeviceCarver* carver) {
  const KdaBwdParams& base = params.base;
  const KdaDims& dims = base.dims;
  BwdMemory memory{};
  const bool packed = params.cu_seqlens.data != nullptr;
  memory.plan = make_plan(dims, packed, true);
  memory.offsets = packed ? carver->take<int64_t>(dims.N + 1) : nullptr;
  const PlainPlan& plan = memory.plan;
  memory.records = carve_records(carver, dims, plan.sequences * plan.chunks, true);
  if (plan.windows > 1) {
    if (base.chunk_states.data == nullptr) {
      memory.states = carver->take<float>((plan.windows - 1) * lane_floats(dims, plan));
    }
    for (float*& carry : memory.carry) {
      carry = carver->take<float>(lane_floats(dims, plan));
    }
  }
  if (wants_gate_sums(base)) {
    memory.lanes = packed ? 1 : dims.N;
    memory.bias = carver->take<double>(memory.lanes * dims.HV * dims.K);
    memory.rate = carver->take<double>(memory.lanes * dims.HV);
  }
  return memory;
}

cudaError_t launch_reverse_scan(ReverseScanParams params, cudaStream_t stream) {
  const KdaDims& dims = params.call.dims;
  return with_scan_lanes(dims.K, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    params.slices = ceil_div(dims.V, int64_t{ScanShape<kLanes>::kSlice});
    return launch(
        &kda_plain_reverse_scan_kernel<kLanes>,
        params,
        window_items(params.call) * dims.HV * params.slices,
        kThreads,
        ForwardScanShared<kLanes>::kFloats * static_cast<int64_t>(sizeof(float)),
        stream
    );
  });
}

// What no window writes: tokens that malformed offsets leave out.
cudaError_t clear_gradients(const KdaBwdParams& base, cudaStream_t stream) {
  const KdaDims& dims = base.dims;
  const KdaTokens& in = base.tokens;
  const int64_t tokens = dims.B * dims.T;
  const auto clear = [&](void* data, int64_t count, DType dtype) {
    return cudaMemsetAsync(data, 0, static_cast<size_t>(count * element_size(dtype)), stream);
  };
  KDA_PLAIN_RETURN_IF_ERROR(clear(base.d_q, tokens * dims.H * dims.K, in.q.dtype));
  KDA_PLAIN_RETURN_IF_ERROR(clear(base.d_k, tokens * dims.H * dims.K, in.k.dtype));
  KDA_PLAIN_RETURN_IF_ERROR(clear(base.d_v, tokens * dims.HV * dims.V, in.v.dtype));
  KDA_PLAIN_RETURN_IF_ERROR(clear(base.d_g, tokens * dims.HV * dims.K, in.g.dtype));
  return clear(base.d_beta, tokens * dims.HV, in.beta.dtype);
}

// One window whose forward states can be had from `replay`.
cudaError_t run_window(
    const KdaBwdParams& base,
    const BwdMemory& memory,
    const ForwardScanParams& replay,
    const ReverseScanParams& reverse,
    cudaStream_t stream
) {
  const KdaDims& dims = base.dims;
  const PlainCall& call = replay.call;
  KDA_PLAIN_RETURN_IF_ERROR(launch_plain_prep(call, stream));
  KDA_PLAIN_RETURN_IF_ERROR(launch_plain_forward_scan(replay, stream));
  KDA_PLAIN_RETURN_IF_ERROR(launch_reverse_scan(reverse, stream));
  const TileGradParams grads{call, base.d_out, base.d_v, base.d_g, base.d_beta};
  const int64_t tiles = call.rows() * call.tiles();
  KDA_PLAIN_RETURN_IF_ERROR(launch(
      &kda_plain_tile_grad_kernel,
      grads,
      tiles * dims.HV,
      kThreads,
      tile_grad_shared_floats(dims.K, dims.V) * static_cast<int64_t>(sizeof(float)),
      stream
  ));
  const FinishParams finish{call, base.d_q, base.d_k};
  KDA_PLAIN_RETURN_IF_ERROR(
      launch(&kda_plain_finish_kernel, finish, tiles * dims.H, kThreads, 0, stream)
  );
  if (!wants_gate_sums(base)) {
    return cudaSuccess;
  }
  const GateSumParams sums{call, memory.bias, memory.rate};
  return launch(
      &kda_plain_gate_sum_kernel, sums, call.window.sequences * dims.HV, kThreads, 0, stream
  );
}

}  // namespace
}  // namespace plain

size_t kda_plain_bwd_workspace(const KdaCudaBwdParams& params) {
  DeviceCarver carver(nullptr);
  plain::carve_bwd(params, &carver);
  return static_cast<size_t>(carver.used());
}

cudaError_t launch_kda_plain_bwd(
    const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream
) {
  using namespace plain;
  const KdaBwdParams& base = params.base;
  const KdaDims& dims = base.dims;
  DeviceCarver carver(workspace);
  const BwdMemory memory = carve_bwd(params, &carver);
  const PlainPlan& plan = memory.plan;
  if (plan.packed) {
    KDA_PLAIN_RETURN_IF_ERROR(clear_gradients(base, stream));
  }
  if (dims.HV == 0) {
    return cudaSuccess;
  }
  if (wants_gate_sums(base)) {
    const size_t sums = static_cast<size_t>(memory.lanes * dims.HV) * sizeof(double);
    KDA_PLAIN_RETURN_IF_ERROR(
        cudaMemsetAsync(memory.bias, 0, sums * static_cast<size_t>(dims.K), stream)
    );
    KDA_PLAIN_RETURN_IF_ERROR(cudaMemsetAsync(memory.rate, 0, sums, stream));
  }
  if (plan.packed && dims.N > 0) {
    KDA_PLAIN_RETURN_IF_ERROR(
        launch_plain_offsets(params.cu_seqlens, dims, memory.offsets, stream)
    );
  }
  ForwardScanParams forward{};
  forward.call = {dims, base.options, base.tokens, memory.offsets, {}, memory.records};
  forward.initial = base.initial;
  ReverseScanParams reverse{};
  reverse.d_out = base.d_out;
  reverse.d_final = base.d_final;
  reverse.d_initial = base.d_initial;
  const bool saved = base.chunk_states.data != nullptr;
  const auto start_of = [&](int64_t window) {
    return memory.states + (window - 1) * lane_floats(dims, plan);
  };
  for (int64_t group = 0; dims.N > 0 && group < plan.groups; ++group) {
    for (int64_t window = 0; !saved && window + 1 < plan.windows; ++window) {
      ForwardScanParams advance = forward;
      advance.call.window = plan.window(dims, group, window);
      advance.carry_in = window > 0 ? start_of(window) : nullptr;
      advance.carry_out = start_of(window + 1);
      KDA_PLAIN_RETURN_IF_ERROR(launch_plain_prep(advance.call, stream));
      KDA_PLAIN_RETURN_IF_ERROR(launch_plain_forward_scan(advance, stream));
    }
    for (int64_t window = plan.windows - 1; window >= 0; --window) {
      ForwardScanParams replay = forward;
      replay.call.window = plan.window(dims, group, window);
      replay.keep = true;
      replay.chunk_states = base.chunk_states;
      replay.from_chunk_states = saved;
      replay.carry_in = !saved && window > 0 ? start_of(window) : nullptr;
      reverse.call = replay.call;
      reverse.carry_in = memory.carry[(window + 1) % 2];
      reverse.carry_out = memory.carry[window % 2];
      KDA_PLAIN_RETURN_IF_ERROR(run_window(base, memory, replay, reverse, stream));
    }
  }
  if (!wants_gate_sums(base)) {
    return cudaSuccess;
  }
  const GateStoreParams store{
      memory.bias, memory.rate, memory.lanes, dims.HV, dims.K, base.d_A_log, base.d_dt_bias
  };
  return launch(&kda_plain_gate_store_kernel, store, dims.HV, kThreads, 0, stream);
}

}  // namespace sdm::kda
