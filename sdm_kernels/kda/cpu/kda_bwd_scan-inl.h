// SPDX-License-Identifier: Apache-2.0
//! @file The two scans of the backward on one block and panel: the forward again, which keeps the
//! state at the block's start, the residual and the write; and the reverse one.
//!
//! With dS the gradient of the state at the block's end and the letters of kda_scan-inl.h:
//!
//!     du = M^T do + kr dS
//!     y  = du - F^T (beta y)                      by substitution, from the last row
//!     dv = beta y,  dbeta = sum over v of y r     no division by beta
//!     dS = gamma dS + qd^T do - kd^T (beta y)     at the block's start
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// What the backward keeps of a block and head.
template <typename Acc>
struct BwdBlock {
  BlockKeys<Acc> keys;
  BlockTokens<Acc> tokens;
  Acc* from_start;  // [2 kBlock, Kp]: qd, then kd
};

template <typename Acc>
SDM_INLINE int64_t bwd_block_elements(int64_t Kp) {
  return keys_elements<Acc>(Kp) + 6 * kBlock * Kp + 2 * kBlock;
}

template <typename Acc>
SDM_INLINE BwdBlock<Acc> bwd_block_at(Acc* memory, int64_t Kp) {
  BwdBlock<Acc> b;
  b.keys = keys_at(memory, Kp);
  b.tokens.q = memory + keys_elements<Acc>(Kp);
  b.tokens.k = b.tokens.q + kBlock * Kp;
  b.tokens.decay = b.tokens.k + kBlock * Kp;
  b.tokens.gate = b.tokens.decay + kBlock * Kp;
  b.tokens.gamma = b.keys.gamma;
  b.tokens.beta = b.keys.beta;
  b.from_start = b.tokens.gate + kBlock * Kp;
  b.tokens.q_factor = b.from_start + 2 * kBlock * Kp;
  b.tokens.k_factor = b.tokens.q_factor + kBlock;
  return b;
}

// What it keeps of a block, head and panel.
template <typename Acc>
struct BwdPanel {
  Acc* state;   // [Kp, kPanel], at the block's start
  Acc* writes;  // [kBlock, kPanel], u
  Acc* r;       // [kBlock, kPanel]
  Acc* d_rows;  // [2 kBlock, kPanel]: do, then -dv
  Acc* d_beta;  // [kBlock], the panel's part
};

template <typename Acc>
SDM_INLINE int64_t bwd_panel_elements(int64_t Kp) {
  return (Kp + 4 * kBlock) * kPanel<Acc> + kBlock;
}

template <typename Acc>
SDM_INLINE BwdPanel<Acc> bwd_panel_at(Acc* memory, int64_t Kp) {
  BwdPanel<Acc> p;
  p.state = memory;
  p.writes = p.state + Kp * kPanel<Acc>;
  p.r = p.writes + kBlock * kPanel<Acc>;
  p.d_rows = p.r + kBlock * kPanel<Acc>;
  p.d_beta = p.d_rows + 2 * kBlock * kPanel<Acc>;
  return p;
}

// Everything about a block that the tokens alone decide.
template <typename Acc>
void prepare_backward(
    const KdaBwdParams& p, const BlockPlace& place, int64_t head, const BwdBlock<Acc>& b, Acc* y
) {
  const int64_t Kp = round_up(p.dims.K, kTile);
  load_tokens(p.dims, p.options, p.tokens, place, head, kBlock, b.tokens);
  const Acc scale = static_cast<Acc>(p.options.scale);
  block_scores(b.tokens, Kp, scale, place.num_tokens, b.keys.neg_kk, b.keys.qk, y);
  Acc* kd = b.from_start + kBlock * Kp;
  decay_from_start(b.tokens, Kp, scale, kd, b.from_start);
  decay_to_end(b.tokens, Kp, b.keys.kr);
  transpose_rows(kd, Kp, Kp, b.keys.first_t, 2 * kBlock);
  transpose_rows(b.keys.kr, Kp, Kp, b.keys.first_t + kBlock, 2 * kBlock);
}

// The forward of a block whose start state stands in x.state; next: the state at its end, null
// where nobody needs it.
template <typename Acc>
void replay_block(
    const KdaBwdParams& p,
    const BlockPlace& place,
    int64_t head,
    int64_t panel,
    const BlockKeys<Acc>& keys,
    const BwdPanel<Acc>& x,
    Acc* v,
    Acc* next
) {
  const int64_t Kp = round_up(p.dims.K, kTile);
  load_panel_rows(p.tokens.v, place.batch, place.token, head, place.num_tokens, panel, p.dims.V, v);
  product<Start::kZero, kPanel<Acc>>(
      kBlock,
      Kp,
      static_cast<const Acc*>(keys.first_t),
      int64_t{1},
      2 * kBlock,
      static_cast<const Acc*>(x.state),
      x.r
  );
  subtract_from(v, x.r);
  solve_block(keys.neg_kk, keys.beta, x.r, x.writes);
  if (next != nullptr) {
    update_state(keys, Kp, x.writes, x.state, next);
  }
}

// y[kBlock, kPanel] comes as du; d_v becomes beta y, neg_d_v its negative.
template <typename Acc>
SDM_INLINE void solve_block_transposed(
    const Acc* neg_kk, const Acc* beta, Acc* y, Acc* d_v, Acc* neg_d_v
) {
  for (int64_t c = 0; c < kPanel<Acc>; c += kLanes<Acc>) {
    Vec<Acc> x[kBlock];
    SDM_UNROLL_TILE
    for (int i = 0; i < kBlock; ++i) {
      x[i] = load(y + i * kPanel<Acc> + c);
    }
    SDM_UNROLL_TILE
    for (int back = 0; back < kBlock; ++back) {
      const int j = kBlock - 1 - back;
      const Vec<Acc> d = mul(set1(beta[j]), x[j]);
      store(y + j * kPanel<Acc> + c, x[j]);
      store(d_v + j * kPanel<Acc> + c, d);
      store(neg_d_v + j * kPanel<Acc> + c, sub(set1(Acc(0)), d));
      SDM_UNROLL_TILE
      for (int i = 0; i < kBlock; ++i) {
        if (i < j) {
          x[i] = fma(set1(neg_kk[j * kBlock + i]), d, x[i]);
        }
      }
    }
  }
}

// Working memory of a thread in the scans.
template <typename Acc>
struct BwdScanScratch {
  Acc* y;    // [kPairColumns, Kp], scores
  Acc* v;    // [kBlock, kPanel]
  Acc* d_u;  // [kBlock, kPanel]
  Acc* d_v;  // [kBlock, kPanel]
};

template <typename Acc>
BwdScanScratch<Acc> carve_bwd_scan_scratch(cpu::Carver* carver, int64_t Kp) {
  BwdScanScratch<Acc> s;
  s.y = carver->take<Acc>(kPairColumns * Kp);
  s.v = carver->take<Acc>(kBlock * kPanel<Acc>);
  s.d_u = carver->take<Acc>(kBlock * kPanel<Acc>);
  s.d_v = carver->take<Acc>(kBlock * kPanel<Acc>);
  return s;
}

// From the gradient of the state at the block's end to the one at its start; writes the rows of
// d_v.
template <typename Acc>
void reverse_block(
    const KdaBwdParams& p,
    const BlockPlace& place,
    int64_t head,
    int64_t panel,
    const BwdBlock<Acc>& b,
    const BwdPanel<Acc>& x,
    const BwdScanScratch<Acc>& s,
    const Acc* d_end,
    Acc* d_start
) {
  const KdaDims& dims = p.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const KdaView d_v = output_view(p.d_v, p.tokens.v.dtype, dims, dims.HV, dims.V);
  prefetch_panel<Acc>(d_v, place, head, panel, dims.V);
  load_panel_rows(
      p.d_out, place.batch, place.token, head, place.num_tokens, panel, dims.V, x.d_rows
  );
  product<Start::kZero, kPanel<Acc>>(
      kBlock,
      Kp,
      static_cast<const Acc*>(b.keys.first_t + kBlock),
      int64_t{1},
      2 * kBlock,
      d_end,
      s.d_u
  );
  product<Start::kAdd, kPanel<Acc>>(
      kBlock,
      kBlock,
      static_cast<const Acc*>(b.keys.qk),
      int64_t{1},
      kBlock,
      static_cast<const Acc*>(x.d_rows),
      s.d_u
  );
  solve_block_transposed(b.keys.neg_kk, b.keys.beta, s.d_u, s.d_v, x.d_rows + kBlock * kPanel<Acc>);
  panel_dots(s.d_u, x.r, kBlock, x.d_beta);
  const int64_t width = panel_width<Acc>(panel, dims.V);
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t token = (place.batch * dims.T + place.token + i) * dims.HV + head;
    store_row(
        s.d_v + i * kPanel<Acc>,
        p.tokens.v.dtype,
        token * dims.V + panel * kPanel<Acc>,
        width,
        p.d_v
    );
  }
  product<Start::kScaled, kPanel<Acc>>(
      Kp,
      2 * kBlock,
      static_cast<const Acc*>(b.from_start),
      int64_t{1},
      Kp,
      static_cast<const Acc*>(x.d_rows),
      d_start,
      static_cast<const Acc*>(b.keys.gamma),
      d_end
  );
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
