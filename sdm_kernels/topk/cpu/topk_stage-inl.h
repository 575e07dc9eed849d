// SPDX-License-Identifier: Apache-2.0
//! @file One stage of the top-k forward: the best c sums of a running list and a factor list.
//!
//! Only the pairs of ranks with (i + 1) * (j + 1) <= c can be among the best c. They are covered by
//! runs of consecutive ranks: rows i < root and, for i >= root, columns j < root (root = floor of
//! the square root of c), so that every sum is a vector addition without a gather. Sums below a
//! bound known to be reached c times are left out; each run is descending, so it ends there.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

struct Candidates {
  int32_t padded;  // keys, a multiple of kLanes
  int32_t num_runs;
  int64_t num_ge;  // keys >= the bound
};

// Appends other[first .. end) + fixed; returns false if not even the first sum reaches the bound.
template <typename Scratch>
inline bool add_run(
    Scratch& scratch,
    Candidates& candidates,
    const float* other,
    float fixed_score,
    TopkRun run,
    int32_t end,
    VecI below
) {
  run.position = candidates.padded;
  for (int32_t rank = run.first; rank < end; rank += kLanes) {
    VecI key = order_keys(load(other + rank) + broadcast(fixed_score));
    if (end - rank < kLanes) {
      key = select(iota() < end - rank, key, broadcast(kLowestKey));
    }
    const uint32_t mask = mask_gt(key, below);
    if (mask == 0) {
      break;
    }
    store(scratch.candidates + candidates.padded, key);
    candidates.padded += kLanes;
    const int num_ge = __builtin_popcount(mask);
    candidates.num_ge += num_ge;
    if (num_ge < kLanes) {
      break;
    }
  }
  run.length = candidates.padded - run.position;
  scratch.runs[candidates.num_runs] = run;
  candidates.num_runs += run.length != 0;
  return run.length != 0;
}

template <typename Scratch>
inline Candidates make_candidates(
    const TopkStage& stage, Scratch& scratch, int32_t list_len, int32_t factor_len, int32_t bound
) {
  Candidates candidates{};
  const VecI below = broadcast(bound - 1);
  for (int32_t i = 0; i < std::min(stage.root, list_len); ++i) {
    const int32_t end = std::min(stage.limit[i], factor_len);
    const TopkRun run{0, 0, i, 0, false};
    if (!add_run(
            scratch, candidates, scratch.factor_scores, scratch.list_scores[i], run, end, below
        )) {
      break;
    }
  }
  for (int32_t j = 0; j < std::min(stage.root, factor_len); ++j) {
    const int32_t end = std::min(stage.limit[j], list_len);
    const TopkRun run{0, 0, j, stage.root, true};
    if (!add_run(
            scratch, candidates, scratch.list_scores, scratch.factor_scores[j], run, end, below
        )) {
      break;
    }
  }
  return candidates;
}

// Chooses among the candidates of exactly the threshold's key; leaves the payloads of the best
// `want` of them in scratch.tied.
template <typename Scratch>
inline void choose_tied(Scratch& scratch, const Candidates& candidates, int32_t key, int64_t want) {
  int64_t num = 0;
  for (int32_t r = 0; r < candidates.num_runs; ++r) {
    const TopkRun& run = scratch.runs[r];
    const int32_t* keys = scratch.candidates + run.position;
    for (int32_t pos = 0; pos < run.length; ++pos) {
      const int32_t other = run.first + pos;
      scratch.tied[num] =
          run.fixed_factor ? tie_payload(other, run.fixed) : tie_payload(run.fixed, other);
      num += keys[pos] == key;
    }
  }
  choose_largest(scratch.tied, want, num);
}

// Slot ids of `count` consecutive ranks of a run; may write a whole vector.
inline void run_ids(
    const TopkRun& run,
    int32_t rank,
    int32_t count,
    const int32_t* list_ids,
    const int32_t* factor_cols,
    int64_t width,
    int32_t* out
) {
  (void)count;
  // Unsigned: lanes behind the list hold anything.
  const uint32_t narrow_width = static_cast<uint32_t>(width);
  if (run.fixed_factor) {
    const uint32_t column = static_cast<uint32_t>(factor_cols[run.fixed]);
    const VecU ids = reinterpret_cast<VecU>(load(list_ids + rank)) * narrow_width + column;
    store(out, reinterpret_cast<VecI>(ids));
  } else {
    const uint32_t first = static_cast<uint32_t>(list_ids[run.fixed]) * narrow_width;
    const VecU ids = reinterpret_cast<VecU>(load(factor_cols + rank)) + first;
    store(out, reinterpret_cast<VecI>(ids));
  }
}

inline void run_ids(
    const TopkRun& run,
    int32_t rank,
    int32_t count,
    const int64_t* list_ids,
    const int32_t* factor_cols,
    int64_t width,
    int64_t* out
) {
  for (int32_t l = 0; l < count; ++l) {
    out[l] = run.fixed_factor ? list_ids[rank + l] * width + factor_cols[run.fixed]
                              : list_ids[run.fixed] * width + factor_cols[rank + l];
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
  for (int32_t r = 0; r < candidates.num_runs; ++r) {
    const TopkRun& run = scratch.runs[r];
    for (int32_t pos = 0; pos < run.length; pos += kLanes) {
      const VecI key = load(scratch.candidates + run.position + pos);
      const int32_t count = __builtin_popcount(mask_gt(key, below));  // a prefix of the lanes
      if (count == 0) {
        break;
      }
      store(scratch.picked_keys + num, key);
      run_ids(
          run,
          run.first + pos,
          count,
          scratch.list_ids,
          scratch.factor_cols,
          stage.width,
          scratch.picked_ids + num
      );
      num += count;
    }
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
  int64_t num = 0;
  for (int32_t r = 0; r < candidates.num_runs; ++r) {
    const TopkRun& run = scratch.runs[r];
    const int32_t* keys = scratch.candidates + run.position;
    for (int32_t pos = 0; pos < run.length && keys[pos] > threshold.key; ++pos) {
      const int32_t other = run.first + pos;
      const int32_t payload =
          run.fixed_factor ? tie_payload(other, run.fixed) : tie_payload(run.fixed, other);
      scratch.merged[num++] = int64_t{keys[pos]} * (int64_t{1} << 32) + payload;
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
