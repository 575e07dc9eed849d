// SPDX-License-Identifier: Apache-2.0
//! @file The rule of docs/topk.md, sentence by sentence, on the host: what test_topk.cu compares
//! to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"

namespace sdm::test {

struct Pick {
  int32_t key;
  int64_t tie;  // larger first among equal keys
  int64_t id;
};

inline void keep_first(std::vector<Pick>& picks, int64_t want) {
  std::sort(picks.begin(), picks.end(), [](const Pick& a, const Pick& b) {
    return a.key != b.key ? a.key > b.key : a.tie > b.tie;
  });
  picks.resize(static_cast<size_t>(want));
}

template <typename T>
std::vector<Pick> ranked(const T* scores, int64_t width, int64_t k) {
  std::vector<Pick> picks;
  for (int64_t column = 0; column < width; ++column) {
    picks.push_back({order_key(to_f32(scores[column])), column, column});
  }
  keep_first(picks, std::min(k, width));
  return picks;
}

template <typename T>
T defined_value(const T* scores, const std::vector<int64_t>& dims, int64_t id) {
  if (dims.size() == 1) {
    return scores[id];
  }
  std::vector<int64_t> columns(dims.size());
  for (size_t f = dims.size(); f-- > 0;) {
    columns[f] = id % dims[f];
    id /= dims[f];
  }
  float sum = to_f32(scores[columns[0]]);
  int64_t offset = dims[0];
  for (size_t f = 1; f < dims.size(); ++f) {
    sum = f == 1 ? sum : to_f32(from_f32<T>(sum));
    sum = sum + to_f32(scores[offset + columns[f]]);
    offset += dims[f];
  }
  return from_f32<T>(std::isnan(sum) ? bits_float(0x7fc00000u) : sum);
}

template <typename T>
void select_reference(
    const T* scores,
    const std::vector<int64_t>& dims,
    int64_t k,
    std::vector<T>* values,
    std::vector<int64_t>* ids
) {
  std::vector<Pick> list = ranked(scores, dims[0], k);
  int64_t offset = dims[0];
  for (size_t f = 1; f < dims.size(); ++f) {
    const std::vector<Pick> factor = ranked(scores + offset, dims[f], k);
    const int64_t n = static_cast<int64_t>(list.size());
    const int64_t m = static_cast<int64_t>(factor.size());
    const int64_t c = std::min(k, n * m);
    std::vector<Pick> sums;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m && (i + 1) * (j + 1) <= c; ++j) {
        const Pick& a = list[static_cast<size_t>(i)];
        const Pick& b = factor[static_cast<size_t>(j)];
        const float running = f == 1 ? key_score(a.key) : to_f32(from_f32<T>(key_score(a.key)));
        sums.push_back(
            {order_key(running + key_score(b.key)), ((i + j) << 32) + i, a.id * dims[f] + b.id}
        );
      }
    }
    keep_first(sums, c);
    list = sums;
    offset += dims[f];
  }
  std::sort(list.begin(), list.end(), [](const Pick& a, const Pick& b) { return a.id < b.id; });
  for (const Pick& pick : list) {
    ids->push_back(pick.id);
    values->push_back(defined_value(scores, dims, pick.id));
  }
}

template <typename T>
std::vector<T> scatter_reference(
    const std::vector<T>& d_values,
    const std::vector<int64_t>& ids,
    const std::vector<int64_t>& dims
) {
  int64_t num_columns = 0;
  int64_t num_slots = 1;
  for (const int64_t width : dims) {
    num_columns += width;
    num_slots *= width;
  }
  std::vector<float> sums(static_cast<size_t>(num_columns), 0.0f);
  for (size_t lane = 0; lane < ids.size(); ++lane) {
    int64_t id = ids[lane];
    if (id < 0 || id >= num_slots) {
      continue;
    }
    int64_t offset = num_columns;
    for (size_t f = dims.size(); f-- > 0;) {
      offset -= dims[f];
      sums[static_cast<size_t>(offset + id % dims[f])] += to_f32(d_values[lane]);
      id /= dims[f];
    }
  }
  std::vector<T> result;
  for (const float sum : sums) {
    result.push_back(from_f32<T>(sum));
  }
  return result;
}

}  // namespace sdm::test
