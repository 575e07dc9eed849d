// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the token recurrence of one stream and one slice of columns in one block, in
//! place.
//!
//! Bound by latency, so it is one chain: ids, rows, one sum, store. All rows of a token, written
//! and read, are fetched as soon as their ids are there, kLanes lanes of 16 bytes a row; while they
//! come, the block finds out which slots are named twice and which reads see the token's own write.
//! With k', q' the weights times the decay of the slot and c = sum of q key over the reads of
//! written slots (key: sum of k over the slot's lanes),
//!
//!     delta = beta (v - sum of k' old row)      out = sum of q' old row + c delta
//!
//! so one pass over the old rows gives both sums, and the new rows, decay old + key delta, are
//! stored and not read back.
//!
//! Row a belongs to group a % 32 of lanes. A group adds its rows in order, the groups' sums are
//! added in pairs, always the same ones: bits do not depend on how wide a slice is, nor on whether
//! a thread works for one group or two, so that these are chosen to fill the device.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_cuda.h"
#include "sdm_kernels/sdm/cuda/sdm_row.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_lanes.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_rows.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_shape.cuh"

namespace sdm::cuda {

// kHeld: rows of either kind and group that a lane keeps in registers; kMore: there may be further
// ones, which are fetched twice. Grid: slices, heads, sequences.
template <typename S, typename View, bool kAligned, int kLanes, int kSets, int kHeld, bool kMore>
__global__ void __launch_bounds__(
    StepShape<S, kLanes, kSets>::kThreads, StepShape<S, kLanes, kSets>::kBlocks
) sdm_step_kernel(const __grid_constant__ SdmStepParams<View> p) {
  using Shape = StepShape<S, kLanes, kSets>;
  constexpr int kThreads = Shape::kThreads;
  constexpr int kColumns = Shape::kColumns;
  constexpr int V = kVec<S>;
  constexpr int kPlaces = 32 / kLanes;      // threads with different groups in a warp
  constexpr int kKindRows = kSets * kHeld;  // written rows of a thread, and read ones
  // rows of a warp that a lane looks up for all
  constexpr int kLooked = (2 * kKindRows * kPlaces + 31) / 32;
  extern __shared__ __align__(16) unsigned char step_memory[];
  float* s_parts = reinterpret_cast<float*>(step_memory);
  float* s_delta = s_parts + Shape::kWarps * Shape::kSums;
  float* s_overlap = s_delta + kColumns;
  int* s_shared = reinterpret_cast<int*>(s_overlap + 1);
  const int W = p.W, R = p.R;
  unsigned char* lanes_memory = reinterpret_cast<unsigned char*>(s_overlap + 4);
  const int2 rows = make_int2(
      static_cast<int>(kMore ? step_rows<kHeld>(W) : kHeld * kStepGroups),
      static_cast<int>(kMore ? step_rows<kHeld>(R) : kHeld * kStepGroups)
  );
  const StepLanes s = step_lanes(lanes_memory, rows.x, rows.y, p.table_bits);

  clear_table<kThreads>(s, p.table_bits);
  if (threadIdx.x == 0) {
    *s_shared = 0;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // the next step's blocks may come and wait, as this one waits for all that was before it
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

#pragma unroll 1
  for (int t = 0; t < p.T; ++t) {
    const int thread = here(static_cast<int>(threadIdx.x));
    __builtin_assume(thread >= 0 && thread < kThreads);  // divisions are shifts
    const int n = here(p.first_sequence + static_cast<int>(blockIdx.z));
    const int head = here(p.first_head + static_cast<int>(blockIdx.y));
    const StepToken token{n, t, head, (n * p.T + t) * p.num_heads + head};
    // Groups are added in this order of their number's bits: 4, 0, 1, 2, 3; the first ones by the
    // thread that works for such groups, the others from neighbour to neighbour.
    const auto group_at = [](int place) {
      return kSets == 4   ? place * 2
             : kSets == 2 ? place
                          : place / 2 + place % 2 * (kStepGroups / 2);
    };
    const auto number_of = [](int set, int u) {
      return set % 2 * (kStepGroups / 2) + set / 2 + u * kStepGroups;
    };
    const int group = group_at(thread / kLanes);
    const auto row_of = [&](int set, int u) { return group + number_of(set, u); };

    // The rows of a warp, each looked up by one lane: written ones, then read ones; by set, then by
    // number in the group, then by place.
    int looked_row[kLooked];
    bool looked_write[kLooked], looked[kLooked], looks[kLooked];  // looks: there is such a lane
    RawId id[kLooked];
    const char* write_ids = p.write_idx.at(token);
    const char* read_ids = p.read_idx.at(token);
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      const int at = thread % 32 + k * 32;
      const int number = at / kPlaces % kKindRows;
      const int place = thread / 32 * kPlaces + at % kPlaces;
      looked_row[k] = group_at(place) + number_of(number / kHeld, number % kHeld);
      looked_write[k] = at < kKindRows * kPlaces;
      looked[k] = at < 2 * kKindRows * kPlaces;
      looks[k] = looked[k] && looked_row[k] < (looked_write[k] ? W : R);
      id[k] = {~0u, ~0u};
      if (looks[k]) {
        const View& ids = looked_write[k] ? p.write_idx : p.read_idx;
        id[k] =
            load_id((looked_write[k] ? write_ids : read_ids) + ids.lane(looked_row[k]), ids.high);
      }
    }
    RawId state{static_cast<unsigned>(n), 0};
    if (p.state_indices != nullptr) {
      state = load_id(p.state_indices + static_cast<int64_t>(n) * (p.state_high + 4), p.state_high);
    }
    // the table is empty, the last token's rows are stored, and the loads below stay below
    __syncthreads();
    const auto load_weight = [&](bool write, int row) {
      const View& values = write ? p.write_val : p.read_val;
      return load_raw(values.at(token) + values.lane(row), values.high);
    };
    // a read takes the token's first gate and makes no use of it
    const auto load_gate = [&](bool write, int row) {
      return load_raw(p.g.at(token) + p.g.lane(p.gate_per_write && write ? row : 0), p.g.high);
    };
    RawFloat weight[kLooked], gate[kLooked];
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      weight[k] = gate[k] = {0, 0};
      if (looks[k]) {
        weight[k] = load_weight(looked_write[k], looked_row[k]);
        gate[k] = load_gate(looked_write[k], looked_row[k]);
      }
    }
    // the sums that this thread finishes: of the first threads retrievals, of the next ones
    // readings
    constexpr bool kBoth = Shape::kSums > kThreads;
    const int first_column = static_cast<int>(blockIdx.x) * kColumns;
    const int column = thread % kColumns;
    const bool retrieves = kBoth || thread < kColumns;
    const bool reads =
        (kBoth || (thread >= kColumns && thread < Shape::kSums)) && first_column + column < p.D;
    const RawFloat raw_beta = load_raw(p.beta.at(token), p.beta.high);
    RawFloat raw_v{0, 0};
    if (retrieves && first_column + column < p.D) {
      raw_v = load_raw(p.v.at(token) + p.v.lane(first_column + column), p.v.high);
    }
    const auto out_at = [&]() {
      return ((static_cast<int64_t>(here(n)) * p.T + t) * p.num_heads + head) * p.D + first_column +
             column;
    };
    const int bank_row = id_below(state, p.state_high, p.pool);
    if (bank_row < 0) {
      if (reads) {
        store_like(p.v, p.out, out_at(), 0.0f);
      }
      continue;
    }

    const int own_column = first_column + thread % kLanes * V;
    const LaneColumns at{0, max(0, min(V, p.D - own_column))};  // counted from own_column
    char* bank = p.bank + bank_row * p.bank_stride[0] + head * p.bank_stride[1] +
                 own_column * static_cast<int64_t>(sizeof(S));
    const auto row_at = [&](int slot) {
      using Unsigned = std::make_unsigned_t<typename View::Stride>;  // one instruction for 32 bits
      return reinterpret_cast<S*>(
          bank +
          static_cast<uint64_t>(static_cast<unsigned>(slot)) * static_cast<Unsigned>(p.slot_stride)
      );
    };
    int slot[kLooked];
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      slot[k] = id_below(id[k], looked_write[k] ? p.write_idx.high : p.read_idx.high, p.S);
    }
    // row `number` of a kind of this thread
    const auto slot_of = [&](bool write, int number) {
      const int first = (number + (write ? 0 : kKindRows)) * kPlaces;
      return __shfl_sync(0xffffffffu, slot[first / 32], first % 32 + thread % 32 / kLanes);
    };
    uint4 write_row[kSets][kHeld] = {}, read_row[kSets][kHeld] = {};
    int write_slot[kSets][kHeld];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int written = slot_of(true, set * kHeld + u);
        write_slot[set][u] = written;
        load_row_if<S, kAligned>(written >= 0, row_at(written), at, &write_row[set][u]);
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int read = slot_of(false, set * kHeld + u);
        load_row_if<S, kAligned>(read >= 0, row_at(read), at, &read_row[set][u]);
      }
    }

    // while the rows come
    float value[kLooked];
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      value[k] = 0.0f;
      if (looked[k]) {
        value[k] = share_step_row(
            p, s, s_shared, looked_write[k], looked_row[k], slot[k], weight[k], gate[k]
        );
      }
    }
    if constexpr (kMore) {
#pragma unroll 1
      for (int x = kHeld * kStepGroups * 2 + thread; x < 2 * max(W, R); x += kThreads) {
        const bool write = x % 2 == 0;  // the rows that no group holds, of both kinds in turn
        const int row = x / 2;
        if (row < (write ? W : R)) {
          const View& ids = write ? p.write_idx : p.read_idx;
          const RawId its_id = load_id((write ? write_ids : read_ids) + ids.lane(row), ids.high);
          share_step_row(
              p,
              s,
              s_shared,
              write,
              row,
              id_below(its_id, ids.high, p.S),
              load_weight(write, row),
              load_gate(write, row)
          );
        }
      }
    }
    __syncthreads();  // all lanes are there, and in the table
    bool overlaps = false;
    if (*s_shared == 0) {
#pragma unroll
      for (int k = 0; k < kLooked; ++k) {
        if (looked[k] && !looked_write[k]) {
          overlaps = finish_read(s, p.table_bits, looked_row[k], slot[k], value[k]) || overlaps;
        }
      }
      if constexpr (kMore) {
#pragma unroll 1
        for (int b = kHeld * kStepGroups + thread; b < R; b += kThreads) {
          overlaps = finish_read(s, p.table_bits, b, s.read_slot[b], s.read[b]) || overlaps;
        }
      }
    } else {
#pragma unroll 1
      for (int x = thread; x < W + R; x += kThreads) {
        overlaps = finish_shared(lanes_memory, rows, p.table_bits, W, x) || overlaps;
      }
    }
    const bool overlapped = __syncthreads_or(overlaps);  // the lanes are complete
    if (overlapped && thread < 32) {
      const float overlap = sum_overlap(s, R);
      if (thread == 0) {
        *s_overlap = overlap;
      }
    }

    float sum[kSets][2 * V] = {};
    const auto add_row = [&](const uint4& row, float weight, float* to) {
      float x[V];
      unpack_raw<S>(row, x);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        to[i] = fmaf(weight, x[i], to[i]);
      }
    };
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int a = row_of(set, u);
        add_row(write_row[set][u], s.write[a].x, sum[set]);
      }
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int b = row_of(set, u);
        add_row(read_row[set][u], s.read[b], sum[set] + V);
      }
      if constexpr (kMore) {
#pragma unroll 1
        for (int a = row_of(set, kHeld); a < W; a += kStepGroups) {
          if (s.write_slot[a] >= 0) {
            add_row(load_raw_row<S, kAligned>(row_at(s.write_slot[a]), at), s.write[a].x, sum[set]);
          }
        }
      }
      if constexpr (kMore) {
#pragma unroll 1
        for (int b = row_of(set, kHeld); b < R; b += kStepGroups) {
          if (s.read_slot[b] >= 0) {
            add_row(load_raw_row<S, kAligned>(row_at(s.read_slot[b]), at), s.read[b], sum[set] + V);
          }
        }
      }
    }
#pragma unroll
    for (int step = 1; step < kSets; step *= 2) {
#pragma unroll
      for (int set = 0; set < kSets; set += 2 * step) {
#pragma unroll
        for (int i = 0; i < 2 * V; ++i) {
          sum[set][i] += sum[set + step][i];
        }
      }
    }
    const int left = add_groups<kLanes, 2 * V>(sum[0]);
    store_floats<step_sums_left(kLanes, 2 * V)>(
        s_parts + thread / 32 * Shape::kSums + left / V * kColumns + thread % kLanes * V + left % V,
        sum[0]
    );
    __syncthreads();  // the parts are there, and every reader has the old rows it wants
    float reading = 0.0f;
    if (retrieves) {
      const float retrieval = add_parts<Shape::kWarps, Shape::kSums>(s_parts + column);
      s_delta[column] = raw_value(p.beta, raw_beta) * (raw_value(p.v, raw_v) - retrieval);
    }
    if (reads) {
      reading = add_parts<Shape::kWarps, Shape::kSums>(s_parts + kColumns + column);
    }
    __syncthreads();  // delta is there
    float delta[V];
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(s_delta + thread % kLanes * V + i);
      delta[i] = four.x;
      delta[i + 1] = four.y;
      delta[i + 2] = four.z;
      delta[i + 3] = four.w;
    }
    const auto new_row = [&](uint4 old, const float4& lane) {
      // else the compiler keeps the row as floats from the first pass on, in twice the registers
      asm volatile("" : "+r"(old.x), "+r"(old.y), "+r"(old.z), "+r"(old.w));
      float x[V];
      unpack_raw<S>(old, x);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        x[i] = fmaf(lane.z, delta[i], lane.y * x[i]);
      }
      return pack_raw<S>(x);
    };
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        const int a = row_of(set, u);
        const float4 lane = s.write[a];
        const uint4 row = new_row(write_row[set][u], lane);
        if (lane.w != 0.0f) {
          store_raw_row<S, kAligned>(row_at(write_slot[set][u]), at, row);
        }
      }
      if constexpr (kMore) {
#pragma unroll 1
        for (int a = row_of(set, kHeld); a < W; a += kStepGroups) {
          if (s.write[a].w != 0.0f) {
            S* row = row_at(s.write_slot[a]);
            store_raw_row<S, kAligned>(
                row, at, new_row(load_raw_row<S, kAligned>(row, at), s.write[a])
            );
          }
        }
      }
    }
    if (reads) {
      if (overlapped) {
        reading = fmaf(*s_overlap, s_delta[column], reading);
      }
      store_like(p.v, p.out, out_at(), reading);
    }
    if (t + 1 < p.T) {
      clear_table<kThreads>(s, p.table_bits);
      if (thread == 0) {
        *s_shared = 0;
      }
    }
  }
}

}  // namespace sdm::cuda
