// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of queries, keys and gates of one block and head, once both of its states are
//! known.
//!
//! With E the decay from the block's start to a token, R the one from behind it to the end,
//! D[j, t] the one from token j to t, q normalised, S the state at the start, dS its gradient
//! at the end, dM = scale do u^T, dF = -dv u^T:
//!
//!     t1 = do S^T,  t2 = -dv S^T,  t3 = u dS^T
//!     dq[t] = scale E[t] t1[t] + sum over j <= t of dM[t, j] D[j, t] k[j]
//!     dk[t] = E[t] t2[t] + R[t] t3[t] + sum over j < t of dF[t, j] D[j, t] k[j] + a[t, t]
//!     a[j, t] = dM[t, j] q[t] + dF[t, j] k[t] + D[t, t + 1] a[j, t + 1]
//!     dg[t] = gamma sum over v of S dS + sum over i >= t of E[i] (scale q[i] t1[i] + k[i] t2[i])
//!           + sum over j < t of R[j] k[j] t3[j] + sum over j < t of D[j, t] k[j] a[j, t]
//!
//! a is the gradient of the key j decayed to t: what stands in dg crosses the gate of t and nothing
//! else does. The usual form, differences of q dq and k dk summed from the end, must cancel every
//! pair that a gate does not part, and leaves the rounding of all of them.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// Working memory of a thread.
template <typename Acc>
struct BwdBlockScratch {
  Acc* d_rows_t;  // [kPanel, 2 kBlock]
  Acc* writes_t;  // [kPanel, kBlock]
  Acc* first_t;   // [Kp, 2 kBlock]: t1, t2
  Acc* last_t;    // [Kp, kBlock]: t3
  Acc* t1;        // [kBlock, Kp]
  Acc* t2;        // [kBlock, Kp]
  Acc* t3;        // [kBlock, Kp]
  Acc* d_scores;  // [2 kBlock, kBlock]: dM, dF
  Acc* crossing;  // [Kp], gamma sum of S dS
  Acc* dots;      // [Kp], one panel's part
  Acc* d_g;       // [kBlock, Kp]
  Acc* beta;      // [kBlock], raw
  Acc* d_beta;    // [kBlock]
};

template <typename Acc>
BwdBlockScratch<Acc> carve_bwd_block_scratch(cpu::Carver* carver, int64_t Kp) {
  BwdBlockScratch<Acc> s;
  s.d_rows_t = carver->take<Acc>(kPanel<Acc> * 2 * kBlock);
  s.writes_t = carver->take<Acc>(kPanel<Acc> * kBlock);
  s.first_t = carver->take<Acc>(Kp * 2 * kBlock);
  s.last_t = carver->take<Acc>(Kp * kBlock);
  s.t1 = carver->take<Acc>(kBlock * Kp);
  s.t2 = carver->take<Acc>(kBlock * Kp);
  s.t3 = carver->take<Acc>(kBlock * Kp);
  s.d_scores = carver->take<Acc>(2 * kBlock * kBlock);
  s.crossing = carver->take<Acc>(Kp);
  s.dots = carver->take<Acc>(Kp);
  s.d_g = carver->take<Acc>(kBlock * Kp);
  s.beta = carver->take<Acc>(kBlock);
  s.d_beta = carver->take<Acc>(kBlock);
  return s;
}

// t1, t2, t3, d_scores and crossing; d_end(panel) and panels(panel) find what the scans left.
template <typename Acc, typename DEnd, typename Panels>
SDM_INLINE void state_products(
    int64_t Kp,
    int64_t num_panels,
    const Acc* gamma,
    Acc scale,
    DEnd&& d_end,
    Panels&& panels,
    const BwdBlockScratch<Acc>& s
) {
  constexpr int both = 2 * static_cast<int>(kBlock);
  constexpr int one = static_cast<int>(kBlock);
  constexpr int64_t width = kPanel<Acc>;
  zero_rows(s.first_t, Kp * both);
  zero_rows(s.last_t, Kp * one);
  zero_rows(s.d_scores, int64_t{both} * one);
  zero_rows(s.crossing, Kp);
  for (int64_t panel = 0; panel < num_panels; ++panel) {
    const BwdPanel<Acc> x = panels(panel);
    transpose_rows(x.d_rows, width, width, s.d_rows_t, both);
    transpose_rows(x.d_rows + kBlock * width, width, width, s.d_rows_t + kBlock, both);
    transpose_rows(x.writes, width, width, s.writes_t, one);
    const Acc* d_rows_t = s.d_rows_t;
    const Acc* writes_t = s.writes_t;
    const Acc* d_rows = x.d_rows;
    const Acc* state = x.state;
    const Acc* d_state = d_end(panel);
    product<Start::kAdd, both>(Kp, width, state, width, int64_t{1}, d_rows_t, s.first_t);
    product<Start::kAdd, one>(Kp, width, d_state, width, int64_t{1}, writes_t, s.last_t);
    product<Start::kAdd, one>(
        int64_t{both}, width, d_rows, width, int64_t{1}, writes_t, s.d_scores
    );
    panel_dots(state, d_state, Kp, s.dots);
    for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
      store(s.crossing + c, add(load(s.crossing + c), load(s.dots + c)));
    }
  }
  transpose_columns(s.first_t, both, Kp, s.t1, Kp);
  transpose_columns(s.first_t + kBlock, both, Kp, s.t2, Kp);
  transpose_columns(s.last_t, one, Kp, s.t3, Kp);
  scale_row(s.d_scores, scale, kBlock * kBlock);
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    store(s.crossing + c, mul(load(gamma + c), load(s.crossing + c)));
  }
}

// The rows of one vector of channels.
template <typename Acc>
struct ChannelRows {
  Vec<Acc> q[kBlock], k[kBlock], decay[kBlock];
  Vec<Acc> d_q[kBlock], d_k[kBlock], d_g[kBlock];
};

// The terms with t1, t2, t3.
template <typename Acc>
SDM_INLINE void add_state_terms(
    const BwdBlockScratch<Acc>& s, int64_t Kp, Acc scale, int64_t c, ChannelRows<Acc>* r
) {
  const Vec<Acc> q_scale = set1(scale);
  Vec<Acc> decay = set1(Acc(1));
  SDM_UNROLL_TILE
  for (int i = 0; i < kBlock; ++i) {
    decay = mul(decay, r->decay[i]);
    const Vec<Acc> d_q = mul(mul(q_scale, decay), load(s.t1 + i * Kp + c));
    const Vec<Acc> d_k = mul(decay, load(s.t2 + i * Kp + c));
    r->d_q[i] = d_q;
    r->d_k[i] = d_k;
    r->d_g[i] = fma(r->q[i], d_q, mul(r->k[i], d_k));
  }
  Vec<Acc> later = load(s.crossing + c);
  Vec<Acc> carried[kBlock];
  decay = set1(Acc(1));
  SDM_UNROLL_TILE
  for (int back = 0; back < kBlock; ++back) {
    const int i = kBlock - 1 - back;
    later = add(later, r->d_g[i]);
    r->d_g[i] = later;
    const Vec<Acc> d_k = mul(decay, load(s.t3 + i * Kp + c));
    r->d_k[i] = add(r->d_k[i], d_k);
    carried[i] = mul(r->k[i], d_k);
    decay = mul(decay, r->decay[i]);
  }
  Vec<Acc> earlier = set1(Acc(0));
  SDM_UNROLL_TILE
  for (int i = 0; i < kBlock; ++i) {
    r->d_g[i] = add(r->d_g[i], earlier);
    earlier = add(earlier, carried[i]);
  }
}

// Row t of the pairs with kColumns earlier keys y, decayed here from row t - 1 and kept for the way
// back. With kOwn the row's own key joins them.
template <int kColumns, bool kOwn, typename Acc>
SDM_INLINE void pair_row(
    const Acc* d_qk, const Acc* d_kk, int64_t t, Vec<Acc>* y, Vec<Acc>* kept, ChannelRows<Acc>* r
) {
  Vec<Acc> d_q = r->d_q[t];
  Vec<Acc> d_k = r->d_k[t];
  const Vec<Acc> decay = r->decay[t];
  SDM_UNROLL_TILE
  for (int j = 0; j < kColumns; ++j) {
    y[j] = mul(y[j], decay);
    kept[j] = y[j];
    d_q = fma(set1(d_qk[j]), y[j], d_q);
    d_k = fma(set1(d_kk[j]), y[j], d_k);
  }
  if constexpr (kOwn) {
    y[kColumns] = r->k[t];
    d_q = fma(set1(d_qk[kColumns]), y[kColumns], d_q);
  }
  r->d_q[t] = d_q;
  r->d_k[t] = d_k;
}

// The same row for the gradients a of the decayed keys, which come as of row t + 1, already through
// its gate. With kOwn the row's own key gets its gradient.
template <int kColumns, bool kOwn, typename Acc>
SDM_INLINE void pair_row_back(
    const Acc* d_qk,
    const Acc* d_kk,
    int64_t t,
    const Vec<Acc>* kept,
    Vec<Acc>* a,
    ChannelRows<Acc>* r
) {
  Vec<Acc> d_g = r->d_g[t];
  const Vec<Acc> q = r->q[t];
  const Vec<Acc> k = r->k[t];
  const Vec<Acc> decay = r->decay[t];
  SDM_UNROLL_TILE
  for (int j = 0; j < kColumns; ++j) {
    const Vec<Acc> here = fma(set1(d_qk[j]), q, fma(set1(d_kk[j]), k, a[j]));
    d_g = fma(kept[j], here, d_g);
    a[j] = mul(here, decay);
  }
  r->d_g[t] = d_g;
  if constexpr (kOwn) {
    r->d_k[t] = add(r->d_k[t], fma(set1(d_qk[kColumns]), q, a[kColumns]));
  }
}

// The terms of pairs of tokens. Rows beyond the block's tokens add zeros.
template <typename Acc>
SDM_INLINE void add_pair_terms(const Acc* d_qk, const Acc* d_kk, ChannelRows<Acc>* r) {
  static_assert(kPairColumns == 4, "the rows on the diagonal are written out");
  Vec<Acc> kept[kBlock][kPairColumns];
  for (int64_t first = 0; first < kBlock; first += kPairColumns) {
    const Acc* qk = d_qk + first * (kBlock + 1);
    const Acc* kk = d_kk + first * (kBlock + 1);
    const int64_t rows = kBlock - first;
    Vec<Acc> y[kPairColumns], a[kPairColumns];
    SDM_UNROLL_TILE
    for (int j = 0; j < kPairColumns; ++j) {
      y[j] = a[j] = set1(Acc(0));
    }
    pair_row<0, true>(qk, kk, first, y, kept[0], r);
    pair_row<1, true>(qk + kBlock, kk + kBlock, first + 1, y, kept[1], r);
    pair_row<2, true>(qk + 2 * kBlock, kk + 2 * kBlock, first + 2, y, kept[2], r);
    pair_row<3, true>(qk + 3 * kBlock, kk + 3 * kBlock, first + 3, y, kept[3], r);
    for (int64_t i = kPairColumns; i < rows; ++i) {
      pair_row<4, false>(qk + i * kBlock, kk + i * kBlock, first + i, y, kept[i], r);
    }
    for (int64_t i = rows - 1; i >= kPairColumns; --i) {
      pair_row_back<4, false>(qk + i * kBlock, kk + i * kBlock, first + i, kept[i], a, r);
    }
    pair_row_back<3, true>(qk + 3 * kBlock, kk + 3 * kBlock, first + 3, kept[3], a, r);
    pair_row_back<2, true>(qk + 2 * kBlock, kk + 2 * kBlock, first + 2, kept[2], a, r);
    pair_row_back<1, true>(qk + kBlock, kk + kBlock, first + 1, kept[1], a, r);
    pair_row_back<0, true>(qk, kk, first, kept[0], a, r);
  }
}

// Rows of the gradients of the normalised q and k of one value head, [kBlock, Kp] each, and of the
// log-decay in s.d_g.
template <typename Acc>
void key_gradients(
    const BwdBlock<Acc>& b, int64_t Kp, Acc scale, const BwdBlockScratch<Acc>& s, Acc* d_q, Acc* d_k
) {
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    ChannelRows<Acc> r;
    for (int64_t i = 0; i < kBlock; ++i) {
      r.q[i] = load(b.tokens.q + i * Kp + c);
      r.k[i] = load(b.tokens.k + i * Kp + c);
      r.decay[i] = load(b.tokens.decay + i * Kp + c);
    }
    add_state_terms(s, Kp, scale, c, &r);
    add_pair_terms(
        static_cast<const Acc*>(s.d_scores),
        static_cast<const Acc*>(s.d_scores + kBlock * kBlock),
        &r
    );
    for (int64_t i = 0; i < kBlock; ++i) {
      store(d_q + i * Kp + c, r.d_q[i]);
      store(d_k + i * Kp + c, r.d_k[i]);
      store(s.d_g + i * Kp + c, r.d_g[i]);
    }
  }
}

// Writes the rows of d_g and d_beta, and the block's sums over tokens for the gradients of dt_bias
// and A_log: d_bias and d_A, [Kp] each.
template <typename Acc, typename Panels>
void finish_gates(
    const KdaBwdParams& p,
    const BlockPlace& place,
    int64_t head,
    const Acc* kept_gates,
    Panels&& panels,
    const BwdBlockScratch<Acc>& s,
    Acc* d_bias,
    Acc* d_A
) {
  const KdaDims& dims = p.dims;
  const int64_t Kp = round_up(dims.K, kTile);
  const Gate<Acc> gate = gate_of_head<Acc>(p.options, p.tokens, dims, head);
  zero_rows(d_bias, Kp);
  zero_rows(d_A, Kp);
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t row = (place.batch * dims.T + place.token + i) * dims.HV + head;
    Acc* d_g = s.d_g + i * Kp;
    if (p.options.gate != KdaGate::kActivated) {
      gate_gradient(gate, dims.K, kept_gates + i * Kp, d_g, d_A);
      for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
        store(d_bias + c, add(load(d_bias + c), load(d_g + c)));
      }
    }
    store_row(d_g, p.tokens.g.dtype, row * dims.K, dims.K, p.d_g);
  }

  zero_rows(s.d_beta, kBlock);
  for (int64_t panel = 0; panel < num_panels<Acc>(dims.V); ++panel) {
    const Acc* part = panels(panel).d_beta;
    for (int64_t i = 0; i < kBlock; i += kLanes<Acc>) {
      store(s.d_beta + i, add(load(s.d_beta + i), load(part + i)));
    }
  }
  load_beta(p.tokens.beta, place.batch, place.token, head, place.num_tokens, s.beta);
  beta_gradient(p.options.beta, s.beta, s.d_beta);
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t row = (place.batch * dims.T + place.token + i) * dims.HV + head;
    store_scalar(p.d_beta, p.tokens.beta.dtype, row, s.d_beta[i]);
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
