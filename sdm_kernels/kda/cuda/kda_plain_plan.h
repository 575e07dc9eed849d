// SPDX-License-Identifier: Apache-2.0
//! @file Windows and workspace of the plain path. Only how the work is cut depends on this, never
//! what is summed with what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sdm_kernels/cuda/device_carver.h"
#include "sdm_kernels/kda/cuda/kda_plain_window.cuh"

namespace sdm::kda::plain {

// Bytes that the records of a window may take; one chunk of all heads is the least.
constexpr int64_t kWindowBytes = int64_t{224} << 20;

inline PlainRecords carve_records(
    DeviceCarver* carver, const KdaDims& dims, int64_t rows, bool backward
) {
  const int64_t slots = rows * (dims.C / kTile) * dims.HV;
  const int64_t K = dims.K, V = dims.V;
  PlainRecords records{};
  records.w = carver->take<float>(slots * kTile * K);
  records.qd = carver->take<float>(slots * kTile * K);
  records.kr = carver->take<float>(slots * kTile * K);
  records.u = carver->take<float>(slots * kTile * V);
  records.gamma = carver->take<float>(slots * K);
  records.scores = carver->take<float>(slots * kScores);
  records.beta = carver->take<float>(slots * kTile);
  if (backward) {
    records.du = carver->take<float>(slots * kTile * V);
    records.states = carver->take<float>(slots * K * V);
    records.d_states = carver->take<float>(slots * K * V);
    records.d_bias = carver->take<float>(slots * K);
    records.d_rate = carver->take<float>(slots);
  }
  return records;
}

// How one call is cut: groups of sequences (one group with cu_seqlens), in each a number of
// windows.
struct PlainPlan {
  bool packed;
  int64_t sequences;  // of a group; 1 with cu_seqlens
  int64_t groups;
  int64_t chunks;      // of a window
  int64_t all_chunks;  // of a group
  int64_t windows;     // of a group

  PlainWindow window(const KdaDims& dims, int64_t group, int64_t index) const {
    const int64_t first = group * sequences;
    const int64_t count = packed ? 1 : std::min(sequences, dims.N - first);
    return {first, count, index * chunks, std::min(chunks, all_chunks - index * chunks)};
  }

  // Lanes of states that wait between two windows.
  int64_t lanes() const { return sequences; }
};

inline PlainPlan make_plan(const KdaDims& dims, bool packed, bool backward) {
  DeviceCarver one(nullptr);
  carve_records(&one, dims, 1, backward);
  const int64_t rows = std::max<int64_t>(1, kWindowBytes / one.used());
  PlainPlan plan{};
  plan.packed = packed;
  plan.all_chunks =
      packed ? dims.T / dims.C + dims.N : std::max<int64_t>(1, ceil_div(dims.T, dims.C));
  plan.sequences = packed ? 1 : std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, dims.N));
  plan.groups = packed ? 1 : ceil_div(dims.N, plan.sequences);
  plan.chunks =
      std::clamp<int64_t>(rows / plan.sequences, 1, std::max<int64_t>(1, plan.all_chunks));
  plan.windows = ceil_div(plan.all_chunks, plan.chunks);
  return plan;
}

#define KDA_PLAIN_RETURN_IF_ERROR(expression)   \
  do {                                          \
    const cudaError_t kda_error = (expression); \
    if (kda_error != cudaSuccess) {             \
      return kda_error;                         \
    }                                           \
  } while (false)

}  // namespace sdm::kda::plain
