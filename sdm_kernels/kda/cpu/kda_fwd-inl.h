// SPDX-License-Identifier: Apache-2.0
//! @file Forward of the sequences of one key head (docs/kda.md).
//!
//! Multiply-adds of a token and value head: 3 K V with the state (read by key and by query,
//! written) and about 0.12 K V for what passes between tokens of a block, 51 thousand at K = V =
//! 128. Memory is not the limit: each token row is read and written once, a state of 64 KiB stays
//! in the second-level cache, a panel of it (16 KiB) in the first. At 16 multiply-adds a cycle in
//! float the products of a block of 16 tokens need 52 thousand cycles; they run in register tiles
//! at 95 to 100 % of that. The whole block takes 70 thousand (measured, AVX-512): gates, norms and
//! scores are the rest.
//!
//! Parallel over (sequence, key head); a unit too long for that is cut once more, into the blocks
//! of a window for what the tokens alone decide and into panels of value columns for the scan.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// A forward, or the part of a backward that makes the states again.
template <typename Acc>
struct FwdCall {
  KdaDims dims;
  KdaOptions options;
  KdaTokens tokens;
  KdaStateView initial;
  KdaStateView final_state;
  KdaStateView chunk_states;  // rows of chunk_state_row()
  void* out;                  // null: only states are wanted
  Acc* checkpoints;           // [groups of chunks, heads of the unit, state]; null: not wanted
  int64_t group_chunks;       // chunks from one checkpoint to the next
};

// How a unit is walked: sizes of its buffers and its parallel regions, never a result.
struct FwdShape {
  int64_t heads;   // value heads at once
  int64_t window;  // blocks at once
};

// Working memory of a unit.
template <typename Acc>
struct FwdUnit {
  Acc* state;  // [heads, panels, Kp, kPanel]
  Acc* keys;   // [heads, window, keys_elements]
};

template <typename Acc>
SDM_INLINE int64_t state_elements(const KdaDims& dims) {
  return num_panels<Acc>(dims.V) * round_up(dims.K, kTile) * kPanel<Acc>;
}

template <typename Acc>
FwdUnit<Acc> carve_fwd_unit(cpu::Carver* carver, const KdaDims& dims, const FwdShape& shape) {
  FwdUnit<Acc> unit;
  unit.state = carver->take<Acc>(shape.heads * state_elements<Acc>(dims));
  unit.keys =
      carver->take<Acc>(shape.heads * shape.window * keys_elements<Acc>(round_up(dims.K, kTile)));
  return unit;
}

// Working memory of a thread.
template <typename Acc>
struct FwdScratch {
  BlockTokens<Acc> tokens;
  Acc* kd;  // [kBlock, Kp]
  Acc* qd;  // [kBlock, Kp]
  Acc* y;   // [kPairColumns, Kp]
  Acc* v;   // [kBlock, kPanel]
  Acc* x;   // [2 kBlock, kPanel]
  Acc* u;   // [kBlock, kPanel]
};

template <typename Acc>
FwdScratch<Acc> carve_fwd_scratch(cpu::Carver* carver, const KdaDims& dims) {
  const int64_t Kp = round_up(dims.K, kTile);
  FwdScratch<Acc> s;
  s.tokens = carve_tokens<Acc>(carver, Kp);
  s.kd = carver->take<Acc>(kBlock * Kp);
  s.qd = carver->take<Acc>(kBlock * Kp);
  s.y = carver->take<Acc>(kPairColumns * Kp);
  s.v = carver->take<Acc>(kBlock * kPanel<Acc>);
  s.x = carver->take<Acc>(2 * kBlock * kPanel<Acc>);
  s.u = carver->take<Acc>(kBlock * kPanel<Acc>);
  return s;
}

// Everything about a block that the tokens alone decide.
template <typename Acc>
void prepare_forward(
    const FwdCall<Acc>& call,
    const BlockPlace& place,
    int64_t head,
    const FwdScratch<Acc>& s,
    const BlockKeys<Acc>& keys
) {
  const int64_t Kp = round_up(call.dims.K, kTile);
  BlockTokens<Acc> tokens = s.tokens;
  tokens.gamma = keys.gamma;
  tokens.beta = keys.beta;
  load_tokens(call.dims, call.options, call.tokens, place, head, kBlock, tokens);
  const Acc scale = static_cast<Acc>(call.options.scale);
  block_scores(tokens, Kp, scale, place.num_tokens, keys.neg_kk, keys.qk, s.y);
  decay_from_start(tokens, Kp, scale, s.kd, s.qd);
  decay_to_end(tokens, Kp, keys.kr);
  transpose_rows(s.kd, Kp, Kp, keys.first_t, 2 * kBlock);
  transpose_rows(s.qd, Kp, Kp, keys.first_t + kBlock, 2 * kBlock);
}

template <typename Acc>
void forward_block(
    const FwdCall<Acc>& call,
    const BlockPlace& place,
    int64_t head,
    int64_t panel,
    const BlockKeys<Acc>& keys,
    const FwdScratch<Acc>& s,
    Acc* state
) {
  const KdaDims& dims = call.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const int64_t rows = call.out != nullptr ? 2 * kBlock : kBlock;
  if (call.out != nullptr) {
    const KdaView out = output_view(call.out, call.tokens.q.dtype, dims, dims.HV, dims.V);
    prefetch_panel<Acc>(out, place, head, panel, dims.V);
  }
  load_panel_rows(
      call.tokens.v, place.batch, place.token, head, place.num_tokens, panel, dims.V, s.v
  );
  product<Start::kZero, kPanel<Acc>>(
      rows, Kp, static_cast<const Acc*>(keys.first_t), int64_t{1}, 2 * kBlock, state, s.x
  );
  subtract_from(s.v, s.x);
  solve_block(keys.neg_kk, keys.beta, s.x, s.u);
  if (call.out != nullptr) {
    Acc* o = s.x + kBlock * kPanel<Acc>;
    add_readings(keys.qk, s.u, o);
    const int64_t width = panel_width<Acc>(panel, dims.V);
    for (int64_t i = 0; i < place.num_tokens; ++i) {
      const int64_t token = (place.batch * dims.T + place.token + i) * dims.HV + head;
      store_row(
          o + i * kPanel<Acc>,
          call.tokens.q.dtype,
          token * dims.V + panel * kPanel<Acc>,
          width,
          call.out
      );
    }
  }
  update_state(keys, Kp, s.u, state, state);
}

// One panel of one head through the blocks [begin, end).
template <typename Acc>
void forward_panel(
    const FwdCall<Acc>& call,
    const BlockGrid& grid,
    int64_t head,
    int64_t panel,
    int64_t begin,
    int64_t end,
    const Acc* keys,
    const FwdScratch<Acc>& s,
    Acc* state
) {
  const KdaDims& dims = call.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const int64_t panel_elements = Kp * kPanel<Acc>;
  const int64_t heads = dims.HV / dims.H;
  if (begin == 0) {
    load_state_panel(call.initial, grid.sequence.state, head, panel, dims.K, dims.V, state);
  }
  for (int64_t block = begin; block < end; ++block) {
    const BlockPlace place = grid.place(block);
    if (place.starts_chunk && call.chunk_states.data != nullptr) {
      const int64_t row = ::sdm::kda::chunk_state_row(
          grid.sequence.index, ::sdm::kda::first_token(grid.sequence, dims), place.chunk, dims.C
      );
      store_state_panel(state, call.chunk_states, row, head, panel, dims.K, dims.V);
    }
    if (place.starts_chunk && call.checkpoints != nullptr && place.chunk % call.group_chunks == 0) {
      const int64_t index = place.chunk / call.group_chunks * heads + head % heads;
      std::memcpy(
          call.checkpoints + index * state_elements<Acc>(dims) + panel * panel_elements,
          state,
          sizeof(Acc) * static_cast<size_t>(panel_elements)
      );
    }
    if (block + 1 < grid.num_blocks) {
      prefetch_panel<Acc>(call.tokens.v, grid.place(block + 1), head, panel, dims.V);
    }
    const BlockKeys<Acc> block_keys =
        keys_at(const_cast<Acc*>(keys) + (block - begin) * keys_elements<Acc>(Kp), Kp);
    forward_block(call, place, head, panel, block_keys, s, state);
  }
  if (end == grid.num_blocks) {
    store_state_panel(state, call.final_state, grid.sequence.state, head, panel, dims.K, dims.V);
  }
}

// One sequence and key head.
template <typename Acc>
void forward_unit(
    const FwdCall<Acc>& call,
    const KdaSequence& sequence,
    int64_t key_head,
    const FwdShape& shape,
    const cpu::ParallelFor& parallel,
    const FwdUnit<Acc>& unit,
    const FwdScratch<Acc>* scratch
) {
  const KdaDims& dims = call.dims;
  const BlockGrid grid = make_grid(sequence, dims.C);
  const int64_t Kp = round_up(dims.K, kTile);
  const int64_t heads = dims.HV / dims.H;
  const int64_t panels = num_panels<Acc>(dims.V);
  const int64_t size = keys_elements<Acc>(Kp);
  for (int64_t first = 0; first < heads; first += shape.heads) {
    const int64_t count = heads - first < shape.heads ? heads - first : shape.heads;
    const int64_t head = key_head * heads + first;
    int64_t begin = 0;
    do {  // once also for an empty sequence, which hands on its state
      const int64_t end =
          grid.num_blocks - begin < shape.window ? grid.num_blocks : begin + shape.window;
      const int64_t blocks = end - begin;
      cpu::for_each_item(parallel, count * blocks, [&](int64_t worker, int64_t item) {
        const int64_t h = item / blocks;
        const int64_t b = item % blocks;
        const BlockKeys<Acc> keys = keys_at(unit.keys + (h * shape.window + b) * size, Kp);
        const int64_t next = begin + b + parallel.num_threads;
        if (next < grid.num_blocks) {
          prefetch_tokens(dims, call.tokens, grid.place(next), head + h);
        }
        prepare_forward(call, grid.place(begin + b), head + h, scratch[worker], keys);
      });
      cpu::for_each_item(parallel, count * panels, [&](int64_t worker, int64_t item) {
        forward_panel(
            call,
            grid,
            head + item / panels,
            item % panels,
            begin,
            end,
            unit.keys + item / panels * shape.window * size,
            scratch[worker],
            unit.state + item * Kp * kPanel<Acc>
        );
      });
      begin = end;
    } while (begin < grid.num_blocks);
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
