// SPDX-License-Identifier: Apache-2.0
//! @file Forward driver: streams in groups, chunks in windows. A window's entries are built one
//! chunk a thread, then every (stream, slice of columns) walks its chunks. Compiled per instruction
//! set.

namespace sdm {
namespace SDM_ISA {

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
    if (used < p.saved.checkpoints) {  // an empty tensor has no address
      std::memset(
          static_cast<char*>(p.saved.rows) + used * bank_bytes,
          0,
          static_cast<size_t>((p.saved.checkpoints - used) * bank_bytes)
      );
    }
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
  const bool own_bank = p.bank.data == nullptr;
  const int64_t row_bytes = saved_row_bytes(p.saved.mode, p.bank_dtype, dims.D);

  clear_skipped(p, sequences);
  clear_unused_saved(p, sequences);
  std::vector<const SdmSequence*> live;
  int64_t max_chunks = 1;
  bool even = true;
  for (const SdmSequence& sequence : sequences) {
    if (sequence.bank >= 0) {
      live.push_back(&sequence);
      max_chunks = std::max(max_chunks, sequence.num_chunks);
      even = even && sequence.num_chunks == live[0]->num_chunks;
    }
  }
  const int64_t num_streams = static_cast<int64_t>(live.size()) * dims.H;
  if (num_streams == 0) {
    return Status::kOk;
  }
  // Long calls touch most of a bank, which is then copied as a whole: a copy in address order costs
  // less than as many first visits of rows. Short ones take rows as they come.
  const bool has_initial = p.initial.data != nullptr;
  const bool lazy = has_initial && max_chunks <= dims.S / 2 / (dims.C * (dims.W + dims.R));
  const int64_t least = lossy ? dims.D : kTileColumns;
  const WorkShape shape = choose_work(parallel, num_streams, dims.D, least, max_chunks, even);
  const int64_t slice_columns = shape.columns;
  const int64_t slices = ceil_div(dims.D, slice_columns);
  const int64_t workers = parallel.num_threads;

  struct Memory {
    std::vector<ChunkEntries<Acc>> entries;
    std::vector<EntrySorter<Acc>> sorters;
    std::vector<FwdScratch<Acc>> scratch;
    S* banks;              // [group, S, D], where the caller does not get the bank
    int32_t* first_write;  // [group, S], where the bank starts as a copy
  } memory;

  memory.entries.resize(static_cast<size_t>(shape.streams * shape.chunks));
  memory.sorters.resize(static_cast<size_t>(workers));
  memory.scratch.resize(static_cast<size_t>(workers));
  const auto carve = [&](void* data) {
    cpu::Carver carver(data);
    memory.banks = own_bank ? carver.take<S>(shape.streams * dims.S * dims.D) : nullptr;
    memory.first_write = lazy ? carver.take<int32_t>(shape.streams * dims.S) : nullptr;
    for (auto& entries : memory.entries) {
      carve_entries(&carver, dims, &entries);
    }
    for (auto& sorter : memory.sorters) {
      sorter = carve_sorter<Acc>(&carver, dims);
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
    const auto bank_of = [&](int64_t stream) -> LazyBank<S> {
      const int64_t row = sequence_of(stream).bank;
      const BankRows<S> bank = own_bank
                                   ? BankRows<S>{memory.banks + stream * dims.S * dims.D, dims.D}
                                   : bank_of_stream<S>(p.bank, row, head_of(stream));
      return {bank, lazy ? bank_of_stream<S>(p.initial, row, head_of(stream)) : bank};
    };
    const auto first_write_of = [&](int64_t stream) {
      return lazy ? memory.first_write + stream * dims.S : nullptr;
    };
    int64_t group_chunks = 0;
    for (int64_t stream = 0; stream < count; ++stream) {
      group_chunks = std::max(group_chunks, sequence_of(stream).num_chunks);
    }

    if (lazy) {
      for (int64_t i = 0; i < count * dims.S; ++i) {
        memory.first_write[i] = kNeverWritten;
      }
    }
    const int64_t grain = copy_grain(dims.D * static_cast<int64_t>(sizeof(S)));
    const auto for_each_piece = [&](auto&& f) {
      const int64_t pieces = ceil_div(dims.S, grain);
      cpu::for_each_item(parallel, count * pieces, [&](int64_t, int64_t item) {
        const int64_t begin = item % pieces * grain;
        f(item / pieces, begin, std::min(begin + grain, dims.S));
      });
    };
    if (has_initial && !lazy && (!own_bank || group_chunks > 0)) {
      for_each_piece([&](int64_t stream, int64_t begin, int64_t end) {
        const int64_t row = sequence_of(stream).bank;
        const auto from = bank_of_stream<S>(p.initial, row, head_of(stream));
        copy_rows(from, bank_of(stream).bank, begin, end, dims.D);
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
      if (lazy) {
        cpu::for_each_item(parallel, count, [&](int64_t, int64_t stream) {
          for (int64_t k = 0; k < window && chunk0 + k < sequence_of(stream).num_chunks; ++k) {
            ChunkEntries<Acc>& entries = memory.entries[static_cast<size_t>(stream * window + k)];
            mark_fresh_rows(chunk0 + k, first_write_of(stream), &entries);
          }
        });
      }
      cpu::for_each_item(parallel, count * slices, [&](int64_t worker, int64_t item) {
        const int64_t stream = item / slices;
        const SdmSequence& sequence = sequence_of(stream);
        const Slice slice = make_slice<Acc>(item % slices, slice_columns, dims.D);
        const LazyBank<S> bank = bank_of(stream);
        for (int64_t k = 0; k < window && chunk0 + k < sequence.num_chunks; ++k) {
          const int64_t chunk = chunk0 + k;
          if (p.saved.mode == SdmSave::kReplay && chunk > 0 &&
              chunk % p.saved.segment_chunks == 0) {
            const int64_t index = sequence.first_checkpoint + chunk / p.saved.segment_chunks - 1;
            S* checkpoint = static_cast<S*>(p.saved.rows) +
                            (index * dims.H + head_of(stream)) * dims.S * dims.D;
            const BankRows<S> to{checkpoint, dims.D};
            copy_rows_at(bank, first_write_of(stream), chunk, to, 0, dims.S, slice.c0, slice.width);
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
    if (lazy && !own_bank) {
      for_each_piece([&](int64_t stream, int64_t begin, int64_t end) {
        copy_unwritten_rows(bank_of(stream), first_write_of(stream), begin, end, dims.D);
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
