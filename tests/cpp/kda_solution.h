// SPDX-License-Identifier: Apache-2.0
//! @file The exact solution of a case of Kimi delta attention: the token recurrence and its
//! reverse, in double on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/cpp/kda_case.h"

namespace sdm::test {

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

// The recurrence of one sequence and value head, and if wanted its reverse.
inline void solve_head(KdaProblem* p, int64_t n, int64_t hv, bool reverse) {
  const KdaCase& c = p->c;
  const bool packed = !p->offsets.empty();
  const int64_t begin = packed ? p->offsets[static_cast<size_t>(n)] : n * c.T;
  const int64_t length = packed ? p->offsets[static_cast<size_t>(n + 1)] - begin : c.T;
  const int64_t K = c.K, V = c.V, h = hv / (c.HV / c.H);
  const size_t KV = static_cast<size_t>(K * V);
  const int64_t state_at = (n * c.HV + hv) * K * V;
  std::vector<std::vector<double>> states(1);  // before each token; the last one if !reverse
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
  std::vector<double> q, k, u(static_cast<size_t>(V)), o(u);
  for (int64_t t = 0; t < length; ++t) {
    const int64_t token = begin + t, row = token * c.HV + hv;
    if (t % c.C == 0) {
      const int64_t chunk = kda::chunk_state_row(n, begin, t / c.C, c.C) * c.HV + hv;
      std::copy(
          states.back().begin(), states.back().end(), p->chunk_states.begin() + chunk * K * V
      );
    }
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
      u[static_cast<size_t>(j)] = beta_of(row) * r[static_cast<size_t>(j)];
    }
    std::fill(o.begin(), o.end(), 0.0);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < V; ++j) {
        S[static_cast<size_t>(i * V + j)] += k[static_cast<size_t>(i)] * u[static_cast<size_t>(j)];
        o[static_cast<size_t>(j)] += S[static_cast<size_t>(i * V + j)] * q[static_cast<size_t>(i)];
      }
    }
    for (int64_t j = 0; j < V; ++j) {
      p->out[static_cast<size_t>(row * V + j)] = p->scale * o[static_cast<size_t>(j)];
    }
    if (reverse) {
      states.push_back(S);
      residuals.push_back(r);
    } else {
      states.back().swap(S);
    }
  }
  std::copy(states.back().begin(), states.back().end(), p->final_state.begin() + state_at);
  if (!reverse) {
    return;
  }

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

// Rows that the chunk states of a problem have at most.
inline int64_t chunk_rows(const KdaProblem& p) {
  return p.offsets.empty() ? p.N * (ceil_div(p.c.T, p.c.C) + 1) : p.c.T / p.c.C + p.N;
}

inline void solve(KdaProblem* p, bool reverse = true) {
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
  p->chunk_states.assign(
      static_cast<size_t>(chunk_rows(*p) * c.HV * c.K * c.V),
      std::numeric_limits<double>::quiet_NaN()
  );
  for (int64_t n = 0; n < p->N; ++n) {
    for (int64_t hv = 0; hv < c.HV; ++hv) {
      solve_head(p, n, hv, reverse);
    }
  }
}

// Relative error of a tensor in the 2-norm; infinite if anything is not finite, none where the
// solution is NaN. What is less than 1e-13 of `size` counts as zero.
inline double relative_error(
    const std::vector<double>& got, const std::vector<double>& want, double size = 0
) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i])) {
      continue;
    }
    if (!std::isfinite(got[i])) {
      return std::numeric_limits<double>::infinity();
    }
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i] + 1e-26 * size * size;
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace sdm::test
