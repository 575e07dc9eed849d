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

// A bank of one stream.
template <typename S>
struct BankRows {
  S* data;
  int64_t stride;

  SDM_INLINE S* row(int64_t slot) const { return data + slot * stride; }
};

template <typename S>
BankRows<S> bank_of_stream(const BankView& view, int64_t sequence, int64_t head) {
  return {
      static_cast<S*>(view.data) + sequence * view.stride[0] + head * view.stride[1], view.stride[2]
  };
}

// Columns [c0, c0 + width), held in working rows of ld elements (whole vectors).
struct Slice {
  int64_t c0, width, ld;
};

template <typename Acc>
Slice make_slice(int64_t index, int64_t slice_columns, int64_t D) {
  const int64_t c0 = index * slice_columns;
  const int64_t width = D - c0 < slice_columns ? D - c0 : slice_columns;
  return {c0, width, round_up(width, kLanes<Acc>)};
}

// Saved rows of one chunk.
struct ChunkRows {
  const SdmSaved* saved;  // null: nothing is saved
  int64_t first;          // index of the first row
  int64_t row_bytes;
  int64_t reserved;  // rows from there on that belong to the chunk; unused ones are zeroed
};

// acc[row] += weight * M[slot] for every entry.
template <typename S, typename Acc>
void gather_rows(
    const ChunkEntries<Acc>& e, const BankRows<S>& bank, const Slice& slice, Acc* acc
) {
  const int64_t groups = e.num_groups;
  for (int64_t g = 0; g < groups; ++g) {
    if (g + kPrefetchGroups < groups) {
      prefetch_row(
          bank.row(e.group_slot[g + kPrefetchGroups]) + slice.c0,
          slice.width * static_cast<int64_t>(sizeof(S))
      );
    }
    const S* row = bank.row(e.group_slot[g]) + slice.c0;
    for (int64_t k = e.group_begin[g]; k < e.group_begin[g + 1]; ++k) {
      const Vec<Acc> weight = set1(e.weight[k]);
      Acc* dst = acc + e.row[k] * slice.ld;
      for (int64_t c = 0; c < slice.width; c += kLanes<Acc>) {
        store(dst + c, fma(weight, load_n(row + c, slice.width - c), load(dst + c)));
      }
    }
  }
}

// Decays and corrects the written rows; saves their old values first when asked to.
template <typename S, typename Acc>
void update_rows(
    const ChunkEntries<Acc>& e,
    const BankRows<S>& bank,
    const Slice& slice,
    const Acc* errors,
    int64_t errors_ld,
    const ChunkRows& rows
) {
  const int64_t groups = e.num_groups;
  int64_t ordinal = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t ahead = g + kPrefetchGroups;
    if (ahead < groups && e.group_num_writes[ahead] > 0) {
      prefetch_row(
          bank.row(e.group_slot[ahead]) + slice.c0, slice.width * static_cast<int64_t>(sizeof(S))
      );
    }
    const int64_t writes = e.group_num_writes[g];
    if (writes == 0) {
      continue;
    }
    S* row = bank.row(e.group_slot[g]) + slice.c0;
    if (rows.saved != nullptr) {
      save_row(*rows.saved, slice.c0, slice.width, rows.row_bytes, rows.first + ordinal, row);
    }
    ++ordinal;
    const int64_t begin = e.group_begin[g];
    const Vec<Acc> decay = set1(e.group_decay[g]);
    for (int64_t c = 0; c < slice.width; c += kLanes<Acc>) {
      Vec<Acc> x = mul(decay, load_n(row + c, slice.width - c));
      for (int64_t k = begin; k < begin + writes; ++k) {
        x = fma(set1(e.post[k]), load(errors + e.row[k] * errors_ld + c), x);
      }
      store_n(row + c, x, slice.width - c);
    }
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
    const BankRows<S>& bank,
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
  update_rows(e, bank, slice, s.errors, slice.ld, rows);
}

// Copies slots [begin, end) of a stream's bank, columns of one slice.
template <typename S>
void copy_bank(
    const BankRows<S>& from,
    const BankRows<S>& to,
    int64_t begin,
    int64_t end,
    int64_t c0,
    int64_t width
) {
  if (from.stride == width && to.stride == width) {
    std::memcpy(
        to.row(begin), from.row(begin), sizeof(S) * static_cast<size_t>((end - begin) * width)
    );
    return;
  }
  for (int64_t slot = begin; slot < end; ++slot) {
    std::memcpy(to.row(slot) + c0, from.row(slot) + c0, sizeof(S) * static_cast<size_t>(width));
  }
}

// Slots that one thread copies or clears at a time: about 256 KiB of a row-major bank.
inline int64_t copy_grain(int64_t row_bytes) {
  const int64_t slots = (int64_t{256} << 10) / row_bytes;
  return slots > 1 ? slots : 1;
}

// Zeroes what the saved tensor reserves beyond the chunks of all sequences: results are functions
// of the inputs to the last byte.
inline void clear_unused_saved(const SdmFwdParams& p, const std::vector<SdmSequence>& sequences) {
  const SdmDims& dims = p.dims;
  int64_t used = 0;
  if (p.saved.mode == SdmSave::kReplay) {
    for (const SdmSequence& sequence : sequences) {
      used += num_checkpoints(sequence.num_chunks, p.saved.segment_chunks);
    }
    const int64_t bank_bytes = dims.H * dims.S * dims.D * element_size(p.bank_dtype);
    std::memset(
        static_cast<char*>(p.saved.rows) + used * bank_bytes,
        0,
        static_cast<size_t>((p.saved.checkpoints - used) * bank_bytes)
    );
  } else if (saves_rows(p.saved.mode)) {
    for (const SdmSequence& sequence : sequences) {
      for (int64_t chunk = 0; chunk < sequence.num_chunks; ++chunk) {
        used += rows_of_chunk(dims, chunk_tokens(sequence, chunk, dims.C));
      }
    }
    const int64_t row_bytes = saved_row_bytes(p.saved.mode, p.bank_dtype, dims.D);
    for (int64_t head = 0; head < dims.H; ++head) {
      const int64_t begin = head * p.saved.rows_per_head;
      clear_saved_rows(
          p.saved,
          0,
          dims.D,
          row_bytes,
          begin + used,
          begin + p.saved.rows_per_head,
          row_bytes / dims.D
      );
    }
  }
}

// Zeroes the output rows of sequences that are skipped.
inline void clear_skipped(const SdmFwdParams& p, const std::vector<SdmSequence>& sequences) {
  const int64_t row_bytes = p.dims.H * p.dims.D * element_size(p.tokens.v.dtype);
  for (const SdmSequence& sequence : sequences) {
    if (sequence.bank < 0 && sequence.length > 0) {
      char* out =
          static_cast<char*>(p.out) + (sequence.batch * p.dims.T + sequence.begin) * row_bytes;
      std::memset(out, 0, static_cast<size_t>(sequence.length * row_bytes));
    }
  }
}

template <typename S>
Status run_forward(
    const SdmFwdParams& p,
    const std::vector<SdmSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  using Acc = typename AccOf<S>::type;
  const SdmDims& dims = p.dims;
  // A lossy row has one scale, so one thread must see all of its columns.
  const bool lossy = p.saved.mode > SdmSave::kRows;
  const int64_t slice_columns = lossy ? dims.D : kSliceColumns;
  const int64_t slices = ceil_div(dims.D, slice_columns);
  const bool own_bank = p.bank.data == nullptr;
  const bool copy = p.initial.data != nullptr;
  const int64_t row_bytes = saved_row_bytes(p.saved.mode, p.bank_dtype, dims.D);

  clear_skipped(p, sequences);
  clear_unused_saved(p, sequences);
  std::vector<const SdmSequence*> live;
  int64_t max_chunks = 1;
  for (const SdmSequence& sequence : sequences) {
    if (sequence.bank >= 0) {
      live.push_back(&sequence);
      max_chunks = std::max(max_chunks, sequence.num_chunks);
    }
  }
  const int64_t num_streams = static_cast<int64_t>(live.size()) * dims.H;
  if (num_streams == 0) {
    return Status::kOk;
  }
  const WorkShape shape = choose_work(parallel, num_streams, slices, max_chunks);
  const int64_t workers = parallel.num_threads;

  struct Memory {
    std::vector<ChunkEntries<Acc>> entries;
    std::vector<EntrySorter> sorters;
    std::vector<FwdScratch<Acc>> scratch;
    S* banks;
  } memory;

  memory.entries.resize(static_cast<size_t>(shape.streams * shape.chunks));
  memory.sorters.resize(static_cast<size_t>(workers));
  memory.scratch.resize(static_cast<size_t>(workers));
  const auto carve = [&](void* data) {
    cpu::Carver carver(data);
    memory.banks = own_bank ? carver.take<S>(shape.streams * dims.S * dims.D) : nullptr;
    for (auto& entries : memory.entries) {
      carve_entries(&carver, dims, &entries);
    }
    for (auto& sorter : memory.sorters) {
      sorter = carve_sorter(&carver, dims);
    }
    for (auto& scratch : memory.scratch) {
      scratch = carve_fwd_scratch<Acc>(&carver, dims, slice_columns);
    }
    return carver.used();
  };
  const cpu::Block block(carve(nullptr));
  if (block.data() == nullptr) {
    return Status::kOutOfMemory;
  }
  carve(block.data());

  for (int64_t first = 0; first < num_streams; first += shape.streams) {
    const int64_t count = std::min(shape.streams, num_streams - first);
    const auto sequence_of = [&](int64_t stream) -> const SdmSequence& {
      return *live[static_cast<size_t>((first + stream) / dims.H)];
    };
    const auto head_of = [&](int64_t stream) { return (first + stream) % dims.H; };
    const auto bank_of = [&](int64_t stream) -> BankRows<S> {
      if (own_bank) {
        return {memory.banks + stream * dims.S * dims.D, dims.D};
      }
      return bank_of_stream<S>(p.bank, sequence_of(stream).bank, head_of(stream));
    };
    int64_t group_chunks = 0;
    for (int64_t stream = 0; stream < count; ++stream) {
      group_chunks = std::max(group_chunks, sequence_of(stream).num_chunks);
    }

    if (copy && (!own_bank || group_chunks > 0)) {
      const int64_t grain = copy_grain(dims.D * static_cast<int64_t>(sizeof(S)));
      const int64_t blocks = ceil_div(dims.S, grain);
      cpu::for_each_item(parallel, count * blocks, [&](int64_t, int64_t item) {
        const int64_t stream = item / blocks;
        const int64_t begin = item % blocks * grain;
        const int64_t end = std::min(begin + grain, dims.S);
        const auto from = bank_of_stream<S>(p.initial, sequence_of(stream).bank, head_of(stream));
        copy_bank(from, bank_of(stream), begin, end, 0, dims.D);
      });
    }

    for (int64_t chunk0 = 0; chunk0 < group_chunks; chunk0 += shape.chunks) {
      const int64_t window = std::min(shape.chunks, group_chunks - chunk0);
      cpu::for_each_item(parallel, count * window, [&](int64_t worker, int64_t item) {
        const int64_t stream = item / window;
        const int64_t chunk = chunk0 + item % window;
        if (chunk < sequence_of(stream).num_chunks) {
          build_entries(
              dims,
              p.tokens,
              chunk_place(sequence_of(stream), head_of(stream), chunk, dims.C),
              true,
              &memory.sorters[static_cast<size_t>(worker)],
              &memory.entries[static_cast<size_t>(item)]
          );
        }
      });
      cpu::for_each_item(parallel, count * slices, [&](int64_t worker, int64_t item) {
        const int64_t stream = item / slices;
        const SdmSequence& sequence = sequence_of(stream);
        const Slice slice = make_slice<Acc>(item % slices, slice_columns, dims.D);
        const BankRows<S> bank = bank_of(stream);
        for (int64_t k = 0; k < window && chunk0 + k < sequence.num_chunks; ++k) {
          const int64_t chunk = chunk0 + k;
          if (p.saved.mode == SdmSave::kReplay && chunk > 0 &&
              chunk % p.saved.segment_chunks == 0) {
            const int64_t index = sequence.first_checkpoint + chunk / p.saved.segment_chunks - 1;
            S* checkpoint = static_cast<S*>(p.saved.rows) +
                            (index * dims.H + head_of(stream)) * dims.S * dims.D;
            copy_bank(bank, {checkpoint, dims.D}, 0, dims.S, slice.c0, slice.width);
          }
          ChunkRows rows{nullptr, 0, row_bytes, 0};
          if (saves_rows(p.saved.mode)) {
            rows.saved = &p.saved;
            rows.first = head_of(stream) * p.saved.rows_per_head + sequence.first_row +
                         chunk * rows_of_chunk(dims, dims.C);
            rows.reserved = rows_of_chunk(dims, chunk_tokens(sequence, chunk, dims.C));
          }
          forward_chunk(
              p,
              memory.entries[static_cast<size_t>(stream * window + k)],
              bank,
              slice,
              rows,
              memory.scratch[static_cast<size_t>(worker)]
          );
        }
      });
    }
  }
  return Status::kOk;
}

inline Status forward(
    const SdmFwdParams& p,
    const std::vector<SdmSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  switch (p.bank_dtype) {
    case DType::kF32:
      return run_forward<float>(p, sequences, parallel);
    case DType::kBf16:
      return run_forward<Bf16>(p, sequences, parallel);
    case DType::kF16:
      return run_forward<F16>(p, sequences, parallel);
    default:
      return run_forward<double>(p, sequences, parallel);
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
