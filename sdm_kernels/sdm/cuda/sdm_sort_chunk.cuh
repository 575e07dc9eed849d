// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, sort: a whole chunk in the shared memory of one block, or of a cluster of blocks.
//!
//! Does what the kernels of sdm_sort.cuh do, where the words of a chunk are narrow and fit: a block
//! has kChunkItems words a thread, in registers while it counts their digits and scatters them to
//! their places in shared memory, its own or that of the cluster's other block. Places by lane are
//! turned round there too, so that everything leaves in order. A stable sort has one result: which
//! kernel made it cannot be seen.
//!
//! Bytes a lane: 4 or 8 of the id in, 12 out.
#pragma once

#include <cstdlib>

#include <cuda_runtime_api.h>

#include "sdm_kernels/sdm/cuda/sdm_cuda_plan.h"
#include "sdm_kernels/sdm/cuda/sdm_sort.cuh"

namespace sdm::cuda {

constexpr int kChunkItems = 32;  // words of a thread
constexpr int kLoadItems = 4;    // whose ids are on their way together

template <int kSortThreads>
struct ChunkSortStorage {
  uint32_t places[kSortThreads / 32][kDigits];  // words of a digit in a warp; then the next place
  uint32_t totals[kDigits];
  uint32_t warps[32];
  uint32_t count;
  uint32_t words[kSortThreads * kChunkItems];
};

// A word of shared memory of a block of the cluster.
template <int kCluster>
struct ClusterWords {
  uint32_t base[kCluster];  // addresses in the cluster's window

  __device__ __forceinline__ explicit ClusterWords(const uint32_t* words) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(words));
#pragma unroll
    for (int rank = 0; rank < kCluster; ++rank) {
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(base[rank]) : "r"(own), "r"(rank));
    }
#endif
  }

  __device__ __forceinline__ uint32_t load(int rank, int i) const {
    uint32_t x = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(base[rank] + i * 4) : "memory");
#endif
    return x;
  }

  // Of all blocks' words one after the other, kEach each.
  template <uint32_t kEach>
  __device__ __forceinline__ void store(uint32_t i, uint32_t x) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    static_assert(kCluster == 2);
    const uint32_t at = (i >= kEach ? base[1] : base[0]) + i % kEach * 4;
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
#endif
  }
};

template <int kCluster>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
}

// Where the ids of a chunk lie; everything inside it fits 32 bits.
struct ChunkIds {
  const char* first;
  int32_t token_stride, lane_stride;  // bytes
  int high;                           // from an element's low half to its high half

  __device__ __forceinline__ ChunkIds(const IndexView& view, const ChunkPlace& place)
      : high(high_half(view)) {
    const int size = 4 + high;
    first = element_at(view, token_offset(view, place, 0), size);
    token_stride = static_cast<int32_t>(view.stride[1]) * size;
    lane_stride = static_cast<int32_t>(view.stride[3]) * size;
  }
};

// The words of a thread from the ids: item i is lane first + i * 32. Keeps the slots by lane.
// Bit i of the result is set where there is one.
__device__ __forceinline__ unsigned load_chunk_words(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    int64_t q,
    int32_t first,
    uint32_t (&words)[kChunkItems]
) {
  const int32_t n = p.records.n, num_tokens = static_cast<int32_t>(place.num_tokens);
  const ChunkIds writes(p.in.tokens.write_idx, place), reads(p.in.tokens.read_idx, place);
  int32_t* slots = p.slots + q * n;
  unsigned used = 0;
#pragma unroll
  for (int batch = 0; batch < kChunkItems; batch += kLoadItems) {
    RawId ids[kLoadItems];
    int high[kLoadItems];
    bool real[kLoadItems];
#pragma unroll
    for (int k = 0; k < kLoadItems; ++k) {
      const int32_t lane = first + (batch + k) * 32;
      // others load one that there is: no branch, so that all loads are on their way together
      const LaneId id = split_lane(p, min(lane, n - 1));
      const int32_t token = min(id.token, num_tokens - 1);
      high[k] = id.write ? writes.high : reads.high;
      real[k] = lane < n && id.token < num_tokens;
      const char* at =
          (id.write ? writes.first : reads.first) +
          static_cast<int64_t>(token) * (id.write ? writes.token_stride : reads.token_stride) +
          static_cast<int64_t>(id.a) * (id.write ? writes.lane_stride : reads.lane_stride);
      ids[k] = load_id(at, high[k]);
    }
#pragma unroll
    for (int k = 0; k < kLoadItems; ++k) {
      const int item = batch + k;
      const int32_t lane = first + item * 32;
      int32_t slot = id_below(ids[k], high[k], static_cast<int>(p.in.dims.S));
      slot = real[k] ? slot : -1;
      if (lane < n) {
        slots[lane] = slot;
      }
      used |= slot >= 0 ? 1u << item : 0u;
      words[item] = static_cast<uint32_t>(slot) << p.lane_bits | static_cast<uint32_t>(lane);
    }
  }
  return used;
}

// Gives each word of a warp its place, in order, and puts it there. `places`: the next one of each
// digit, of this warp. Digits have at most kBits bits.
template <int kBits, int kSortThreads, int kCluster>
__device__ __forceinline__ void scatter_words(
    const uint32_t (&words)[kChunkItems],
    unsigned used,
    int shift,
    uint32_t mask,
    uint32_t* places,
    uint32_t* s_words,
    const ClusterWords<kCluster>& cluster
) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int item = 0; item < kChunkItems; ++item) {
    const bool here = (used >> item & 1u) != 0;
    const unsigned digit = words[item] >> shift & mask;
    const unsigned peers = match_bits<kBits>(digit, __ballot_sync(kAllLanes, here));
    uint32_t place = 0;
    if (here) {
      place = places[digit];
    }
    __syncwarp();  // all have read it
    if (here && peers >> lane == 1) {
      places[digit] = place + static_cast<uint32_t>(__popc(peers));
    }
    __syncwarp();  // the next word of the digit reads it
    place += static_cast<uint32_t>(__popc(peers & ((1u << lane) - 1)));
    if (here) {
      if constexpr (kCluster == 1) {
        s_words[place] = words[item];
      } else {
        cluster.template store<kSortThreads * kChunkItems>(place, words[item]);
      }
    }
  }
}

// Grid: num_q clusters. At most kCluster * kSortThreads * kChunkItems lanes a chunk.
template <int kSortThreads, int kCluster>
__global__ void __launch_bounds__(kSortThreads, 1024 / kSortThreads) sdm_sort_chunk_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  constexpr int kSortWarps = kSortThreads / 32;
  constexpr uint32_t kBlockWords = kSortThreads * kChunkItems;
  extern __shared__ __align__(16) unsigned char sort_memory[];
  auto& s = *reinterpret_cast<ChunkSortStorage<kSortThreads>*>(sort_memory);
  const SdmDims& dims = p.in.dims;
  const int64_t q = blockIdx.x / kCluster;
  const int rank = static_cast<int>(blockIdx.x % kCluster);
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int32_t n = p.records.n;
  wait_for_previous();
  ChunkPlace place{0, 0, 0, 0};
  const bool exists = find_chunk(dims, p.in.sequences, p.window, q, &place);
  if (rank == 0) {
    const FloatView& view = p.in.tokens.beta;
    for (int32_t i = static_cast<int32_t>(thread); i < dims.C; i += kSortThreads) {
      p.records.beta[q * dims.C + i] =
          i < place.num_tokens ? raw_value(view, load_raw(view, token_offset(view, place, i)))
                               : 0.0f;
    }
    if (!exists && thread == 0) {
      p.records.group_count[q] = make_int2(0, 0);
    }
  }
  if (!exists) {
    return;
  }
  const ClusterWords<kCluster> words_of(s.words), totals_of(s.totals);
  // of this block; the cluster's words follow each other
  const uint32_t own_first = warp * kChunkItems * 32 + lane;
  const uint32_t first = static_cast<uint32_t>(rank) * kBlockWords + own_first;
  uint32_t words[kChunkItems];
  unsigned used = load_chunk_words(p, place, q, static_cast<int32_t>(first), words);
  uint32_t count = 0;
#pragma unroll 1
  for (int pass = 0; pass < p.passes; ++pass) {
    const int shift = p.lane_bits + pass * p.digit_bits;
    uint32_t* own_places = s.places[warp];
#pragma unroll
    for (int i = 0; i < kDigits; i += 32) {
      own_places[i + static_cast<int>(lane)] = 0;
    }
    __syncwarp();  // the counts are zero before anyone adds
    const uint32_t mask = (1u << p.digit_bits) - 1;
#pragma unroll
    for (int item = 0; item < kChunkItems; ++item) {
      if ((used >> item & 1u) != 0) {
        atomicAdd(own_places + (words[item] >> shift & mask), 1u);
      }
    }
    __syncthreads();  // all warps have counted, and hold their words
    uint32_t total = 0, before = 0;
    if (thread < kDigits) {
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) {
        total += s.places[w][thread];
      }
    }
    if constexpr (kCluster > 1) {
      if (thread < kDigits) {
        s.totals[thread] = total;
      }
      sync_cluster<kCluster>();  // all blocks have counted
      if (thread < kDigits) {
        total = 0;
#pragma unroll
        for (int r = 0; r < kCluster; ++r) {
          const uint32_t theirs = totals_of.load(r, static_cast<int>(thread));
          before += r < rank ? theirs : 0;
          total += theirs;
        }
      }
    }
    const uint32_t digit_first = block_sum_before(total, s.warps);
    if (thread < kDigits) {
      uint32_t next = digit_first + before;
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) {
        const uint32_t words_of_warp = s.places[w][thread];
        s.places[w][thread] = next;
        next += words_of_warp;
      }
      if (thread == kDigits - 1) {
        s.count = digit_first + total;
      }
    }
    __syncthreads();  // the warps know their places
    count = s.count;
    if (p.digit_bits == 8) {
      scatter_words<8, kSortThreads>(words, used, shift, mask, own_places, s.words, words_of);
    } else {
      scatter_words<7, kSortThreads>(words, used, shift, mask, own_places, s.words, words_of);
    }
    sync_cluster<kCluster>();  // all words are there
    used = 0;
#pragma unroll
    for (int item = 0; item < kChunkItems; ++item) {
      words[item] = s.words[own_first + static_cast<uint32_t>(item) * 32];
      used |= first + static_cast<uint32_t>(item) * 32 < count ? 1u << item : 0u;
    }
  }
  if (rank == 0 && thread == 0) {
    p.records.entry_count[q] = static_cast<int32_t>(count);
  }
  uint32_t* sorted = const_cast<uint32_t*>(static_cast<const uint32_t*>(p.sorted)) + q * n;
#pragma unroll
  for (int item = 0; item < kChunkItems; ++item) {
    if ((used >> item & 1u) != 0) {
      sorted[first + static_cast<uint32_t>(item) * 32] = words[item];
    }
  }
  sync_cluster<kCluster>();  // the words' memory is free
  if (count < static_cast<uint32_t>(n)) {
#pragma unroll 8
    for (int item = 0; item < kChunkItems; ++item) {
      s.words[own_first + static_cast<uint32_t>(item) * 32] = ~0u;
    }
    sync_cluster<kCluster>();  // no lane has a place yet
  }
#pragma unroll
  for (int item = 0; item < kChunkItems; ++item) {
    if ((used >> item & 1u) != 0) {
      const uint32_t at = static_cast<uint32_t>(lane_of(p, words[item]));
      const uint32_t its_place = first + static_cast<uint32_t>(item) * 32;
      if constexpr (kCluster == 1) {
        s.words[at] = its_place;
      } else {
        words_of.template store<kSortThreads * kChunkItems>(at, its_place);
      }
    }
  }
  sync_cluster<kCluster>();  // the places are there
  int32_t* positions = p.records.position + q * n;
#pragma unroll 8
  for (int item = 0; item < kChunkItems; ++item) {
    const uint32_t at = first + static_cast<uint32_t>(item) * 32;
    if (at < static_cast<uint32_t>(n)) {
      positions[at] = static_cast<int32_t>(s.words[own_first + static_cast<uint32_t>(item) * 32]);
    }
  }
}

// Blocks that sort a chunk of narrow words together, 0 where they have no room.
inline int chunk_sort_blocks(const SdmPhase1Params& p, const CardLimits& card) {
  // 32 bits for what lies inside a chunk
  const auto near = [](const IndexView& view) {
    const int64_t most = INT32_MAX / (view.is_int64 ? 8 : 4);
    return std::abs(view.stride[1]) <= most && std::abs(view.stride[3]) <= most;
  };
  constexpr int32_t kMost = 1024 * kChunkItems;
  if (!near(p.in.tokens.write_idx) || !near(p.in.tokens.read_idx) ||
      card.shared_memory < static_cast<int64_t>(sizeof(ChunkSortStorage<1024>))) {
    return 0;
  }
  return p.records.n <= kMost ? 1 : p.records.n <= 2 * kMost && card.overlap ? 2 : 0;
}

template <int kSortThreads, int kCluster>
cudaError_t launch_sort_chunk(
    const SdmPhase1Params& p, const CardLimits& card, cudaStream_t stream
) {
  constexpr int kBytes = static_cast<int>(sizeof(ChunkSortStorage<kSortThreads>));
  const auto kernel = &sdm_sort_chunk_kernel<kSortThreads, kCluster>;
  const int64_t blocks = p.records.num_q * kCluster;
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  SDM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)
  );
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = kCluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kSortThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !card.overlap ? 0 : kCluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace sdm::cuda
