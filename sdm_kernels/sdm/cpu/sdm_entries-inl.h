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

// Working memory of one thread.
struct EntrySorter {
  uint64_t* keys;      // [n], slot in the high half, enumeration order in the low half
  uint64_t* scratch;   // [n]
  int32_t* histogram;  // [kDigits]
  double* token_gate;  // [C]
  static constexpr int kDigitBits = 11;
  static constexpr int kDigits = 1 << kDigitBits;
};

inline EntrySorter carve_sorter(cpu::Carver* carver, const SdmDims& dims) {
  const int64_t n = dims.C * (dims.W + dims.R);
  EntrySorter s;
  s.keys = carver->take<uint64_t>(n);
  s.scratch = carver->take<uint64_t>(n);
  s.histogram = carver->take<int32_t>(EntrySorter::kDigits);
  s.token_gate = carver->take<double>(dims.C);
  return s;
}

SDM_INLINE int64_t load_index(const IndexView& view, int64_t offset) {
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[offset]
                       : static_cast<const int32_t*>(view.data)[offset];
}

template <typename View>
SDM_INLINE int64_t offset_of(const View& view, int64_t batch, int64_t token, int64_t head) {
  return batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

// Stable radix sort by slot; the enumeration order in the low half breaks ties by itself.
inline void sort_by_slot(EntrySorter* s, int64_t n, int64_t num_slots) {
  int bits = 1;
  while ((int64_t{1} << bits) < num_slots) {
    ++bits;
  }
  const int passes = static_cast<int>(ceil_div(bits, EntrySorter::kDigitBits));
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

// Adds one lane of indices of every token; ids outside the bank are unused lanes and leave no
// entry.
inline int64_t enumerate_lanes(
    const ChunkPlace& place,
    const IndexView& view,
    int64_t lanes,
    int64_t num_slots,
    int64_t first_id,
    int64_t n,
    uint64_t* keys
) {
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    const int64_t at = offset_of(view, place.batch, place.token + i, place.head);
    for (int64_t a = 0; a < lanes; ++a) {
      const int64_t slot = load_index(view, at + a * view.stride[3]);
      if (slot >= 0 && slot < num_slots) {
        keys[n++] =
            static_cast<uint64_t>(slot) << 32 | static_cast<uint64_t>(first_id + i * lanes + a);
      }
    }
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

// Builds the entries of the chunk at `place`. `gram` is off for the replay of row updates, which
// needs no products of pairs.
template <typename Acc>
void build_entries(
    const SdmDims& dims,
    const SdmTokens& in,
    const ChunkPlace& place,
    bool gram,
    EntrySorter* s,
    ChunkEntries<Acc>* e
) {
  const int64_t C = dims.C, W = dims.W, R = dims.R;
  const int64_t num_tokens = place.num_tokens;
  e->place = place;

  const int64_t num_writes = enumerate_lanes(place, in.write_idx, W, dims.S, 0, 0, s->keys);
  const int64_t n = enumerate_lanes(place, in.read_idx, R, dims.S, C * W, num_writes, s->keys);
  e->num_entries = static_cast<int32_t>(n);
  sort_by_slot(s, n, dims.S);

  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t token = place.token + i;
    e->beta[i] = static_cast<Acc>(
        load_scalar(in.beta.data, in.beta.dtype, offset_of(in.beta, place.batch, token, place.head))
    );
    if (!dims.gate_per_write) {
      const int64_t at = offset_of(in.g, place.batch, token, place.head);
      s->token_gate[i] = exp_f64(load_scalar(in.g.data, in.g.dtype, at));
    }
  }
  if (gram) {
    std::memset(e->neg_a, 0, sizeof(Acc) * static_cast<size_t>(num_tokens * C));
    std::memset(e->qk, 0, sizeof(Acc) * static_cast<size_t>(num_tokens * C));
  }

  int64_t groups = 0;
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const uint64_t slot = s->keys[begin] >> 32;
    int64_t mid = begin;
    for (end = begin; end < n && s->keys[end] >> 32 == slot; ++end) {
      const int64_t id = static_cast<int64_t>(s->keys[end] & 0xffffffffu);
      const bool write = id < C * W;
      const int64_t lane = write ? id : id - C * W;
      const int64_t i = write ? lane / W : lane / R;
      const int64_t a = lane - i * (write ? W : R);
      const FloatView& view = write ? in.write_val : in.read_val;
      const int64_t at = offset_of(view, place.batch, place.token + i, place.head);
      e->value[end] = static_cast<Acc>(load_scalar(view.data, view.dtype, at + a * view.stride[3]));
      e->lane[end] = static_cast<int32_t>(lane);
      e->row[end] = static_cast<int32_t>(write ? i : C + i);
      if (write) {
        mid = end + 1;
        const bool owner = end == begin || e->row[end - 1] != i;
        e->owner[end] = owner;
        e->gate[end] = 1.0;
        if (owner && dims.gate_per_write) {
          const int64_t gate = offset_of(in.g, place.batch, place.token + i, place.head);
          e->gate[end] = exp_f64(load_scalar(in.g.data, in.g.dtype, gate + a * in.g.stride[3]));
        } else if (owner) {
          e->gate[end] = s->token_gate[i];
        }
      }
    }
    scan_group(begin, mid, end, C, e);
    if (gram && mid > begin && end - begin > 1) {
      gram_group(begin, mid, end, C, e);
    }
    for (int64_t w = begin; w < mid; ++w) {
      e->weight[w] = static_cast<Acc>(e->value[w] * e->before[w]);
      e->post[w] = static_cast<Acc>(e->value[w] * e->after[w] * e->beta[e->row[w]]);
    }
    for (int64_t r = mid; r < end; ++r) {
      e->weight[r] = static_cast<Acc>(e->value[r] * e->before[r]);
    }
    e->group_slot[groups] = static_cast<int32_t>(slot);
    e->group_begin[groups] = static_cast<int32_t>(begin);
    e->group_num_writes[groups] = static_cast<int32_t>(mid - begin);
    e->group_decay[groups] = static_cast<Acc>(mid > begin ? e->before[mid - 1] : 1.0);
    e->group_fresh[groups] = 0;
    ++groups;
  }
  e->group_begin[groups] = static_cast<int32_t>(n);
  e->num_groups = static_cast<int32_t>(groups);

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
