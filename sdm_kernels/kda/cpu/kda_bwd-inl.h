// SPDX-License-Identifier: Apache-2.0
//! @file Backward of the sequences of one key head (docs/kda.md).
//!
//! Walks segments of chunks from the last to the first. A segment's blocks are prepared and their
//! states made again from the saved state (or a checkpoint of a first forward, where none was
//! saved); then the reverse scan carries the gradient of the state, and a last stage per block
//! makes the gradients of queries, keys and gates.
//!
//! Multiply-adds of a token and value head: 8 K V with the states (2 again, 3 in the reverse scan,
//! 3 after) and about 0.4 K V inside a block, 137 thousand at K = V = 128, of which the last block
//! of a group spares K V; where no state was saved 2 K V more. A block of 16 tokens takes 190
//! thousand cycles (measured, AVX-512, float, states saved) against 137 thousand of its products at
//! 16 multiply-adds a cycle. Memory: the states of a segment and, where none was saved, one a group
//! of chunks of the unit at work; the products run on panels as in the forward. The value heads of
//! a key head are summed in order.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// How a unit is walked: sizes of its buffers and its parallel regions, never a result.
struct BwdShape {
  FwdShape forward;        // for the checkpoints
  int64_t heads;           // value heads at once
  int64_t group_chunks;    // chunks that follow one stored state
  int64_t segment_blocks;  // whole groups
  int64_t window;          // blocks that the reverse scan goes ahead of the last stage
  int64_t checkpoints;     // groups of the longest sequence; 0: states were saved
};

// Working memory of a unit; `all` are the value heads of a key head.
template <typename Acc>
struct BwdUnit {
  FwdUnit<Acc> forward;
  Acc* checkpoints;  // [checkpoints, all, state]
  Acc* blocks;       // [heads, segment_blocks, bwd_block_elements]
  Acc* panels;       // [heads, segment_blocks, panels, bwd_panel_elements]
  Acc* d_state;      // [all, window + 1, panels, Kp, kPanel], a ring by block
  Acc* d_keys;       // [all, segment_blocks, 2, kBlock, Kp]: d_q, d_k
  Acc* sums;         // [all, segment_blocks, 2, Kp]: d_bias, d_A
  double* totals;    // [all, 2, Kp]
};

template <typename Acc>
BwdUnit<Acc> carve_bwd_unit(cpu::Carver* carver, const KdaDims& dims, const BwdShape& shape) {
  const int64_t Kp = round_up(dims.K, kTile);
  const int64_t all = dims.HV / dims.H;
  const int64_t state = state_elements<Acc>(dims);
  const int64_t held = shape.heads * shape.segment_blocks;
  BwdUnit<Acc> unit;
  if (shape.checkpoints > 0) {
    unit.forward = carve_fwd_unit<Acc>(carver, dims, shape.forward);
  }
  unit.checkpoints = carver->take<Acc>(shape.checkpoints * all * state);
  unit.blocks = carver->take<Acc>(held * bwd_block_elements<Acc>(Kp));
  unit.panels = carver->take<Acc>(held * num_panels<Acc>(dims.V) * bwd_panel_elements<Acc>(Kp));
  unit.d_state = carver->take<Acc>(all * (shape.window + 1) * state);
  unit.d_keys = carver->take<Acc>(all * shape.segment_blocks * 2 * kBlock * Kp);
  unit.sums = carver->take<Acc>(all * shape.segment_blocks * 2 * Kp);
  unit.totals = carver->take<double>(all * 2 * Kp);
  return unit;
}

// Working memory of a thread.
template <typename Acc>
struct BwdScratch {
  BwdScanScratch<Acc> scan;
  BwdBlockScratch<Acc> block;
};

template <typename Acc>
BwdScratch<Acc> carve_bwd_scratch(cpu::Carver* carver, const KdaDims& dims) {
  const int64_t Kp = round_up(dims.K, kTile);
  BwdScratch<Acc> s;
  s.scan = carve_bwd_scan_scratch<Acc>(carver, Kp);
  s.block = carve_bwd_block_scratch<Acc>(carver, Kp);
  return s;
}

// A unit at work.
template <typename Acc>
struct BwdWalk {
  const KdaBwdParams& p;
  const BwdShape& shape;
  const BwdUnit<Acc>& unit;
  const BwdScratch<Acc>* scratch;
  BlockGrid grid;
  int64_t key_head;
  int64_t Kp, all, panels;

  int64_t head(int64_t r) const { return key_head * all + r; }

  // Block by its place in the segment, head by its place among those at work.
  BwdBlock<Acc> block(int64_t h, int64_t b) const {
    const int64_t index = h * shape.segment_blocks + b;
    return bwd_block_at(unit.blocks + index * bwd_block_elements<Acc>(Kp), Kp);
  }

  BwdPanel<Acc> panel(int64_t h, int64_t b, int64_t panel) const {
    const int64_t index = (h * shape.segment_blocks + b) * panels + panel;
    return bwd_panel_at(unit.panels + index * bwd_panel_elements<Acc>(Kp), Kp);
  }

  // Gradient of the state at the end of a block of the sequence; r counts all heads.
  Acc* d_state(int64_t r, int64_t block, int64_t panel) const {
    const int64_t slots = shape.window + 1;
    const int64_t slot = (block + slots) % slots;
    return unit.d_state + ((r * slots + slot) * panels + panel) * Kp * kPanel<Acc>;
  }

  Acc* d_keys(int64_t r, int64_t b) const {
    return unit.d_keys + (r * shape.segment_blocks + b) * 2 * kBlock * Kp;
  }

  // The block as far into the segment before; negative: there is none.
  int64_t earlier_segment(int64_t block) const { return block - shape.segment_blocks; }

  Acc* sums(int64_t r, int64_t b) const {
    return unit.sums + (r * shape.segment_blocks + b) * 2 * Kp;
  }
};

// States of one panel through the blocks [begin, end) of a group; h-th head at work, the r-th of
// all.
template <typename Acc>
void replay_group(
    const BwdWalk<Acc>& w,
    int64_t h,
    int64_t r,
    int64_t panel,
    int64_t segment_begin,
    int64_t begin,
    int64_t end,
    Acc* v
) {
  const KdaDims& dims = w.p.dims;
  for (int64_t block = begin; block < end; ++block) {
    const BlockPlace place = w.grid.place(block);
    const int64_t b = block - segment_begin;
    const BwdPanel<Acc> x = w.panel(h, b, panel);
    if (block == begin) {
      const int64_t elements = w.Kp * kPanel<Acc>;
      if (w.p.chunk_states.data != nullptr) {
        const int64_t row = ::sdm::kda::chunk_state_row(
            w.grid.sequence.index,
            ::sdm::kda::first_token(w.grid.sequence, dims),
            place.chunk,
            dims.C
        );
        const KdaStateView view = state_view(w.p.chunk_states, dims);
        load_state_panel(view, row, w.head(r), panel, dims.K, dims.V, x.state);
      } else {
        const int64_t index = place.chunk / w.shape.group_chunks * w.all + r;
        std::memcpy(
            x.state,
            w.unit.checkpoints + (index * w.panels + panel) * elements,
            sizeof(Acc) * static_cast<size_t>(elements)
        );
      }
    }
    const int64_t next_replayed = block + 1 < end ? block + 1 : w.earlier_segment(begin);
    if (next_replayed >= 0) {
      prefetch_panel<Acc>(w.p.tokens.v, w.grid.place(next_replayed), w.head(r), panel, dims.V);
    }
    Acc* next = block + 1 < end ? w.panel(h, b + 1, panel).state : nullptr;
    replay_block(w.p, place, w.head(r), panel, w.block(h, b).keys, x, v, next);
  }
}

// The reverse scan of one panel through the blocks [begin, end).
template <typename Acc>
void reverse_panel(
    const BwdWalk<Acc>& w,
    int64_t h,
    int64_t r,
    int64_t panel,
    int64_t segment_begin,
    int64_t begin,
    int64_t end,
    const BwdScanScratch<Acc>& s
) {
  const KdaDims& dims = w.p.dims;
  const int64_t n = w.grid.sequence.index;
  if (end == w.grid.num_blocks) {
    Acc* last = w.d_state(r, end - 1, panel);
    load_state_panel(w.p.d_final, n, w.head(r), panel, dims.K, dims.V, last);
  }
  for (int64_t block = end - 1; block >= begin; --block) {
    const int64_t b = block - segment_begin;
    if (block > 0) {
      prefetch_panel<Acc>(w.p.d_out, w.grid.place(block - 1), w.head(r), panel, dims.V);
    }
    reverse_block(
        w.p,
        w.grid.place(block),
        w.head(r),
        panel,
        w.block(h, b),
        w.panel(h, b, panel),
        s,
        static_cast<const Acc*>(w.d_state(r, block, panel)),
        w.d_state(r, block - 1, panel)
    );
  }
  if (begin == 0) {
    store_state_panel(w.d_state(r, -1, panel), w.p.d_initial, n, w.head(r), panel, dims.K, dims.V);
  }
}

// Fetches the rows that the last stage and, with its last head, finish_keys() will write.
template <typename Acc>
SDM_INLINE void prefetch_outputs(const BwdWalk<Acc>& w, const BlockPlace& place, int64_t r) {
  const KdaDims& dims = w.p.dims;
  const int64_t n = place.num_tokens;
  const KdaView d_g = output_view(w.p.d_g, w.p.tokens.g.dtype, dims, dims.HV, dims.K);
  prefetch_rows(d_g, place.batch, place.token, w.head(r), n, 0, dims.K);
  if (r + 1 == w.all) {
    const KdaView d_q = output_view(w.p.d_q, w.p.tokens.q.dtype, dims, dims.H, dims.K);
    const KdaView d_k = output_view(w.p.d_k, w.p.tokens.k.dtype, dims, dims.H, dims.K);
    prefetch_rows(d_q, place.batch, place.token, w.key_head, n, 0, dims.K);
    prefetch_rows(d_k, place.batch, place.token, w.key_head, n, 0, dims.K);
  }
}

// The last stage of one block and head.
template <typename Acc>
void finish_block(
    const BwdWalk<Acc>& w,
    int64_t h,
    int64_t r,
    int64_t segment_begin,
    int64_t block,
    const BwdBlockScratch<Acc>& s
) {
  const BlockPlace place = w.grid.place(block);
  const int64_t b = block - segment_begin;
  const BwdBlock<Acc> record = w.block(h, b);
  const auto d_end = [&](int64_t panel) {
    return static_cast<const Acc*>(w.d_state(r, block, panel));
  };
  const auto panels = [&](int64_t panel) { return w.panel(h, b, panel); };
  prefetch_outputs(w, place, r);
  const Acc* gamma = record.keys.gamma;
  const Acc scale = static_cast<Acc>(w.p.options.scale);
  state_products(w.Kp, w.panels, gamma, scale, d_end, panels, s);
  Acc* d_q = w.d_keys(r, b);
  key_gradients(record, w.Kp, scale, s, d_q, d_q + kBlock * w.Kp);
  const Acc* gate = record.tokens.gate;
  finish_gates(w.p, place, w.head(r), gate, panels, s, w.sums(r, b), w.sums(r, b) + w.Kp);
}

// Sums the value heads' gradients of one block's queries or keys and takes them to the raw rows.
// The normalised ones are at hand in the record of any head.
template <typename Acc>
void finish_keys(
    const BwdWalk<Acc>& w,
    int64_t segment_begin,
    int64_t block,
    int64_t which  // 0: q, 1: k
) {
  const KdaDims& dims = w.p.dims;
  const BlockPlace place = w.grid.place(block);
  const int64_t b = block - segment_begin;
  const BlockTokens<Acc> tokens = w.block(0, b).tokens;
  const Acc* normalised = which == 0 ? tokens.q : tokens.k;
  const Acc* factors = which == 0 ? tokens.q_factor : tokens.k_factor;
  const DType dtype = which == 0 ? w.p.tokens.q.dtype : w.p.tokens.k.dtype;
  void* out = which == 0 ? w.p.d_q : w.p.d_k;
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t at = (which * kBlock + i) * w.Kp;
    Acc* row = w.d_keys(0, b) + at;
    for (int64_t r = 1; r < w.all; ++r) {
      const Acc* other = w.d_keys(r, b) + at;
      for (int64_t c = 0; c < w.Kp; c += kLanes<Acc>) {
        store(row + c, add(load(row + c), load(other + c)));
      }
    }
    if (w.p.options.l2norm) {
      norm_gradient(normalised + i * w.Kp, factors[i], row, w.Kp);
    }
    const int64_t index = (place.batch * dims.T + place.token + i) * dims.H + w.key_head;
    store_row(row, dtype, index * dims.K, dims.K, out);
  }
}

// Adds the sums of the segment's blocks, from the last to the first, to those of the r-th head.
template <typename Acc>
void add_sums(const BwdWalk<Acc>& w, int64_t r, int64_t blocks) {
  double* total = w.unit.totals + r * 2 * w.Kp;
  for (int64_t b = blocks - 1; b >= 0; --b) {
    const Acc* part = w.sums(r, b);
    for (int64_t c = 0; c < 2 * w.Kp; ++c) {
      total[c] += static_cast<double>(part[c]);
    }
  }
}

// The blocks [begin, end), whole groups.
template <typename Acc>
void backward_segment(
    const BwdWalk<Acc>& w, int64_t begin, int64_t end, const cpu::ParallelFor& parallel
) {
  const BwdShape& shape = w.shape;
  const int64_t blocks = end - begin;
  const int64_t group_blocks = shape.group_chunks * w.grid.per_chunk;
  const int64_t groups = ceil_div(blocks, group_blocks);
  for (int64_t first = 0; first < w.all; first += shape.heads) {
    const int64_t heads = w.all - first < shape.heads ? w.all - first : shape.heads;
    cpu::for_each_item(parallel, heads * blocks, [&](int64_t worker, int64_t item) {
      const int64_t h = item / blocks;
      const int64_t b = item % blocks;
      const int64_t ahead = b + parallel.num_threads;
      const int64_t next =
          ahead < blocks ? begin + ahead : w.earlier_segment(begin + ahead - blocks);
      if (next >= 0) {
        prefetch_tokens(w.p.dims, w.p.tokens, w.grid.place(next), w.head(first + h));
      }
      prepare_backward(
          w.p, w.grid.place(begin + b), w.head(first + h), w.block(h, b), w.scratch[worker].scan.y
      );
    });
    cpu::for_each_item(parallel, heads * groups * w.panels, [&](int64_t worker, int64_t item) {
      const int64_t h = item / (groups * w.panels);
      const int64_t group = item / w.panels % groups;
      const int64_t from = begin + group * group_blocks;
      const int64_t to = end - from < group_blocks ? end : from + group_blocks;
      replay_group(w, h, first + h, item % w.panels, begin, from, to, w.scratch[worker].scan.v);
    });
    for (int64_t to = end; to > begin; to -= shape.window) {
      const int64_t from = to - begin < shape.window ? begin : to - shape.window;
      const int64_t count = to - from;
      cpu::for_each_item(parallel, heads * w.panels, [&](int64_t worker, int64_t item) {
        const int64_t h = item / w.panels;
        reverse_panel(w, h, first + h, item % w.panels, begin, from, to, w.scratch[worker].scan);
      });
      cpu::for_each_item(parallel, heads * count, [&](int64_t worker, int64_t item) {
        const int64_t h = item / count;
        finish_block(w, h, first + h, begin, from + item % count, w.scratch[worker].block);
      });
    }
  }
  cpu::for_each_item(parallel, 2 * blocks + w.all, [&](int64_t, int64_t item) {
    if (item < 2 * blocks) {
      finish_keys(w, begin, begin + item / 2, item % 2);
    } else {
      add_sums(w, item - 2 * blocks, blocks);
    }
  });
}

// One sequence and key head. Leaves the sums over its tokens for the gradients of dt_bias and A_log
// in unit.totals.
template <typename Acc>
void backward_unit(
    const KdaBwdParams& p,
    const KdaSequence& sequence,
    int64_t key_head,
    const BwdShape& shape,
    const cpu::ParallelFor& parallel,
    const BwdUnit<Acc>& unit,
    const BwdScratch<Acc>* scratch,
    const FwdScratch<Acc>* forward_scratch
) {
  const KdaDims& dims = p.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const BwdWalk<Acc> w{
      p,
      shape,
      unit,
      scratch,
      make_grid(sequence, dims.C),
      key_head,
      Kp,
      dims.HV / dims.H,
      num_panels<Acc>(dims.V)
  };
  zero_rows(unit.totals, w.all * 2 * Kp);
  if (w.grid.num_blocks == 0) {
    for (int64_t item = 0; item < w.all * w.panels; ++item) {
      const int64_t head = w.head(item / w.panels);
      const int64_t panel = item % w.panels;
      Acc* d = unit.d_state;
      load_state_panel(p.d_final, sequence.index, head, panel, dims.K, dims.V, d);
      store_state_panel(d, p.d_initial, sequence.index, head, panel, dims.K, dims.V);
    }
    return;
  }
  if (shape.checkpoints > 0) {
    const FwdCall<Acc> call{
        dims,
        p.options,
        p.tokens,
        p.initial,
        KdaStateView{},
        KdaStateView{},
        nullptr,
        unit.checkpoints,
        shape.group_chunks
    };
    forward_unit(call, sequence, key_head, shape.forward, parallel, unit.forward, forward_scratch);
  }
  const int64_t segments = ceil_div(w.grid.num_blocks, shape.segment_blocks);
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = segment * shape.segment_blocks;
    const int64_t rest = w.grid.num_blocks - begin;
    backward_segment(
        w, begin, begin + (rest < shape.segment_blocks ? rest : shape.segment_blocks), parallel
    );
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
