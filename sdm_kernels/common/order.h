// SPDX-License-Identifier: Apache-2.0
//! @file The total order of top-k selection as integer keys (docs/topk.md).
//!
//! order_key maps a score to a signed integer: larger score, larger key; -0 < +0; NaN equals -inf.
//! Pairs of equal sum are told apart by tie_payload: the larger one is picked first.
#pragma once

#include <cstdint>
#include <cstring>

#include "sdm_kernels/common/hd.h"

namespace sdm {

// Most slots one call can select; it bounds the ranks that tie_payload packs.
constexpr int64_t kMaxTopk = 1024;

// Below the key of every score: unused lanes.
constexpr int32_t kLowestKey = INT32_MIN;
constexpr int64_t kLowestKey64 = INT64_MIN;

// The key of -inf (and of NaN): no score is lower.
constexpr int32_t kNegInfKey = INT32_MIN + 0x7fffff;
constexpr int64_t kNegInfKey64 = INT64_MIN + 0xfffffffffffff;

SDM_HD int32_t order_key(float score) {
  int32_t bits;
  memcpy(&bits, &score, sizeof(bits));
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return kNegInfKey;
  }
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

SDM_HD int64_t order_key(double score) {
  int64_t bits;
  memcpy(&bits, &score, sizeof(bits));
  if ((bits & INT64_MAX) > 0x7ff0000000000000) {
    return kNegInfKey64;
  }
  return bits ^ ((bits >> 63) & INT64_MAX);
}

// The score of a key; exact for every score but NaN, which became -inf.
SDM_HD float key_score(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float score;
  memcpy(&score, &bits, sizeof(score));
  return score;
}

SDM_HD double key_score(int64_t key) {
  const int64_t bits = key ^ ((key >> 63) & INT64_MAX);
  double score;
  memcpy(&score, &bits, sizeof(score));
  return score;
}

// Priority of the pair (rank i of the running list, rank j of the factor) among equal sums: larger
// i + j first, then larger i. Candidates have (i + 1) * (j + 1) <= kMaxTopk, so i + j < kMaxTopk.
constexpr int kRankBits = 10;

SDM_HD constexpr int32_t tie_payload(int32_t i, int32_t j) {
  return ((i + j) << kRankBits) | i;
}

SDM_HD constexpr int32_t payload_first(int32_t payload) {
  return payload & ((1 << kRankBits) - 1);
}

SDM_HD constexpr int32_t payload_second(int32_t payload) {
  return (payload >> kRankBits) - payload_first(payload);
}

}  // namespace sdm
