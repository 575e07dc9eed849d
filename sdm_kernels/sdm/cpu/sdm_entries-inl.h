// SPDX-License-Identifier: Apache-2.0
//! @file Everything of a chunk that does not depend on the bank: sort, scan, gram.
//!
//! An entry is one write lane or one read lane of one token. Sorted by slot (stable, writes before
//! reads, then token, then lane), the entries of a slot form a group. With d(entry) = exp(g) for
//! the first write of a (token, slot) and 1 otherwise:
//!
//!     before = product of d over the group's writes up to the entry's token   (decay of the bank
//!     row) after  = product of d over the group's later writes                     (decay until
//!     the chunk's end) A[i,j]  = sum over shared slots of k_i k_j before_i / before_j,  j <  i
//!     QK[i,j] = sum over shared slots of q_i k_j before_i / before_j,  j <= i
//!
//! The quotients are never formed: walking from an entry to earlier ones multiplies the factors in
//! between, so nothing overflows that the token recurrence does not. Products are in double: one
//! exp a gate, no logarithms.
//!
//! One thread builds one chunk; sums run in slot order. Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

template <typename Acc>
struct ChunkEntries {
  ChunkPlace place;
  int32_t num_groups;
  int32_t num_entries;
  int32_t* group_slot;        // [n], ascending
  int32_t* group_begin;       // [n + 1], first entry; its writes come first
  int32_t* group_num_writes;  // [n]
  Acc* group_decay;           // [n], product of d over the whole group
  uint8_t* group_fresh;       // [n], forward: 1 where no earlier chunk wrote the row
  int64_t* group_row;         // [n], backward: the row that holds the slot at the chunk's start
  int32_t* row;               // [n], token of a write, C + token of a read
  Acc* weight;                // [n], k * before or q * before
  Acc* post;                  // [n], writes: k * after * beta
  Acc* neg_a;                 // [C, C], -A[i,j] * beta[j], strictly lower
  Acc* qk;                    // [C, C], QK[i,j] * beta[j], lower
  // what the gradients of weights and gates need besides
  int32_t* lane;   // [n], token * W + lane of a write, token * R + lane of a read
  Acc* value;      // [n], k or q
  double* before;  // [n]
  double* after;   // [n], writes
  double* gate;    // [n], writes: d
  uint8_t* owner;  // [n], writes: 1 for the lane whose gate decays the slot
  Acc* beta;       // [C]
};

template <typename Acc>
void carve_entries(cpu::Carver* carver, const SdmDims& dims, ChunkEntries<Acc>* e) {
  const int64_t n = dims.C * (dims.W + dims.R);
  e->group_slot = carver->take<int32_t>(n);
  e->group_begin = carver->take<int32_t>(n + 1);
  e->group_num_writes = carver->take<int32_t>(n);
  e->group_decay = carver->take<Acc>(n);
  e->group_fresh = carver->take<uint8_t>(n);
  e->group_row = carver->take<int64_t>(n);
  e->row = carver->take<int32_t>(n);
  e->weight = carver->take<Acc>(n);
  e->post = carver->take<Acc>(n);
  e->neg_a = carver->take<Acc>(dims.C * dims.C);
  e->qk = carver->take<Acc>(dims.C * dims.C);
  e->lane = carver->take<int32_t>(n);
  e->before = carver->take<double>(n);
  e->after = carver->take<double>(n);
  e->gate = carver->take<double>(n);
  e->owner = carver->take<uint8_t>(n);
  e->value = carver->take<Acc>(n);
  e->beta = carver->take<Acc>(dims.C);
}

// Working memory of one thread. A lane's id is its place in the enumeration: writes, then reads,
// each by token and lane.
template <typename Acc>
struct EntrySorter {
  uint64_t* keys;      // [n], slot in the high half, id in the low half
  uint64_t* scratch;   // [n]
  int32_t* histogram;  // [kDigits]
  int32_t* row;        // [n], by id: token of a write, C + token of a read
  Acc* value;          // [n], by id: k or q
  double* gate;        // [C * W] by id, or [C] by token if a token has one gate
  static constexpr int kDigitBits = 11;
  static constexpr int kDigits = 1 << kDigitBits;
};

template <typename Acc>
EntrySorter<Acc> carve_sorter(cpu::Carver* carver, const SdmDims& dims) {
  const int64_t n = dims.C * (dims.W + dims.R);
  EntrySorter<Acc> s;
  s.keys = carver->take<uint64_t>(n);
  s.scratch = carver->take<uint64_t>(n);
  s.histogram = carver->take<int32_t>(EntrySorter<Acc>::kDigits);
  s.row = carver->take<int32_t>(n);
  s.value = carver->take<Acc>(n + kLanes<Acc>);  // whole vectors are stored
  s.gate = carver->take<double>(dims.gate_per_write ? dims.C * dims.W : dims.C);
  return s;
}

template <typename View>
SDM_INLINE int64_t offset_of(const View& view, int64_t batch, int64_t token, int64_t head) {
  return batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

// Stable radix sort by slot; the enumeration order in the low half breaks ties by itself.
template <typename Acc>
void sort_by_slot(EntrySorter<Acc>* s, int64_t n, int64_t num_slots) {
  int bits = 1;
  while ((int64_t{1} << bits) < num_slots) {
    ++bits;
  }
  const int passes = static_cast<int>(ceil_div(bits, EntrySorter<Acc>::kDigitBits));
  const int digit_bits = static_cast<int>(ceil_div(bits, passes));
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = 32 + pass * digit_bits;
    std::memset(s->histogram, 0, sizeof(int32_t) << digit_bits);
    for (int64_t i = 0; i < n; ++i) {
      ++s->histogram[(s->keys[i] >> shift) & mask];
    }
    int32_t begin = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      const int32_t count = s->histogram[digit];
      s->histogram[digit] = begin;
      begin += count;
    }
    for (int64_t i = 0; i < n; ++i) {
      s->scratch[s->histogram[(s->keys[i] >> shift) & mask]++] = s->keys[i];
    }
    uint64_t* swap = s->keys;
    s->keys = s->scratch;
    s->scratch = swap;
  }
}

// Adds the lanes of one token; slots outside the bank are unused lanes and leave no entry.
template <typename Index>
SDM_INLINE int64_t enumerate_token(
    const Index* slots, int64_t lanes, int64_t num_slots, uint64_t id, int64_t n, uint64_t* keys
) {
  for (int64_t a = 0; a < lanes; ++a) {
    const int64_t slot = slots[a];
    keys[n] = static_cast<uint64_t>(slot) << 32 | (id + static_cast<uint64_t>(a));
    n += slot >= 0 && slot < num_slots;
  }
  return n;
}

// Adds the write lanes or the read lanes of every token, with their rows and values.
template <typename Acc>
int64_t enumerate_lanes(
    const ChunkPlace& place,
    const IndexView& slots,
    const FloatView& values,
    int64_t lanes,
    int64_t num_slots,
    int64_t first_id,
    int64_t first_row,
    int64_t n,
    EntrySorter<Acc>* s
) {
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t id = first_id + i * lanes;
    const int64_t at = offset_of(slots, place.batch, place.token + i, place.head);
    const uint64_t key = static_cast<uint64_t>(id);
    n = slots.is_int64
            ? enumerate_token(
                  static_cast<const int64_t*>(slots.data) + at, lanes, num_slots, key, n, s->keys
              )
            : enumerate_token(
                  static_cast<const int32_t*>(slots.data) + at, lanes, num_slots, key, n, s->keys
              );
    for (int64_t a = 0; a < lanes; ++a) {
      s->row[id + a] = static_cast<int32_t>(first_row + i);
    }
    const int64_t from = offset_of(values, place.batch, place.token + i, place.head);
    load_row(values.data, values.dtype, from, lanes, s->value + id);
  }
  return n;
}

// Decays inside one group: writes are [begin, mid), reads [mid, end), each in token order.
template <typename Acc>
void scan_group(int64_t begin, int64_t mid, int64_t end, int64_t C, ChunkEntries<Acc>* e) {
  double product = 1.0;
  int64_t read = mid;
  for (int64_t w = begin; w < mid; ++w) {
    // reads of earlier tokens see the writes so far
    for (; read < end && e->row[read] - C < e->row[w]; ++read) {
      e->before[read] = product;
    }
    product *= e->gate[w];
    e->before[w] = product;
  }
  for (; read < end; ++read) {
    e->before[read] = product;
  }
  double rest = 1.0;
  for (int64_t w = mid - 1; w >= begin; --w) {
    e->after[w] = rest;
    rest *= e->gate[w];
  }
}

// Adds the group's pairs to A (in neg_a) and QK, not yet scaled.
template <typename Acc>
void gram_group(int64_t begin, int64_t mid, int64_t end, int64_t C, ChunkEntries<Acc>* e) {
  for (int64_t r = begin + 1; r < mid; ++r) {
    const int64_t i = e->row[r];
    double decay = e->gate[r];
    for (int64_t p = r - 1; p >= begin && decay != 0.0; --p) {
      const int64_t j = e->row[p];
      if (j < i) {
        e->neg_a[i * C + j] +=
            static_cast<Acc>(static_cast<double>(e->value[r]) * e->value[p] * decay);
      }
      decay *= e->gate[p];
    }
  }
  int64_t last = begin;  // one past the last write at or before the read's token
  for (int64_t r = mid; r < end; ++r) {
    const int64_t i = e->row[r] - C;
    while (last < mid && e->row[last] <= i) {
      ++last;
    }
    double decay = 1.0;
    for (int64_t p = last - 1; p >= begin && decay != 0.0; --p) {
      e->qk[i * C + e->row[p]] +=
          static_cast<Acc>(static_cast<double>(e->value[r]) * e->value[p] * decay);
      decay *= e->gate[p];
    }
  }
}

// The factors of a row in the gather and in the update.
template <typename Acc>
void weigh_entries(const ChunkEntries<Acc>& e, int64_t n, int64_t C) {
  const int32_t* row = e.row;
  const Acc* SDM_RESTRICT value = e.value;
  const Acc* SDM_RESTRICT beta = e.beta;
  const double* SDM_RESTRICT before = e.before;
  const double* SDM_RESTRICT after = e.after;
  Acc* SDM_RESTRICT weight = e.weight;
  Acc* SDM_RESTRICT post = e.post;
  const int32_t num_rows = static_cast<int32_t>(C);
  for (int64_t k = 0; k < n; ++k) {
    const int32_t token = row[k] < num_rows ? row[k] : 0;  // a read has no use for `post`
    weight[k] = static_cast<Acc>(value[k] * before[k]);
    post[k] = static_cast<Acc>(value[k] * after[k] * beta[token]);
  }
}

// Builds the entries of the chunk at `place`. `gram` is off for the replay of row updates, which
// needs no products of pairs.
template <typename Acc>
void build_entries(
    const SdmDims& dims,
    const SdmTokens& in,
    const ChunkPlace& place,
    bool gram,
    EntrySorter<Acc>* s,
    ChunkEntries<Acc>* e
) {
  const int64_t C = dims.C, W = dims.W, R = dims.R;
  const int64_t num_tokens = place.num_tokens;
  e->place = place;

  const int64_t writes = C * W;  // ids below are those of writes
  int64_t n = enumerate_lanes(place, in.write_idx, in.write_val, W, dims.S, 0, 0, 0, s);
  n = enumerate_lanes(place, in.read_idx, in.read_val, R, dims.S, writes, C, n, s);
  e->num_entries = static_cast<int32_t>(n);
  sort_by_slot(s, n, dims.S);

  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t token = place.token + i;
    e->beta[i] = static_cast<Acc>(
        load_scalar(in.beta.data, in.beta.dtype, offset_of(in.beta, place.batch, token, place.head))
    );
    const int64_t at = offset_of(in.g, place.batch, token, place.head);
    const int64_t gates = dims.gate_per_write ? W : 1;
    for (int64_t a = 0; a < gates; ++a) {
      s->gate[i * gates + a] = exp_f64(load_scalar(in.g.data, in.g.dtype, at + a));
    }
  }
  if (gram) {
    std::memset(e->neg_a, 0, sizeof(Acc) * static_cast<size_t>(num_tokens * C));
    std::memset(e->qk, 0, sizeof(Acc) * static_cast<size_t>(num_tokens * C));
  }

  // Entries as if each were alone in its group, without a branch that depends on the slots: most
  // groups have one entry, and which ones is not to be predicted.
  const ChunkEntries<Acc> to = *e;  // its arrays do not overlap, which is not to be seen through e
  int64_t groups = 0;
  int32_t num_writes = 0;
  int64_t last_slot = -1;
  int32_t last_row = -1;
  to.group_begin[0] = 0;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t slot = static_cast<int64_t>(s->keys[k] >> 32);
    const int64_t id = static_cast<int64_t>(s->keys[k] & 0xffffffffu);
    const int32_t row = s->row[id];
    const bool write = id < writes;
    const bool first = slot != last_slot;
    const bool owner = write & (first | (row != last_row));
    const double gate = s->gate[!write ? 0 : dims.gate_per_write ? id : row];
    to.row[k] = row;
    to.value[k] = s->value[id];
    to.lane[k] = static_cast<int32_t>(write ? id : id - writes);
    to.owner[k] = owner;
    to.gate[k] = owner ? gate : 1.0;
    to.before[k] = owner ? gate : 1.0;
    to.after[k] = 1.0;
    groups += first;
    num_writes = (first ? 0 : num_writes) + write;
    to.group_slot[groups - 1] = static_cast<int32_t>(slot);
    to.group_begin[groups] = static_cast<int32_t>(k + 1);
    to.group_num_writes[groups - 1] = num_writes;
    last_slot = slot;
    last_row = row;
  }
  e->num_groups = static_cast<int32_t>(groups);

  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = e->group_begin[g];
    const int64_t end = e->group_begin[g + 1];
    const int64_t mid = begin + e->group_num_writes[g];
    if (end - begin > 1 && mid > begin) {
      scan_group(begin, mid, end, C, e);
      if (gram) {
        gram_group(begin, mid, end, C, e);
      }
    }
    // reads leave their row alone: `before` of a group without writes is 1
    e->group_decay[g] = static_cast<Acc>(e->before[mid > begin ? mid - 1 : begin]);
    e->group_fresh[g] = 0;
  }
  weigh_entries(*e, n, C);

  if (gram) {
    for (int64_t i = 0; i < num_tokens; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        e->neg_a[i * C + j] *= -e->beta[j];
        e->qk[i * C + j] *= e->beta[j];
      }
    }
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
