// SPDX-License-Identifier: Apache-2.0
//! @file Where the rows of a bank stand.
//!
//! Forward of a short call: a row is read from the initial bank until a chunk has written it to the
//! new one. What nothing wrote is copied at the end, and only for a caller who gets the bank.
//!
//! Backward: a row as it was at a chunk's start is one of the rows that were kept or, where there
//! is none, that of a base bank. With bank checkpoints the base is the bank at the segment's start
//! and a chunk keeps the rows it makes; in the rows modes the base is the bank at the end and a
//! chunk kept the rows it replaced. Neither needs a bank to work in.
//!
//! One walk over the groups of a stream's chunks finds all that for every slice of columns.
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

// Saved rows of one chunk of a forward.
struct ChunkRows {
  const SdmSaved* saved;  // null: nothing is saved
  int64_t first;          // index of the first row
  int64_t row_bytes;
  int64_t reserved;  // rows from there on that belong to the chunk; unused ones are zeroed
};

// Slots that one thread copies or clears at a time: about 256 KiB of a row-major bank.
inline int64_t copy_grain(int64_t row_bytes) {
  const int64_t slots = (int64_t{256} << 10) / row_bytes;
  return slots > 1 ? slots : 1;
}

// ---------------------------------------------------------------------------------------------
// Forward

// A bank that is written row by row: `initial` where `fresh` says so, else `bank`.
template <typename S>
struct LazyBank {
  BankRows<S> bank;
  BankRows<S> initial;

  SDM_INLINE const S* row(int64_t slot, bool fresh) const {
    return (fresh ? initial : bank).row(slot);
  }
};

constexpr int32_t kNeverWritten = INT32_MAX;

template <typename S>
void copy_rows(
    const BankRows<S>& from, const BankRows<S>& to, int64_t begin, int64_t end, int64_t width
) {
  if (from.stride == width && to.stride == width) {
    std::memcpy(
        to.row(begin), from.row(begin), sizeof(S) * static_cast<size_t>((end - begin) * width)
    );
    return;
  }
  for (int64_t slot = begin; slot < end; ++slot) {
    std::memcpy(to.row(slot), from.row(slot), sizeof(S) * static_cast<size_t>(width));
  }
}

// Marks the groups of `chunk` whose rows no earlier chunk wrote; first_write is by slot.
template <typename Acc>
void mark_fresh_rows(int64_t chunk, int32_t* first_write, ChunkEntries<Acc>* e) {
  for (int64_t g = 0; g < e->num_groups; ++g) {
    int32_t* first = first_write + e->group_slot[g];
    e->group_fresh[g] = *first == kNeverWritten;
    if (e->group_num_writes[g] > 0 && *first == kNeverWritten) {
      *first = static_cast<int32_t>(chunk);
    }
  }
}

// Copies columns [c0, c0 + width) of the slots [begin, end) as they are at the start of `chunk`.
template <typename S>
void copy_rows_at(
    const LazyBank<S>& from,
    const int32_t* first_write,
    int64_t chunk,
    const BankRows<S>& to,
    int64_t begin,
    int64_t end,
    int64_t c0,
    int64_t width
) {
  for (int64_t slot = begin; slot < end; ++slot) {
    const bool fresh = first_write != nullptr && first_write[slot] >= chunk;
    std::memcpy(
        to.row(slot) + c0, from.row(slot, fresh) + c0, sizeof(S) * static_cast<size_t>(width)
    );
  }
}

// Copies the slots of [begin, end) that no chunk wrote.
template <typename S>
void copy_unwritten_rows(
    const LazyBank<S>& rows, const int32_t* first_write, int64_t begin, int64_t end, int64_t width
) {
  for (int64_t slot = begin; slot < end; ++slot) {
    if (first_write[slot] == kNeverWritten) {
      std::memcpy(
          rows.bank.row(slot), rows.initial.row(slot), sizeof(S) * static_cast<size_t>(width)
      );
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Backward

// The bank of one stream in the backward: kept rows by index, -1 for the row of the base.
template <typename S>
struct KeptBank {
  BankRows<S> base;
  const SdmSaved* kept;
  int64_t row_bytes;

  // The piece of an exact row from column c0 on.
  SDM_INLINE S* exact_row(int64_t index, int64_t slot, int64_t c0) const {
    char* rows = static_cast<char*>(kept->rows);
    return (index < 0 ? base.row(slot) : reinterpret_cast<S*>(rows + index * row_bytes)) + c0;
  }

  // A kept row has the slice's columns in its bytes [kept_begin, kept_begin + kept_bytes).
  SDM_INLINE void prefetch(
      int64_t index, int64_t slot, const Slice& slice, int64_t kept_begin, int64_t kept_bytes
  ) const {
    if (index < 0) {
      prefetch_row(base.row(slot) + slice.c0, slice.width * static_cast<int64_t>(sizeof(S)));
    } else {
      prefetch_row(
          static_cast<const char*>(kept->rows) + index * row_bytes + kept_begin, kept_bytes
      );
    }
  }
};

// Finds the rows at the start of a chunk whose update makes rows `first` and up (checkpoints).
// `newest` is by slot; chunks come in their order.
template <typename Acc>
void find_made_rows(int64_t first, int64_t* newest, ChunkEntries<Acc>* e) {
  for (int64_t g = 0; g < e->num_groups; ++g) {
    int64_t* row = newest + e->group_slot[g];
    e->group_row[g] = *row;
    if (e->group_num_writes[g] > 0) {
      *row = first++;
    }
  }
}

// Finds the rows at the start of a chunk that kept rows `first` and up when it replaced them.
// Chunks come in reverse.
template <typename Acc>
void find_replaced_rows(int64_t first, int64_t* newest, ChunkEntries<Acc>* e) {
  for (int64_t g = 0; g < e->num_groups; ++g) {
    int64_t* row = newest + e->group_slot[g];
    if (e->group_num_writes[g] > 0) {
      *row = first++;
    }
    e->group_row[g] = *row;
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
