// SPDX-License-Identifier: Apache-2.0
//! @file Forward of the chunked recurrence (docs/semantics.md): gather, solve, update.
//!
//! For one chunk with entries as in sdm_entries-inl.h and M the bank at its start:
//!
//!     ret0[i], inter[i] = sum over entries of weight * M[slot]           gather
//!     e[i] = v[i] - ret0[i] - sum over j < i of A[i,j] beta_j e[j]       solve, by substitution
//!     y[i] = inter[i] + sum over j <= i of QK[i,j] beta_j e[j]
//!     M[slot] = decay * M[slot] + sum over writes of post * e[token]     update, one rounding
//!
//! Bytes: each distinct row of a chunk is read once for the gather, each written one once more and
//! stored once; everything else is a few percent and stays in cache. So the walk is by slot, in
//! ascending address order with rows fetched ahead, and scatters into token rows that stay in
//! cache. Columns are independent: work is cut into (stream, slice of columns), each walked through
//! all chunks by one thread; a window of chunks has its entries built first, one chunk a thread.
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// acc[row] += weight * M[slot] for the entries [begin, end) of one slot, n columns.
template <int kVectors, typename S, typename Acc>
SDM_INLINE void gather_tile(
    const ChunkEntries<Acc>& e,
    int64_t begin,
    int64_t end,
    const S* row,
    int64_t n,
    Acc* acc,
    int64_t ld
) {
  constexpr int64_t lanes = kLanes<Acc>;
  if constexpr (kVectors > 0) {
    Vec<Acc> m[kVectors];
    SDM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      m[j] = load(row + j * lanes);
    }
    for (int64_t k = begin; k < end; ++k) {
      const Vec<Acc> weight = set1(e.weight[k]);
      Acc* dst = acc + e.row[k] * ld;
      SDM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        store(dst + j * lanes, fma(weight, m[j], load(dst + j * lanes)));
      }
    }
  } else {
    for (int64_t k = begin; k < end; ++k) {
      const Vec<Acc> weight = set1(e.weight[k]);
      Acc* dst = acc + e.row[k] * ld;
      for (int64_t c = 0; c < n; c += lanes) {
        store(dst + c, fma(weight, load_n(row + c, n - c), load(dst + c)));
      }
    }
  }
}

template <typename S, typename Acc>
void gather_rows(
    const ChunkEntries<Acc>& e, const LazyBank<S>& bank, const Slice& slice, Acc* acc
) {
  const int64_t groups = e.num_groups;
  for (int64_t g = -kPrefetchGroups; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups) {
      prefetch_row(
          bank.row(e.group_slot[ahead], e.group_fresh[ahead] != 0) + slice.c0,
          slice.width * static_cast<int64_t>(sizeof(S))
      );
    }
    if (g < 0) {
      continue;
    }
    const S* row = bank.row(e.group_slot[g], e.group_fresh[g] != 0) + slice.c0;
    const int64_t begin = e.group_begin[g];
    const int64_t end = e.group_begin[g + 1];
    for_each_tile<Acc>(slice.width, [&](auto vectors, int64_t c, int64_t n) {
      gather_tile<decltype(vectors)::value>(e, begin, end, row + c, n, acc + c, slice.ld);
    });
  }
}

// Decays and corrects n columns of a written row: `to` = decay * `from` + sum of post * errors.
// They may be the same row.
template <int kVectors, typename S, typename Acc>
SDM_INLINE void update_tile(
    const ChunkEntries<Acc>& e,
    int64_t g,
    int64_t n,
    const Acc* errors,
    int64_t errors_ld,
    const S* from,
    S* to
) {
  constexpr int64_t lanes = kLanes<Acc>;
  const int64_t begin = e.group_begin[g];
  const int64_t end = begin + e.group_num_writes[g];
  const Vec<Acc> decay = set1(e.group_decay[g]);
  if constexpr (kVectors > 0) {
    Vec<Acc> x[kVectors];
    SDM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      x[j] = mul(decay, load(from + j * lanes));
    }
    for (int64_t k = begin; k < end; ++k) {
      const Vec<Acc> post = set1(e.post[k]);
      const Acc* error = errors + e.row[k] * errors_ld;
      SDM_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        x[j] = fma(post, load(error + j * lanes), x[j]);
      }
    }
    SDM_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      store(to + j * lanes, x[j]);
    }
  } else {
    for (int64_t c = 0; c < n; c += lanes) {
      Vec<Acc> x = mul(decay, load_n(from + c, n - c));
      for (int64_t k = begin; k < end; ++k) {
        x = fma(set1(e.post[k]), load_n(errors + e.row[k] * errors_ld + c, n - c), x);
      }
      store_n(to + c, x, n - c);
    }
  }
}

template <typename S, typename Acc>
SDM_INLINE void update_row(
    const ChunkEntries<Acc>& e,
    int64_t g,
    int64_t width,
    const Acc* errors,
    int64_t errors_ld,
    const S* from,
    S* to
) {
  for_each_tile<Acc>(width, [&](auto vectors, int64_t c, int64_t n) {
    update_tile<decltype(vectors)::value>(e, g, n, errors + c, errors_ld, from + c, to + c);
  });
}

// Updates the rows that the chunk writes; saves their old values first when asked to.
template <typename S, typename Acc>
void update_rows(
    const ChunkEntries<Acc>& e,
    const LazyBank<S>& bank,
    const Slice& slice,
    const Acc* errors,
    const ChunkRows& rows
) {
  const int64_t groups = e.num_groups;
  int64_t ordinal = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups && e.group_num_writes[ahead] > 0) {
      prefetch_row(
          bank.bank.row(e.group_slot[ahead]) + slice.c0,
          slice.width * static_cast<int64_t>(sizeof(S))
      );
    }
    if (e.group_num_writes[g] == 0) {
      continue;
    }
    const S* from = bank.row(e.group_slot[g], e.group_fresh[g] != 0) + slice.c0;
    S* to = bank.bank.row(e.group_slot[g]) + slice.c0;
    if (rows.saved != nullptr) {
      save_row(*rows.saved, slice.c0, slice.width, rows.row_bytes, rows.first + ordinal, from);
    }
    ++ordinal;
    update_row(e, g, slice.width, errors, slice.ld, from, to);
  }
  if (rows.saved != nullptr) {
    clear_saved_rows(
        *rows.saved,
        slice.c0,
        slice.width,
        rows.row_bytes,
        rows.first + ordinal,
        rows.first + rows.reserved,
        static_cast<int64_t>(sizeof(S))
    );
  }
}

// Working memory of one thread in the chunk loop.
template <typename Acc>
struct FwdScratch {
  Acc* acc;     // [2C, ld], retrievals then readings
  Acc* errors;  // [C, ld]
};

template <typename Acc>
FwdScratch<Acc> carve_fwd_scratch(cpu::Carver* carver, const SdmDims& dims, int64_t slice_columns) {
  const int64_t ld = round_up(slice_columns, kLanes<Acc>);
  FwdScratch<Acc> s;
  s.acc = carver->take<Acc>(2 * dims.C * ld);
  s.errors = carver->take<Acc>(dims.C * ld);
  return s;
}

// One chunk, one slice.
template <typename S, typename Acc>
void forward_chunk(
    const SdmFwdParams& p,
    const ChunkEntries<Acc>& e,
    const LazyBank<S>& bank,
    const Slice& slice,
    const ChunkRows& rows,
    const FwdScratch<Acc>& s
) {
  const SdmDims& dims = p.dims;
  const ChunkPlace& place = e.place;
  const int64_t num_tokens = place.num_tokens;
  Acc* retrieved = s.acc;
  Acc* readings = s.acc + dims.C * slice.ld;
  zero_rows(retrieved, num_tokens * slice.ld);
  zero_rows(readings, num_tokens * slice.ld);
  gather_rows(e, bank, slice, s.acc);

  const FloatView& v = p.tokens.v;
  for (int64_t i = 0; i < num_tokens; ++i) {
    Acc* error = s.errors + i * slice.ld;
    const int64_t at = offset_of(v, place.batch, place.token + i, place.head);
    load_row(v.data, v.dtype, at + slice.c0, slice.width, error);
    for (int64_t c = 0; c < slice.ld; c += kLanes<Acc>) {
      store(error + c, sub(load(error + c), load(retrieved + i * slice.ld + c)));
    }
  }
  solve_lower(e.neg_a, dims.C, num_tokens, s.errors, slice.ld);
  add_lower(e.qk, dims.C, num_tokens, s.errors, readings, slice.ld);

  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t token = (place.batch * dims.T + place.token + i) * dims.H + place.head;
    const int64_t at = token * dims.D + slice.c0;
    store_row(readings + i * slice.ld, v.dtype, at, slice.width, p.out);
    if (p.saved.errors != nullptr) {
      round_row(s.errors + i * slice.ld, slice.width, static_cast<Acc*>(p.saved.errors) + at);
    }
  }
  update_rows(e, bank, slice, s.errors, rows);
}

}  // namespace SDM_ISA
}  // namespace sdm
