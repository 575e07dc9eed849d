// SPDX-License-Identifier: Apache-2.0
//! @file Forward of sparse delta memory on CUDA: windows of chunks, phase 1 then chunk after chunk.
//!
//! With save="rows" no bank is advanced: every chunk appends the rows that it writes to a log,
//! which the backward keeps, and a row is read where it lies (sdm_sources.h). Short calls that keep
//! nothing read a row from the initial bank until a chunk has written it, instead of a copy.

#include "sdm_kernels/sdm/cuda/sdm_chunk_launch.h"
#include "sdm_kernels/sdm/cuda/sdm_gather.cuh"
#include "sdm_kernels/sdm/cuda/sdm_merge.h"
#include "sdm_kernels/sdm/cuda/sdm_save.cuh"
#include "sdm_kernels/sdm/cuda/sdm_sources.h"
#include "sdm_kernels/sdm/cuda/sdm_update.cuh"

namespace sdm {
namespace cuda {
namespace {

struct FwdMemory {
  ChunkMemory chunk;
  void* bank;          // [N, H, S, D] when the caller wants no final bank
  SdmSources sources;  // of a group, for a log
  void* phase1;
  float* product;  // qk * inverse of a window
};

// Where no bank at the end is wanted, a slot needs no copy of its row before a chunk writes it. To
// find out costs about as much for an entry as to copy so many bytes.
bool fills_slots(const SdmFwdParams& p) {
  constexpr int64_t kBytesAnEntry = 100;
  const SdmDims& dims = p.dims;
  return p.saved.mode == SdmSave::kNone && p.bank.data == nullptr &&
         dims.S * dims.D * element_size(p.bank_dtype) >= kBytesAnEntry * dims.T * (dims.W + dims.R);
}

bool keeps_log(const SdmFwdParams& p) {
  return p.saved.mode == SdmSave::kRows;
}

bool makes_log(const SdmFwdParams& p) {
  return keeps_log(p) || fills_slots(p);
}

cudaError_t carve_fwd(DeviceCarver* carver, const SdmFwdParams& p, FwdMemory* memory) {
  const SdmDims group = group_dims(p.dims);
  memory->chunk = carve_chunk(carver, p.dims, group, true);
  const int64_t bank_bytes = p.dims.N * p.dims.H * p.dims.S * p.dims.D * element_size(p.bank_dtype);
  const bool log = makes_log(p);
  memory->bank = p.bank.data == nullptr && !keeps_log(p) ? carver->take(bank_bytes) : nullptr;
  const SdmWindow window{0, window_chunks(group)};
  const int64_t streams = log ? group.N * group.H : 0;
  memory->sources.row = carver->take<int>(streams * window.chunks * lanes_of_chunk(group));
  memory->sources.touched = carver->take<int>(streams * group.S);
  memory->sources.written = carver->take<int>(fills_slots(p) ? streams * group.S : 0);
  memory->product = carver->take<float>(merge_cells(group, window));
  return carve_phase1(carver, p.dims, group, window, &memory->phase1);
}

// Zeroes what the saved tensor reserves beyond the chunks of all sequences. Which rows those are is
// known on the host only without cu_seqlens; otherwise all are zeroed first. A log has such rows in
// every chunk, which nobody reads: a large one is left as it is.
cudaError_t clear_unused_saved(const SdmFwdParams& p, bool packed, cudaStream_t stream) {
  const SdmDims& dims = p.dims;
  char* rows = static_cast<char*>(p.saved.rows);
  if (keeps_log(p)) {
    constexpr int64_t kSmall = 1 << 20;
    const int64_t count = dims.H * p.saved.rows_per_head;
    const int64_t bytes = count * dims.D * element_size(p.bank_dtype);
    if (bytes > kSmall) {
      return cudaSuccess;
    }
    SDM_RETURN_IF_ERROR(cudaMemsetAsync(rows, 0, static_cast<size_t>(bytes), stream));
    return cudaMemsetAsync(
        p.saved.links, 0, static_cast<size_t>(count) * sizeof(*p.saved.links), stream
    );
  }
  if (p.saved.mode == SdmSave::kReplay && packed) {
    const int64_t bytes =
        p.saved.checkpoints * dims.H * dims.S * dims.D * element_size(p.bank_dtype);
    return cudaMemsetAsync(rows, 0, static_cast<size_t>(bytes), stream);
  }
  if (!saves_rows(p.saved.mode)) {
    return cudaSuccess;
  }
  const int64_t row_bytes = saved_row_bytes(p.saved.mode, p.bank_dtype, dims.D);
  int64_t used = 0;
  if (!packed && dims.T > 0) {
    const int64_t full = ceil_div(dims.T, dims.C) - 1;
    used =
        dims.N * (full * rows_of_chunk(dims, dims.C) + rows_of_chunk(dims, dims.T - full * dims.C));
  }
  const int64_t unused = p.saved.rows_per_head - used;
  if (unused == 0) {
    return cudaSuccess;
  }
  SDM_RETURN_IF_ERROR(cudaMemset2DAsync(
      rows + used * row_bytes,
      static_cast<size_t>(p.saved.rows_per_head * row_bytes),
      0,
      static_cast<size_t>(unused * row_bytes),
      static_cast<size_t>(dims.H),
      stream
  ));
  if (p.saved.scales == nullptr) {
    return cudaSuccess;
  }
  return cudaMemset2DAsync(
      p.saved.scales + used,
      static_cast<size_t>(p.saved.rows_per_head) * sizeof(float),
      0,
      static_cast<size_t>(unused) * sizeof(float),
      static_cast<size_t>(dims.H),
      stream
  );
}

template <typename S>
cudaError_t launch_quantise(const SdmChunkParams& p, cudaStream_t stream) {
  const SdmQuantiseParams q{
      p.dims,
      p.window,
      p.sequences,
      p.records,
      p.bank,
      p.saved,
      saved_row_bytes(p.saved.mode, sizeof(S) == 4 ? DType::kF32 : DType::kBf16, p.dims.D),
      p.k
  };
  constexpr int kThreads = 256;
  const int64_t warps = p.dims.N * p.dims.H * rows_of_chunk(p.dims, p.dims.C);
  const int64_t blocks = ceil_div(warps * 32, kThreads);
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  sdm_quantise_rows_kernel<S><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(q);
  return cudaGetLastError();
}

// `update`: somebody reads the bank afterwards.
template <typename S, bool kAligned, bool kLog>
cudaError_t run_chunk(
    const SdmChunkParams& p, const CardLimits& card, bool update, cudaStream_t stream
) {
  if (!kLog && p.saved.mode > SdmSave::kRows) {  // a lossy row needs all its columns at once
    SDM_RETURN_IF_ERROR(launch_quantise<S>(p, stream));
  }
  const int64_t blocks = gather_blocks(p.dims, p.num_slices, fwd_gather_shape(p));
  SDM_RETURN_IF_ERROR(launch_blocks(
      &sdm_gather_kernel<S, kAligned, kLog>,
      p,
      blocks,
      kGatherThreads,
      card.overlap ? spreading_memory(blocks, gather_smem(), card) : 0,
      stream,
      card.overlap
  ));
  SDM_RETURN_IF_ERROR((launch_solve_chunk<S, false>(p, card, stream)));
  if (!update) {
    return cudaSuccess;
  }
  return launch_slots<S, UpdateShape>(
      p,
      p.records.Cp,
      card,
      [&](auto wide, const SdmChunkParams& shared, int64_t blocks, int64_t smem) {
        return launch_blocks(
            &sdm_update_kernel<S, kAligned, decltype(wide)::value, kLog>,
            shared,
            blocks,
            UpdateShape::kThreads,
            smem,
            stream,
            card.overlap
        );
      }
  );
}

// Where the rows of a window lie, for gather and update. n: its first sequence.
cudaError_t launch_log_sources(
    const SdmFwdParams& base,
    const SdmChunkParams& p,
    int64_t n,
    SdmSources* sources,
    cudaStream_t stream
) {
  const int64_t end = p.window.first_chunk + p.window.chunks;
  const bool keep_all = base.bank.data != nullptr || end < most_chunks(p.dims);
  if (keeps_log(base)) {
    sources->written = written_at_end(base.saved, base.dims, n);
  }
  if (!keep_all) {
    SDM_RETURN_IF_ERROR(launch_forget_touched(p.dims, *sources, stream));
  }
  const SavedRowsLayout layout{
      keeps_log(base) ? SavedRows::kForwardLog : SavedRows::kSlotLog,
      false,
      keep_all,
      rows_of_chunk(p.dims, p.dims.C),
      base.saved.rows_per_head,
      base.saved.links,
      nullptr
  };
  SDM_RETURN_IF_ERROR(launch_sdm_sources(
      p.dims, p.sequences, p.window, p.records, layout, *sources, p.window.first_chunk == 0, stream
  ));
  return launch_lane_sources(p.dims, p.sequences, p.window, p.records, *sources, stream);
}

// One window whose records are ready. first_bank: that of its first sequence.
template <typename S>
cudaError_t run_window(
    SdmChunkParams p,
    const BankView& first_bank,
    DType bank_dtype,
    CardLimits card,
    bool aligned,
    bool final_bank,
    cudaStream_t stream
) {
  void (*const gather)(SdmChunkParams) = &sdm_gather_kernel<S, true, false>;
  SDM_RETURN_IF_ERROR(may_overlap(reinterpret_cast<const void*>(gather), &card.overlap));
  for (p.k = 0; p.k < p.window.chunks; ++p.k) {
    const int64_t chunk = p.window.first_chunk + p.k;
    if (p.saved.mode == SdmSave::kReplay && chunk > 0 && chunk % p.saved.segment_chunks == 0) {
      SDM_RETURN_IF_ERROR(launch_keep_bank(
          bank_dtype,
          p.dims,
          first_bank,
          stream,
          p.sequences,
          p.saved.rows,
          chunk,
          p.saved.segment_chunks
      ));
    }
    const bool update = final_bank || chunk + 1 < most_chunks(p.dims);
    const auto run = [&](auto is_aligned) {
      constexpr bool kAligned = decltype(is_aligned)::value;
      return p.log.rows != nullptr ? run_chunk<S, kAligned, true>(p, card, update, stream)
                                   : run_chunk<S, kAligned, false>(p, card, update, stream);
    };
    SDM_RETURN_IF_ERROR(aligned ? run(std::true_type()) : run(std::false_type()));
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace cuda

cudaError_t sdm_fwd_cuda_workspace(const SdmCudaFwdParams& params, size_t* bytes) {
  DeviceCarver carver(nullptr);
  cuda::FwdMemory memory;
  SDM_RETURN_IF_ERROR(cuda::carve_fwd(&carver, params.base, &memory));
  *bytes = static_cast<size_t>(carver.used());
  return cudaSuccess;
}

cudaError_t launch_sdm_fwd(const SdmCudaFwdParams& params, void* workspace, cudaStream_t stream) {
  using namespace cuda;
  const SdmFwdParams& base = params.base;
  const SdmDims& dims = base.dims;
  CardLimits card;
  SDM_RETURN_IF_ERROR(card_limits(&card));
  DeviceCarver carver(workspace);
  FwdMemory memory;
  SDM_RETURN_IF_ERROR(carve_fwd(&carver, base, &memory));

  const bool packed = params.cu_seqlens.data != nullptr;
  if (packed || params.state_indices.data != nullptr) {
    // tokens of skipped sequences, and tokens that malformed offsets leave out
    const int64_t bytes = dims.B * dims.T * dims.H * dims.D * element_size(base.tokens.v.dtype);
    SDM_RETURN_IF_ERROR(cudaMemsetAsync(base.out, 0, static_cast<size_t>(bytes), stream));
    if (base.saved.errors != nullptr) {
      const size_t error_bytes = static_cast<size_t>(dims.B * dims.T * dims.H * dims.D) * 4;
      SDM_RETURN_IF_ERROR(cudaMemsetAsync(base.saved.errors, 0, error_bytes, stream));
    }
  }
  SDM_RETURN_IF_ERROR(clear_unused_saved(base, packed, stream));
  if (dims.N == 0) {
    return cudaSuccess;
  }
  SDM_RETURN_IF_ERROR(launch_sdm_sequences(
      dims,
      params.cu_seqlens.data,
      params.cu_seqlens.is_int64,
      params.state_indices.data,
      params.state_indices.is_int64,
      params.pool,
      base.saved.segment_chunks,
      memory.chunk.sequences,
      stream
  ));
  const bool log = makes_log(base), final_bank = base.bank.data != nullptr;
  const BankView bank = log          ? base.initial
                        : final_bank ? base.bank
                                     : contiguous_bank(memory.bank, dims);
  if (base.initial.data != nullptr && !log) {
    SDM_RETURN_IF_ERROR(launch_copy_bank(base.bank_dtype, dims, base.initial, bank, stream));
  }
  if (dims.T == 0) {
    return log && final_bank
               ? launch_copy_bank(base.bank_dtype, dims, base.initial, base.bank, stream)
               : cudaSuccess;
  }

  SdmChunkParams p{};
  p.dims = group_dims(dims);
  p.v = base.tokens.v;
  p.out = base.out;
  p.errors = static_cast<float*>(base.saved.errors);
  p.saved = base.saved;
  p.x = memory.chunk.x;
  p.y = memory.chunk.y;
  p.num_slices = num_slices(dims, base.bank_dtype);
  const bool aligned = aligned_bank(bank, base.bank_dtype, dims.D) &&
                       (!keeps_log(base) || reinterpret_cast<uintptr_t>(base.saved.rows) % 16 == 0);
  p.token_vectors = aligned && aligned_tokens(base.tokens.v, dims.D);
  p.bank = bank;
  p.product = memory.product;
  p.source_rows = memory.sources.row;

  const int64_t step = window_chunks(p.dims), group = p.dims.N;
  for (int64_t n = 0; n < dims.N; n += group) {
    p.dims.N = std::min(group, dims.N - n);
    p.sequences = memory.chunk.sequences + n;
    if (keeps_log(base)) {
      p.log = {base.saved.rows, {0, base.saved.rows_per_head * dims.D}, false};
    } else if (log) {
      const BankView filled = bank_from(contiguous_bank(memory.bank, dims), n, base.bank_dtype);
      p.log = {filled.data, {filled.stride[0], filled.stride[1]}, true};
    }
    const SdmCudaInputs inputs{p.dims, base.tokens, base.bank_dtype, p.sequences};
    for (int64_t first = 0; first < most_chunks(dims); first += step) {
      p.window = {first, std::min(step, most_chunks(dims) - first)};
      SDM_RETURN_IF_ERROR(
          launch_sdm_phase1(inputs, p.window, true, &p.records, memory.phase1, stream)
      );
      if (log) {
        SDM_RETURN_IF_ERROR(launch_log_sources(base, p, n, &memory.sources, stream));
      }
      // launched after the records of sources: it does not overlap them, and what follows may
      SDM_RETURN_IF_ERROR(launch_sdm_merge(
          p.dims, p.window, p.sequences, p.records, base.bank_dtype, memory.product, stream
      ));
      SDM_RETURN_IF_ERROR(dispatch_bank(base.bank_dtype, [&](auto* type) {
        using S = std::remove_pointer_t<decltype(type)>;
        // training has a bank for every sequence, in their order
        return run_window<S>(
            p,
            bank_from(bank, n, base.bank_dtype),
            base.bank_dtype,
            card,
            aligned,
            final_bank,
            stream
        );
      }));
    }
    if (log && final_bank) {
      SDM_RETURN_IF_ERROR(launch_bank_of_log(
          base.bank_dtype,
          p.dims,
          bank_from(base.initial, n, base.bank_dtype),
          memory.sources.written,
          base.saved,
          bank_from(base.bank, n, base.bank_dtype),
          stream
      ));
    }
  }
  return cudaSuccess;
}

}  // namespace sdm
