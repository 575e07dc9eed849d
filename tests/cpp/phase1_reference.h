// SPDX-License-Identifier: Apache-2.0
//! @file The records of a chunk by definition, in double, compared with those of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/sdm/cuda/sdm_phase1.h"
#include "tests/cpp/phase1_case.h"

namespace sdm::test {

struct HostRecords {
  std::vector<int2> lane, write_post, group_count;
  std::vector<int32_t> position;
  std::vector<int4> entry, group, head_post, head_weight;
  std::vector<SdmPair> pair;
  std::vector<int32_t> entry_group, entry_count;
  std::vector<float> group_decay, beta, inverse, qk;
};

// Zeroes what phase 1 leaves out of a matrix: in every row the columns beyond the `block` that has
// the diagonal.
inline void forget_upper(std::vector<float>* cells, int64_t Cp, int64_t block) {
  for (size_t at = 0; at < cells->size(); ++at) {
    const int64_t row = static_cast<int64_t>(at) / Cp % Cp, column = static_cast<int64_t>(at) % Cp;
    if (column / block > row / block) {
      (*cells)[at] = 0.0f;
    }
  }
}

inline HostRecords fetch(const SdmRecords& r, int64_t C, size_t W, bool gram) {
  const size_t lanes = static_cast<size_t>(r.num_q * r.n);
  const size_t cells = gram ? static_cast<size_t>(r.num_q * r.Cp * r.Cp) : 0;
  HostRecords h;
  h.lane = to_host(r.lane, lanes);
  h.write_post = to_host(r.write_post, lanes == 0 ? 0 : static_cast<size_t>(r.num_q * C) * W);
  h.head_post = to_host(r.head_post, lanes);
  h.head_weight = to_host(r.head_weight, lanes);
  h.position = to_host(r.position, lanes);
  h.entry = to_host(r.entry, lanes);
  h.pair = to_host(r.pair, lanes);
  h.entry_group = to_host(r.entry_group, lanes);
  h.entry_count = to_host(r.entry_count, static_cast<size_t>(r.num_q));
  h.group = to_host(r.group, lanes);
  h.group_decay = to_host(r.group_decay, lanes);
  h.group_count = to_host(r.group_count, static_cast<size_t>(r.num_q));
  h.beta = to_host(r.beta, static_cast<size_t>(r.num_q * C));
  h.inverse = to_host(r.inverse, cells);
  h.qk = to_host(r.qk, cells);
  forget_upper(&h.inverse, r.Cp, 32);
  forget_upper(&h.qk, r.Cp, 16);
  return h;
}

inline float as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Collects the outcome of one case; a NaN counts as an error.
struct Report {
  int64_t wrong = 0;
  double weight = 0, log_decay = 0, qk = 0, inverse = 0;

  void same(int64_t got, int64_t want, const char* what) {
    if (got != want && ++wrong <= 5) {
      std::printf("  %s: got %lld, want %lld\n", what, (long long)got, (long long)want);
    }
  }

  void close(
      double got, double want, double scale, double tolerance, const char* what, double* worst
  ) {
    const double error = got == want ? 0.0 : std::fabs(got - want) / std::max(scale, 1e-30);
    *worst = std::max(*worst, error);
    if (!(error <= tolerance) && ++wrong <= 5) {
      std::printf("  %s: got %.9g, want %.9g\n", what, got, want);
    }
  }
};

struct Entry {
  int64_t slot, lane, token;
  bool write, owner;
  double value, log_decay;
};

// Groups and scans of one chunk by definition.
inline std::vector<Entry> sorted_entries(const Inputs& in, const ChunkPlace& place) {
  const SdmDims& d = in.dims;
  std::vector<Entry> entries;
  for (int64_t i = 0; i < place.num_tokens; ++i) {
    for (int64_t a = 0; a < d.W + d.R; ++a) {
      const bool write = a < d.W;
      const int64_t b = write ? a : a - d.W;
      const int64_t slot = id_at(write ? in.host.write_idx : in.host.read_idx, place, i, b);
      if (slot >= 0 && slot < d.S) {
        const int64_t lane = write ? i * d.W + b : d.C * d.W + i * d.R + b;
        const double value = value_at(write ? in.host.write_val : in.host.read_val, place, i, b);
        entries.push_back({slot, lane, i, write, false, value, 0.0});
      }
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.slot != b.slot ? a.slot < b.slot : a.lane < b.lane;
  });
  return entries;
}

inline void compare_matrices(
    const std::vector<double>& A,
    const std::vector<double>& QK,
    const HostRecords& got,
    const std::vector<double>& beta,
    int64_t q,
    int64_t Cp,
    int64_t num_tokens,
    Report* report
) {
  std::vector<double> X(static_cast<size_t>(Cp * Cp), 0.0);
  double largest = 1.0;
  double largest_qk = 1e-30;
  for (int64_t j = 0; j < num_tokens; ++j) {
    for (int64_t i = j; i < num_tokens; ++i) {
      double sum = i == j ? 1.0 : 0.0;
      for (int64_t k = j; k < i; ++k) {
        sum -= A[static_cast<size_t>(i * Cp + k)] * beta[static_cast<size_t>(k)] *
               X[static_cast<size_t>(k * Cp + j)];
      }
      X[static_cast<size_t>(i * Cp + j)] = sum;
      largest = std::max(largest, std::fabs(sum));
      largest_qk = std::max(largest_qk, std::fabs(QK[static_cast<size_t>(i * Cp + j)]));
    }
  }
  for (int64_t i = 0; i < Cp; ++i) {
    for (int64_t j = 0; j < Cp; ++j) {
      const size_t at = static_cast<size_t>(i * Cp + j);
      const size_t device_at = static_cast<size_t>(q * Cp * Cp) + at;
      const bool inside = i < num_tokens && j <= i;
      const double qk = inside ? QK[at] * beta[static_cast<size_t>(j)] : 0.0;
      const double x = inside ? X[at] : 0.0;
      report->close(got.qk[device_at], qk, largest_qk, inside ? 1e-5 : 0.0, "qk", &report->qk);
      report->close(
          got.inverse[device_at], x, largest, inside ? 1e-4 : 0.0, "inverse", &report->inverse
      );
    }
  }
}

inline void compare_chunk(
    const Inputs& in,
    const ChunkPlace& place,
    const HostRecords& got,
    int64_t q,
    int64_t Cp,
    bool gram,
    Report* report
) {
  const SdmDims& d = in.dims;
  const int64_t n = d.C * (d.W + d.R);
  const size_t at = static_cast<size_t>(q * n);
  std::vector<Entry> entries = sorted_entries(in, place);
  std::vector<double> beta(static_cast<size_t>(Cp), 0.0);
  for (int64_t i = 0; i < d.C; ++i) {
    if (i < place.num_tokens) {
      beta[static_cast<size_t>(i)] = value_at(in.host.beta, place, i, 0);
    }
    report->same(
        got.beta[static_cast<size_t>(q * d.C + i)] == beta[static_cast<size_t>(i)], 1, "beta"
    );
  }
  std::vector<double> A(static_cast<size_t>(Cp * Cp), 0.0);
  std::vector<double> QK(A);
  std::vector<bool> seen(static_cast<size_t>(n), false);
  int64_t with_writes = 0;
  for (size_t e = 0; e < entries.size(); ++e) {
    with_writes += entries[e].write && (e == 0 || entries[e - 1].slot != entries[e].slot);
  }
  int64_t next[2] = {with_writes, 0};  // next group without and with writes
  for (size_t begin = 0, end; begin < entries.size(); begin = end) {
    double sum = 0.0;
    int64_t writes = 0;
    for (end = begin; end < entries.size() && entries[end].slot == entries[begin].slot; ++end) {
      Entry& x = entries[end];
      x.owner = x.write && (end == begin || entries[end - 1].token != x.token);
      if (x.owner) {
        const int64_t a = d.gate_per_write ? x.lane % d.W : 0;
        sum += std::max(-1e4, value_at(in.host.g, place, x.token, a));
      }
      writes += x.write;
    }
    const double total = sum;
    // a read sees the writes of its own token and of earlier ones
    for (size_t r = begin; r < end; ++r) {
      Entry& x = entries[r];
      x.log_decay = 0.0;
      for (size_t p = begin; p < begin + static_cast<size_t>(writes); ++p) {
        if (entries[p].owner && entries[p].token <= x.token) {
          const int64_t a = d.gate_per_write ? entries[p].lane % d.W : 0;
          x.log_decay += std::max(-1e4, value_at(in.host.g, place, entries[p].token, a));
        }
      }
    }
    for (size_t r = begin; r < end; ++r) {
      const Entry& x = entries[r];
      for (size_t p = begin; gram && p < begin + static_cast<size_t>(writes); ++p) {
        const Entry& y = entries[p];
        const double term = x.value * y.value * std::exp(x.log_decay - y.log_decay);
        const size_t cell = static_cast<size_t>(x.token * Cp + y.token);
        if (x.write && y.token < x.token) {
          A[cell] += term;
        } else if (!x.write && y.token <= x.token) {
          QK[cell] += term;
        }
      }
      const size_t lane = at + static_cast<size_t>(x.lane);
      seen[static_cast<size_t>(x.lane)] = true;
      const double weight = x.value * std::exp(x.log_decay);
      const double post =
          x.write ? x.value * std::exp(total - x.log_decay) * beta[static_cast<size_t>(x.token)]
                  : 0.0;
      const int4 entry = got.entry[at + r];
      report->same(
          entry.x, (x.write ? x.token : d.C + x.token) | (x.owner ? sdm::kOwnerBit : 0), "entry row"
      );
      report->close(
          as_float(entry.y), weight, std::fabs(weight) + 1e-32, 1e-6, "weight", &report->weight
      );
      report->close(
          as_float(entry.z), post, std::fabs(post) + 1e-32, 1e-6, "post", &report->weight
      );
      report->same(entry.w & sdm::kLaneMask, x.lane, "entry lane");
      if (x.write) {
        const int2 copy = got.write_post[static_cast<size_t>(q * d.C * d.W + x.lane)];
        report->same(copy.x, x.slot, "write_post slot");
        report->same(copy.y, entry.z, "write_post");
      }
      if (r - begin < 2) {  // the group's first two entries, with how many there are
        const size_t group = at + static_cast<size_t>(next[writes > 0]);
        const bool first = r == begin;
        const int4 posts = got.head_post[group], weights = got.head_weight[group];
        const auto flags = [&](int64_t members) {
          return first ? (members > 1 ? sdm::kSecondBit : 0) | (members > 2 ? sdm::kMoreBit : 0)
                       : 0;
        };
        const int64_t plain = x.write ? x.token : d.C + x.token;
        report->same(first ? posts.x : posts.z, plain | flags(writes), "head_post row");
        report->same(first ? posts.y : posts.w, entry.z, "head_post");
        report->same(
            first ? weights.x : weights.z,
            plain | flags(static_cast<int64_t>(end - begin)) | (x.write ? sdm::kOwnerBit : 0),
            "head_weight row"
        );
        report->same(first ? weights.y : weights.w, entry.y, "head_weight");
      }
      report->same(got.lane[lane].x, x.slot, "lane slot");
      report->same(got.lane[lane].y, entry.y, "lane weight");
      report->same(got.position[lane], static_cast<int64_t>(r), "position");
      report->same(got.pair[at + r].value == static_cast<float>(x.value), 1, "pair value");
      report->same(
          got.pair[at + r].info,
          static_cast<uint32_t>(x.token) | static_cast<uint32_t>(r - begin) << kPairTokenBits,
          "pair info"
      );
      report->same(got.entry_group[at + r], next[writes > 0], "entry group");
      report->close(
          got.pair[at + r].log_decay,
          x.log_decay,
          std::max(1.0, std::fabs(total)),
          1e-12,
          "log_decay",
          &report->log_decay
      );
    }
    const size_t group = at + static_cast<size_t>(next[writes > 0]++);
    report->same(got.group[group].x, entries[begin].slot, "group slot");
    report->same(got.group[group].y, static_cast<int64_t>(begin), "group first");
    report->same(got.group[group].z, writes, "group writes");
    report->same(got.group[group].w, static_cast<int64_t>(end - begin) - writes, "group reads");
    report->close(
        got.group_decay[group],
        std::exp(total),
        std::exp(total) + 1e-32,
        1e-6,
        "group decay",
        &report->weight
    );
  }
  report->same(
      got.entry_count[static_cast<size_t>(q)], static_cast<int64_t>(entries.size()), "entries"
  );
  report->same(got.group_count[static_cast<size_t>(q)].x, with_writes, "groups with writes");
  report->same(got.group_count[static_cast<size_t>(q)].y, next[0], "groups");
  for (int64_t lane = 0; lane < n; ++lane) {
    if (!seen[static_cast<size_t>(lane)]) {
      report->same(got.lane[at + static_cast<size_t>(lane)].x, -1, "unused lane");
      report->same(got.lane[at + static_cast<size_t>(lane)].y, 0, "unused weight");
      report->same(got.position[at + static_cast<size_t>(lane)], -1, "unused position");
      if (lane < d.C * d.W) {
        const int2 copy = got.write_post[static_cast<size_t>(q * d.C * d.W + lane)];
        report->same(copy.x, -1, "unused write_post");
        report->same(copy.y, 0, "unused write_post");
      }
    }
  }
  if (gram) {
    compare_matrices(A, QK, got, beta, q, Cp, place.num_tokens, report);
  }
}

}  // namespace sdm::test
