// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the step of sdm_step.cuh for grids that leave the device room, on compute
//! capability 9.0 and later.
//!
//! A step follows a step, and what takes longest hardly depends on the one before. So blocks come
//! in early, read the token as it is, have L2 fetch its rows, and find out what is named twice;
//! only then they wait for the kernels before them. Nothing that was read until then counts: it is
//! read again while the rows come, past L1, and a block that finds any of it changed starts over.
//! Rows, sums and stores are what is left between two steps. Every thread makes the deltas of its
//! columns by itself, which spares a barrier.
//!
//! Sums are those of sdm_step.cuh, in the same order: the same bits.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_row.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_lanes.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_rows.cuh"
#include "sdm_kernels/sdm/cuda/sdm_step_shape.cuh"

namespace sdm::cuda {

// kHeld: most rows of either kind and group, which a lane keeps in registers. Banks are aligned.
// Grid: slices, heads, sequences.
template <typename S, typename View, int kLanes, int kSets, int kHeld>
__global__ void __launch_bounds__(
    StepShape<S, kLanes, kSets>::kThreads, StepShape<S, kLanes, kSets>::kEarlyBlocks
) sdm_step_early_kernel(const __grid_constant__ SdmStepParams<View> p) {
  using Shape = StepShape<S, kLanes, kSets>;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr bool kAhead = true;
#else
  constexpr bool kAhead = false;  // nothing runs ahead
#endif
  constexpr int kThreads = Shape::kThreads;
  constexpr int kColumns = Shape::kColumns;
  static_assert(kColumns <= kThreads);
  constexpr int V = kVec<S>;
  constexpr int kPlaces = 32 / kLanes;      // threads with different groups in a warp
  constexpr int kKindRows = kSets * kHeld;  // written rows of a thread, and read ones
  // rows of a warp that a lane looks up for all
  constexpr int kLooked = (2 * kKindRows * kPlaces + 31) / 32;
  extern __shared__ __align__(16) unsigned char step_memory[];
  float* s_parts = reinterpret_cast<float*>(step_memory);
  float* s_v = s_parts + Shape::kWarps * Shape::kSums;
  float* s_overlap = s_v + kColumns;
  int* s_shared = reinterpret_cast<int*>(s_overlap + 1);
  const int W = p.W, R = p.R;
  unsigned char* lanes_memory = reinterpret_cast<unsigned char*>(s_overlap + 4);
  const int2 rows = make_int2(kHeld * kStepGroups, kHeld * kStepGroups);
  const StepLanes s = step_lanes(lanes_memory, rows.x, rows.y, p.table_bits);

  clear_table<kThreads>(s, p.table_bits);
  if (threadIdx.x == 0) {
    *s_shared = 0;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // the next step's blocks may come and wait, as this one waits for all that was before it
  asm volatile("griddepcontrol.launch_dependents;");
  if constexpr (!kAhead) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
#endif
  bool sure = !kAhead;  // what is read is what the kernels before have written

#pragma unroll 1
  for (int t = 0; t < p.T;) {
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
    const char* id_at[kLooked];
    int id_high[kLooked];
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
      const View& ids = looked_write[k] ? p.write_idx : p.read_idx;
      id_at[k] = here((looked_write[k] ? write_ids : read_ids) + ids.lane(looked_row[k]));
      id_high[k] = ids.high;
      if (looks[k]) {
        id[k] = load_id(id_at[k], id_high[k]);
      }
    }
    const auto load_state = [&]() {
      return load_id(p.state_indices + static_cast<int64_t>(n) * (p.state_high + 4), p.state_high);
    };
    RawId state{static_cast<unsigned>(n), 0};
    if (p.state_indices != nullptr) {
      state = load_state();
    }
    // the table is empty, the last token's rows are stored, and the loads below stay below
    __syncthreads();
    const auto weight_of = [&](bool write, int row) {
      const View& values = write ? p.write_val : p.read_val;
      return values.at(token) + values.lane(row);
    };
    // a read takes the token's first gate and makes no use of it
    const auto gate_of = [&](bool write, int row) {
      return p.g.at(token) + p.g.lane(p.gate_per_write && write ? row : 0);
    };
    RawFloat weight[kLooked], gate[kLooked];
    const char *weight_at[kLooked], *gate_at[kLooked];
    int weight_high[kLooked];
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      weight[k] = gate[k] = {0, 0};
      weight_at[k] = here(weight_of(looked_write[k], looked_row[k]));
      gate_at[k] = here(gate_of(looked_write[k], looked_row[k]));
      weight_high[k] = looked_write[k] ? p.write_val.high : p.read_val.high;
      if (looks[k]) {
        weight[k] = load_step_value(weight_at[k], weight_high[k]);
        gate[k] = load_step_value(gate_at[k], p.g.high);
      }
    }
    const int first_column = static_cast<int>(blockIdx.x) * kColumns;
    const bool reads = thread < kColumns && first_column + thread < p.D;  // and has a column of v
    RawFloat raw_beta, raw_v{0, 0};
    const char* beta_at = here(p.beta.at(token));
    const char* v_at = here(p.v.at(token) + p.v.lane(first_column + thread));
    const auto load_own = [&]() {
      raw_beta = load_step_value(beta_at, p.beta.high);
      if (reads) {
        raw_v = load_step_value(v_at, p.v.high);
      }
    };
    if constexpr (!kAhead) {
      load_own();
    }
    const int bank_row = id_below(state, p.state_high, p.pool);

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
      const int high = looked_write[k] ? p.write_idx.high : p.read_idx.high;
      slot[k] = bank_row < 0 ? -1 : id_below(id[k], high, p.S);
    }
    // row `number` of a kind of this thread
    const auto slot_of = [&](bool write, int number) {
      const int first = (number + (write ? 0 : kKindRows)) * kPlaces;
      return __shfl_sync(0xffffffffu, slot[first / 32], first % 32 + thread % 32 / kLanes);
    };
    uint4 write_row[kSets][kHeld] = {}, read_row[kSets][kHeld] = {};
    int write_slot[kSets][kHeld], read_slot[kSets][kHeld];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        write_slot[set][u] = slot_of(true, set * kHeld + u);
        read_slot[set][u] = slot_of(false, set * kHeld + u);
      }
    }
    const auto for_rows = [&](const auto& f) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int u = 0; u < kHeld; ++u) {
          f(write_slot[set][u], &write_row[set][u]);
        }
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int u = 0; u < kHeld; ++u) {
          f(read_slot[set][u], &read_row[set][u]);
        }
      }
    };
    const auto load_rows = [&]() {
      for_rows([&](int its_slot, uint4* to) {
        load_row_if<S, true>(its_slot >= 0, row_at(its_slot), at, to);
      });
    };
    if (sure) {
      load_rows();
    } else {
      for_rows([&](int its_slot, uint4*) {
        prefetch_row_if<S>(its_slot >= 0, row_at(its_slot), at);
      });
      if (reads) {
        prefetch_step_value(v_at);
      }
      if (thread == 0) {
        prefetch_step_value(beta_at);
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
    __syncthreads();  // all lanes are there, and in the table
    bool overlaps = false;
    if (*s_shared == 0) {
#pragma unroll
      for (int k = 0; k < kLooked; ++k) {
        if (looked[k] && !looked_write[k]) {
          overlaps = finish_read(s, p.table_bits, looked_row[k], slot[k], value[k]) || overlaps;
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

    RawId id_now[kLooked], state_now = state;
    RawFloat weight_now[kLooked], gate_now[kLooked];
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      id_now[k] = id[k];
      weight_now[k] = weight[k];
      gate_now[k] = gate[k];
    }
    if constexpr (kAhead) {
      if (!sure) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        load_rows();
#pragma unroll
        for (int k = 0; k < kLooked; ++k) {
          if (looks[k]) {
            id_now[k] = load_id(id_at[k], id_high[k]);
            weight_now[k] = load_step_value(weight_at[k], weight_high[k]);
            gate_now[k] = load_step_value(gate_at[k], p.g.high);
          }
        }
        if (p.state_indices != nullptr) {
          state_now = load_state();
        }
      }
      load_own();
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
    if (thread < kColumns) {
      s_v[thread] = raw_value(p.v, raw_v);
    }
    bool changed = state_now.low != state.low || state_now.high != state.high;
#pragma unroll
    for (int k = 0; k < kLooked; ++k) {
      changed = changed || id_now[k].low != id[k].low || id_now[k].high != id[k].high ||
                weight_now[k].low != weight[k].low || weight_now[k].high != weight[k].high ||
                gate_now[k].low != gate[k].low || gate_now[k].high != gate[k].high;
    }
    // the parts are there, and every reader has the old rows it wants
    if (__syncthreads_or(changed) != 0) {
      sure = true;  // once more, with what is there now
      clear_table<kThreads>(s, p.table_bits);
      if (thread == 0) {
        *s_shared = 0;
      }
      continue;
    }
    sure = true;
    const float beta = raw_value(p.beta, raw_beta);
    float delta[V];
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const int column = thread % kLanes * V + i;
      const float4 v = *reinterpret_cast<const float4*>(s_v + column);
      const float4 retrieval =
          add_parts<Shape::kWarps, Shape::kSums>(reinterpret_cast<const float4*>(s_parts + column));
      delta[i] = beta * (v.x - retrieval.x);
      delta[i + 1] = beta * (v.y - retrieval.y);
      delta[i + 2] = beta * (v.z - retrieval.z);
      delta[i + 3] = beta * (v.w - retrieval.w);
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
          store_raw_row<S, true>(row_at(write_slot[set][u]), at, row);
        }
      }
    }
    if (reads) {
      float reading = add_parts<Shape::kWarps, Shape::kSums>(s_parts + kColumns + thread);
      if (overlapped) {
        const float retrieval = add_parts<Shape::kWarps, Shape::kSums>(s_parts + thread);
        reading = fmaf(*s_overlap, beta * (s_v[thread] - retrieval), reading);
      }
      const int64_t at_out =
          ((static_cast<int64_t>(here(n)) * p.T + t) * p.num_heads + head) * p.D + first_column;
      store_like(p.v, p.out, at_out + thread, reading);
    }
    if (++t < p.T) {
      clear_table<kThreads>(s, p.table_bits);
      if (thread == 0) {
        *s_shared = 0;
      }
    }
  }
}

}  // namespace sdm::cuda
