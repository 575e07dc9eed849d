// SPDX-License-Identifier: Apache-2.0
//! @file What the kernels that work on one chunk of every stream share.
//!
//! The sequential part of a call is a loop of the host over chunks; a chunk is three launches:
//! forward sdm_gather.cuh, sdm_fwd_solve.cuh, sdm_update.cuh; backward sdm_bwd_gather.cuh,
//! sdm_bwd_solve.cuh, sdm_bwd_walk.cuh or sdm_bwd_rows.cuh. Token rows travel between them in float
//! scratch of [stream][Cp][D], which stays in L2. A launch costs about as much as a barrier among
//! the blocks of one stream would, and leaves each stage its own registers, shared memory and split
//! of the work. (All stages in one resident kernel were tried first: the compiler kept what they
//! share alive through all of them and spilled in every inner loop, and one shape of block had to
//! serve all.)
#pragma once

#include <cstddef>

#include "sdm_kernels/cuda/async_copy.cuh"
#include "sdm_kernels/cuda/row_ring.cuh"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"

namespace sdm::cuda {

// Row pieces that a thread keeps in flight.
constexpr int kRingDepth = 8;

// Rows that chunks make in the place of those of a bank (sdm_sources.h). A code counts them from
// rows + sequence * stride[0] + head * stride[1].
struct SdmLog {
  void* rows;  // null: none
  int64_t stride[2];
  bool by_slot;  // a slot has one row, its own; otherwise every chunk has rows for all that it
                 // writes, from first_row of the sequence on
};

struct SdmChunkParams {
  SdmDims dims;
  SdmWindow window;
  int64_t k;                     // the chunk, counted from the start of the window
  const SdmSequence* sequences;  // [N]
  SdmRecords records;
  const float* product;    // [q][Cp][Cp] qk * inverse (sdm_merge.h)
  FloatView v;             // forward
  BankView bank;           // forward: advanced in place; backward: at the end; replay: at the start
  void* out;               // forward: [B, T, H, D] in v's dtype
  float* errors;           // [B, T, H, D]; forward: written unless null; otherwise read
  SdmSaved saved;          // rows or checkpoints of the forward
  SdmLog log;              // forward
  void* replay_rows;       // replay: [N * H][chunks of a window but the last][rows of a chunk][D]
  FloatView d_out;         // backward
  const int* source_rows;  // backward: SdmSources::row
  BankView grad;           // backward: gradient of the bank
  void* d_v;               // backward: [B, T, H, D] in d_out's dtype
  SdmDots dots;            // backward
  __half* token_halves;    // backward: token records (sdm_token_record.cuh), null: none
  uint8_t* token_scales;
  float* x;  // [N * H][Cp][D]: v - retrieved, then errors; backward: gathered
  float* y;  // forward: [N * H][Cp][D], readings
  int64_t num_slices;
  int parts;           // blocks that share the slots (update, walk) or none
  bool token_vectors;  // v and out (or d_out and d_v) rows are on 16-byte boundaries
};

// A launch that may overlap the one before it (launch_blocks): its blocks come in as those of the
// other go, and wait here until all of them are done and what they wrote can be seen. Every block
// must pass here. Before that it may read only what older launches have written: records.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of numbers of blocks and streams, which fit 31 bits: a division of 64 bits takes four times as
// long, and every block begins with several.
__device__ __forceinline__ int quotient(int64_t x, int64_t y) {
  return static_cast<int>(static_cast<uint32_t>(x) / static_cast<uint32_t>(y));
}

__device__ __forceinline__ int remainder(int64_t x, int64_t y) {
  return static_cast<int>(static_cast<uint32_t>(x) % static_cast<uint32_t>(y));
}

// The chunk of a stream.
struct StreamChunk {
  int64_t stream, head, sequence;
  int64_t q;  // its record
  ChunkPlace place;
  bool exists;

  __device__ __forceinline__ StreamChunk(const SdmChunkParams& p, int64_t stream_)
      : stream(stream_), head(remainder(stream_, p.dims.H)), sequence(quotient(stream_, p.dims.H)) {
    const SdmSequence& s = p.sequences[sequence];
    const int64_t chunk = p.window.first_chunk + p.k;
    exists = s.bank >= 0 && chunk < s.num_chunks;
    q = (sequence * p.window.chunks + p.k) * p.dims.H + head;
    place = chunk_place(s, head, chunk, p.dims.C);
  }

  // First row of the scratch of token rows.
  __device__ __forceinline__ int64_t scratch(const SdmChunkParams& p) const {
    return stream * p.records.Cp * p.dims.D;
  }
};

// The row of a token in a contiguous [B, T, H, D] tensor.
__device__ __forceinline__ int64_t
token_row(const SdmDims& dims, const ChunkPlace& place, int64_t i) {
  return ((place.batch * dims.T + place.token + i) * dims.H + place.head) * dims.D;
}

__device__ __forceinline__ int64_t
view_row(const FloatView& view, const ChunkPlace& place, int64_t i) {
  return place.batch * view.stride[0] + (place.token + i) * view.stride[1] +
         place.head * view.stride[2];
}

// A contiguous [rows, D] float tensor as a view whose token rows token_row() or scratch() give.
__device__ __forceinline__ FloatView float_rows(const float* data) {
  return {data, DType::kF32, {0, 0, 0, 1}};
}

// The rows of the forward's log that codes of a stream count from.
template <typename S>
__device__ __forceinline__ S* log_rows(const SdmChunkParams& p, const StreamChunk& c) {
  return static_cast<S*>(p.log.rows) + c.sequence * p.log.stride[0] + c.head * p.log.stride[1];
}

// Starts the fetch of a lane's part of a row into a slot of the ring; a row that is not `valid`
// reads as zeros.
template <typename S, bool kAligned, typename Ring>
__device__ __forceinline__ void fetch_lane(
    const Ring& ring, int slot, const S* lane, int count, bool valid
) {
  if constexpr (kAligned) {
    ring.issue(slot, lane, valid && count > 0);
  } else {
    Piece<S> piece;
    if (valid) {
      piece = load_lane<S, kAligned>(lane, count);
    }
    ring.put(slot, piece.raw);
  }
}

template <typename S, typename Ring>
__device__ __forceinline__ Piece<S> fetched_piece(const Ring& ring, int slot) {
  Piece<S> piece;
  piece.raw = ring.get(slot);
  return piece;
}

}  // namespace sdm::cuda
