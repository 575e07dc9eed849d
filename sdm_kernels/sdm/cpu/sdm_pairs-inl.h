// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of weights, strengths and gates of one chunk, after its column walk
//! (docs/semantics.md).
//!
//! With VE[i,j] = <dv_i, e_j>, GE[i,j] = <dy_i, e_j>, computed only for pairs of tokens that share
//! a slot, and `decay` the product of gates between the two entries of a pair:
//!
//!     dA[i,j] = -VE[i,j] beta_j,  dQK[i,j] = GE[i,j] beta_j
//!     dk = dA and dQK over the pairs of the entry - <dv, M> before + beta <e, G> after
//!     dq = dQK over its pairs + <dy, M> before
//!     dbeta_j = sum of k after <e, G> + sum over i of (GE QK - VE A)[i,j] / beta_j   (undivided)
//!     dg(owner) = sum over entries from it on of value * (change through `before`)
//!               + sum over earlier writes of value * (change through `after`) + decay <G, M>
//!
//! Pairs without a gate between them leave dg alone: they would add the same number twice with
//! opposite signs. All sums are double, in slot order. Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// Working memory of one thread.
template <typename Acc>
struct PairScratch {
  uint8_t* shared_a;   // [C, C], 1 where VE is needed
  uint8_t* shared_qk;  // [C, C], likewise GE
  double* ve;          // [C, C]
  double* ge;          // [C, C]
  Acc* d_y;            // [C, ld]
  Acc* d_v;            // [C, ld]
  Acc* errors;         // [C, ld]
  double* d_value;     // [n]
  double* d_before;    // [n], times the value
  double* d_after;     // [n], writes, times the value
  double* d_beta;      // [C]
  double* d_gate;      // [C]
};

template <typename Acc>
PairScratch<Acc> carve_pair_scratch(cpu::Carver* carver, const SdmDims& dims) {
  const int64_t n = dims.C * (dims.W + dims.R);
  const int64_t square = dims.C * dims.C;
  const int64_t token_rows = dims.C * round_up(dims.D, kLanes<Acc>);
  PairScratch<Acc> s;
  s.shared_a = carver->take<uint8_t>(square);
  s.shared_qk = carver->take<uint8_t>(square);
  s.ve = carver->take<double>(square);
  s.ge = carver->take<double>(square);
  s.d_y = carver->take<Acc>(token_rows);
  s.d_v = carver->take<Acc>(token_rows);
  s.errors = carver->take<Acc>(token_rows);
  s.d_value = carver->take<double>(n);
  s.d_before = carver->take<double>(n);
  s.d_after = carver->take<double>(n);
  s.d_beta = carver->take<double>(dims.C);
  s.d_gate = carver->take<double>(dims.C);
  return s;
}

// Calls f(r, p, i, j, decay, gated) for every pair that A (f_a) or QK (f_qk) sums over: a later
// entry r of token i, an earlier write p of token j, the decay between them and whether any gate
// lies between.
template <typename Acc, typename FA, typename FQk>
SDM_INLINE void for_each_pair(const ChunkEntries<Acc>& e, int64_t C, FA&& f_a, FQk&& f_qk) {
  for (int64_t g = 0; g < e.num_groups; ++g) {
    const int64_t begin = e.group_begin[g];
    const int64_t mid = begin + e.group_num_writes[g];
    const int64_t end = e.group_begin[g + 1];
    for (int64_t r = begin + 1; r < mid; ++r) {
      double decay = e.gate[r];
      bool gated = e.owner[r] != 0;
      for (int64_t p = r - 1; p >= begin && decay != 0.0; --p) {
        if (e.row[p] < e.row[r]) {
          f_a(r, p, int64_t{e.row[r]}, int64_t{e.row[p]}, decay, gated);
        }
        decay *= e.gate[p];
        gated = gated || e.owner[p] != 0;
      }
    }
    int64_t last = begin;
    for (int64_t r = mid; r < end; ++r) {
      const int64_t i = e.row[r] - C;
      while (last < mid && e.row[last] <= i) {
        ++last;
      }
      double decay = 1.0;
      bool gated = false;
      for (int64_t p = last - 1; p >= begin && decay != 0.0; --p) {
        f_qk(r, p, i, int64_t{e.row[p]}, decay, gated);
        decay *= e.gate[p];
        gated = gated || e.owner[p] != 0;
      }
    }
  }
}

// out[i, j] = <x_i, y_j> where wanted.
template <typename Acc>
void wanted_dots(
    const uint8_t* wanted,
    int64_t C,
    int64_t num_tokens,
    const Acc* x,
    const Acc* y,
    int64_t ld,
    double* out
) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      if (wanted[i * C + j] != 0) {
        Vec<Acc> dot = set1(Acc(0));
        for (int64_t c = 0; c < ld; c += kLanes<Acc>) {
          dot = fma(load(x + i * ld + c), load(y + j * ld + c), dot);
        }
        out[i * C + j] = sum(dot);
      }
    }
  }
}

// Adds the parts of the tiles, in order.
template <typename Acc>
SDM_INLINE double sum_tiles(const Acc* parts, int64_t at, int64_t n, int64_t tiles) {
  double total = 0.0;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    total += parts[tile * n + at];
  }
  return total;
}

template <typename Acc>
void pair_gradients(const ChunkEntries<Acc>& e, int64_t C, PairScratch<Acc>* s) {
  for_each_pair(
      e,
      C,
      [&](int64_t r, int64_t p, int64_t i, int64_t j, double decay, bool gated) {
        const double k_r = e.value[r], k_p = e.value[p];
        const double through = s->ve[i * C + j] * decay;
        const double d_a = -static_cast<double>(e.beta[j]) * through;
        s->d_value[r] += d_a * k_p;
        s->d_value[p] += d_a * k_r;
        s->d_beta[j] -= through * k_r * k_p;
        if (gated) {
          s->d_before[r] += d_a * k_r * k_p;
          s->d_before[p] -= d_a * k_r * k_p;
        }
      },
      [&](int64_t r, int64_t p, int64_t i, int64_t j, double decay, bool gated) {
        const double q_r = e.value[r], k_p = e.value[p];
        const double through = s->ge[i * C + j] * decay;
        const double d_qk = static_cast<double>(e.beta[j]) * through;
        s->d_value[r] += d_qk * k_p;
        s->d_value[p] += d_qk * q_r;
        s->d_beta[j] += through * q_r * k_p;
        if (gated) {
          s->d_before[r] += d_qk * q_r * k_p;
          s->d_before[p] -= d_qk * q_r * k_p;
        }
      }
  );
}

// Gradient of the gates that one group's owners carry.
template <typename Acc, typename Emit>
void gate_gradients(
    const ChunkEntries<Acc>& e,
    int64_t g,
    int64_t C,
    double d_decay,
    PairScratch<Acc>* s,
    Emit&& emit
) {
  const int64_t begin = e.group_begin[g];
  const int64_t mid = begin + e.group_num_writes[g];
  // d_after becomes the sum over earlier writes
  double earlier = 0.0;
  for (int64_t w = begin; w < mid; ++w) {
    const double own = s->d_after[w];
    s->d_after[w] = earlier;
    earlier += own;
  }
  double later = 0.0;
  int64_t read = e.group_begin[g + 1] - 1;
  for (int64_t w = mid - 1; w >= begin; --w) {
    for (; read >= mid && e.row[read] - C >= e.row[w]; --read) {
      later += s->d_before[read];
    }
    later += s->d_before[w];
    if (e.owner[w] != 0) {
      emit(w, later + s->d_after[w] + d_decay);
    }
  }
}

// Writes the chunk's rows of d_write_val, d_read_val, d_beta and d_g.
template <typename Acc>
void finish_chunk(
    const SdmBwdParams& p,
    const ChunkEntries<Acc>& e,
    const ChunkDots<Acc>& dots,
    int64_t tiles,
    PairScratch<Acc>* s
) {
  const SdmDims& dims = p.dims;
  const ChunkPlace& place = e.place;
  const int64_t C = dims.C, W = dims.W, R = dims.R, D = dims.D;
  const int64_t n = C * (W + R);
  const int64_t ld = round_up(D, kLanes<Acc>);
  const int64_t num_tokens = place.num_tokens;
  const int64_t first_token = (place.batch * dims.T + place.token) * dims.H + place.head;

  std::memset(s->shared_a, 0, static_cast<size_t>(num_tokens * C));
  std::memset(s->shared_qk, 0, static_cast<size_t>(num_tokens * C));
  for_each_pair(
      e,
      C,
      [&](int64_t, int64_t, int64_t i, int64_t j, double, bool) { s->shared_a[i * C + j] = 1; },
      [&](int64_t, int64_t, int64_t i, int64_t j, double, bool) { s->shared_qk[i * C + j] = 1; }
  );
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t at = offset_of(p.d_out, place.batch, place.token + i, place.head);
    load_row(p.d_out.data, p.d_out.dtype, at, D, s->d_y + i * ld);
    convert_row(dots.d_v + i * D, D, s->d_v + i * ld);
    const Acc* error = static_cast<const Acc*>(p.saved.errors) + (first_token + i * dims.H) * D;
    convert_row(error, D, s->errors + i * ld);
  }
  wanted_dots(s->shared_a, C, num_tokens, s->d_v, s->errors, ld, s->ve);
  wanted_dots(s->shared_qk, C, num_tokens, s->d_y, s->errors, ld, s->ge);

  zero_rows(s->d_value, e.num_entries);
  zero_rows(s->d_before, e.num_entries);
  zero_rows(s->d_beta, num_tokens);
  zero_rows(s->d_gate, num_tokens);
  pair_gradients(e, C, s);

  // lanes without an entry keep a zero gradient
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t token = first_token + i * dims.H;
    for (int64_t a = 0; a < W; ++a) {
      store_scalar(p.d_write_val, p.tokens.write_val.dtype, token * W + a, 0.0);
      if (dims.gate_per_write) {
        store_scalar(p.d_g, p.tokens.g.dtype, token * W + a, 0.0);
      }
    }
    for (int64_t b = 0; b < R; ++b) {
      store_scalar(p.d_read_val, p.tokens.read_val.dtype, token * R + b, 0.0);
    }
  }
  // position of a lane's gradient: lanes count token * width + lane inside the chunk
  const auto place_of = [&](int64_t lane, int64_t width) {
    return (first_token + lane / width * dims.H) * width + lane % width;
  };
  for (int64_t g = 0; g < e.num_groups; ++g) {
    const int64_t begin = e.group_begin[g];
    const int64_t mid = begin + e.group_num_writes[g];
    for (int64_t w = begin; w < mid; ++w) {
      const int64_t i = e.row[w];
      const double k = e.value[w];
      const double error_grad = sum_tiles(dots.error_grad, w, n, tiles) * e.after[w];
      const double through_before = -sum_tiles(dots.row, w, n, tiles) * e.before[w];
      const double through_after = e.beta[i] * error_grad;
      s->d_beta[i] += k * error_grad;
      s->d_before[w] += k * through_before;
      s->d_after[w] = k * through_after;
      const double d_k = s->d_value[w] + through_before + through_after;
      store_scalar(p.d_write_val, p.tokens.write_val.dtype, place_of(e.lane[w], W), d_k);
    }
    for (int64_t r = mid; r < e.group_begin[g + 1]; ++r) {
      const double through_before = sum_tiles(dots.row, r, n, tiles) * e.before[r];
      s->d_before[r] += e.value[r] * through_before;
      const double d_q = s->d_value[r] + through_before;
      store_scalar(p.d_read_val, p.tokens.read_val.dtype, place_of(e.lane[r], R), d_q);
    }
    if (mid > begin) {
      const double d_decay = e.group_decay[g] * sum_tiles(dots.decay, g, n, tiles);
      gate_gradients(e, g, C, d_decay, s, [&](int64_t w, double d_gate) {
        if (dims.gate_per_write) {
          store_scalar(p.d_g, p.tokens.g.dtype, place_of(e.lane[w], W), d_gate);
        } else {
          s->d_gate[e.row[w]] += d_gate;
        }
      });
    }
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t token = first_token + i * dims.H;
    store_scalar(p.d_beta, p.tokens.beta.dtype, token, s->d_beta[i]);
    if (!dims.gate_per_write) {
      store_scalar(p.d_g, p.tokens.g.dtype, token, s->d_gate[i]);
    }
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
