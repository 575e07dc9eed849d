// SPDX-License-Identifier: Apache-2.0
//! @file Where the rows of the bank lie as they were at the start of a chunk.
//!
//! Lossy rows: every chunk keeps the rows that it writes as they were before. So a row at the start
//! of chunk k is the one kept by the first chunk from k on that writes its slot, or that of the
//! bank at the end: one pass over the chunks from last to first with a table of the rows kept so
//! far. Logs: every chunk leaves the rows that it writes in a log. So the row is the one left by
//! the last chunk before k that writes the slot, or that of the bank at the start: one pass from
//! first to last, which for a log of the whole call also notes the code of every row's slot before
//! it, so that the backward can go the way back. The table costs 4 bytes a group to write and 4 to
//! read, instead of a copy of the bank that chunks advance or take back, 2 KB a row.
//!
//! The pass from last to first also finds whether a later chunk touches a slot. If none does, the
//! gradient of its row is still zero and is not read; if none of the window does, a replay need not
//! make the row, nor the forward in its last window.
//!
//! A block owns a range of a stream's slots, so that blocks need not meet; the groups of a range
//! are found by bisection, since both kinds of groups are sorted by slot.

#include <algorithm>
#include <type_traits>

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_sources.h"

namespace sdm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBatch = kThreads / 4;  // chunks whose bounds are found together

struct SourcesParams {
  SdmDims dims;
  SdmWindow window;
  const SdmSequence* sequences;
  SdmRecords records;
  SavedRowsLayout layout;
  SdmSources sources;
  int ranges;  // of a stream
};

// The first group in [begin, end) whose slot is at least `slot`.
__device__ int lower_bound(const int4* groups, int begin, int end, int64_t slot) {
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (groups[middle].x < slot) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The chunks of a stream in the window, one after the other: work(k, q, bounds) with the bounds of
// the block's written groups and its others.
template <bool kUpwards, typename Work>
__device__ __forceinline__ void for_chunks(
    const SourcesParams& p, int64_t stream, int64_t range, int (*bounds)[4], const Work& work
) {
  const int64_t head = stream % p.dims.H;
  const int64_t n = stream / p.dims.H;
  const int64_t first_slot = p.dims.S * range / p.ranges;
  const int64_t end_slot = p.dims.S * (range + 1) / p.ranges;
  const int64_t rest = p.sequences[n].num_chunks - p.window.first_chunk;
  const int64_t chunks = rest < p.window.chunks ? rest : p.window.chunks;
  const auto record = [&](int64_t k) { return (n * p.window.chunks + k) * p.dims.H + head; };
  for (int64_t done = 0; done < chunks; done += kBatch) {
    const int64_t batch = chunks - done < kBatch ? chunks - done : kBatch;
    const int64_t first = kUpwards ? done : chunks - done - batch;
    // a bisection waits for one load after the other: all those of a batch at once
    const int64_t own = threadIdx.x / 4;
    if (own < batch) {
      const int64_t q = record(first + own);
      const int2 count = p.records.group_count[q];
      const bool other = threadIdx.x % 4 >= 2;
      bounds[own][threadIdx.x % 4] = lower_bound(
          p.records.group + q * p.records.n,
          other ? count.x : 0,
          other ? count.y : count.x,
          threadIdx.x % 2 == 0 ? first_slot : end_slot
      );
    }
    __syncthreads();  // bounds
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t of_batch = kUpwards ? i : batch - 1 - i;
      work(first + of_batch, record(first + of_batch), bounds[of_batch]);
      __syncthreads();  // tables are as this chunk leaves them; bounds may be overwritten
    }
  }
}

// Calls f(g, written) for this thread's groups.
template <typename F>
__device__ __forceinline__ void for_own_groups(const int (&bound)[4], const F& f) {
  for (int g = bound[0] + static_cast<int>(threadIdx.x); g < bound[1]; g += kThreads) {
    f(g, true);
  }
  for (int g = bound[2] + static_cast<int>(threadIdx.x); g < bound[3]; g += kThreads) {
    f(g, false);
  }
}

__global__ void __launch_bounds__(kThreads) sdm_sources_kernel(
    const __grid_constant__ SourcesParams p
) {
  const int64_t stream = blockIdx.x / p.ranges;
  const int64_t range = blockIdx.x % p.ranges;
  const SdmSequence& sequence = p.sequences[stream / p.dims.H];
  int* written = p.sources.written + stream * p.dims.S;
  int* touched = p.sources.touched + stream * p.dims.S;
  __shared__ int bounds[kBatch][4];  // of a chunk: written groups, other groups
  const bool replay = p.layout.kind == SavedRows::kReplayLog;
  const bool by_slot = p.layout.kind == SavedRows::kSlotLog;
  const bool forward = p.layout.kind == SavedRows::kForwardLog || by_slot;
  int* links = p.layout.links + stream % p.dims.H * p.layout.rows_per_head;
  if (forward) {
    const auto work = [&](int64_t k, int64_t q, const int (&bound)[4]) {
      const int4* groups = p.records.group + q * p.records.n;
      int* codes = p.sources.row + q * p.records.n;
      const int64_t first_row = sequence.first_row + (p.window.first_chunk + k) * p.layout.reserved;
      for_own_groups(bound, [&](int g, bool writes) {
        const int slot = groups[g].x;  // in no other group of this chunk
        const int code = written[slot] + 1;
        codes[g] = p.layout.keep_all ? code | kReadLaterBit : code;
        if (writes && !by_slot) {
          links[first_row + g] = code;
        }
        if (writes) {
          written[slot] = by_slot ? slot : static_cast<int>(first_row + g);
        }
      });
    };
    for_chunks<true>(p, stream, range, bounds, work);
    if (p.layout.keep_all) {
      return;
    }
  }
  if (replay) {
    const auto work = [&](int64_t k, int64_t q, const int (&bound)[4]) {
      const int4* groups = p.records.group + q * p.records.n;
      int* codes = p.sources.row + q * p.records.n;
      const bool logged = !is_last_chunk(sequence, p.window, k);
      const int64_t first_row = (stream * (p.window.chunks - 1) + k) * p.layout.reserved;
      for_own_groups(bound, [&](int g, bool writes) {
        const int slot = groups[g].x;  // in no other group of this chunk
        codes[g] = written[slot] + 1;
        if (writes && logged) {
          written[slot] = static_cast<int>(first_row + g);
        }
      });
    };
    for_chunks<true>(p, stream, range, bounds, work);
  }
  const int64_t end = p.window.first_chunk + p.window.chunks;
  const auto work = [&](int64_t k, int64_t q, const int (&bound)[4]) {
    const int4* groups = p.records.group + q * p.records.n;
    int* codes = p.sources.row + q * p.records.n;
    const int64_t chunk = p.window.first_chunk + k;
    const int64_t first_row = sequence.first_row + chunk * p.layout.reserved;
    for_own_groups(bound, [&](int g, bool writes) {
      const int4 group = groups[g];
      const int slot = group.x, later = touched[slot];
      touched[slot] = static_cast<int>(chunk);
      int code;
      if (replay || forward) {
        code = codes[g] | (later < end ? kReadLaterBit : 0);
      } else if (writes) {
        const int row = static_cast<int>(first_row + g);
        code = p.layout.kind == SavedRows::kLog ? links[row] : row + 1;
        written[slot] = code - 1;
      } else {
        code = written[slot] + 1;
      }
      if (p.layout.zero_gradient && later == kNeverTouched) {
        code |= kUntouchedBit;
        for (int e = 0; e < group.z; ++e) {
          const int lane = p.records.entry[q * p.records.n + group.y + e].w & kLaneMask;
          p.records.write_post[q * p.dims.C * p.dims.W + lane].x = -1;
        }
      }
      codes[g] = code;
    });
  };
  for_chunks<false>(p, stream, range, bounds, work);
}

// A thread a sorted entry; `blocks` a chunk.
__global__ void __launch_bounds__(kThreads) sdm_lane_sources_kernel(
    const __grid_constant__ SourcesParams p, int blocks
) {
  const int64_t q = blockIdx.x / blocks;
  ChunkPlace place;
  if (!find_chunk(p.dims, p.sequences, p.window, q, &place)) {
    return;
  }
  const int64_t first = q * p.records.n;
  const int count = p.records.entry_count[q];
  for (int e = static_cast<int>(blockIdx.x % blocks) * kThreads + static_cast<int>(threadIdx.x);
       e < count;
       e += blocks * kThreads) {
    const int code = p.sources.row[first + p.records.entry_group[first + e]] & kSourceMask;
    if (code > 0) {
      const int lane = p.records.entry[first + e].w & kLaneMask;
      p.records.lane[first + lane].x = -1 - code;
    }
  }
}

// A warp a row.
template <typename T>
__global__ void __launch_bounds__(kThreads) sdm_clear_untouched_kernel(
    const int* touched, int64_t rows, int64_t pieces, T* bank
) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       row < rows;
       row += step) {
    if (touched[row] == kNeverTouched) {
      for (int64_t i = threadIdx.x % 32; i < pieces; i += 32) {
        bank[row * pieces + i] = T{};
      }
    }
  }
}

// A warp a row; strides in pieces of type T.
template <typename T>
__global__ void __launch_bounds__(kThreads) sdm_bank_of_log_kernel(
    const __grid_constant__ SdmDims dims,
    BankView initial,
    const int* written,
    const T* log,
    int64_t rows_per_head,
    int64_t pieces,
    BankView to
) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
  const int64_t rows = dims.N * dims.H * dims.S;
  const auto row_of = [](const BankView& bank, int64_t n, int64_t head, int64_t slot) {
    return static_cast<T*>(bank.data) + n * bank.stride[0] + head * bank.stride[1] +
           slot * bank.stride[2];
  };
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
       row < rows;
       row += step) {
    const int64_t slot = row % dims.S, head = row / dims.S % dims.H, n = row / dims.S / dims.H;
    const int logged = written[row];
    const T* from = logged >= 0 ? log + (head * rows_per_head + logged) * pieces
                                : row_of(initial, n, head, slot);
    T* target = row_of(to, n, head, slot);
#pragma unroll 4
    for (int64_t i = threadIdx.x % 32; i < pieces; i += 32) {
      target[i] = from[i];
    }
  }
}

template <typename T>
cudaError_t launch_clear(
    const int* touched, int64_t rows, int64_t row_bytes, void* bank, cudaStream_t stream
) {
  constexpr int64_t kMostBlocks = 1 << 14;
  const int64_t blocks = std::clamp<int64_t>(rows / (kThreads / 32), 1, kMostBlocks);
  sdm_clear_untouched_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      touched, rows, row_bytes / static_cast<int64_t>(sizeof(T)), static_cast<T*>(bank)
  );
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_forget_touched(
    const SdmDims& dims, const SdmSources& sources, cudaStream_t stream
) {
  const size_t bytes = static_cast<size_t>(dims.N * dims.H * dims.S) * sizeof(int);
  return cudaMemsetAsync(sources.touched, 0x7f, bytes, stream);
}

cudaError_t launch_sdm_sources(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    const SdmRecords& records,
    const SavedRowsLayout& layout,
    const SdmSources& sources,
    bool restart,
    cudaStream_t stream
) {
  const int64_t streams = dims.N * dims.H;
  const int64_t rows = layout.kind == SavedRows::kReplayLog
                           ? streams * (window.chunks - 1) * layout.reserved
                       : layout.kind == SavedRows::kSlotLog ? dims.S
                                                            : layout.rows_per_head;
  // small ranges fill the card with few streams, but leave each thread a group or two a chunk
  const int64_t ranges = std::clamp<int64_t>(dims.S / (2 * kThreads), 1, 64);
  if (rows > kSourceMask - 1 || streams * ranges > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (restart) {
    const size_t bytes = static_cast<size_t>(streams * dims.S) * sizeof(int);
    const cudaError_t error =
        layout.kind == SavedRows::kLog
            ? cudaMemcpyAsync(
                  sources.written, layout.written, bytes, cudaMemcpyDeviceToDevice, stream
              )
            : cudaMemsetAsync(sources.written, 0xff, bytes, stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  const SourcesParams p{
      dims, window, sequences, records, layout, sources, static_cast<int>(ranges)
  };
  sdm_sources_kernel<<<static_cast<unsigned>(streams * ranges), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_lane_sources(
    const SdmDims& dims,
    const SdmSequence* sequences,
    const SdmWindow& window,
    const SdmRecords& records,
    const SdmSources& sources,
    cudaStream_t stream
) {
  constexpr int64_t kEntries = 4;  // of a thread
  const int64_t blocks = std::max<int64_t>(1, records.n / (kEntries * kThreads));
  if (records.num_q * blocks == 0) {
    return cudaSuccess;
  }
  if (records.num_q * blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const SourcesParams p{dims, window, sequences, records, {}, sources, 0};
  sdm_lane_sources_kernel<<<static_cast<unsigned>(records.num_q * blocks), kThreads, 0, stream>>>(
      p, static_cast<int>(blocks)
  );
  return cudaGetLastError();
}

cudaError_t launch_bank_of_log(
    DType dtype,
    const SdmDims& dims,
    const BankView& initial,
    const int* written,
    const SdmSaved& log,
    const BankView& to,
    cudaStream_t stream
) {
  const auto launch = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t elements = static_cast<int64_t>(sizeof(T)) / element_size(dtype);
    const auto in_pieces = [&](BankView bank) {
      for (int64_t& stride : bank.stride) {
        stride /= elements;
      }
      return bank;
    };
    constexpr int64_t kMostBlocks = 1 << 16;
    const int64_t rows = dims.N * dims.H * dims.S;
    const int64_t blocks = std::clamp<int64_t>(rows / (kThreads / 32), 1, kMostBlocks);
    sdm_bank_of_log_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
        dims,
        in_pieces(initial),
        written,
        static_cast<const T*>(log.rows),
        log.rows_per_head,
        dims.D / elements,
        in_pieces(to)
    );
    return cudaGetLastError();
  };
  if (aligned_bank(initial, dtype, dims.D) && aligned_bank(to, dtype, dims.D) &&
      reinterpret_cast<uintptr_t>(log.rows) % 16 == 0) {
    return launch(static_cast<uint4*>(nullptr));
  }
  return element_size(dtype) == 4 ? launch(static_cast<uint32_t*>(nullptr))
                                  : launch(static_cast<uint16_t*>(nullptr));
}

cudaError_t launch_clear_untouched(
    const SdmDims& dims,
    const SdmSources& sources,
    void* bank,
    int64_t row_bytes,
    cudaStream_t stream
) {
  const int64_t rows = dims.N * dims.H * dims.S;
  if (reinterpret_cast<uintptr_t>(bank) % 16 == 0 && row_bytes % 16 == 0) {
    return launch_clear<uint4>(sources.touched, rows, row_bytes, bank, stream);
  }
  return launch_clear<uint16_t>(sources.touched, rows, row_bytes, bank, stream);
}

}  // namespace sdm::cuda
