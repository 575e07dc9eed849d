// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1 of the CUDA kernels: workspace and launches.
//!
//! keys -> radix sort -> tiles -> scan -> finish [-> gram -> solve], see the .cuh files. Sort keys
//! are 32 bits wide when the slot and the chunk number fit, as they do for usual windows.
#include <cub/device/device_radix_sort.cuh>
#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_gram.cuh"
#include "sdm_kernels/sdm/cuda/sdm_phase1.h"
#include "sdm_kernels/sdm/cuda/sdm_scan.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sequences.cuh"
#include "sdm_kernels/sdm/cuda/sdm_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm {
namespace {

using cuda::SdmPhase1Params;

int bits_of(int64_t largest) {
  int bits = 0;
  while (bits < 63 && (largest >> bits) != 0) {
    ++bits;
  }
  return bits;
}

// Cuts arrays off one block; with a null base only sizes count.
struct Carver {
  char* base;
  size_t used;

  template <typename T>
  void take(int64_t count, T** out) {
    *out = base != nullptr ? reinterpret_cast<T*>(base + used) : nullptr;
    used += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 256));
  }
};

struct Plan {
  SdmPhase1Params params;
  int key_bits;
  void* keys[2];  // radix sort flips between the two
  int32_t* lanes[2];
  void* sort_temp;
  size_t sort_temp_bytes;
  size_t records_bytes;
  size_t bytes;
};

template <typename Key>
cudaError_t sort_lanes(Plan* plan, int64_t count, void* temp, size_t* bytes, cudaStream_t stream) {
  cub::DoubleBuffer<Key> keys(static_cast<Key*>(plan->keys[0]), static_cast<Key*>(plan->keys[1]));
  cub::DoubleBuffer<int32_t> lanes(plan->lanes[0], plan->lanes[1]);
  const cudaError_t error =
      cub::DeviceRadixSort::SortPairs(temp, *bytes, keys, lanes, count, 0, plan->key_bits, stream);
  plan->params.sorted_keys = keys.Current();
  plan->params.sorted_lanes = lanes.Current();
  return error;
}

cudaError_t make_plan(
    const SdmDims& dims, const SdmWindow& window, bool gram, void* workspace, Plan* plan
) {
  *plan = Plan{};
  SdmPhase1Params& p = plan->params;
  SdmRecords& r = p.records;
  p.window = window;
  p.gram = gram;
  const int64_t n = checked_mul(dims.C, dims.W + dims.R);
  const int64_t num_q = checked_mul(checked_mul(dims.N, window.chunks), dims.H);
  const int64_t tiles = ceil_div(n, cuda::kTile);
  const int64_t Cp = round_up(dims.C, 16);
  if (dims.C < 1 || dims.C > cuda::kMaxChunk || dims.S < 1 || dims.S > INT32_MAX || n < 0 ||
      n > INT32_MAX / 2 || num_q < 0 || num_q > INT32_MAX || num_q * tiles > INT32_MAX ||
      num_q * (Cp / cuda::kGramWarps) > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int64_t count = num_q * n;
  const int64_t cells = gram ? num_q * Cp * Cp : 0;
  r.num_q = num_q;
  r.n = static_cast<int32_t>(n);
  r.Cp = static_cast<int32_t>(Cp);
  p.tiles = static_cast<int32_t>(tiles);
  p.slot_bits = bits_of(dims.S);
  plan->key_bits = p.slot_bits + bits_of(num_q - 1);
  const bool wide = plan->key_bits > 32;

  Carver carver{static_cast<char*>(workspace), 0};
  carver.take(count, &r.lane);
  carver.take(num_q * dims.C * dims.W, &r.write_post);
  carver.take(count, &r.position);
  carver.take(count, &r.entry);
  carver.take(count, &r.log_decay);
  carver.take(count, &r.group);
  carver.take(count, &r.group_decay);
  carver.take(count, &r.head_post);
  carver.take(count, &r.head_weight);
  carver.take(num_q, &r.group_count);
  carver.take(num_q * dims.C, &r.beta);
  carver.take(cells, &r.inverse);
  carver.take(cells, &r.qk);
  plan->records_bytes = carver.used;

  carver.take(num_q * tiles, &p.tile_state);
  carver.take(count, &p.group_of);
  carver.take(gram ? count : 0, &p.pair);
  carver.take(gram ? count : 0, &p.span);
  carver.take(cells, &p.scaled_a);
  for (int i = 0; i < 2; ++i) {
    uint64_t* wide_keys = nullptr;
    uint32_t* narrow_keys = nullptr;
    if (wide) {
      carver.take(count, &wide_keys);
    } else {
      carver.take(count, &narrow_keys);
    }
    plan->keys[i] = wide ? static_cast<void*>(wide_keys) : static_cast<void*>(narrow_keys);
    carver.take(count, &plan->lanes[i]);
  }
  p.keys = plan->keys[0];
  p.lanes = plan->lanes[0];
  if (count > 0) {
    const cudaError_t error =
        wide ? sort_lanes<uint64_t>(plan, count, nullptr, &plan->sort_temp_bytes, nullptr)
             : sort_lanes<uint32_t>(plan, count, nullptr, &plan->sort_temp_bytes, nullptr);
    if (error != cudaSuccess) {
      return error;
    }
  }
  char* temp = nullptr;
  carver.take(static_cast<int64_t>(plan->sort_temp_bytes), &temp);
  plan->sort_temp = temp;
  plan->bytes = carver.used;
  return cudaSuccess;
}

template <typename Key>
cudaError_t launch_sdm_sort_scan(Plan* plan, cudaStream_t stream) {
  SdmPhase1Params& p = plan->params;
  const unsigned blocks = static_cast<unsigned>(p.records.num_q * p.tiles);
  cuda::sdm_keys_kernel<Key><<<blocks, cuda::kThreads, 0, stream>>>(p);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    return error;
  }
  const int64_t count = p.records.num_q * p.records.n;
  error = sort_lanes<Key>(plan, count, plan->sort_temp, &plan->sort_temp_bytes, stream);
  if (error != cudaSuccess) {
    return error;
  }
  if (p.tiles > 1) {
    cuda::sdm_scan_tiles_kernel<Key><<<blocks, cuda::kThreads, 0, stream>>>(p);
    error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  cuda::sdm_scan_kernel<Key><<<blocks, cuda::kThreads, 0, stream>>>(p);
  error = cudaGetLastError();
  if (error != cudaSuccess) {
    return error;
  }
  cuda::sdm_finish_kernel<Key><<<blocks, cuda::kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sdm_gram(const SdmPhase1Params& p, cudaStream_t stream) {
  const int64_t blocks = p.records.num_q * (p.records.Cp / cuda::kGramWarps);
  cuda::sdm_gram_kernel<<<static_cast<unsigned>(blocks), cuda::kGramWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_sdm_solve(const SdmPhase1Params& p, cudaStream_t stream) {
  const int64_t blocks = p.records.num_q * ceil_div(p.records.Cp, cuda::kPanel);
  cuda::sdm_solve_kernel<<<static_cast<unsigned>(blocks), cuda::kSolveWarps * 32, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sdm_sequences(
    const SdmDims& dims,
    const void* cu_seqlens,
    bool cu_seqlens_is_int64,
    const void* state_indices,
    bool state_indices_is_int64,
    int64_t pool,
    int64_t segment_chunks,
    SdmSequence* sequences,
    cudaStream_t stream
) {
  const cuda::SdmSequencesParams params{
      dims,
      cu_seqlens,
      cu_seqlens_is_int64,
      state_indices,
      state_indices_is_int64,
      pool,
      segment_chunks,
      sequences
  };
  cuda::sdm_sequences_kernel<<<1, cuda::kSequenceThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t sdm_phase1_workspace(
    const SdmDims& dims, const SdmWindow& window, bool gram, size_t* bytes
) {
  Plan plan;
  const cudaError_t error = make_plan(dims, window, gram, nullptr, &plan);
  *bytes = plan.bytes;
  return error;
}

cudaError_t launch_sdm_phase1(
    const SdmCudaInputs& inputs,
    const SdmWindow& window,
    bool gram,
    SdmRecords* records,
    void* workspace,
    cudaStream_t stream,
    size_t* records_bytes
) {
  Plan plan;
  cudaError_t error = make_plan(inputs.dims, window, gram, workspace, &plan);
  if (error != cudaSuccess) {
    return error;
  }
  plan.params.in = inputs;
  *records = plan.params.records;
  if (records_bytes != nullptr) {
    *records_bytes = plan.records_bytes;
  }
  if (records->num_q == 0 || records->n == 0) {
    return cudaSuccess;
  }
  error = plan.key_bits > 32 ? launch_sdm_sort_scan<uint64_t>(&plan, stream)
                             : launch_sdm_sort_scan<uint32_t>(&plan, stream);
  if (error != cudaSuccess || !gram) {
    return error;
  }
  error = launch_sdm_gram(plan.params, stream);
  if (error != cudaSuccess) {
    return error;
  }
  return launch_sdm_solve(plan.params, stream);
}

}  // namespace sdm
