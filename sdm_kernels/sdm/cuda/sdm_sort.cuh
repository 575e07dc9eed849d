// SPDX-License-Identifier: Apache-2.0
//! @file Phase 1, sort: the entries of every chunk of a window ordered by slot, and what all stages
//! of phase 1 share.
//!
//! A word holds slot << lane_bits | lane: 32 bits when both fit, as they usually do, else 64. Lanes
//! without an entry get none. A stable radix sort of each chunk by itself, at most 8 bits of the
//! slot a pass, leaves [q][0, entry_count) sorted by (slot, lane). As write lanes precede read
//! lanes and both run by token, a group comes out as the specification wants it: writes first, each
//! kind in token order.
//!
//! A pass counts the digits of every tile of kSortTile words, then places them: a block knows its
//! places from the counts of all tiles of its chunk, ranks its words in warps, and writes them
//! through shared memory, so that words of one digit leave together. The first pass makes slots of
//! the ids, and of these the words; the last one tells every lane its place. Bytes a lane: 4 or 8
//! of the id in, 8 out, then three words a pass. Most chunks are sorted by sdm_sort_chunk.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "sdm_kernels/cuda/raw_load.cuh"
#include "sdm_kernels/sdm/cuda/sdm_chunk.cuh"
#include "sdm_kernels/sdm/cuda/sdm_records.cuh"

namespace sdm::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 2048;  // sorted entries of a block
constexpr int kTileRows = kTile / 32;
constexpr int kSortItems = 16;  // words of a thread
constexpr int kSortTile = kThreads * kSortItems;
constexpr int kDigits = 256;    // of 8 bits
constexpr int kMaxChunk = 256;  // rows in shared memory of gram and solve
constexpr unsigned kAllLanes = 0xffffffffu;

// Division of numbers below 2^31 by a fixed one.
struct FastDivide {
  uint32_t divisor, factor, shift;

  static FastDivide by(uint32_t divisor) {
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t factor =
        ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1;
    return {divisor, static_cast<uint32_t>(factor), shift};
  }

  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return (__umulhi(n, factor) + n) >> shift;
  }
};

// A tile of sorted entries by itself. Positions count from the chunk's first entry, -1: none.
struct SdmTileState {
  double lead_sum;                      // gates up to the first head
  double tail_sum;                      // gates from the last head on, all gates without a head
  int32_t with_writes, without_writes;  // heads of groups with writes, of reads only
  int32_t first_head;
  int32_t first_bound;  // the first head or first read after a write
  int32_t last_head;
  int32_t last_writes;  // 1: the last head is a write
};

// Arguments of all kernels of phase 1.
struct SdmPhase1Params {
  SdmCudaInputs in;
  SdmWindow window;
  SdmRecords records;
  bool gram;
  FastDivide by_writes, by_reads;
  int32_t lane_bits;
  int32_t digit_bits;
  int32_t pass, passes;      // of the sort
  int32_t sort_tiles;        // ceil(n / kSortTile)
  int32_t tiles;             // ceil(n / kTile)
  void* words[2];            // [q][n]; a pass goes from one to the other
  const void* sorted;        // [q][n] after the last pass
  uint32_t* digits;          // [q][sort_tiles][kDigits]
  int32_t* slots;            // [q][n] by lane, -1: no entry
  SdmTileState* tile_state;  // [q][tiles]
  double* local_log;         // [q][n] sorted: sum of the group's gates up to the entry, in its tile
  float* scaled_a;           // [q][Cp][Cp] A[i,j] * beta[j], strictly lower, zero elsewhere
};

// Element 0 of token i of the chunk.
template <typename View>
__device__ __forceinline__ int64_t token_offset(const View& view, const ChunkPlace& place, int i) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2];
}

// The place of a view's element in memory, for raw loads.
template <typename View>
const __device__ __forceinline__ char* element_at(const View& view, int64_t at, int size) {
  return static_cast<const char*>(view.data) + at * size;
}

__device__ __forceinline__ int high_half(const IndexView& view) {
  return view.is_int64 ? 4 : 0;
}

__device__ __forceinline__ int high_half(const FloatView& view) {
  return view.dtype == DType::kF32 ? 2 : 0;
}

__device__ __forceinline__ RawFloat load_raw(const FloatView& view, int64_t at) {
  const int high = high_half(view);
  return load_raw(element_at(view, at, 2 + high), high);
}

__device__ __forceinline__ float raw_value(const FloatView& view, const RawFloat& raw) {
  return raw_value(raw, high_half(view), view.dtype == DType::kF16);
}

// As load_raw, but a narrow element is one load.
__device__ __forceinline__ RawFloat load_narrow(const char* from, int high) {
  RawFloat raw{0, __ldg(reinterpret_cast<const unsigned short*>(from + high))};
  if (high != 0) {
    raw.low = __ldg(reinterpret_cast<const unsigned short*>(from));
  }
  return raw;
}

// The lanes of the warp that have the same kBits lowest bits of x as this one, of those in `among`.
// Votes: faster than __match_any_sync where most lanes differ.
template <int kBits>
__device__ __forceinline__ unsigned match_bits(unsigned x, unsigned among) {
  unsigned peers = among;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    unsigned same;
    asm volatile(
        "{\n"
        ".reg .pred one;\n"
        "and.b32 %0, %1, %2;\n"
        "setp.ne.u32 one, %0, 0;\n"
        "vote.sync.ballot.b32 %0, one, 0xffffffff;\n"
        "@!one not.b32 %0, %0;\n"
        "}"
        : "=&r"(same)
        : "r"(x), "r"(1u << bit)
    );
    peers &= same;
  }
  return peers;
}

// A lane number taken apart.
struct LaneId {
  bool write;
  int32_t token;
  int32_t a;
};

__device__ __forceinline__ LaneId split_lane(const SdmPhase1Params& p, int32_t lane) {
  const uint32_t writes = static_cast<uint32_t>(p.in.dims.C * p.in.dims.W);
  const bool write = static_cast<uint32_t>(lane) < writes;
  const uint32_t local = static_cast<uint32_t>(lane) - (write ? 0u : writes);
  const FastDivide& by = write ? p.by_writes : p.by_reads;
  const uint32_t token = by(local);
  return {write, static_cast<int32_t>(token), static_cast<int32_t>(local - token * by.divisor)};
}

// Where the weights, gates or ids of a chunk lie.
struct ChunkView {
  const char* first;
  int64_t token_stride, lane_stride;  // bytes
  int high;                           // from an element's low half to its high half

  template <typename View>
  __device__ __forceinline__ ChunkView(const View& view, const ChunkPlace& place, int narrow)
      : high(high_half(view)) {
    const int size = narrow + high;
    first = element_at(view, token_offset(view, place, 0), size);
    token_stride = view.stride[1] * size;
    lane_stride = view.stride[3] * size;
  }
};

// Of either kind. Field by field: a choice of structures would put them into memory.
const __device__ __forceinline__ char* lane_element(
    const ChunkView& write, const ChunkView& read, const LaneId& id
) {
  return (id.write ? write.first : read.first) +
         id.token * (id.write ? write.token_stride : read.token_stride) +
         id.a * (id.write ? write.lane_stride : read.lane_stride);
}

template <typename Word>
__device__ __forceinline__ int32_t lane_of(const SdmPhase1Params& p, Word word) {
  return static_cast<int32_t>(word & ((Word{1} << p.lane_bits) - 1));
}

template <typename Word>
__device__ __forceinline__ int32_t slot_of(const SdmPhase1Params& p, Word word) {
  return static_cast<int32_t>(word >> p.lane_bits);
}

template <typename Word>
__device__ __forceinline__ int digit_of(const SdmPhase1Params& p, Word word) {
  return static_cast<int>(
      word >> (p.lane_bits + p.pass * p.digit_bits) & ((Word{1} << p.digit_bits) - 1)
  );
}

// A block's tile of a chunk.
struct TilePlace {
  int64_t q;
  int32_t tile;
};

__device__ __forceinline__ TilePlace tile_place(int32_t tiles) {
  return {
      blockIdx.x / static_cast<uint32_t>(tiles),
      static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(tiles))
  };
}

// The first lane, or sorted entry, of a thread: item i of warp w is number
// tile + (w * kSortItems + i) * 32 + lane.
__device__ __forceinline__ int32_t first_item(const TilePlace& at) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  return at.tile * kSortTile + warp * kSortItems * 32 + static_cast<int32_t>(threadIdx.x % 32);
}

// Slots of the lanes of a thread from the ids, -1 for a lane without an entry.
__device__ __forceinline__ void load_slots(
    const SdmPhase1Params& p,
    const ChunkPlace& place,
    const TilePlace& at,
    int32_t (&slots)[kSortItems]
) {
  const int32_t first = first_item(at), n = p.records.n;
  const ChunkView writes(p.in.tokens.write_idx, place, 4), reads(p.in.tokens.read_idx, place, 4);
  RawId ids[kSortItems];
#pragma unroll
  for (int item = 0; item < kSortItems; ++item) {
    const int32_t lane = first + item * 32;
    const LaneId id = split_lane(p, lane);
    ids[item] = {~0u, ~0u};
    if (lane < n && id.token < place.num_tokens) {
      ids[item] = load_id(lane_element(writes, reads, id), id.write ? writes.high : reads.high);
    }
  }
  const int32_t end_writes = static_cast<int32_t>(p.in.dims.C * p.in.dims.W);
#pragma unroll
  for (int item = 0; item < kSortItems; ++item) {
    const int high = first + item * 32 < end_writes ? writes.high : reads.high;
    slots[item] = id_below(ids[item], high, static_cast<int>(p.in.dims.S));
  }
}

// The words of a thread. `used`: bit i is set where there is one. kFirst: made from the slots that
// the count kernel left.
template <typename Word, bool kFirst>
__device__ __forceinline__ unsigned load_words(
    const SdmPhase1Params& p, const TilePlace& at, Word (&words)[kSortItems]
) {
  const int32_t first = first_item(at);
  const int64_t own = at.q * p.records.n + first;
  const int32_t rest = (kFirst ? p.records.n : p.records.entry_count[at.q]) - first;
  unsigned used = 0;
  if constexpr (kFirst) {
    const int32_t* from = p.slots + own;
#pragma unroll
    for (int item = 0; item < kSortItems; ++item) {
      words[item] = static_cast<Word>(item * 32 < rest ? from[item * 32] : -1);
    }
#pragma unroll
    for (int item = 0; item < kSortItems; ++item) {
      used |= static_cast<int32_t>(words[item]) >= 0 ? 1u << item : 0u;
      words[item] = words[item] << p.lane_bits | static_cast<Word>(first + item * 32);
    }
  } else {
    const Word* from = static_cast<const Word*>(p.words[(p.pass + 1) % 2]) + own;
#pragma unroll
    for (int item = 0; item < kSortItems; ++item) {
      words[item] = 0;
      if (item * 32 < rest) {
        words[item] = from[item * 32];
        used |= 1u << item;
      }
    }
  }
  return used;
}

// Grid: num_q * sort_tiles blocks.
template <typename Word, bool kFirst>
__global__ void __launch_bounds__(kThreads, kFirst ? 3 : 4) sdm_sort_count_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ uint32_t s_digits[kDigits];
  const SdmDims& dims = p.in.dims;
  const TilePlace at = tile_place(p.sort_tiles);
  ChunkPlace place{0, 0, 0, 0};
  const bool exists = find_chunk(dims, p.in.sequences, p.window, at.q, &place);
  if (kFirst && at.tile == 0) {
    const FloatView& view = p.in.tokens.beta;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < dims.C; i += kThreads) {
      p.records.beta[at.q * dims.C + i] =
          i < place.num_tokens ? raw_value(view, load_raw(view, token_offset(view, place, i)))
                               : 0.0f;
    }
    if (!exists && threadIdx.x == 0) {
      p.records.group_count[at.q] = make_int2(0, 0);
    }
  }
  if (!exists) {
    return;
  }
  s_digits[threadIdx.x] = 0;
  __syncthreads();  // the counts are zero before anyone adds
  if constexpr (kFirst) {
    int32_t slots[kSortItems];
    load_slots(p, place, at, slots);
    const int32_t first = first_item(at);
    const int64_t own = at.q * p.records.n + first;
#pragma unroll
    for (int item = 0; item < kSortItems; ++item) {
      if (slots[item] >= 0) {
        atomicAdd(&s_digits[slots[item] & ((1 << p.digit_bits) - 1)], 1u);
      }
      if (first + item * 32 < p.records.n) {
        p.slots[own + item * 32] = slots[item];
        if (slots[item] < 0) {
          p.records.position[own + item * 32] = -1;
        }
      }
    }
  } else {
    Word words[kSortItems];
    const unsigned used = load_words<Word, false>(p, at, words);
#pragma unroll
    for (int item = 0; item < kSortItems; ++item) {
      if (used >> item & 1u) {
        atomicAdd(&s_digits[digit_of(p, words[item])], 1u);
      }
    }
  }
  __syncthreads();  // the counts are complete
  p.digits[(at.q * p.sort_tiles + at.tile) * kDigits + threadIdx.x] = s_digits[threadIdx.x];
}

// The sum of x over the block's threads before this one.
__device__ __forceinline__ uint32_t block_sum_before(uint32_t x, uint32_t* s_warps) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = x;
#pragma unroll
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, sum, offset);
    sum += lane >= offset ? before : 0;
  }
  if (lane == 31) {
    s_warps[warp] = sum;
  }
  __syncthreads();  // the warps' sums are there
  uint32_t base = 0;
  for (unsigned w = 0; w < warp; ++w) {
    base += s_warps[w];
  }
  __syncthreads();  // s_warps may be written again
  return base + sum - x;
}

template <typename Word>
struct PlaceStorage {
  uint32_t ranks[kWarps][kDigits];  // words of a digit in a warp; then the first one's place
  uint32_t first[kDigits];          // of a digit: its place in the chunk less its place in the tile
  uint32_t warps[kWarps];
  uint32_t count;
  Word words[kSortTile];
};

// Grid: num_q * sort_tiles blocks.
template <typename Word, bool kFirst>
__global__ void __launch_bounds__(kThreads, sizeof(Word) == 4 ? 4 : 2) sdm_sort_place_kernel(
    const __grid_constant__ SdmPhase1Params p
) {
  __shared__ PlaceStorage<Word> s;
  const int32_t n = p.records.n;
  const TilePlace at = tile_place(p.sort_tiles);
  ChunkPlace place;
  if (!find_chunk(p.in.dims, p.in.sequences, p.window, at.q, &place)) {
    return;
  }
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    s.ranks[w][thread] = 0;
  }
  Word words[kSortItems];
  const unsigned used = load_words<Word, kFirst>(p, at, words);
  // words of this thread's digit in the tiles before, in all tiles
  uint32_t before = 0, all = 0;
  const uint32_t* digits = p.digits + at.q * p.sort_tiles * kDigits + thread;
#pragma unroll 8
  for (int32_t t = 0; t < p.sort_tiles; ++t) {
    const uint32_t count = digits[t * kDigits];
    before += t < at.tile ? count : 0;
    all += count;
  }
  const uint32_t digit_base = block_sum_before(all, s.warps);
  if (kFirst && at.tile == 0 && thread == kThreads - 1) {
    p.records.entry_count[at.q] = static_cast<int32_t>(digit_base + all);
  }

  unsigned short ranks[kSortItems];
#pragma unroll
  for (int item = 0; item < kSortItems; ++item) {
    const bool here = used >> item & 1u;
    const int digit = digit_of(p, words[item]);
    const unsigned peers =
        match_bits<8>(static_cast<unsigned>(digit), __ballot_sync(kAllLanes, here));
    const int leader = here ? __ffs(static_cast<int>(peers)) - 1 : static_cast<int>(lane);
    uint32_t rank = 0;
    if (here && static_cast<int>(lane) == leader) {
      rank = s.ranks[warp][digit];
      s.ranks[warp][digit] = rank + static_cast<uint32_t>(__popc(peers));
    }
    __syncwarp();  // the next leader of the digit reads the count
    rank = __shfl_sync(kAllLanes, rank, leader);
    ranks[item] = static_cast<unsigned short>(
        rank + static_cast<uint32_t>(__popc(peers & ((1u << lane) - 1)))
    );
  }
  __syncthreads();  // all warps have counted
  uint32_t own = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const uint32_t count = s.ranks[w][thread];
    s.ranks[w][thread] = own;
    own += count;
  }
  const uint32_t start = block_sum_before(own, s.warps);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    s.ranks[w][thread] += start;
  }
  s.first[thread] = digit_base + before - start;
  if (thread == kThreads - 1) {
    s.count = start + own;
  }
  __syncthreads();  // places are known
#pragma unroll
  for (int item = 0; item < kSortItems; ++item) {
    if (used >> item & 1u) {
      s.words[s.ranks[warp][digit_of(p, words[item])] + ranks[item]] = words[item];
    }
  }
  __syncthreads();  // the tile is sorted
  Word* to = static_cast<Word*>(p.words[p.pass % 2]) + at.q * n;
  int32_t* position = p.records.position + at.q * n;
  const bool last = p.pass + 1 == p.passes;
  for (uint32_t i = thread; i < s.count; i += kThreads) {
    const Word word = s.words[i];
    const uint32_t place_of_word = s.first[digit_of(p, word)] + i;
    to[place_of_word] = word;
    // while little else is written, so that whole sectors leave L2
    if (last) {
      position[lane_of(p, word)] = static_cast<int32_t>(place_of_word);
    }
  }
}

}  // namespace sdm::cuda
