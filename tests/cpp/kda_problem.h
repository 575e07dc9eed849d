// SPDX-License-Identifier: Apache-2.0
//! @file Random problems of Kimi delta attention and their exact solution: the token recurrence and
//! its reverse, in double on the host.
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
  DType dtype = DType::kF32;          // of q, k, v and the output
  DType gate_dtype = DType::kF32, beta_dtype = DType::kF32, d_out_dtype = DType::kF32;
  KdaGate gate = KdaGate::kLowerBound;
  KdaBeta beta = KdaBeta::kSigmoid;
  double lower_bound = -5;
  bool l2norm = true, A_log = true, dt_bias = true;
  bool initial = true, final_state = true, d_final = true;
  DType state_dtype = DType::kF32;
  bool v_first = false;
  int saved = 0;          // chunk states for the backward: 0 none, 1 as float32, 2 as bfloat16
  bool expanded = false;  // the upstream gradient is one number
  int64_t pad = 0;        // elements between rows of the inputs
  double gate_mean = 0, gate_spread = 1;
  double alike = 0;  // share of a common direction in the keys
};

// A tensor [B, T, heads, columns] with `pad` unused elements, NaN, after each row.
struct KdaTensor {
  std::vector<double> values;  // without padding, as the kernels read them
  std::vector<uint8_t> bytes;
  DType dtype;
  int64_t stride[4];
};

inline double rounded(double x, DType dtype) {
  uint8_t bytes[8];
  store_scalar(bytes, dtype, 0, x);
  return load_scalar(bytes, dtype, 0);
}

template <typename Draw>
KdaTensor make_tensor(
    int64_t B, int64_t T, int64_t heads, int64_t columns, int64_t pad, DType dtype, Draw&& draw
) {
  KdaTensor t;
  t.dtype = dtype;
  const int64_t row = columns + pad;
  const int64_t strides[4] = {T * heads * row, heads * row, row, 1};
  std::copy(strides, strides + 4, t.stride);
  t.bytes.assign(static_cast<size_t>(B * T * heads * row * element_size(dtype)), 0xff);
  for (int64_t r = 0; r < B * T * heads; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      const double x = rounded(draw(r, c), dtype);
      store_scalar(t.bytes.data(), dtype, r * row + c, x);
      t.values.push_back(x);
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
  // solution
  std::vector<double> out, final_state;
  std::vector<double> d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial;
};

inline KdaProblem make_problem(const KdaCase& c, unsigned seed = 1) {
  KdaProblem p;
  p.c = c;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto any = [&](int64_t, int64_t) { return normal(random); };
  const bool packed = !c.lengths.empty();
  p.N = packed ? static_cast<int64_t>(c.lengths.size()) : c.B;
  if (packed) {
    p.offsets.push_back(0);
    for (int64_t length : c.lengths) {
      p.offsets.push_back(p.offsets.back() + length);
    }
  }
  std::vector<double> common;
  for (int64_t i = 0; i < c.K; ++i) {
    common.push_back(normal(random));
  }
  const double size = c.l2norm ? 1 : 1 / std::sqrt(static_cast<double>(c.K));
  p.q = make_tensor(c.B, c.T, c.H, c.K, c.pad, c.dtype, [&](int64_t, int64_t) {
    return size * normal(random);
  });
  p.k = make_tensor(c.B, c.T, c.H, c.K, c.pad, c.dtype, [&](int64_t, int64_t i) {
    const double own = normal(random);
    return size * (c.alike * common[static_cast<size_t>(i)] + (1 - c.alike) * own);
  });
  p.v = make_tensor(c.B, c.T, c.HV, c.V, c.pad, c.dtype, any);
  p.g = make_tensor(c.B, c.T, c.HV, c.K, c.pad, c.gate_dtype, [&](int64_t, int64_t) {
    const double x = c.gate_mean + c.gate_spread * normal(random);
    return c.gate == KdaGate::kActivated ? -std::abs(x) : x;
  });
  p.beta = make_tensor(c.B, c.T, c.HV, 1, c.pad, c.beta_dtype, [&](int64_t, int64_t) {
    const double x = normal(random);
    return c.beta == KdaBeta::kActivated ? 1 / (1 + std::exp(-x)) : x;
  });
  p.d_out = make_tensor(c.B, c.T, c.HV, c.V, c.pad, c.d_out_dtype, [&](int64_t, int64_t) {
    return c.expanded ? 0.75 : normal(random);
  });
  for (int64_t hv = 0; hv < c.HV; ++hv) {
    p.A_log.push_back(c.A_log ? rounded(0.5 * normal(random), DType::kF32) : 0);
    for (int64_t i = 0; i < c.K; ++i) {
      p.dt_bias.push_back(c.dt_bias ? rounded(0.3 * normal(random), DType::kF32) : 0);
    }
  }
  for (int64_t i = 0; i < p.N * c.HV * c.K * c.V; ++i) {
    p.initial.push_back(c.initial ? rounded(normal(random), c.state_dtype) : 0);
    p.d_final.push_back(c.d_final ? rounded(normal(random), DType::kF32) : 0);
  }
  p.scale = rounded(0.8 / std::sqrt(static_cast<double>(c.K)), DType::kF32);
  return p;
}

namespace detail {

inline double logistic(double x) {
  return 1 / (1 + std::exp(-x));
}

// One row with its norm applied; returns the factor.
inline double norm_row(const double* from, int64_t K, bool l2norm, std::vector<double>* to) {
  double squares = 0;
  to->assign(from, from + K);
  for (double x : *to) {
    squares += x * x;
  }
  const double factor = l2norm ? 1 / std::sqrt(squares + 1e-6) : 1;
  for (double& x : *to) {
    x *= factor;
  }
  return factor;
}

inline void add_norm_gradient(
    const std::vector<double>& x,
    double factor,
    bool l2norm,
    const std::vector<double>& d,
    double* to
) {
  double dot = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    dot += l2norm ? x[i] * d[i] : 0;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    to[i] += factor * (d[i] - x[i] * dot);
  }
}

}  // namespace detail

// The recurrence of one sequence and value head, then its reverse.
inline void solve_head(KdaProblem* p, int64_t n, int64_t hv) {
  const KdaCase& c = p->c;
  const bool packed = !p->offsets.empty();
  const int64_t begin = packed ? p->offsets[static_cast<size_t>(n)] : n * c.T;
  const int64_t length = packed ? p->offsets[static_cast<size_t>(n + 1)] - begin : c.T;
  const int64_t K = c.K, V = c.V, h = hv / (c.HV / c.H);
  const size_t KV = static_cast<size_t>(K * V);
  const int64_t state_at = (n * c.HV + hv) * K * V;
  std::vector<std::vector<double>> states(1);  // before each token
  states[0].assign(p->initial.begin() + state_at, p->initial.begin() + state_at + K * V);
  const double rate = std::exp(p->A_log[static_cast<size_t>(hv)]);
  const auto z_of = [&](int64_t row, int64_t i) {
    return p->g.values[static_cast<size_t>(row * K + i)] +
           (c.gate == KdaGate::kActivated ? 0 : p->dt_bias[static_cast<size_t>(hv * K + i)]);
  };
  const auto g_of = [&](int64_t row, int64_t i) {
    const double z = z_of(row, i);
    switch (c.gate) {
      case KdaGate::kActivated:
        return z;
      case KdaGate::kSoftplus:
        return -rate * (z > 30 ? z : std::log1p(std::exp(z)));
      default:
        return c.lower_bound * detail::logistic(rate * z);
    }
  };
  const auto beta_of = [&](int64_t row) {
    const double raw = p->beta.values[static_cast<size_t>(row)];
    return c.beta == KdaBeta::kActivated
               ? raw
               : (c.beta == KdaBeta::kSigmoid ? 1 : 2) * detail::logistic(raw);
  };
  std::vector<std::vector<double>> residuals;
  std::vector<double> q, k;
  for (int64_t t = 0; t < length; ++t) {
    const int64_t token = begin + t, row = token * c.HV + hv;
    detail::norm_row(p->q.values.data() + (token * c.H + h) * K, K, c.l2norm, &q);
    detail::norm_row(p->k.values.data() + (token * c.H + h) * K, K, c.l2norm, &k);
    std::vector<double> S = states.back(), r(static_cast<size_t>(V));
    for (int64_t i = 0; i < K; ++i) {
      const double decay = std::exp(g_of(row, i));
      for (int64_t j = 0; j < V; ++j) {
        S[static_cast<size_t>(i * V + j)] *= decay;
        r[static_cast<size_t>(j)] -= S[static_cast<size_t>(i * V + j)] * k[static_cast<size_t>(i)];
      }
    }
    for (int64_t j = 0; j < V; ++j) {
      r[static_cast<size_t>(j)] += p->v.values[static_cast<size_t>(row * V + j)];
    }
    for (int64_t j = 0; j < V; ++j) {
      double o = 0;
      const double u = beta_of(row) * r[static_cast<size_t>(j)];
      for (int64_t i = 0; i < K; ++i) {
        S[static_cast<size_t>(i * V + j)] += k[static_cast<size_t>(i)] * u;
        o += S[static_cast<size_t>(i * V + j)] * q[static_cast<size_t>(i)];
      }
      p->out[static_cast<size_t>(row * V + j)] = p->scale * o;
    }
    states.push_back(S);
    residuals.push_back(r);
  }
  std::copy(states.back().begin(), states.back().end(), p->final_state.begin() + state_at);

  std::vector<double> dS(p->d_final.begin() + state_at, p->d_final.begin() + state_at + K * V);
  for (int64_t t = length - 1; t >= 0; --t) {
    const int64_t token = begin + t, row = token * c.HV + hv;
    const size_t at = static_cast<size_t>(t);
    const double q_factor =
        detail::norm_row(p->q.values.data() + (token * c.H + h) * K, K, c.l2norm, &q);
    const double k_factor =
        detail::norm_row(p->k.values.data() + (token * c.H + h) * K, K, c.l2norm, &k);
    const std::vector<double>&before = states[at], &after = states[at + 1], &r = residuals[at];
    const double beta = beta_of(row);
    std::vector<double> dq(static_cast<size_t>(K)), dk(static_cast<size_t>(K));
    std::vector<double> du(static_cast<size_t>(V));
    double d_beta = 0;
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < V; ++j) {
        const size_t e = static_cast<size_t>(i * V + j);
        const double d_out = p->d_out.values[static_cast<size_t>(row * V + j)];
        dq[static_cast<size_t>(i)] += p->scale * after[e] * d_out;
        dS[e] += p->scale * q[static_cast<size_t>(i)] * d_out;
        dk[static_cast<size_t>(i)] += dS[e] * beta * r[static_cast<size_t>(j)];
        du[static_cast<size_t>(j)] += dS[e] * k[static_cast<size_t>(i)];
      }
    }
    for (int64_t j = 0; j < V; ++j) {
      d_beta += du[static_cast<size_t>(j)] * r[static_cast<size_t>(j)];
      p->d_v[static_cast<size_t>(row * V + j)] = beta * du[static_cast<size_t>(j)];
    }
    for (int64_t i = 0; i < K; ++i) {
      const double decay = std::exp(g_of(row, i)), z = z_of(row, i);
      double dg = 0;
      for (int64_t j = 0; j < V; ++j) {
        const size_t e = static_cast<size_t>(i * V + j);
        const double dr = beta * du[static_cast<size_t>(j)];
        dk[static_cast<size_t>(i)] -= decay * before[e] * dr;
        dS[e] = decay * (dS[e] - k[static_cast<size_t>(i)] * dr);
        dg += dS[e] * before[e];
      }
      double dz = dg;
      if (c.gate == KdaGate::kSoftplus) {
        dz = -rate * detail::logistic(z) * dg;
        p->d_A_log[static_cast<size_t>(hv)] += g_of(row, i) * dg;
      } else if (c.gate == KdaGate::kLowerBound) {
        dz = rate * c.lower_bound * detail::logistic(rate * z) * detail::logistic(-rate * z) * dg;
        p->d_A_log[static_cast<size_t>(hv)] += dz * z;
      }
      p->d_g[static_cast<size_t>(row * K + i)] = dz;
      p->d_dt_bias[static_cast<size_t>(hv * K + i)] += dz;
    }
    const double raw = p->beta.values[static_cast<size_t>(row)];
    const double slope = detail::logistic(raw) * detail::logistic(-raw);
    p->d_beta[static_cast<size_t>(row)] = d_beta * (c.beta == KdaBeta::kActivated ? 1
                                                    : c.beta == KdaBeta::kSigmoid ? slope
                                                                                  : 2 * slope);
    double* d_q = p->d_q.data() + (token * c.H + h) * K;
    double* d_k = p->d_k.data() + (token * c.H + h) * K;
    detail::add_norm_gradient(q, q_factor, c.l2norm, dq, d_q);
    detail::add_norm_gradient(k, k_factor, c.l2norm, dk, d_k);
  }
  std::copy(dS.begin(), dS.begin() + static_cast<int64_t>(KV), p->d_initial.begin() + state_at);
}

inline void solve(KdaProblem* p) {
  const KdaCase& c = p->c;
  const auto zeros = [](int64_t count) { return std::vector<double>(static_cast<size_t>(count)); };
  const int64_t tokens = c.B * c.T;
  p->out = p->d_v = zeros(tokens * c.HV * c.V);
  p->d_q = p->d_k = zeros(tokens * c.H * c.K);
  p->d_g = zeros(tokens * c.HV * c.K);
  p->d_beta = zeros(tokens * c.HV);
  p->d_A_log = zeros(c.HV);
  p->d_dt_bias = zeros(c.HV * c.K);
  p->final_state = p->d_initial = zeros(p->N * c.HV * c.K * c.V);
  for (int64_t n = 0; n < p->N; ++n) {
    for (int64_t hv = 0; hv < c.HV; ++hv) {
      solve_head(p, n, hv);
    }
  }
}

// Relative error of a tensor in the 2-norm; infinite if anything is not finite.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) {
      return std::numeric_limits<double>::infinity();
    }
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace sdm::test
