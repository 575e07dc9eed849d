// SPDX-License-Identifier: Apache-2.0
//! @file The tokens of one block and one value head: activated rows and the decayed scores between
//! them.
//!
//! Decays are products of the tokens' own factors exp(g), one exponential an element: between two
//! tokens, from the block's start and to its end. No factor is above 1 whatever the gate, a row
//! depends on no gate behind it, and what enters the state a block is exp of the summed gates,
//! rounded once. The scores cost 120 pairs of rows a block instead of the products of anchored
//! tiles: of the 3 K V multiply-adds a token, under a tenth.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

// Where a block stands.
struct BlockPlace {
  int64_t batch;
  int64_t token;       // its first one in the batch row
  int64_t num_tokens;  // 1 to kBlock
  int64_t chunk;       // of the sequence
  bool starts_chunk;
};

// Blocks restart with each chunk, so that the state at its start is on hand.
struct BlockGrid {
  KdaSequence sequence;
  int64_t C;
  int64_t num_chunks;
  int64_t per_chunk;
  int64_t num_blocks;

  SDM_INLINE BlockPlace place(int64_t block) const {
    const int64_t chunk = block / per_chunk;
    const int64_t inside = (block - chunk * per_chunk) * kBlock;
    const int64_t begin = chunk * C + inside;
    const int64_t of_chunk = C - inside < kBlock ? C - inside : kBlock;
    const int64_t rest = sequence.length - begin;
    return {
        sequence.batch,
        sequence.begin + begin,
        rest < of_chunk ? rest : of_chunk,
        chunk,
        inside == 0
    };
  }
};

SDM_INLINE BlockGrid make_grid(const KdaSequence& sequence, int64_t C) {
  const int64_t num_chunks = ceil_div(sequence.length, C);
  const int64_t per_chunk = ceil_div(C, kBlock);
  const int64_t last = sequence.length - (num_chunks - 1) * C;
  const int64_t num_blocks =
      num_chunks == 0 ? 0 : (num_chunks - 1) * per_chunk + ceil_div(last, kBlock);
  return {sequence, C, num_chunks, per_chunk, num_blocks};
}

// Rows beyond the block's tokens are neutral: nothing read, nothing written, no decay.
template <typename Acc>
struct BlockTokens {
  Acc* q;         // [kBlock, Kp], normalised
  Acc* k;         // [kBlock, Kp], normalised
  Acc* decay;     // [kBlock, Kp], exp(g)
  Acc* gate;      // [kBlock, Kp], raw gate plus bias; null: not wanted
  Acc* q_factor;  // [kBlock], of the norm
  Acc* k_factor;  // [kBlock]
  Acc* beta;      // [kBlock]
  Acc* gamma;     // [Kp], decay of the whole block
};

template <typename Acc>
BlockTokens<Acc> carve_tokens(cpu::Carver* carver, int64_t Kp) {
  BlockTokens<Acc> t;
  t.q = carver->take<Acc>(kBlock * Kp);
  t.k = carver->take<Acc>(kBlock * Kp);
  t.decay = carver->take<Acc>(kBlock * Kp);
  t.gate = nullptr;
  t.q_factor = carver->take<Acc>(kBlock);
  t.k_factor = carver->take<Acc>(kBlock);
  t.beta = carver->take<Acc>(kBlock);
  t.gamma = carver->take<Acc>(Kp);
  return t;
}

// Row of K elements with zeros up to Kp.
template <typename Acc>
SDM_INLINE void load_key_row(
    const KdaView& view, int64_t batch, int64_t token, int64_t head, int64_t K, int64_t Kp, Acc* dst
) {
  if (K < Kp) {
    zero_rows(dst + Kp - kTile, kTile);
  }
  load_row(view.data, view.dtype, offset_of(view, batch, token, head), K, dst);
}

// Fills the rows of the place's tokens, and neutral ones up to `rows`.
template <typename Acc>
void load_tokens(
    const KdaDims& dims,
    const KdaOptions& options,
    const KdaTokens& tokens,
    const BlockPlace& place,
    int64_t head,
    int64_t rows,
    const BlockTokens<Acc>& t
) {
  const int64_t K = dims.K;
  const int64_t Kp = round_up(K, kTile);
  const int64_t key_head = head / (dims.HV / dims.H);
  const Gate<Acc> gate = gate_of_head<Acc>(options, tokens, dims, head);
  zero_rows(t.gamma, Kp);
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t token = place.token + i;
    Acc* q = t.q + i * Kp;
    Acc* k = t.k + i * Kp;
    Acc* decay = t.decay + i * Kp;
    load_key_row(tokens.q, place.batch, token, key_head, K, Kp, q);
    load_key_row(tokens.k, place.batch, token, key_head, K, Kp, k);
    load_key_row(tokens.g, place.batch, token, head, K, Kp, decay);
    if (options.l2norm) {
      t.q_factor[i] = inverse_norm(q, Kp);
      t.k_factor[i] = inverse_norm(k, Kp);
      scale_row(q, t.q_factor[i], Kp);
      scale_row(k, t.k_factor[i], Kp);
    }
    activate_gate(gate, K, decay, t.gamma, t.gate != nullptr ? t.gate + i * Kp : nullptr);
  }
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    store(t.gamma + c, exp(load(t.gamma + c)));
  }
  const int64_t padding = (rows - place.num_tokens) * Kp;
  zero_rows(t.q + place.num_tokens * Kp, padding);
  zero_rows(t.k + place.num_tokens * Kp, padding);
  for (int64_t c = 0; c < padding; c += kLanes<Acc>) {
    store(t.decay + place.num_tokens * Kp + c, set1(Acc(1)));
  }
  load_beta(tokens.beta, place.batch, place.token, head, place.num_tokens, t.beta);
  activate_beta(options.beta, place.num_tokens, t.beta);
}

// Fetches what load_tokens() will read.
SDM_INLINE void prefetch_tokens(
    const KdaDims& dims, const KdaTokens& tokens, const BlockPlace& place, int64_t head
) {
  const int64_t n = place.num_tokens;
  const int64_t key_head = head / (dims.HV / dims.H);
  prefetch_rows(tokens.q, place.batch, place.token, key_head, n, 0, dims.K);
  prefetch_rows(tokens.k, place.batch, place.token, key_head, n, 0, dims.K);
  prefetch_rows(tokens.g, place.batch, place.token, head, n, 0, dims.K);
}

// Fetches a panel's columns of v or of its gradient.
template <typename Acc>
SDM_INLINE void prefetch_panel(
    const KdaView& view, const BlockPlace& place, int64_t head, int64_t panel, int64_t V
) {
  prefetch_rows(
      view,
      place.batch,
      place.token,
      head,
      place.num_tokens,
      panel * kPanel<Acc>,
      panel_width<Acc>(panel, V)
  );
}

// ---------------------------------------------------------------------------------------------
// Scores

// Columns of scores that are made together, so that a row's loads serve all of them.
constexpr int kPairColumns = 4;

// Row t of the scores with kColumns earlier tokens, whose keys y come decayed to row t - 1 and
// leave decayed to row t. With kOwn the token's own key joins them and gets its undecayed score
// with q.
template <int kColumns, bool kOwn, typename Acc>
SDM_INLINE void score_row(
    const BlockTokens<Acc>& tokens, int64_t Kp, Acc scale, int64_t t, Acc* y, Acc* kk, Acc* qk
) {
  Vec<Acc> dot_k[kPairColumns], dot_q[kPairColumns];
  SDM_UNROLL_TILE
  for (int j = 0; j < kPairColumns; ++j) {
    dot_k[j] = dot_q[j] = set1(Acc(0));
  }
  const Acc* q_row = tokens.q + t * Kp;
  const Acc* k_row = tokens.k + t * Kp;
  const Acc* decay_row = tokens.decay + t * Kp;
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    const Vec<Acc> q = load(q_row + c);
    const Vec<Acc> k = load(k_row + c);
    const Vec<Acc> decay = load(decay_row + c);
    SDM_UNROLL_TILE
    for (int j = 0; j < kColumns; ++j) {
      const Vec<Acc> key = mul(load(y + j * Kp + c), decay);
      store(y + j * Kp + c, key);
      dot_k[j] = fma(k, key, dot_k[j]);
      dot_q[j] = fma(q, key, dot_q[j]);
    }
    if constexpr (kOwn) {
      store(y + kColumns * Kp + c, k);
      dot_q[kColumns] = fma(q, k, dot_q[kColumns]);
    }
  }
  Acc k_sums[kPairColumns], q_sums[kPairColumns];
  sum4(dot_k, k_sums);
  sum4(dot_q, q_sums);
  SDM_UNROLL_TILE
  for (int j = 0; j < kColumns; ++j) {
    kk[j] = -k_sums[j];
    qk[j] = scale * q_sums[j];
  }
  if constexpr (kOwn) {
    qk[kColumns] = scale * q_sums[kColumns];
  }
}

// neg_kk[i, j] = -k_i . k_j decayed from j to i for j < i, qk[i, j] = scale q_i . k_j for j <= i,
// zero elsewhere; both [kBlock, kBlock]. y: [kPairColumns, Kp] to work in.
template <typename Acc>
void block_scores(
    const BlockTokens<Acc>& tokens,
    int64_t Kp,
    Acc scale,
    int64_t num_tokens,
    Acc* neg_kk,
    Acc* qk,
    Acc* y
) {
  zero_rows(neg_kk, kBlock * kBlock);
  zero_rows(qk, kBlock * kBlock);
  for (int64_t j = 0; j < num_tokens; j += kPairColumns) {
    for (int64_t t = j; t < num_tokens; ++t) {
      Acc* kk_row = neg_kk + t * kBlock + j;
      Acc* qk_row = qk + t * kBlock + j;
      switch (t - j) {
        case 0:
          score_row<0, true>(tokens, Kp, scale, t, y, kk_row, qk_row);
          break;
        case 1:
          score_row<1, true>(tokens, Kp, scale, t, y, kk_row, qk_row);
          break;
        case 2:
          score_row<2, true>(tokens, Kp, scale, t, y, kk_row, qk_row);
          break;
        case 3:
          score_row<3, true>(tokens, Kp, scale, t, y, kk_row, qk_row);
          break;
        default:
          score_row<4, false>(tokens, Kp, scale, t, y, kk_row, qk_row);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Decays to the ends of the block

// x_out[i] = x[i] * decay from the block's start to token i, for x = k and scale q.
template <typename Acc>
SDM_INLINE void decay_from_start(
    const BlockTokens<Acc>& t, int64_t Kp, Acc scale, Acc* k_out, Acc* q_out
) {
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    Vec<Acc> decay = set1(Acc(1));
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t at = i * Kp + c;
      decay = mul(decay, load(t.decay + at));
      store(k_out + at, mul(load(t.k + at), decay));
      store(q_out + at, mul(load(t.q + at), mul(set1(scale), decay)));
    }
  }
}

// k_out[i] = k[i] * decay from behind token i to the block's end.
template <typename Acc>
SDM_INLINE void decay_to_end(const BlockTokens<Acc>& t, int64_t Kp, Acc* k_out) {
  for (int64_t c = 0; c < Kp; c += kLanes<Acc>) {
    Vec<Acc> decay = set1(Acc(1));
    for (int64_t i = kBlock - 1; i >= 0; --i) {
      const int64_t at = i * Kp + c;
      store(k_out + at, mul(load(t.k + at), decay));
      decay = mul(decay, load(t.decay + at));
    }
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
