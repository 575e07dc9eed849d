// SPDX-License-Identifier: Apache-2.0
//! @file Backward of one chunk that needs the bank and its gradient: walked from the last chunk to
//! the first, by slice of columns (docs/semantics.md).
//!
//! With G the gradient of the bank at the chunk's end, M the bank at its start, e the saved errors
//! and dy the gradient of the readings:
//!
//!     dv[i]  = sum over writes of post * G[slot] + sum over j >= i of QK[j,i] beta_i dy[j]
//!              - sum over j > i of A[j,i] beta_i dv[j]                       solve, transposed
//!     G[slot] = decay * G[slot] - sum over writes of weight * dv[token] + sum over reads of weight
//!     * dy[token]
//!
//! and per entry the dots <e, G>, <dv, M> or <dy, M>, and per group <G, M>, from which
//! sdm_pairs-inl.h makes the gradients of weights, strengths and gates. dv is the total gradient of
//! the value: no product with the inverse of the triangular system and no division by beta is
//! needed.
//!
//! Bytes: rows of G are read twice where written and once elsewhere and stored once; M is read
//! once, from wherever its row is kept (sdm_banks-inl.h). Dots are summed inside a slice; the
//! slices' parts are added in order later. Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// What the column walk leaves of one chunk for the gradients of weights and gates.
template <typename Acc>
struct ChunkDots {
  Acc* error_grad;  // [tiles, n], writes: <e[token], G[slot]> with G at the chunk's end
  Acc* row;         // [tiles, n], writes: <dv[token], M[slot]>; reads: <dy[token], M[slot]>
  Acc* decay;       // [tiles, n], by group: <G[slot], M[slot]>
  Acc* d_v;         // [C, D]
};

template <typename Acc>
ChunkDots<Acc> carve_dots(cpu::Carver* carver, const SdmDims& dims, int64_t tiles) {
  const int64_t n = tiles * dims.C * (dims.W + dims.R);
  ChunkDots<Acc> dots;
  dots.error_grad = carver->take<Acc>(n);
  dots.row = carver->take<Acc>(n);
  dots.decay = carver->take<Acc>(n);
  dots.d_v = carver->take<Acc>(dims.C * dims.D);
  return dots;
}

// Working memory of one thread in the column walk.
template <typename Acc>
struct BwdScratch {
  Acc* tokens;  // [2C, ld]: dv, then dy
  Acc* row;     // [ld], a bank row
};

template <typename Acc>
BwdScratch<Acc> carve_bwd_scratch(cpu::Carver* carver, const SdmDims& dims, int64_t slice_columns) {
  const int64_t ld = round_up(slice_columns, kLanes<Acc>);
  BwdScratch<Acc> s;
  s.tokens = carver->take<Acc>(2 * dims.C * ld);
  s.row = carver->take<Acc>(ld);
  return s;
}

// dv += post * G and the dots <e, G> for the writes [begin, end) of one slot, n columns.
template <int kVectors, typename Acc>
SDM_INLINE void gather_gradient_tile(
    const ChunkEntries<Acc>& e,
    int64_t begin,
    int64_t end,
    const Acc* row,
    int64_t n,
    const Acc* errors,
    int64_t errors_ld,
    Acc* d_v,
    int64_t ld,
    Acc* error_grad
) {
  constexpr int64_t lanes = kLanes<Acc>;
  [[maybe_unused]] Vec<Acc> x[kVectors > 0 ? kVectors : 1];
  SDM_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    x[j] = load(row + j * lanes);
  }
  for (int64_t k = begin; k < end; ++k) {
    const Vec<Acc> post = set1(e.post[k]);
    const Acc* error = errors + e.row[k] * errors_ld;
    Acc* dst = d_v + e.row[k] * ld;
    Vec<Acc> dot = set1(Acc(0));
    if constexpr (kVectors > 0) {
      SDM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        store(dst + j * lanes, fma(post, x[j], load(dst + j * lanes)));
        dot = fma(load(error + j * lanes), x[j], dot);
      }
    } else {
      for (int64_t c = 0; c < n; c += lanes) {
        const Vec<Acc> y = load_n(row + c, n - c);
        store(dst + c, fma(post, y, load(dst + c)));
        dot = fma(load_n(error + c, n - c), y, dot);
      }
    }
    error_grad[k] = sum(dot);
  }
}

// The same over all written rows. `error_grad` is that of the slice's first tile, the next tile is
// `plane` further on.
template <typename Acc>
void gather_gradient(
    const ChunkEntries<Acc>& e,
    const BankRows<Acc>& grad,
    const Slice& slice,
    const Acc* errors,
    int64_t errors_ld,
    Acc* d_v,
    Acc* error_grad,
    int64_t plane
) {
  const int64_t groups = e.num_groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups && e.group_num_writes[ahead] > 0) {
      prefetch_row(
          grad.row(e.group_slot[ahead]) + slice.c0, slice.width * static_cast<int64_t>(sizeof(Acc))
      );
    }
    const int64_t begin = e.group_begin[g];
    const int64_t end = begin + e.group_num_writes[g];
    if (begin == end) {
      continue;
    }
    const Acc* row = grad.row(e.group_slot[g]) + slice.c0;
    for_each_tile<Acc>(slice.width, [&](auto vectors, int64_t c, int64_t n) {
      gather_gradient_tile<decltype(vectors)::value>(
          e,
          begin,
          end,
          row + c,
          n,
          errors + c,
          errors_ld,
          d_v + c,
          slice.ld,
          error_grad + c / kTileColumns * plane
      );
    });
  }
}

// One slot of walk_gradient, n columns: G from the chunk's end to its start, and the dots with the
// bank row m at the chunk's start.
template <int kVectors, typename Acc>
SDM_INLINE void walk_tile(
    const ChunkEntries<Acc>& e,
    int64_t g,
    int64_t n,
    const Acc* tokens,
    int64_t ld,
    const Acc* m,
    Acc* grad,
    Acc* dot_row,
    Acc* dot_decay
) {
  constexpr int64_t lanes = kLanes<Acc>;
  const int64_t begin = e.group_begin[g];
  const int64_t end = e.group_begin[g + 1];
  const int64_t mid = begin + e.group_num_writes[g];
  const Vec<Acc> decay = set1(e.group_decay[g]);
  Vec<Acc> dot = set1(Acc(0));
  if constexpr (kVectors > 0) {
    Vec<Acc> x[kVectors], y[kVectors];
    SDM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      x[j] = load(grad + j * lanes);
      y[j] = load(m + j * lanes);
    }
    if (mid > begin) {
      SDM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        dot = fma(x[j], y[j], dot);
        x[j] = mul(decay, x[j]);
      }
      dot_decay[g] = sum(dot);
    }
    for (int64_t k = begin; k < end; ++k) {
      const Vec<Acc> weight = set1(k < mid ? -e.weight[k] : e.weight[k]);
      const Acc* src = tokens + e.row[k] * ld;
      dot = set1(Acc(0));
      SDM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const Vec<Acc> token = load(src + j * lanes);
        x[j] = fma(weight, token, x[j]);
        dot = fma(token, y[j], dot);
      }
      dot_row[k] = sum(dot);
    }
    SDM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      store(grad + j * lanes, x[j]);
    }
  } else {
    if (mid > begin) {
      for (int64_t c = 0; c < n; c += lanes) {
        const Vec<Acc> x = load_n(grad + c, n - c);
        dot = fma(x, load_n(m + c, n - c), dot);
        store_n(grad + c, mul(decay, x), n - c);
      }
      dot_decay[g] = sum(dot);
    }
    for (int64_t k = begin; k < end; ++k) {
      const Vec<Acc> weight = set1(k < mid ? -e.weight[k] : e.weight[k]);
      const Acc* src = tokens + e.row[k] * ld;
      dot = set1(Acc(0));
      for (int64_t c = 0; c < n; c += lanes) {
        const Vec<Acc> token = load(src + c);
        store_n(grad + c, fma(weight, token, load_n(grad + c, n - c)), n - c);
        dot = fma(token, load_n(m + c, n - c), dot);
      }
      dot_row[k] = sum(dot);
    }
  }
}

// Walks the chunk's slots once: G to the chunk's start, and the dots with M. `tokens` holds dv in
// rows [0, C) and dy in rows [C, 2C), as entries number them.
template <typename S, typename Acc>
void walk_gradient(
    const ChunkEntries<Acc>& e,
    const KeptBank<S>& bank,
    const BankRows<Acc>& grad,
    const Slice& slice,
    int64_t D,
    const Acc* tokens,
    Acc* scratch,
    Acc* dot_row,
    Acc* dot_decay,
    int64_t plane
) {
  const int64_t groups = e.num_groups;
  const bool exact = bank.kept->mode <= SdmSave::kRows;
  const int64_t kept_begin = slice.c0 * bank.row_bytes / D;
  const int64_t kept_bytes = slice.width * bank.row_bytes / D;
  for (int64_t g = 0; g < groups; ++g) {
    if (g + kPrefetchGroups < groups) {
      const int64_t ahead = g + kPrefetchGroups;
      const int64_t slot = e.group_slot[ahead];
      prefetch_row(grad.row(slot) + slice.c0, slice.width * static_cast<int64_t>(sizeof(Acc)));
      bank.prefetch(e.group_row[ahead], slot, slice, kept_begin, kept_bytes);
    }
    const int64_t slot = e.group_slot[g];
    const int64_t kept = e.group_row[g];
    const Acc* m = scratch;
    if (kept >= 0 && !exact) {
      load_saved_row<S>(*bank.kept, bank.row_bytes, kept, slice.c0, slice.width, scratch);
    } else if constexpr (std::is_same_v<S, Acc>) {
      m = bank.exact_row(kept, slot, slice.c0);
    } else {
      convert_row(bank.exact_row(kept, slot, slice.c0), slice.width, scratch);
    }
    Acc* grad_row = grad.row(slot) + slice.c0;
    for_each_tile<Acc>(slice.width, [&](auto vectors, int64_t c, int64_t n) {
      const int64_t part = c / kTileColumns * plane;
      walk_tile<decltype(vectors)::value>(
          e, g, n, tokens + c, slice.ld, m + c, grad_row + c, dot_row + part, dot_decay + part
      );
    });
  }
}

// One chunk, one slice.
template <typename S, typename Acc>
void backward_chunk(
    const SdmBwdParams& p,
    const ChunkEntries<Acc>& e,
    const KeptBank<S>& bank,
    const BankRows<Acc>& grad,
    const Slice& slice,
    const ChunkDots<Acc>& dots,
    const BwdScratch<Acc>& s
) {
  const SdmDims& dims = p.dims;
  const ChunkPlace& place = e.place;
  const int64_t num_tokens = place.num_tokens;
  const int64_t plane = dims.C * (dims.W + dims.R);
  const int64_t first_dot = slice.c0 / kTileColumns * plane;
  Acc* d_v = s.tokens;
  Acc* d_y = s.tokens + dims.C * slice.ld;
  const int64_t first_token = (place.batch * dims.T + place.token) * dims.H + place.head;
  const Acc* errors = static_cast<const Acc*>(p.saved.errors) + first_token * dims.D + slice.c0;

  zero_rows(d_v, num_tokens * slice.ld);
  gather_gradient(e, grad, slice, errors, dims.H * dims.D, d_v, dots.error_grad + first_dot, plane);
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t at = offset_of(p.d_out, place.batch, place.token + i, place.head);
    load_row(p.d_out.data, p.d_out.dtype, at + slice.c0, slice.width, d_y + i * slice.ld);
  }
  add_lower_transposed(e.qk, dims.C, num_tokens, d_y, d_v, slice.ld);
  solve_lower_transposed(e.neg_a, dims.C, num_tokens, d_v, slice.ld);
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t at = (first_token + i * dims.H) * dims.D + slice.c0;
    store_row(d_v + i * slice.ld, p.d_out.dtype, at, slice.width, p.d_v);
    round_row(d_v + i * slice.ld, slice.width, dots.d_v + i * dims.D + slice.c0);
  }
  walk_gradient(
      e,
      bank,
      grad,
      slice,
      dims.D,
      s.tokens,
      s.row,
      dots.row + first_dot,
      dots.decay + first_dot,
      plane
  );
}

// Runs the chunk's updates once more, from the rows at its start into kept rows `first` and up.
template <typename S, typename Acc>
void replay_updates(
    const ChunkEntries<Acc>& e,
    const KeptBank<S>& bank,
    const Slice& slice,
    const Acc* errors,
    int64_t errors_ld,
    int64_t first
) {
  const int64_t groups = e.num_groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups && e.group_num_writes[ahead] > 0) {
      prefetch_row(
          bank.exact_row(e.group_row[ahead], e.group_slot[ahead], slice.c0),
          slice.width * static_cast<int64_t>(sizeof(S))
      );
    }
    if (e.group_num_writes[g] > 0) {
      const S* from = bank.exact_row(e.group_row[g], e.group_slot[g], slice.c0);
      S* to = bank.exact_row(first++, 0, slice.c0);
      update_row(e, g, slice.width, errors, errors_ld, from, to);
    }
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
