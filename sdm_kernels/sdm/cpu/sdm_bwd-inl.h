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
//! Bytes: rows of G are read twice where written and once elsewhere and stored once; M is read once
//! and put back. Dots are summed inside a slice; the slices' parts are added in order later.
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// What the column walk leaves of one chunk for the gradients of weights and gates.
template <typename Acc>
struct ChunkDots {
  Acc* error_grad;  // [slices, n], writes: <e[token], G[slot]> with G at the chunk's end
  Acc* row;         // [slices, n], writes: <dv[token], M[slot]>; reads: <dy[token], M[slot]>
  Acc* decay;       // [slices, n], by group: <G[slot], M[slot]>
  Acc* d_v;         // [C, D]
};

template <typename Acc>
ChunkDots<Acc> carve_dots(cpu::Carver* carver, const SdmDims& dims, int64_t slices) {
  const int64_t n = slices * dims.C * (dims.W + dims.R);
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
BwdScratch<Acc> carve_bwd_scratch(cpu::Carver* carver, const SdmDims& dims) {
  BwdScratch<Acc> s;
  s.tokens = carver->take<Acc>(2 * dims.C * kSliceColumns);
  s.row = carver->take<Acc>(kSliceColumns);
  return s;
}

// dv += post * G and the dots <e, G>, over the written rows.
template <typename Acc>
void gather_gradient(
    const ChunkEntries<Acc>& e,
    const BankRows<Acc>& grad,
    const Slice& slice,
    const Acc* errors,
    int64_t errors_ld,
    Acc* d_v,
    Acc* error_grad
) {
  const int64_t groups = e.num_groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups && e.group_num_writes[ahead] > 0) {
      prefetch_row(
          grad.row(e.group_slot[ahead]) + slice.c0, slice.width * static_cast<int64_t>(sizeof(Acc))
      );
    }
    const Acc* row = grad.row(e.group_slot[g]) + slice.c0;
    const int64_t begin = e.group_begin[g];
    for (int64_t k = begin; k < begin + e.group_num_writes[g]; ++k) {
      const Vec<Acc> post = set1(e.post[k]);
      const Acc* error = errors + e.row[k] * errors_ld;
      Acc* dst = d_v + e.row[k] * slice.ld;
      Vec<Acc> dot = set1(Acc(0));
      for (int64_t c = 0; c < slice.width; c += kLanes<Acc>) {
        const Vec<Acc> x = load_n(row + c, slice.width - c);
        store(dst + c, fma(post, x, load(dst + c)));
        dot = fma(load_n(error + c, slice.width - c), x, dot);
      }
      error_grad[k] = sum(dot);
    }
  }
}

// Walks the chunk's slots once: G to the chunk's start, M back to the chunk's start, and the dots
// with M. `tokens` holds dv in rows [0, C) and dy in rows [C, 2C), as entries number them.
template <typename S, typename Acc>
void walk_gradient(
    const ChunkEntries<Acc>& e,
    const BankRows<S>& bank,
    const BankRows<Acc>& grad,
    const Slice& slice,
    int64_t D,
    const Acc* tokens,
    const ChunkRows& rows,
    Acc* saved_row,
    Acc* dot_row,
    Acc* dot_decay
) {
  const int64_t groups = e.num_groups;
  int64_t ordinal = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (g + kPrefetchGroups < groups) {
      const int64_t slot = e.group_slot[g + kPrefetchGroups];
      prefetch_row(grad.row(slot) + slice.c0, slice.width * static_cast<int64_t>(sizeof(Acc)));
      prefetch_row(bank.row(slot) + slice.c0, slice.width * static_cast<int64_t>(sizeof(S)));
    }
    const int64_t slot = e.group_slot[g];
    S* bank_row = bank.row(slot) + slice.c0;
    Acc* grad_row = grad.row(slot) + slice.c0;
    const int64_t writes = e.group_num_writes[g];
    if (writes > 0) {
      // the rows lie one after the other, but a slice is only a piece of each
      prefetch_row(
          static_cast<const char*>(rows.saved->rows) +
              (rows.first + ordinal + kPrefetchGroups) * rows.row_bytes +
              slice.c0 * rows.row_bytes / D,
          slice.width * rows.row_bytes / D
      );
      load_saved_row<S>(
          *rows.saved, rows.row_bytes, rows.first + ordinal, slice.c0, slice.width, saved_row
      );
      round_row(saved_row, slice.width, bank_row);
      ++ordinal;
      const Vec<Acc> decay = set1(e.group_decay[g]);
      Vec<Acc> dot = set1(Acc(0));
      for (int64_t c = 0; c < slice.width; c += kLanes<Acc>) {
        const Vec<Acc> x = load_n(grad_row + c, slice.width - c);
        dot = fma(x, load(saved_row + c), dot);
        store_n(grad_row + c, mul(decay, x), slice.width - c);
      }
      dot_decay[g] = sum(dot);
    } else {
      convert_row(bank_row, slice.width, saved_row);
    }
    const int64_t begin = e.group_begin[g];
    for (int64_t k = begin; k < e.group_begin[g + 1]; ++k) {
      const Vec<Acc> weight = set1(k < begin + writes ? -e.weight[k] : e.weight[k]);
      const Acc* src = tokens + e.row[k] * slice.ld;
      Vec<Acc> dot = set1(Acc(0));
      for (int64_t c = 0; c < slice.width; c += kLanes<Acc>) {
        const Vec<Acc> x = load(src + c);
        const int64_t n = slice.width - c;
        store_n(grad_row + c, fma(weight, x, load_n(grad_row + c, n)), n);
        dot = fma(x, load(saved_row + c), dot);
      }
      dot_row[k] = sum(dot);
    }
  }
}

// One chunk, one slice.
template <typename S, typename Acc>
void backward_chunk(
    const SdmBwdParams& p,
    const ChunkEntries<Acc>& e,
    const BankRows<S>& bank,
    const BankRows<Acc>& grad,
    const Slice& slice,
    const ChunkRows& rows,
    const ChunkDots<Acc>& dots,
    const BwdScratch<Acc>& s
) {
  const SdmDims& dims = p.dims;
  const ChunkPlace& place = e.place;
  const int64_t num_tokens = place.num_tokens;
  const int64_t plane = slice.c0 / kSliceColumns * dims.C * (dims.W + dims.R);
  Acc* d_v = s.tokens;
  Acc* d_y = s.tokens + dims.C * slice.ld;
  const int64_t first_token = (place.batch * dims.T + place.token) * dims.H + place.head;
  const Acc* errors = static_cast<const Acc*>(p.saved.errors) + first_token * dims.D + slice.c0;

  zero_rows(d_v, num_tokens * slice.ld);
  gather_gradient(e, grad, slice, errors, dims.H * dims.D, d_v, dots.error_grad + plane);
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
      e, bank, grad, slice, dims.D, s.tokens, rows, s.row, dots.row + plane, dots.decay + plane
  );
}

}  // namespace SDM_ISA
}  // namespace sdm
