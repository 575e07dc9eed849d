// SPDX-License-Identifier: Apache-2.0
//! @file Backward of Kimi delta attention on tensor cores: windows of chunks from the last to the
//! first, in each the records, the reverse scan and the gradients of the tokens. While a window is
//! scanned, the gradients of the one behind it and the records of the one before it are made.
//!
//! With few heads all segments of a window are scanned at once, from gradients that are found first
//! (kda_tensor_segments.h); every stage fills the card, and none runs beside another.
//!
//! States that the forward did not keep are recomputed by running it once more, with d_v, which is
//! written later, in the place of its output. Where there is one window of segments, its records
//! and the transitions of its segments are still there afterwards. Cards whose shared memory does
//! not hold the token stage take the plain backward, which reads the same states.

#include <algorithm>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd.h"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.h"

namespace sdm::kda {
namespace {

// Records of a window: four waves of blocks, two on each of 132 multiprocessors, and 0.32 GiB in
// all. Short calls have windows of one wave, so that the scan of one still has others beside it.
constexpr int64_t kWindowRecords = 1056, kShortWindowRecords = 264;

// Of a window of segments, which has one buffer.
constexpr int64_t kSegmentRecords = 2112;

struct BwdMemory {
  char* records[3];
  char* bwd_records[2];
  float* group_grads;
  float* gate_sums;
  KdaSegments segments;
  void* states;
  void* forward;
  int64_t gate_bytes;
  size_t bytes;
};

int64_t record_bytes(const KdaDims& dims) {
  return dims.K == 128 ? KdaRecord<128>::kForwardBytes : KdaRecord<64>::kForwardBytes;
}

int64_t bwd_record_bytes(const KdaDims& dims) {
  if (dims.K == 128) {
    return dims.V == 128 ? KdaBwdRecord<128, 128>::kBytes : KdaBwdRecord<128, 64>::kBytes;
  }
  return dims.V == 128 ? KdaBwdRecord<64, 128>::kBytes : KdaBwdRecord<64, 64>::kBytes;
}

bool is_packed(const KdaCudaBwdParams& params) {
  return params.cu_seqlens.data != nullptr;
}

// Rows of the sums over chunks, and of states that are recomputed.
int64_t chunk_rows(const KdaDims& dims, bool packed) {
  return packed ? dims.T / kTensorChunk + dims.N : dims.N * ceil_div(dims.T, kTensorChunk);
}

int64_t state_rows(const KdaDims& dims) {
  return dims.B * dims.T / kTensorChunk + dims.N;
}

KdaCudaFwdParams forward_params(const KdaCudaBwdParams& params, void* states) {
  const KdaBwdParams& base = params.base;
  KdaCudaFwdParams forward{};
  forward.base.dims = base.dims;
  forward.base.options = base.options;
  forward.base.tokens = base.tokens;
  forward.base.initial = base.initial;
  forward.base.chunk_states = {states, DType::kBf16, false};
  forward.base.out = base.d_v;
  forward.cu_seqlens = params.cu_seqlens;
  return forward;
}

BwdMemory carve(const KdaCudaBwdParams& params, const KdaWindowPlan& plan, void* workspace) {
  const KdaDims& dims = params.base.dims;
  const int64_t state = dims.HV * dims.K * dims.V;
  const int64_t entries = plan.max_slots() * dims.HV;
  DeviceCarver carver(workspace);
  BwdMemory memory{};
  memory.gate_bytes = chunk_rows(dims, plan.packed) * dims.HV * 2 * dims.K * 4;
  memory.gate_sums = static_cast<float*>(carver.take(memory.gate_bytes));
  if (params.base.chunk_states.data == nullptr) {
    memory.states = carver.take(state_rows(dims) * state * 2);
  }
  const DeviceCarver shared = carver;  // the forward is over when the windows begin
  for (int64_t i = 0; i < (plan.segment > 0 ? 1 : 3); ++i) {
    memory.records[i] = carver.take<char>(entries * record_bytes(dims));
  }
  memory.segments = KdaSegments::carve(dims, plan, &carver);
  for (int64_t i = 0; i < (plan.segment > 0 ? 1 : 2); ++i) {
    memory.bwd_records[i] = carver.take<char>(entries * bwd_record_bytes(dims));
  }
  if (dims.HV > dims.H) {
    memory.group_grads = carver.take<float>(entries * 2 * kTensorChunk * dims.K);
  }
  memory.bytes = static_cast<size_t>(carver.used());
  if (params.base.chunk_states.data == nullptr) {
    DeviceCarver again = shared;
    memory.forward = again.take(
        static_cast<int64_t>(kda_tensor_fwd_workspace(forward_params(params, memory.states)))
    );
    memory.bytes = std::max(memory.bytes, static_cast<size_t>(again.used()));
  }
  return memory;
}

KdaWindowPlan window_plan(const KdaCudaBwdParams& params) {
  const KdaDims& dims = params.base.dims;
  const int64_t records = chunk_rows(dims, is_packed(params)) * dims.HV;
  return kda_window_plan(
      dims,
      is_packed(params),
      kda_segment_chunks(dims) > 0 ? kSegmentRecords
                                   : std::clamp(records / 4, kShortWindowRecords, kWindowRecords)
  );
}

KdaBwdWindow window_params(
    const KdaCudaBwdParams& params,
    const BwdMemory& memory,
    const KdaWindowPlan& plan,
    int64_t index
) {
  const KdaBwdParams& base = params.base;
  return {
      base.dims,
      base.options,
      base.tokens,
      params.cu_seqlens,
      plan.window(index),
      {memory.records[plan.segment > 0 ? 0 : index % 3], record_bytes(base.dims)},
      memory.bwd_records[plan.segment > 0 ? 0 : index % 2]
  };
}

KdaBwdTokenParams token_params(
    const KdaCudaBwdParams& params,
    const BwdMemory& memory,
    const KdaChunkStates& states,
    const KdaBwdWindow& common
) {
  const KdaBwdParams& base = params.base;
  KdaBwdTokenParams tokens{};
  tokens.common = common;
  tokens.d_out = base.d_out;
  tokens.chunk_states = states;
  tokens.d_q = base.d_q;
  tokens.d_k = base.d_k;
  tokens.d_v = base.d_v;
  tokens.d_g = base.d_g;
  tokens.d_beta = base.d_beta;
  tokens.group_grads = memory.group_grads;
  tokens.gate_sums = memory.gate_sums;
  tokens.aligned_v = cuda::aligned_rows(base.tokens.v, 1);
  tokens.aligned_out =
      base.d_out.dtype != DType::kF32 && cuda::aligned_rows(base.d_out, base.d_out.stride[3]);
  tokens.aligned_qk = cuda::aligned_rows(base.tokens.q, 1) && cuda::aligned_rows(base.tokens.k, 1);
  tokens.aligned_g = base.tokens.g.dtype != DType::kF32 && cuda::aligned_rows(base.tokens.g, 1);
  return tokens;
}

// The launches of all windows, from the last to the first.
struct BwdLaunches {
  const KdaCudaBwdParams& params;
  const BwdMemory& memory;
  const KdaChunkStates& states;
  const KdaWindowPlan& plan;
  bool prepared;  // the records and transitions of the only window are there
  cudaStream_t stream;

  KdaBwdWindow window(int64_t index) const { return window_params(params, memory, plan, index); }

  cudaError_t make_records(int64_t index, bool overlap) const {
    const KdaBwdWindow w = window(index);
    return launch_kda_tensor_prep(
        {w.dims, w.options, w.tokens, w.cu_seqlens, w.window, w.records}, stream, overlap
    );
  }

  KdaBwdScanParams scan_params(int64_t index) const {
    const KdaBwdParams& base = params.base;
    return {window(index), base.d_out, base.d_final, base.d_initial, memory.segments};
  }

  // Waits for everything in front of it.
  cudaError_t scan(int64_t index) const {
    return launch_kda_tensor_bwd_scan(scan_params(index), stream);
  }

  // The gradients behind all segments of a window.
  cudaError_t find_gradients(int64_t index) const {
    const KdaBwdWindow w = window(index);
    const KdaSegmentParams segments = {
        w.dims, w.options, w.tokens.v, {}, w.cu_seqlens, w.window, w.records, memory.segments
    };
    cudaError_t error = prepared ? cudaSuccess : launch_kda_segment_scan(segments, false, stream);
    if (error == cudaSuccess) {
      error = launch_kda_tensor_bwd_segments(scan_params(index), stream);
    }
    return error == cudaSuccess ? launch_kda_segment_chain(segments, true, stream) : error;
  }

  cudaError_t finish_tokens(int64_t index, bool overlap) const {
    const KdaBwdTokenParams tokens = token_params(params, memory, states, window(index));
    const cudaError_t error = launch_kda_tensor_bwd_tokens(tokens, stream, overlap);
    if (error != cudaSuccess || memory.group_grads == nullptr) {
      return error;
    }
    return launch_kda_tensor_bwd_groups(tokens, stream);
  }

  cudaError_t run_segments() const {
    cudaError_t error = cudaSuccess;
    for (int64_t i = plan.num_windows() - 1; i >= 0 && error == cudaSuccess; --i) {
      error = prepared ? cudaSuccess : make_records(i, false);
      if (error == cudaSuccess) {
        error = find_gradients(i);
      }
      if (error == cudaSuccess) {
        error = scan(i);
      }
      if (error == cudaSuccess) {
        error = finish_tokens(i, false);
      }
    }
    return error;
  }

  cudaError_t run() const {
    if (plan.segment > 0) {
      return run_segments();
    }
    const int64_t last = plan.num_windows() - 1;
    cudaError_t error = make_records(last, false);
    if (error == cudaSuccess) {
      error = scan(last);
    }
    if (error == cudaSuccess && last > 0) {
      error = make_records(last - 1, true);
    }
    for (int64_t i = last; i >= 0 && error == cudaSuccess; --i) {
      if (i > 0) {
        error = scan(i - 1);
      }
      // The next two start while that scan runs, which waited for what they read and for everything
      // that read what they write.
      if (error == cudaSuccess) {
        error = finish_tokens(i, i > 0);
      }
      if (error == cudaSuccess && i > 1) {
        error = make_records(i - 2, true);
      }
    }
    return error;
  }
};

bool fits_card(const KdaDims& dims) {
  int device = 0, shared = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) ==
             cudaSuccess &&
         shared >= kda_tensor_bwd_shared_bytes(dims);
}

}  // namespace

size_t kda_tensor_bwd_workspace(const KdaCudaBwdParams& params) {
  if (!fits_card(params.base.dims)) {
    return kda_plain_bwd_workspace(params);
  }
  return carve(params, window_plan(params), nullptr).bytes;
}

cudaError_t launch_kda_tensor_bwd(
    const KdaCudaBwdParams& params, void* workspace, cudaStream_t stream
) {
  const KdaBwdParams& base = params.base;
  const KdaDims& dims = base.dims;
  if (!fits_card(dims)) {
    return launch_kda_plain_bwd(params, workspace, stream);
  }
  const KdaWindowPlan plan = window_plan(params);
  const BwdMemory memory = carve(params, plan, workspace);
  KdaChunkStates states = base.chunk_states;
  bool prepared = false;
  if (states.data == nullptr && dims.N > 0 && dims.HV > 0) {
    const KdaCudaFwdParams forward = forward_params(params, memory.states);
    const cudaError_t error = launch_kda_tensor_fwd(forward, memory.forward, stream);
    if (error != cudaSuccess) {
      return error;
    }
    states = forward.base.chunk_states;
    prepared = plan.segment > 0 && plan.num_windows() == 1;
  }
  if (plan.packed && memory.gate_bytes > 0) {
    // rows without a chunk
    const cudaError_t error =
        cudaMemsetAsync(memory.gate_sums, 0, static_cast<size_t>(memory.gate_bytes), stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (plan.packed) {
    const cudaError_t error = launch_kda_tensor_bwd_clear(
        token_params(params, memory, states, window_params(params, memory, plan, 0)), stream
    );
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (dims.N > 0 && dims.HV > 0) {
    const cudaError_t error = BwdLaunches{params, memory, states, plan, prepared, stream}.run();
    if (error != cudaSuccess) {
      return error;
    }
  }
  if (base.d_A_log == nullptr && base.d_dt_bias == nullptr) {
    return cudaSuccess;
  }
  return launch_kda_tensor_bwd_sums(
      {memory.gate_sums,
       dims.N > 0 ? chunk_rows(dims, plan.packed) : 0,
       dims.HV,
       dims.K,
       base.tokens.A_log != nullptr,
       static_cast<float*>(base.d_A_log),
       static_cast<float*>(base.d_dt_bias)},
      stream
  );
}

}  // namespace sdm::kda
