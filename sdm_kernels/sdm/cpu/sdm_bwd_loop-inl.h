// SPDX-License-Identifier: Apache-2.0
//! @file Backward driver: streams in groups, segments of chunks from last to first.
//!
//! A segment's entries are built anew, one chunk a thread. With bank checkpoints (replay) the row
//! updates run once more, which is exact, and the rows they make are kept for the segment only; in
//! the rows modes the forward kept the rows. Then every (stream, slice) walks the chunks backwards,
//! and the gradients of weights and gates follow, one chunk a thread. Memory besides the results:
//! per stream of the group one segment of rows, and a gradient where the result cannot hold it.
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

template <typename S>
class BackwardRun {
 public:
  using Acc = typename AccOf<S>::type;

  BackwardRun(
      const SdmBwdParams& p,
      const std::vector<SdmSequence>& sequences,
      const cpu::ParallelFor& parallel
  )
      : p_(p), dims_(p.dims), sequences_(sequences), parallel_(parallel) {}

  Status run() {
    const int64_t num_streams = dims_.N * dims_.H;
    clear_initial_gradient();
    if (num_streams == 0) {
      return Status::kOk;
    }
    replay_ = p_.saved.mode == SdmSave::kReplay;
    int64_t max_chunks = 1;
    bool even = true;
    for (const SdmSequence& sequence : sequences_) {
      max_chunks = std::max(max_chunks, sequence.num_chunks);
      even = even && sequence.num_chunks == sequences_[0].num_chunks;
    }
    const WorkShape shape =
        choose_work(parallel_, num_streams, dims_.D, kTileColumns, max_chunks, even);
    slice_columns_ = shape.columns;
    slices_ = ceil_div(dims_.D, slice_columns_);
    group_streams_ = shape.streams;
    segment_chunks_ = replay_ ? std::min(p_.saved.segment_chunks, max_chunks) : shape.chunks;
    if (!allocate()) {
      return Status::kOutOfMemory;
    }
    for (first_ = 0; first_ < num_streams; first_ += group_streams_) {
      count_ = std::min(group_streams_, num_streams - first_);
      run_group();
    }
    round_shared_gradient();
    return Status::kOk;
  }

 private:
  const SdmSequence& sequence_of(int64_t stream) const {
    return sequences_[static_cast<size_t>((first_ + stream) / dims_.H)];
  }

  int64_t head_of(int64_t stream) const { return (first_ + stream) % dims_.H; }

  int64_t bank_elements() const { return dims_.S * dims_.D; }

  int64_t num_segments(int64_t stream) const {
    return ceil_div(sequence_of(stream).num_chunks, segment_chunks_);
  }

  // A stream's gradient lives in the result itself where that has the compute type and one owner.
  bool direct_gradient() const {
    return p_.d_initial != nullptr && std::is_same_v<S, Acc> && (!p_.shared_bank || dims_.N == 1);
  }

  BankRows<Acc> grad(int64_t stream) const {
    Acc* data = direct_gradient()
                    ? static_cast<Acc*>(p_.d_initial) + (first_ + stream) * bank_elements()
                    : grads_ + stream * bank_elements();
    return {data, dims_.D};
  }

  // Sums the gradients of all sequences of a shared bank, in sequence order.
  bool needs_shared_sum() const {
    return p_.d_initial != nullptr && p_.shared_bank && !direct_gradient();
  }

  Acc* shared_sum() const {
    return std::is_same_v<S, Acc> ? static_cast<Acc*>(p_.d_initial) : shared_sum_;
  }

  bool allocate() {
    entries_.resize(static_cast<size_t>(group_streams_ * segment_chunks_));
    dots_.resize(entries_.size());
    const size_t workers = static_cast<size_t>(parallel_.num_threads);
    sorters_.resize(workers);
    scratch_.resize(workers);
    pair_scratch_.resize(workers);
    block_ = std::make_unique<cpu::Block>(carve(nullptr));
    if (block_->data() == nullptr) {
      return false;
    }
    carve(block_->data());
    if (needs_shared_sum() && !std::is_same_v<S, Acc>) {
      std::memset(shared_sum_, 0, sizeof(Acc) * static_cast<size_t>(dims_.H * bank_elements()));
    }
    return true;
  }

  int64_t carve(void* data) {
    cpu::Carver carver(data);
    grads_ = direct_gradient() ? nullptr : carver.take<Acc>(group_streams_ * bank_elements());
    shared_sum_ = needs_shared_sum() && !std::is_same_v<S, Acc>
                      ? carver.take<Acc>(dims_.H * bank_elements())
                      : nullptr;
    chunk_rows_ = rows_of_chunk(dims_, dims_.C);
    rows_ = replay_ ? carver.take<S>(group_streams_ * segment_chunks_ * chunk_rows_ * dims_.D)
                    : nullptr;
    newest_ = carver.take<int64_t>(group_streams_ * dims_.S);
    for (size_t i = 0; i < entries_.size(); ++i) {
      carve_entries(&carver, dims_, &entries_[i]);
      dots_[i] = carve_dots<Acc>(&carver, dims_, ceil_div(dims_.D, kTileColumns));
    }
    for (size_t i = 0; i < sorters_.size(); ++i) {
      sorters_[i] = carve_sorter<Acc>(&carver, dims_);
      scratch_[i] = carve_bwd_scratch<Acc>(&carver, dims_, slice_columns_);
      pair_scratch_[i] = carve_pair_scratch<Acc>(&carver, dims_);
    }
    return carver.used();
  }

  // The start of the sum over sequences; also the whole result if there are none.
  void clear_initial_gradient() {
    if (p_.d_initial != nullptr && p_.shared_bank && !direct_gradient()) {
      std::memset(p_.d_initial, 0, sizeof(S) * static_cast<size_t>(dims_.H * bank_elements()));
    }
  }

  // f(stream, begin, end) over pieces of the banks of the group.
  template <typename F>
  void for_each_bank_piece(F&& f) {
    const int64_t grain = copy_grain(dims_.D * static_cast<int64_t>(sizeof(Acc)));
    const int64_t pieces = ceil_div(dims_.S, grain);
    cpu::for_each_item(parallel_, count_ * pieces, [&](int64_t, int64_t item) {
      const int64_t begin = item % pieces * grain;
      f(item / pieces, begin, std::min(begin + grain, dims_.S));
    });
  }

  void start_gradients() {
    for_each_bank_piece([&](int64_t stream, int64_t begin, int64_t end) {
      const BankRows<Acc> to = grad(stream);
      if (p_.d_final.data == nullptr) {
        zero_rows(to.row(begin), (end - begin) * dims_.D);
        return;
      }
      const BankRows<S> from =
          bank_of_stream<S>(p_.d_final, (first_ + stream) / dims_.H, head_of(stream));
      for (int64_t slot = begin; slot < end; ++slot) {
        for (int64_t c = 0; c < dims_.D; c += kLanes<Acc>) {
          const int64_t n = dims_.D - c;
          store_n(to.row(slot) + c, load_n(from.row(slot) + c, n), n);
        }
      }
    });
  }

  void finish_gradients() {
    if (p_.d_initial == nullptr || direct_gradient()) {
      return;
    }
    if (!needs_shared_sum()) {
      for_each_bank_piece([&](int64_t stream, int64_t begin, int64_t end) {
        S* to = static_cast<S*>(p_.d_initial) + (first_ + stream) * bank_elements();
        round_row(grad(stream).row(begin), (end - begin) * dims_.D, to + begin * dims_.D);
      });
      return;
    }
    // one item for each piece of each head: sequences are added in order by one thread
    const int64_t grain = copy_grain(dims_.D * static_cast<int64_t>(sizeof(Acc)));
    const int64_t pieces = ceil_div(dims_.S, grain);
    cpu::for_each_item(parallel_, dims_.H * pieces, [&](int64_t, int64_t item) {
      const int64_t head = item / pieces;
      const int64_t begin = item % pieces * grain * dims_.D;
      const int64_t end = std::min(begin + grain * dims_.D, bank_elements());
      Acc* sum = shared_sum() + head * bank_elements();
      for (int64_t stream = 0; stream < count_; ++stream) {
        if (head_of(stream) != head) {
          continue;
        }
        const Acc* part = grad(stream).data;
        for (int64_t c = begin; c < end; c += kLanes<Acc>) {
          const int64_t n = end - c;
          store_n(sum + c, add(load_n(sum + c, n), load_n(part + c, n)), n);
        }
      }
    });
  }

  void round_shared_gradient() {
    if (!needs_shared_sum() || std::is_same_v<S, Acc>) {
      return;
    }
    const int64_t total = dims_.H * bank_elements();
    cpu::for_each_range(
        parallel_, ceil_div(total, kRoundBlock), 1, [&](int64_t begin, int64_t end) {
          const int64_t first = begin * kRoundBlock;
          const int64_t last = std::min(end * kRoundBlock, total);
          round_row(shared_sum_ + first, last - first, static_cast<S*>(p_.d_initial) + first);
        }
    );
  }

  // The rows of a stream in this round: kept ones over the bank at the segment's start (replay), or
  // over the bank at the end.
  KeptBank<S> bank(int64_t stream, int64_t round) const {
    const int64_t segment = num_segments(stream) - 1 - round;
    BankRows<S> base;
    if (replay_ && segment > 0) {
      const int64_t index = sequence_of(stream).first_checkpoint + segment - 1;
      base.data =
          static_cast<S*>(p_.saved.rows) + (index * dims_.H + head_of(stream)) * bank_elements();
      base.stride = dims_.D;
    } else {
      base = bank_of_stream<S>(p_.bank, (first_ + stream) / dims_.H, head_of(stream));
    }
    const SdmSave mode = replay_ ? SdmSave::kRows : p_.saved.mode;
    return {
        base, replay_ ? &replay_rows_ : &p_.saved, saved_row_bytes(mode, p_.bank_dtype, dims_.D)
    };
  }

  // Chunks [begin, end) of a stream in this round; empty when it has no segment left.
  void segment_of(int64_t stream, int64_t round, int64_t* begin, int64_t* end) const {
    const int64_t segment = num_segments(stream) - 1 - round;
    *begin = std::max<int64_t>(segment, 0) * segment_chunks_;
    *end =
        segment < 0 ? *begin : std::min(*begin + segment_chunks_, sequence_of(stream).num_chunks);
  }

  size_t chunk_index(int64_t stream, int64_t chunk_in_segment) const {
    return static_cast<size_t>(stream * segment_chunks_ + chunk_in_segment);
  }

  // First kept row of a chunk: in this call's memory for replay, the forward's tensor otherwise.
  int64_t first_row(int64_t stream, int64_t chunk, int64_t chunk_in_segment) const {
    return replay_ ? (stream * segment_chunks_ + chunk_in_segment) * chunk_rows_
                   : head_of(stream) * p_.saved.rows_per_head + sequence_of(stream).first_row +
                         chunk * chunk_rows_;
  }

  // Finds the bank row of every group of the round.
  void find_rows(int64_t stream, int64_t round) {
    int64_t begin, end;
    segment_of(stream, round, &begin, &end);
    int64_t* newest = newest_ + stream * dims_.S;
    if (replay_ || round == 0) {
      std::memset(newest, 0xff, sizeof(int64_t) * static_cast<size_t>(dims_.S));  // all -1
    }
    for (int64_t chunk = begin; replay_ && chunk < end; ++chunk) {
      const int64_t k = chunk - begin;
      find_made_rows(first_row(stream, chunk, k), newest, &entries_[chunk_index(stream, k)]);
    }
    for (int64_t chunk = end - 1; !replay_ && chunk >= begin; --chunk) {
      const int64_t k = chunk - begin;
      find_replaced_rows(first_row(stream, chunk, k), newest, &entries_[chunk_index(stream, k)]);
    }
  }

  // f(worker, stream, chunk, chunk in segment) for every chunk of the round, in any order.
  template <typename F>
  void for_each_chunk(int64_t round, F&& f) {
    cpu::for_each_item(parallel_, count_ * segment_chunks_, [&](int64_t worker, int64_t item) {
      const int64_t stream = item / segment_chunks_;
      int64_t begin, end;
      segment_of(stream, round, &begin, &end);
      const int64_t k = item % segment_chunks_;
      if (begin + k < end) {
        f(static_cast<size_t>(worker), stream, begin + k, k);
      }
    });
  }

  void walk(int64_t worker, int64_t stream, int64_t round, const Slice& slice) {
    int64_t begin, end;
    segment_of(stream, round, &begin, &end);
    if (begin == end) {
      return;
    }
    const BwdScratch<Acc>& scratch = scratch_[static_cast<size_t>(worker)];
    const KeptBank<S> rows = bank(stream, round);
    const int64_t errors_ld = dims_.H * dims_.D;
    // nobody asks for the bank after the last chunk
    for (int64_t chunk = begin; replay_ && chunk < end - 1; ++chunk) {
      const ChunkEntries<Acc>& e = entries_[chunk_index(stream, chunk - begin)];
      const ChunkPlace& place = e.place;
      const int64_t token = (place.batch * dims_.T + place.token) * dims_.H + place.head;
      const Acc* errors = static_cast<const Acc*>(p_.saved.errors) + token * dims_.D + slice.c0;
      const int64_t first = first_row(stream, chunk, chunk - begin);
      replay_updates(e, rows, slice, errors, errors_ld, first);
    }
    for (int64_t chunk = end - 1; chunk >= begin; --chunk) {
      const size_t at = chunk_index(stream, chunk - begin);
      backward_chunk(p_, entries_[at], rows, grad(stream), slice, dots_[at], scratch);
    }
  }

  void run_group() {
    replay_rows_ = SdmSaved{SdmSave::kRows, 0, nullptr, rows_, nullptr, 0, 0};
    start_gradients();
    int64_t rounds = 0;
    for (int64_t stream = 0; stream < count_; ++stream) {
      rounds = std::max(rounds, num_segments(stream));
    }
    for (int64_t round = 0; round < rounds; ++round) {
      for_each_chunk(round, [&](size_t worker, int64_t stream, int64_t chunk, int64_t k) {
        const ChunkPlace place = chunk_place(sequence_of(stream), head_of(stream), chunk, dims_.C);
        build_entries(
            dims_, p_.tokens, place, true, &sorters_[worker], &entries_[chunk_index(stream, k)]
        );
      });
      cpu::for_each_item(parallel_, count_, [&](int64_t, int64_t stream) {
        find_rows(stream, round);
      });
      cpu::for_each_item(parallel_, count_ * slices_, [&](int64_t worker, int64_t item) {
        const Slice slice = make_slice<Acc>(item % slices_, slice_columns_, dims_.D);
        walk(worker, item / slices_, round, slice);
      });
      for_each_chunk(round, [&](size_t worker, int64_t stream, int64_t, int64_t k) {
        const size_t at = chunk_index(stream, k);
        const int64_t tiles = ceil_div(dims_.D, kTileColumns);
        finish_chunk(p_, entries_[at], dots_[at], tiles, &pair_scratch_[worker]);
      });
    }
    finish_gradients();
  }

  static constexpr int64_t kRoundBlock = 1 << 16;

  const SdmBwdParams& p_;
  const SdmDims& dims_;
  const std::vector<SdmSequence>& sequences_;
  const cpu::ParallelFor& parallel_;
  bool replay_ = false;
  int64_t slice_columns_ = 1;
  int64_t slices_ = 1;
  int64_t group_streams_ = 1;
  int64_t segment_chunks_ = 1;
  int64_t chunk_rows_ = 0;  // rows kept for one chunk
  int64_t first_ = 0;       // the group's first stream
  int64_t count_ = 0;       // its streams
  std::unique_ptr<cpu::Block> block_;
  Acc* grads_ = nullptr;       // [group, S, D], unless the result holds them
  Acc* shared_sum_ = nullptr;  // [H, S, D], for a shared bank below float
  S* rows_ = nullptr;          // [group, segment, chunk rows, D], replay
  int64_t* newest_ = nullptr;  // [group, S], of the kept rows of a slot
  SdmSaved replay_rows_{};
  std::vector<ChunkEntries<Acc>> entries_;
  std::vector<ChunkDots<Acc>> dots_;
  std::vector<EntrySorter<Acc>> sorters_;
  std::vector<BwdScratch<Acc>> scratch_;
  std::vector<PairScratch<Acc>> pair_scratch_;
};

inline Status backward(
    const SdmBwdParams& p,
    const std::vector<SdmSequence>& sequences,
    const cpu::ParallelFor& parallel
) {
  switch (p.bank_dtype) {
    case DType::kF32:
      return BackwardRun<float>(p, sequences, parallel).run();
    case DType::kBf16:
      return BackwardRun<Bf16>(p, sequences, parallel).run();
    case DType::kF16:
      return BackwardRun<F16>(p, sequences, parallel).run();
    default:
      return BackwardRun<double>(p, sequences, parallel).run();
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
