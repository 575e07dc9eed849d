// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1 of the CUDA kernels: workspace and launches.
//!
//! sort -> scan -> entries -> gram [-> solve], see the .cuh files. A sort is one kernel where a
//! chunk fits the shared memory of a block or two, else count and place for every 8 bits of a slot.
//! Blocks of a stage come in while the one before it ends. Without `gram` the gram kernel only
//! writes the records by lane.
#include <algorithm>

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_entries.cuh"
#include "sdm_kernels/sdm/cuda/sdm_gram.cuh"
#include "sdm_kernels/sdm/cuda/sdm_phase1.h"
#include "sdm_kernels/sdm/cuda/sdm_scan.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sequences.cuh"
#include "sdm_kernels/sdm/cuda/sdm_solve.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sort_chunk.cuh"

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

struct Plan {
  SdmPhase1Params params;
  bool wide;  // 64-bit words
  int passes;
  size_t records_bytes;
  size_t bytes;
};

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
      n > kMaxLanes || num_q < 0 || num_q > INT32_MAX || num_q * tiles > INT32_MAX ||
      num_q * (Cp / cuda::kGramWarps) > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int64_t count = num_q * n;
  const int64_t cells = gram ? num_q * Cp * Cp : 0;
  r.num_q = num_q;
  r.n = static_cast<int32_t>(n);
  r.Cp = static_cast<int32_t>(Cp);
  p.tiles = static_cast<int32_t>(tiles);
  p.sort_tiles = static_cast<int32_t>(ceil_div(n, cuda::kSortTile));
  p.by_writes = cuda::FastDivide::by(static_cast<uint32_t>(std::max<int64_t>(dims.W, 1)));
  p.by_reads = cuda::FastDivide::by(static_cast<uint32_t>(std::max<int64_t>(dims.R, 1)));
  const int slot_bits = std::max(1, bits_of(dims.S - 1));
  plan->passes = static_cast<int>(ceil_div(slot_bits, 8));
  p.digit_bits = static_cast<int32_t>(ceil_div(slot_bits, plan->passes));
  const int lane_bits = std::max(1, bits_of(n - 1));
  plan->wide = slot_bits + lane_bits > 32;
  p.lane_bits = plan->wide ? 32 : lane_bits;

  DeviceCarver carver(workspace);
  carver.take(count, &r.lane);
  carver.take(num_q * dims.C * dims.W, &r.write_post);
  carver.take(count, &r.position);
  carver.take(count, &r.entry);
  carver.take(count, &r.pair);
  carver.take(count, &r.entry_group);
  carver.take(count, &r.group);
  carver.take(count, &r.group_decay);
  carver.take(count, &r.head_post);
  carver.take(count, &r.head_weight);
  carver.take(num_q, &r.group_count);
  carver.take(num_q, &r.entry_count);
  carver.take(num_q * dims.C, &r.beta);
  carver.take(cells, &r.inverse);
  carver.take(cells, &r.qk);
  plan->records_bytes = static_cast<size_t>(carver.used());

  const auto take_words = [&]() {
    uint64_t* wide_words = nullptr;
    uint32_t* narrow_words = nullptr;
    carver.take(plan->wide ? count : 0, &wide_words);
    carver.take(plan->wide ? 0 : count, &narrow_words);
    return plan->wide ? static_cast<void*>(wide_words) : static_cast<void*>(narrow_words);
  };
  p.words[0] = take_words();
  p.words[1] = take_words();
  p.passes = plan->passes;
  p.sorted = p.words[(plan->passes + 1) % 2];
  carver.take(num_q * p.sort_tiles * cuda::kDigits, &p.digits);
  carver.take(num_q * tiles, &p.tile_state);
  carver.take(count, &p.local_log);
  carver.take(count, &p.slots);
  carver.take(cells, &p.scaled_a);
  plan->bytes = static_cast<size_t>(carver.used());
  return cudaSuccess;
}

template <typename Word, bool kFirst>
void launch_sort_pass(const SdmPhase1Params& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.records.num_q * p.sort_tiles);
  cuda::sdm_sort_count_kernel<Word, kFirst><<<blocks, cuda::kThreads, 0, stream>>>(p);
  cuda::sdm_sort_place_kernel<Word, kFirst><<<blocks, cuda::kThreads, 0, stream>>>(p);
}

template <typename Word>
cudaError_t launch_sort_passes(SdmPhase1Params p, cudaStream_t stream) {
  launch_sort_pass<Word, true>(p, stream);
  for (p.pass = 1; p.pass < p.passes; ++p.pass) {
    launch_sort_pass<Word, false>(p, stream);
  }
  return cudaGetLastError();
}

template <typename Word>
cudaError_t launch_sort(
    const SdmPhase1Params& p, const cuda::CardLimits& card, cudaStream_t stream
) {
  if constexpr (sizeof(Word) == 4) {
    switch (cuda::chunk_sort_blocks(p, card)) {
      case 1:
        if (p.records.n <= 256 * cuda::kChunkItems) {
          return cuda::launch_sort_chunk<256, 1>(p, card, stream);
        }
        if (p.records.n <= 512 * cuda::kChunkItems) {
          return cuda::launch_sort_chunk<512, 1>(p, card, stream);
        }
        return cuda::launch_sort_chunk<1024, 1>(p, card, stream);
      case 2:
        return cuda::launch_sort_chunk<1024, 2>(p, card, stream);
      default:
        break;
    }
  }
  return launch_sort_passes<Word>(p, stream);
}

template <int kBatch>
cudaError_t launch_gram(
    const SdmPhase1Params& p, const cuda::CardLimits& card, cudaStream_t stream
) {
  return cuda::launch_blocks(
      p.gram ? &cuda::sdm_gram_kernel<true, kBatch> : &cuda::sdm_gram_kernel<false, kBatch>,
      p,
      p.records.num_q * (p.records.Cp / cuda::kGramWarps),
      cuda::kGramWarps * 32,
      0,
      stream,
      card.overlap
  );
}

cudaError_t launch_solve(
    const SdmPhase1Params& p, const cuda::CardLimits& card, cudaStream_t stream
) {
  return cuda::launch_blocks(
      &cuda::sdm_solve_kernel,
      p,
      p.records.num_q * ceil_div(p.records.Cp, cuda::kPanel),
      cuda::kSolveThreads,
      cuda::solve_smem(p.records.Cp),
      stream,
      card.overlap
  );
}

template <typename Word>
cudaError_t launch_stages(
    const SdmPhase1Params& p, const cuda::CardLimits& card, cudaStream_t stream
) {
  const int64_t tiles = p.records.num_q * p.tiles;
  SDM_RETURN_IF_ERROR(launch_sort<Word>(p, card, stream));
  SDM_RETURN_IF_ERROR(
      cuda::launch_blocks(
          &cuda::sdm_scan_kernel<Word>, p, tiles, cuda::kThreads, 0, stream, card.overlap
      )
  );
  SDM_RETURN_IF_ERROR(
      cuda::launch_blocks(
          &cuda::sdm_entries_kernel<Word>, p, tiles, cuda::kThreads, 0, stream, card.overlap
      )
  );
  switch (cuda::gram_batch(p.in.dims.W + p.in.dims.R)) {
    case 1:
      SDM_RETURN_IF_ERROR(launch_gram<1>(p, card, stream));
      break;
    case 2:
      SDM_RETURN_IF_ERROR(launch_gram<2>(p, card, stream));
      break;
    default:
      SDM_RETURN_IF_ERROR(launch_gram<4>(p, card, stream));
  }
  return p.gram ? launch_solve(p, card, stream) : cudaSuccess;
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
  cuda::CardLimits card;
  SDM_RETURN_IF_ERROR(cuda::card_limits(&card));
  SDM_RETURN_IF_ERROR(
      cuda::may_overlap(reinterpret_cast<const void*>(&cuda::sdm_solve_kernel), &card.overlap)
  );
  return plan.wide ? launch_stages<uint64_t>(plan.params, card, stream)
                   : launch_stages<uint32_t>(plan.params, card, stream);
}

}  // namespace sdm
