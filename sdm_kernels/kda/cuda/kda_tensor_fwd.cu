// SPDX-License-Identifier: Apache-2.0
//! @file Forward of Kimi delta attention on tensor cores: records of a window of chunks, then the
//! scan through them, window after window. With few heads the states of segments come in between
//! (kda_tensor_segments.h), and all segments of a window are scanned at once.
#include <algorithm>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/kda/cuda/kda_paths.h"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_scan.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_segments.h"

namespace sdm::kda {
namespace {

// Records of a window: every window costs some 14 us, in which its first and last blocks leave room
// on the card; 106 MB at K = 128.
constexpr int64_t kWindowRecords = 1584;

// The preparation of a window overlaps the scan of the one before, which reads the other buffer.
constexpr int64_t kBuffers = 2;

// Of a window of segments, which has the memory of both: each of its stages fills the card and
// waits for the one before.
constexpr int64_t kSegmentRecords = 4224;

constexpr int64_t kMaxGridY = 65535;

// Blocks of 64 value columns that keep a card of 132 multiprocessors busy.
constexpr int64_t kManyBlocks = 128;

KdaWindowPlan plan_of(const KdaCudaFwdParams& params) {
  const KdaDims& dims = params.base.dims;
  return kda_window_plan(
      dims,
      params.cu_seqlens.data != nullptr,
      kda_segment_chunks(dims) > 0 ? kSegmentRecords : kWindowRecords
  );
}

int64_t record_bytes(int64_t K) {
  return K == 128 ? KdaRecord<128>::kForwardBytes : KdaRecord<64>::kForwardBytes;
}

// Memory of a call: buffers of records, then the states between windows and segments. The backward
// looks for those of a single window in the same places.
struct Workspace {
  char* records[kBuffers];
  KdaSegments segments;
  size_t bytes;
};

Workspace carve(const KdaDims& dims, const KdaWindowPlan& plan, void* memory) {
  DeviceCarver carver(memory);
  Workspace w{};
  const int64_t bytes = plan.max_slots() * dims.HV * record_bytes(dims.K);
  const int64_t buffers = plan.segment > 0 || plan.num_windows() == 1 ? 1 : kBuffers;
  for (int64_t i = 0; i < buffers; ++i) {
    w.records[i] = carver.take<char>(bytes);
  }
  w.segments = KdaSegments::carve(dims, plan, &carver);
  w.bytes = static_cast<size_t>(carver.used());
  return w;
}

template <DType kType, int kK, int kGroups, cuda::ScanKind kKind>
cudaError_t launch_kind(cuda::KdaScanArgs args, int64_t spans, cudaStream_t stream) {
  using Ring = cuda::ScanRing<kK, kGroups>;
  args.buffers = Ring::bytes(3) <= shared_limit() ? 3 : 2;
  const dim3 grid(
      static_cast<unsigned>(args.dims.V / (cuda::kGroupColumns * kGroups)),
      static_cast<unsigned>(args.dims.HV),
      static_cast<unsigned>(spans)
  );
  return launch_kernel(
      cuda::kda_scan_kernel<kType, kK, kGroups, kKind>,
      grid,
      128 * kGroups,
      Ring::bytes(args.buffers),
      stream,
      args.overlap,
      args
  );
}

template <DType kType, int kK, int kGroups>
cudaError_t launch_groups(const cuda::KdaScanArgs& args, int64_t spans, cudaStream_t stream) {
  using Kind = cuda::ScanKind;
  return args.chunk_states.data != nullptr
             ? launch_kind<kType, kK, kGroups, Kind::kStates>(args, spans, stream)
             : launch_kind<kType, kK, kGroups, Kind::kNoStates>(args, spans, stream);
}

template <DType kType, int kK>
cudaError_t launch_scan(const cuda::KdaScanArgs& args, int64_t spans, cudaStream_t stream) {
  const KdaChunkStates& states = args.chunk_states;
  if (!args.whole_v ||
      (states.data != nullptr && (states.v_first || states.dtype == DType::kF32))) {
    return launch_kind<kType, kK, 1, cuda::ScanKind::kAny>(args, spans, stream);
  }
  // Two groups share what they read; one gives more blocks where there are few.
  if constexpr (kK == 128) {
    const KdaWindow& window = args.window;
    const int64_t chains =
        window.segment > 0 ? window.num_sequences * window.segment_slots() : spans;
    if (args.dims.V == 128 && chains * args.dims.HV * 2 > kManyBlocks) {
      return launch_groups<kType, kK, 2>(args, spans, stream);
    }
  }
  return launch_groups<kType, kK, 1>(args, spans, stream);
}

cudaError_t launch_scan(const cuda::KdaScanArgs& args, int64_t spans, cudaStream_t stream) {
  const bool bf16 = args.v.dtype == DType::kBf16;
  if (args.dims.K == 128) {
    return bf16 ? launch_scan<DType::kBf16, 128>(args, spans, stream)
                : launch_scan<DType::kF16, 128>(args, spans, stream);
  }
  return bf16 ? launch_scan<DType::kBf16, 64>(args, spans, stream)
              : launch_scan<DType::kF16, 64>(args, spans, stream);
}

}  // namespace

bool kda_tensor_supports(const KdaDims& dims, DType dtype) {
  if ((dtype != DType::kBf16 && dtype != DType::kF16) || (dims.K != 64 && dims.K != 128) ||
      (dims.V != 64 && dims.V != 128) || dims.HV > kMaxGridY) {
    return false;
  }
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
    return false;
  }
  // Cards with 99 KB (8.6, 8.9, 12.0) have room for the scan's two records at K = 64 only.
  const int scan =
      dims.K == 128 ? cuda::ScanRing<128, 1>::bytes(2) : cuda::ScanRing<64, 1>::bytes(2);
  return major >= 8 && shared_limit() >= std::max(scan, kda_tensor_prep_shared_bytes(dims.K));
}

size_t kda_tensor_fwd_workspace(const KdaCudaFwdParams& params) {
  const KdaDims& dims = params.base.dims;
  return carve(dims, plan_of(params), nullptr).bytes;
}

cudaError_t launch_kda_tensor_fwd(
    const KdaCudaFwdParams& params, void* workspace, cudaStream_t stream
) {
  const KdaFwdParams& base = params.base;
  const KdaDims& dims = base.dims;
  if (dims.N <= 0 || dims.HV <= 0) {
    return cudaSuccess;
  }
  const KdaWindowPlan plan = plan_of(params);
  const Workspace memory = carve(dims, plan, workspace);
  const bool overlap = kernels_overlap();

  KdaPrepParams prep;
  prep.dims = dims;
  prep.options = base.options;
  prep.tokens = base.tokens;
  prep.cu_seqlens = params.cu_seqlens;
  prep.records.stride = record_bytes(dims.K);

  cuda::KdaScanArgs scan;
  scan.dims = dims;
  scan.cu_seqlens = params.cu_seqlens;
  scan.v = base.tokens.v;
  scan.initial = base.initial;
  scan.final_state = base.final_state;
  scan.chunk_states = base.chunk_states;
  scan.segments = memory.segments;
  scan.out = base.out;
  scan.scale = static_cast<float>(base.options.scale);
  scan.whole_v = kda_rows_aligned(base.tokens.v, 8);
  scan.bounded = base.options.l2norm && base.options.gate != KdaGate::kActivated;
  scan.overlap = overlap;

  KdaSegmentParams segments;
  segments.dims = dims;
  segments.options = base.options;
  segments.v = base.tokens.v;
  segments.initial = base.initial;
  segments.cu_seqlens = params.cu_seqlens;
  segments.segments = memory.segments;

  // The preparation of a window starts when the scan of the one before has started, which is after
  // the scan before that has ended, whose buffer it fills.
  for (int64_t i = 0; i < plan.num_windows(); ++i) {
    prep.window = plan.window(i);
    prep.records.data = memory.records[plan.segment > 0 ? 0 : i % kBuffers];
    segments.window = scan.window = prep.window;
    segments.records = scan.records = prep.records;
    // The first kernel may not overlap the one in front of the call.
    cudaError_t error = launch_kda_tensor_prep(prep, stream, overlap && i > 0 && plan.segment == 0);
    if (error == cudaSuccess && plan.segment > 0) {
      error = launch_kda_segment_scan(segments, true, stream);
    }
    if (error == cudaSuccess && plan.segment > 0) {
      error = launch_kda_segment_chain(segments, false, stream);
    }
    if (error == cudaSuccess) {
      error = launch_scan(scan, scan.window.max_pieces(plan.packed, dims.N), stream);
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace sdm::kda
