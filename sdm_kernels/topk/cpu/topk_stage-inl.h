// SPDX-License-Identifier: Apache-2.0
//! @file One stage of the top-k forward: the best c sums of a running list and a factor list.
//!
//! Only the pairs of ranks with (i + 1) * (j + 1) <= c can be among the best c. They are covered by
//! runs of consecutive ranks: rows i < root and, for i >= root, columns j < root (root = floor of
//! the square root of c), so that every sum is a vector addition without a gather. Each run is
//! descending, so a long one can end at a bound known to be reached c times.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

struct Candidates {
  int32_t padded;  // keys, a multiple of kLanes; one TopkSpan for each kLanes of them
  VecI num_ge;     // keys >= the bound, by lane
};

// From this many selected slots on, a run ends at the bound. Below it, fewer sums are worth less
// than the branches that go the same way in every row.
constexpr int32_t kMinCutRuns = 128;

// Appends other[first .. end) + fixed; returns false if not even the first sum reaches the bound.
template <typename Scratch>
inline bool add_run(
    Scratch& scratch,
    Candidates& candidates,
    const float* other,
    float fixed_score,
    TopkSpan span,
    int32_t end,
    VecI below,
    bool cut
) {
  const VecF fixed = broadcast(fixed_score);
  const int32_t begin = span.first;
  for (; span.first < end; span.first += kLanes) {
    VecI key = order_keys(load(other + span.first) + fixed);
    if (end - span.first < kLanes) {
      key = select(iota() < end - span.first, key, broadcast(kLowestKey));
    }
    if (cut && mask_gt(key, below) == 0) {
      return span.first != begin;
    }
    store(scratch.candidates + candidates.padded, key);
    scratch.spans[candidates.padded / kLanes] = span;
    candidates.padded += kLanes;
    candidates.num_ge = count_gt(candidates.num_ge, key, below);
  }
  return true;
}

template <typename Scratch>
inline Candidates make_candidates(const TopkStage& stage, Scratch& scratch, int32_t bound) {
  Candidates candidates{};
  const VecI below = broadcast(bound - 1);
  const bool cut = stage.num_selected >= kMinCutRuns;
  const float* list = scratch.list_scores;
  const float* factor = scratch.factor_scores;
  for (int32_t i = 0; i < std::min(stage.root, stage.list_len); ++i) {
    const int32_t end = std::min(stage.limit[i], stage.factor_len);
    if (!add_run(scratch, candidates, factor, list[i], {i, 0, false}, end, below, cut)) {
      break;
    }
  }
  for (int32_t j = 0; j < std::min(stage.root, stage.factor_len); ++j) {
    const int32_t end = std::min(stage.limit[j], stage.list_len);
    if (!add_run(scratch, candidates, list, factor[j], {j, stage.root, true}, end, below, cut)) {
      break;
    }
  }
  return candidates;
}

inline int32_t span_payload(const TopkSpan& span, int32_t lane) {
  const int32_t other = span.first + lane;
  return span.fixed_factor ? tie_payload(other, span.fixed) : tie_payload(span.fixed, other);
}

// Chooses among the candidates of exactly the threshold's key; leaves the payloads of the best
// `want` of them in scratch.tied.
template <typename Scratch>
inline void choose_tied(Scratch& scratch, const Candidates& candidates, int32_t key, int64_t want) {
  const VecI bound = broadcast(key);
  int64_t num = 0;
  for (int32_t pos = 0; pos < candidates.padded; pos += kLanes) {
    const TopkSpan& span = scratch.spans[pos / kLanes];
    for (uint32_t mask = mask_eq(load(scratch.candidates + pos), bound); mask != 0;
         mask &= mask - 1) {
      scratch.tied[num++] = span_payload(span, __builtin_ctz(mask));
    }
  }
  choose_largest(scratch.tied, want, num);
}

// Slot ids of the first `count` lanes of a span; may write a whole vector.
inline void span_ids(
    const TopkSpan& span,
    int32_t count,
    const int32_t* list_ids,
    const int32_t* factor_cols,
    int64_t width,
    int32_t* out
) {
  (void)count;
  // Unsigned: lanes behind the list hold anything.
  const uint32_t narrow_width = static_cast<uint32_t>(width);
  if (span.fixed_factor) {
    const uint32_t column = static_cast<uint32_t>(factor_cols[span.fixed]);
    const VecU ids = reinterpret_cast<VecU>(load(list_ids + span.first)) * narrow_width + column;
    store(out, reinterpret_cast<VecI>(ids));
  } else {
    const uint32_t first = static_cast<uint32_t>(list_ids[span.fixed]) * narrow_width;
    const VecU ids = reinterpret_cast<VecU>(load(factor_cols + span.first)) + first;
    store(out, reinterpret_cast<VecI>(ids));
  }
}

inline void span_ids(
    const TopkSpan& span,
    int32_t count,
    const int64_t* list_ids,
    const int32_t* factor_cols,
    int64_t width,
    int64_t* out
) {
  for (int32_t l = 0; l < count; ++l) {
    out[l] = span.fixed_factor ? list_ids[span.first + l] * width + factor_cols[span.fixed]
                               : list_ids[span.fixed] * width + factor_cols[span.first + l];
  }
}

// Writes keys and ids of the best c sums, in no particular order.
template <typename Id>
inline void pick_last(
    const TopkStage& stage,
    TopkScratch<Id>& scratch,
    const Candidates& candidates,
    Threshold threshold
) {
  const bool tied = threshold.num_ge != stage.num_selected;
  const VecI below = broadcast(tied ? threshold.key : threshold.key - 1);
  int64_t num = 0;
  for (int32_t pos = 0; pos < candidates.padded; pos += kLanes) {
    const VecI key = load(scratch.candidates + pos);
    const int32_t count = popcount(mask_gt(key, below));  // a prefix of the lanes
    store(scratch.picked_keys + num, key);
    span_ids(
        scratch.spans[pos / kLanes],
        count,
        scratch.list_ids,
        scratch.factor_cols,
        stage.width,
        scratch.picked_ids + num
    );
    num += count;
  }
  if (tied) {
    const int64_t want = stage.num_selected - num;
    choose_tied(scratch, candidates, threshold.key, want);
    for (int64_t pos = 0; pos < want; ++pos, ++num) {
      const int32_t i = payload_first(scratch.tied[pos]);
      const int32_t j = payload_second(scratch.tied[pos]);
      scratch.picked_keys[num] = threshold.key;
      scratch.picked_ids[num] =
          static_cast<Id>(scratch.list_ids[i] * stage.width + scratch.factor_cols[j]);
    }
  }
}

// The best c sums become the next running list: in order, scores rounded to T.
template <typename T, typename Id>
inline void pick_running(
    const TopkStage& stage,
    TopkScratch<Id>& scratch,
    const Candidates& candidates,
    Threshold threshold
) {
  const VecI bound = broadcast(threshold.key);
  int64_t num = 0;
  for (int32_t pos = 0; pos < candidates.padded; pos += kLanes) {
    const TopkSpan& span = scratch.spans[pos / kLanes];
    for (uint32_t mask = mask_gt(load(scratch.candidates + pos), bound); mask != 0;
         mask &= mask - 1) {
      const int32_t lane = __builtin_ctz(mask);
      scratch.merged[num++] =
          int64_t{scratch.candidates[pos + lane]} * (int64_t{1} << 32) + span_payload(span, lane);
    }
  }
  const int64_t num_tied = stage.num_selected - num;
  choose_tied(scratch, candidates, threshold.key, num_tied);
  for (int64_t pos = 0; pos < num_tied; ++pos) {
    scratch.merged[num++] = int64_t{threshold.key} * (int64_t{1} << 32) + scratch.tied[pos];
  }
  sort_descending(scratch.merged, num);
  for (int64_t pos = 0; pos < num; ++pos) {
    const int32_t payload = static_cast<int32_t>(scratch.merged[pos] & 0x7fffffff);
    scratch.picked_keys[pos] = static_cast<int32_t>(scratch.merged[pos] >> 32);
    scratch.picked_ids[pos] = static_cast<Id>(
        scratch.list_ids[payload_first(payload)] * stage.width +
        scratch.factor_cols[payload_second(payload)]
    );
  }
  for (int64_t pos = 0; pos < num; ++pos) {
    scratch.list_scores[pos] = to_f32(from_f32<T>(key_score(scratch.picked_keys[pos])));
    scratch.list_ids[pos] = scratch.picked_ids[pos];
  }
  store(scratch.list_scores + num, broadcast(-INFINITY));
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
