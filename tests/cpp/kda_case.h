// SPDX-License-Identifier: Apache-2.0
//! @file Random cases of Kimi delta attention for the programs that test its kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "sdm_kernels/kda/kda_params.h"

namespace sdm::test {

using kda::KdaBeta;
using kda::KdaGate;

struct KdaCase {
  const char* name;
  int64_t B = 1, T = 40, H = 1, HV = 2, K = 32, V = 32, C = 64;
  std::vector<int64_t> lengths = {};  // packed sequences; B is 1 then, T at least their sum
  bool int64_offsets = true;
  DType dtype = DType::kF32;  // of q, k, v and the output
  DType gate_dtype = DType::kF32, beta_dtype = DType::kF32, d_out_dtype = DType::kF32;
  KdaGate gate = KdaGate::kLowerBound;
  KdaBeta beta = KdaBeta::kSigmoid;
  double lower_bound = -5;
  bool l2norm = true, A_log = true, dt_bias = true;
  bool initial = true, final_state = true, d_final = true;
  DType state_dtype = DType::kF32;  // of the initial state
  bool v_first = false;
  int saved = 0;          // chunk states: 0 none, 1 as float32, 2 as bfloat16
  bool expanded = false;  // the upstream gradient is one number
  // layout of the inputs
  int64_t pad = 0;           // elements of NaN behind every row
  int64_t rows_behind = 0;   // tokens of NaN behind those of every batch row
  bool heads_outer = false;  // [B, heads, T, columns] in memory
  // values
  double gate_mean = 0, gate_spread = 1;
  bool mixed_gates = false;  // of three channels one -60, one -1e-6, one drawn
  double beta_mean = 0, beta_spread = 1;
  double fixed_beta = -1;  // of every token, unless negative
  double alike = 0;        // share of a common direction in the keys
  int64_t run = 1;         // so many tokens have the same key
  double v_size = 1;       // of v and of the states
  double outlier = 1;      // factor on v of every fiftieth token
};

// A tensor [B, T, heads, columns]; what lies between its elements is NaN.
struct KdaTensor {
  std::vector<double> values;  // dense, as the kernels read them
  std::vector<uint8_t> bytes;
  DType dtype;
  int64_t stride[4];
};

inline double rounded(double x, DType dtype) {
  uint8_t bytes[8];
  store_scalar(bytes, dtype, 0, x);
  return load_scalar(bytes, dtype, 0);
}

inline KdaTensor make_tensor(
    const KdaCase& c, int64_t heads, int64_t columns, DType dtype, const std::vector<double>& values
) {
  KdaTensor t;
  t.dtype = dtype;
  const int64_t row = columns + c.pad, tokens = c.T + c.rows_behind;
  const int64_t strides[4] = {
      tokens * heads * row, c.heads_outer ? row : heads * row, c.heads_outer ? tokens * row : row, 1
  };
  std::copy(strides, strides + 4, t.stride);
  // Nothing lies behind the last element.
  const int64_t count = std::max<int64_t>(c.B * tokens * heads * row - c.pad, 0);
  t.bytes.assign(static_cast<size_t>(count * element_size(dtype)), 0xff);
  t.values.reserve(values.size());
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t token = 0; token < c.T; ++token) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t at = b * t.stride[0] + token * t.stride[1] + h * t.stride[2];
        for (int64_t i = 0; i < columns; ++i) {
          store_scalar(t.bytes.data(), dtype, at + i, values[t.values.size()]);
          t.values.push_back(load_scalar(t.bytes.data(), dtype, at + i));
        }
      }
    }
  }
  return t;
}

struct KdaProblem {
  KdaCase c;
  int64_t N;
  std::vector<int64_t> offsets;  // [N + 1], empty if not packed
  KdaTensor q, k, v, g, beta, d_out;
  std::vector<double> A_log, dt_bias;    // rounded to float
  std::vector<double> initial, d_final;  // [N, HV, K, V]
  double scale;
  // solution: kda_solution.h
  std::vector<double> out, final_state;
  std::vector<double> chunk_states;  // rows of chunk_state_row(); NaN where there is none
  std::vector<double> d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial;
};

// Of each head and token so many numbers: draw(row, column).
template <typename Draw>
std::vector<double> draw_values(const KdaCase& c, int64_t heads, int64_t columns, Draw&& draw) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(c.B * c.T * heads * columns));
  for (int64_t row = 0; row < c.B * c.T * heads; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      values.push_back(draw(row, column));
    }
  }
  return values;
}

inline KdaProblem make_problem(const KdaCase& c, unsigned seed = 1) {
  KdaProblem p;
  p.c = c;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const bool packed = !c.lengths.empty();
  p.N = packed ? static_cast<int64_t>(c.lengths.size()) : c.B;
  if (packed) {
    p.offsets.push_back(0);
    for (int64_t length : c.lengths) {
      p.offsets.push_back(p.offsets.back() + length);
    }
  }
  const auto make = [&](int64_t heads, int64_t columns, DType dtype, auto&& draw) {
    return make_tensor(c, heads, columns, dtype, draw_values(c, heads, columns, draw));
  };
  std::vector<double> common;
  for (int64_t i = 0; i < c.K; ++i) {
    common.push_back(normal(random));
  }
  const double size = c.l2norm ? 1 : 1 / std::sqrt(static_cast<double>(c.K));
  p.q = make(c.H, c.K, c.dtype, [&](int64_t, int64_t) { return size * normal(random); });
  std::vector<double> keys = draw_values(c, c.H, c.K, [&](int64_t, int64_t i) {
    const double own = normal(random);
    return size * (c.alike * common[static_cast<size_t>(i)] + (1 - c.alike) * own);
  });
  for (size_t i = 0; c.run > 1 && i < keys.size(); ++i) {
    const size_t token = static_cast<size_t>(c.H * c.K);
    keys[i] = keys[i - i / token % static_cast<size_t>(c.T) % static_cast<size_t>(c.run) * token];
  }
  p.k = make_tensor(c, c.H, c.K, c.dtype, keys);
  p.v = make(c.HV, c.V, c.dtype, [&](int64_t row, int64_t) {
    return c.v_size * (row / c.HV % 50 == 17 ? c.outlier : 1) * normal(random);
  });
  p.g = make(c.HV, c.K, c.gate_dtype, [&](int64_t row, int64_t i) {
    const double x = c.gate_mean + c.gate_spread * normal(random);
    const double drawn = c.gate == KdaGate::kActivated ? -std::abs(x) : x;
    const int64_t kind = c.mixed_gates ? (row * c.K + i) % 3 : 2;
    return kind == 0 ? -60.0 : kind == 1 ? -1e-6 : drawn;
  });
  p.beta = make(c.HV, 1, c.beta_dtype, [&](int64_t, int64_t) {
    const double x = c.beta_mean + c.beta_spread * normal(random);
    return c.fixed_beta >= 0               ? c.fixed_beta
           : c.beta == KdaBeta::kActivated ? 1 / (1 + std::exp(-x))
                                           : x;
  });
  p.d_out = make(c.HV, c.V, c.d_out_dtype, [&](int64_t, int64_t) {
    return c.expanded ? 0.75 : normal(random);
  });
  for (int64_t hv = 0; hv < c.HV; ++hv) {
    p.A_log.push_back(c.A_log ? rounded(0.5 * normal(random), DType::kF32) : 0);
    for (int64_t i = 0; i < c.K; ++i) {
      p.dt_bias.push_back(c.dt_bias ? rounded(0.3 * normal(random), DType::kF32) : 0);
    }
  }
  for (int64_t i = 0; i < p.N * c.HV * c.K * c.V; ++i) {
    p.initial.push_back(c.initial ? rounded(c.v_size * normal(random), c.state_dtype) : 0);
    p.d_final.push_back(c.d_final ? rounded(normal(random), DType::kF32) : 0);
  }
  p.scale = rounded(0.8 / std::sqrt(static_cast<double>(c.K)), DType::kF32);
  return p;
}

// Tokens [begin, end) of the first batch row as a call of their own, from the states of sequence n.
inline KdaProblem part_of(const KdaProblem& p, int64_t begin, int64_t end, int64_t n) {
  KdaProblem part = p;
  KdaCase& c = part.c;
  c.B = part.N = 1;
  c.T = end - begin;
  c.lengths.clear();
  part.offsets.clear();
  const auto cut = [&](KdaTensor* t, int64_t heads, int64_t columns) {
    const int64_t token = heads * columns;
    const std::vector<double> values(
        t->values.begin() + begin * token, t->values.begin() + end * token
    );
    *t = make_tensor(c, heads, columns, t->dtype, values);
  };
  cut(&part.q, c.H, c.K);
  cut(&part.k, c.H, c.K);
  cut(&part.v, c.HV, c.V);
  cut(&part.g, c.HV, c.K);
  cut(&part.beta, c.HV, 1);
  cut(&part.d_out, c.HV, c.V);
  const int64_t state = c.HV * c.K * c.V;
  for (std::vector<double>* x : {&part.initial, &part.d_final}) {
    *x = {x->begin() + n * state, x->begin() + (n + 1) * state};
  }
  return part;
}

}  // namespace sdm::test
