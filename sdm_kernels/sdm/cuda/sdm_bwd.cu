// SPDX-License-Identifier: Apache-2.0
//! @file Backward of sparse delta memory on CUDA: segments of chunks from last to first; in each
//! phase 1, with replay the rows that its chunks leave, chunk after chunk backwards, then the pair
//! stage.

#include "sdm_kernels/sdm/cuda/sdm_bwd_gather.cuh"
#include "sdm_kernels/sdm/cuda/sdm_bwd_rows.cuh"
#include "sdm_kernels/sdm/cuda/sdm_bwd_walk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_chunk_launch.h"
#include "sdm_kernels/sdm/cuda/sdm_merge.h"
#include "sdm_kernels/sdm/cuda/sdm_pairs.h"
#include "sdm_kernels/sdm/cuda/sdm_sources.h"
#include "sdm_kernels/sdm/cuda/sdm_update.cuh"

namespace sdm {
namespace cuda {

namespace {

int64_t segment_of(const SdmBwdParams& p) {
  return p.saved.mode == SdmSave::kReplay ? std::min(p.saved.segment_chunks, most_chunks(p.dims))
                                          : window_chunks(group_dims(p.dims));
}

SdmDims group_of(const SdmBwdParams& p) {
  return group_dims(p.dims, p.saved.mode == SdmSave::kReplay ? segment_of(p) : 1);
}

// The bank's gradient lives in the result where that has one owner.
bool direct_gradient(const SdmBwdParams& p) {
  return p.d_initial != nullptr && (!p.shared_bank || p.dims.N == 1);
}

bool aligned_rows(const SdmBwdParams& p) {
  return aligned_bank(p.bank, p.bank_dtype, p.dims.D) &&
         reinterpret_cast<uintptr_t>(p.saved.rows) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.d_initial) % 16 == 0;
}

// Whether slots are walked by whole rows (sdm_bwd_rows.cuh). Shorter ones do not fill a warp, and
// float32 banks want more than halves of their tokens.
bool walks_rows(const SdmBwdParams& p) {
  constexpr int64_t kLongRow = 256;
  const bool exact = p.saved.mode <= SdmSave::kRows || p.saved.mode == SdmSave::kReplay;
  return exact && p.bank_dtype != DType::kF32 && p.dims.D >= kLongRow && aligned_rows(p);
}

struct BwdMemory {
  ChunkMemory chunk;
  void* grad;  // [N, H, S, D] unless the result holds it
  // of a group of sequences
  void* replay_rows;  // [N * H][segment - 1][rows of a chunk][D]
  SdmSources sources;
  SdmDots dots;
  __half* token_halves;  // token records of a chunk of every stream, or null
  uint8_t* token_scales;
  void* phase1;
  float* product;
  void* pairs;
};

cudaError_t carve_bwd(DeviceCarver* carver, const SdmBwdParams& p, BwdMemory* memory) {
  const SdmDims& dims = p.dims;
  const SdmDims group = group_of(p);
  const int64_t streams = group.N * dims.H;
  const int64_t element = element_size(p.bank_dtype);
  const int64_t segment = segment_of(p);
  const int64_t num_q = streams * segment;
  const int64_t bank_elements = dims.H * dims.S * dims.D;
  memory->chunk = carve_chunk(carver, dims, group, false);
  const bool replay = p.saved.mode == SdmSave::kReplay;
  memory->grad = direct_gradient(p) ? nullptr : carver->take(dims.N * bank_elements * element);
  memory->replay_rows =
      replay ? carver->take((num_q - streams) * rows_of_chunk(dims, dims.C) * dims.D * element)
             : nullptr;
  memory->sources.row = carver->take<int>(num_q * lanes_of_chunk(dims));
  memory->sources.written = carver->take<int>(streams * dims.S);
  memory->sources.touched = carver->take<int>(streams * dims.S);
  const int64_t slices = num_slices(dims, p.bank_dtype);
  const bool rows = walks_rows(p);
  const int64_t row_slices = rows ? RowTiles(dims.D).tiles : slices;
  memory->dots.num_slices = slices;
  memory->dots.row_slices = row_slices;
  memory->dots.error_grad = carver->take<float>(slices * num_q * dims.C * dims.W);
  memory->dots.row = carver->take<float>(row_slices * num_q * lanes_of_chunk(dims));
  memory->dots.decay = carver->take<float>(row_slices * num_q * lanes_of_chunk(dims));
  memory->dots.d_v = carver->take<float>(num_q * dims.C * dims.D);
  const int64_t records = rows ? streams * 2 * round_up(dims.C, 16) : 0;
  const auto record = [&](int64_t bytes) { return bytes > 0 ? carver->take(bytes) : nullptr; };
  memory->token_halves = static_cast<__half*>(record(TokenRecord::half_bytes(records, dims.D)));
  memory->token_scales = static_cast<uint8_t*>(record(TokenRecord::scale_bytes(records, dims.D)));
  const SdmWindow window{0, segment};
  memory->product = carver->take<float>(merge_cells(group, window));
  SDM_RETURN_IF_ERROR(carve_phase1(carver, dims, group, window, &memory->phase1));
  const size_t pairs = std::max(
      sdm_pairs_workspace(group, window), sdm_pairs_workspace(last_group(dims, group), window)
  );
  memory->pairs = carver->take(static_cast<int64_t>(pairs));
  return cudaSuccess;
}

template <typename S, int kPieces>
cudaError_t launch_rows_walk(SdmChunkParams p, const CardLimits& card, cudaStream_t stream) {
  using Walk = RowWalk<kPieces>;
  const int64_t fit = card.shared_memory / Walk::kWarpBytes;
  const int warps = static_cast<int>(std::min<int64_t>(Walk::kWarps, fit));
  const int64_t blocks = p.dims.N * p.dims.H * RowTiles(p.dims.D).tiles;
  p.parts = parts_of(blocks, card);
  return launch_blocks(
      &sdm_bwd_rows_kernel<S, kPieces>,
      p,
      blocks * p.parts,
      warps * 32,
      warps * Walk::kWarpBytes,
      stream,
      card.overlap
  );
}

template <typename S>
cudaError_t launch_rows_walk(const SdmChunkParams& p, const CardLimits& card, cudaStream_t stream) {
  switch (RowTiles(p.dims.D).lane_pieces()) {
    case 1:
      return launch_rows_walk<S, 1>(p, card, stream);
    case 2:
      return launch_rows_walk<S, 2>(p, card, stream);
    case 3:
      return launch_rows_walk<S, 3>(p, card, stream);
    default:
      return launch_rows_walk<S, 4>(p, card, stream);
  }
}

template <typename S, bool kAligned>
cudaError_t run_segment(SdmChunkParams p, CardLimits card, cudaStream_t stream) {
  void (*const gather)(SdmChunkParams) = &sdm_bwd_gather_kernel<S, kAligned>;
  SDM_RETURN_IF_ERROR(may_overlap(reinterpret_cast<const void*>(gather), &card.overlap));
  const auto update = [&](auto wide, const SdmChunkParams& shared, int64_t blocks, int64_t smem) {
    return launch_blocks(
        &sdm_update_kernel<S, kAligned, decltype(wide)::value, true>,
        shared,
        blocks,
        UpdateShape::kThreads,
        smem,
        stream,
        card.overlap
    );
  };
  const auto walk = [&](auto wide, const SdmChunkParams& shared, int64_t blocks, int64_t smem) {
    constexpr int kWide = decltype(wide)::value;
    return launch_blocks(
        p.saved.mode <= SdmSave::kRows ? &sdm_bwd_walk_kernel<S, kAligned, kWide, true>
                                       : &sdm_bwd_walk_kernel<S, kAligned, kWide, false>,
        shared,
        blocks,
        WalkShape::kThreads,
        smem,
        stream,
        card.overlap
    );
  };
  if (p.saved.mode == SdmSave::kReplay) {
    for (p.k = 0; p.k + 1 < p.window.chunks; ++p.k) {
      SDM_RETURN_IF_ERROR((launch_slots<S, UpdateShape>(p, p.records.Cp, card, update)));
    }
  }
  for (p.k = p.window.chunks - 1; p.k >= 0; --p.k) {
    SDM_RETURN_IF_ERROR(launch_blocks(
        gather, p, gather_blocks(p.dims, p.num_slices), kGatherThreads, 0, stream, card.overlap
    ));
    SDM_RETURN_IF_ERROR((launch_solve_chunk<S, true>(p, card, stream)));
    if constexpr (kAligned && sizeof(S) == 2) {
      if (p.token_halves != nullptr) {
        SDM_RETURN_IF_ERROR(launch_rows_walk<S>(p, card, stream));
        continue;
      }
    }
    SDM_RETURN_IF_ERROR((launch_slots<S, WalkShape>(p, 2 * p.records.Cp, card, walk)));
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda

cudaError_t sdm_bwd_cuda_workspace(const SdmCudaBwdParams& params, size_t* bytes) {
  DeviceCarver carver(nullptr);
  cuda::BwdMemory memory;
  SDM_RETURN_IF_ERROR(cuda::carve_bwd(&carver, params.base, &memory));
  *bytes = static_cast<size_t>(carver.used());
  return cudaSuccess;
}

cudaError_t launch_sdm_bwd(const SdmCudaBwdParams& params, void* workspace, cudaStream_t stream) {
  using namespace cuda;
  const SdmBwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  CardLimits card;
  SDM_RETURN_IF_ERROR(card_limits(&card));
  DeviceCarver carver(workspace);
  BwdMemory memory;
  SDM_RETURN_IF_ERROR(carve_bwd(&carver, base, &memory));
  const int64_t element = element_size(base.bank_dtype);
  const int64_t bank_elements = dims.H * dims.S * dims.D;
  const bool replay = base.saved.mode == SdmSave::kReplay;

  if (params.cu_seqlens.data != nullptr) {
    // tokens that malformed offsets leave out
    const size_t tokens = static_cast<size_t>(dims.B * dims.T * dims.H);
    const auto clear = [&](void* data, int64_t columns, DType dtype) {
      return cudaMemsetAsync(
          data, 0, tokens * static_cast<size_t>(columns * element_size(dtype)), stream
      );
    };
    const int64_t gates = dims.gate_per_write ? dims.W : 1;
    SDM_RETURN_IF_ERROR(clear(base.d_write_val, dims.W, base.tokens.write_val.dtype));
    SDM_RETURN_IF_ERROR(clear(base.d_v, dims.D, base.d_out.dtype));
    SDM_RETURN_IF_ERROR(clear(base.d_beta, 1, base.tokens.beta.dtype));
    SDM_RETURN_IF_ERROR(clear(base.d_g, gates, base.tokens.g.dtype));
    SDM_RETURN_IF_ERROR(clear(base.d_read_val, dims.R, base.tokens.read_val.dtype));
  }
  if (dims.N == 0) {
    return base.d_initial == nullptr || !base.shared_bank
               ? cudaSuccess
               : cudaMemsetAsync(
                     base.d_initial, 0, static_cast<size_t>(bank_elements * element), stream
                 );
  }
  SDM_RETURN_IF_ERROR(launch_sdm_sequences(
      dims,
      params.cu_seqlens.data,
      params.cu_seqlens.is_int64,
      nullptr,
      false,
      0,
      base.saved.segment_chunks,
      memory.chunk.sequences,
      stream
  ));
  const BankView grad = contiguous_bank(direct_gradient(base) ? base.d_initial : memory.grad, dims);
  const bool zero_gradient = base.d_final.data == nullptr;  // and then a row's first touch sets it
  if (!zero_gradient) {
    SDM_RETURN_IF_ERROR(launch_copy_bank(base.bank_dtype, dims, base.d_final, grad, stream));
  }

  SdmChunkParams p{};
  p.dims = group_of(base);
  p.errors = static_cast<float*>(base.saved.errors);
  p.saved = base.saved;
  p.replay_rows = memory.replay_rows;
  p.d_out = base.d_out;
  p.source_rows = memory.sources.row;
  p.d_v = base.d_v;
  p.dots = memory.dots;
  p.token_halves = memory.token_halves;
  p.token_scales = memory.token_scales;
  p.x = memory.chunk.x;
  p.product = memory.product;
  p.num_slices = memory.dots.num_slices;
  const bool aligned = aligned_rows(base);
  p.token_vectors = aligned && aligned_tokens(base.d_out, dims.D);
  const SdmPairGrads grads{base.d_write_val, base.d_read_val, base.d_beta, base.d_g};

  const int64_t step = segment_of(base), group = p.dims.N;
  for (int64_t n = 0; n < dims.N; n += group) {
    p.dims.N = std::min(group, dims.N - n);
    p.sequences = memory.chunk.sequences + n;
    p.bank = bank_from(base.bank, n, base.bank_dtype);
    p.grad = bank_from(grad, n, base.bank_dtype);
    SDM_RETURN_IF_ERROR(launch_forget_touched(p.dims, memory.sources, stream));
    const SdmCudaInputs inputs{p.dims, base.tokens, base.bank_dtype, p.sequences};
    for (int64_t first = dims.T == 0 ? -1 : (most_chunks(dims) - 1) / step * step; first >= 0;
         first -= step) {
      // the window keeps its full length, as the workspace was laid out for it
      p.window = {first, step};
      SDM_RETURN_IF_ERROR(
          launch_sdm_phase1(inputs, p.window, true, &p.records, memory.phase1, stream)
      );
      SDM_RETURN_IF_ERROR(launch_sdm_merge(
          p.dims, p.window, p.sequences, p.records, base.bank_dtype, memory.product, stream
      ));
      const bool log = base.saved.mode == SdmSave::kRows;
      const SavedRowsLayout layout{
          replay ? SavedRows::kReplayLog
          : log  ? SavedRows::kLog
                 : SavedRows::kOld,
          zero_gradient,
          false,
          rows_of_chunk(dims, dims.C),
          base.saved.rows_per_head,
          base.saved.links,
          log ? written_at_end(base.saved, dims, n) : nullptr
      };
      SDM_RETURN_IF_ERROR(launch_sdm_sources(
          p.dims,
          p.sequences,
          p.window,
          p.records,
          layout,
          memory.sources,
          replay || first + step >= most_chunks(dims),
          stream
      ));
      SDM_RETURN_IF_ERROR(dispatch_bank(base.bank_dtype, [&](auto* type) {
        using S = std::remove_pointer_t<decltype(type)>;
        return aligned ? run_segment<S, true>(p, card, stream)
                       : run_segment<S, false>(p, card, stream);
      }));
      SDM_RETURN_IF_ERROR(launch_sdm_pairs(
          inputs,
          p.window,
          p.records,
          memory.dots,
          p.errors,
          base.d_out,
          grads,
          memory.pairs,
          stream
      ));
    }
    if (zero_gradient) {
      SDM_RETURN_IF_ERROR(
          launch_clear_untouched(p.dims, memory.sources, p.grad.data, dims.D * element, stream)
      );
    }
  }
  if (base.d_initial != nullptr && !direct_gradient(base)) {
    return launch_sum_banks(
        base.bank_dtype, grad.data, base.d_initial, dims.N, bank_elements, stream
    );
  }
  return cudaSuccess;
}

}  // namespace sdm
