// SPDX-License-Identifier: Apache-2.0
//! @file The activations around the recurrence and their gradients: gate, beta, L2 norm.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

constexpr double kNormEps = 1e-6;

// ---------------------------------------------------------------------------------------------
// Gate

// The gate of one head.
template <typename Acc>
struct Gate {
  KdaGate kind;
  Acc factor;       // exp(A_log), 1 without
  Acc lower_bound;  // kLowerBound only
  const Acc* bias;  // [K], null: none
};

template <typename Acc>
Gate<Acc> gate_of_head(
    const KdaOptions& options, const KdaTokens& tokens, const KdaDims& dims, int64_t head
) {
  // of the compute type, whatever the declaration says (kda_params.h)
  const Acc* A_log = reinterpret_cast<const Acc*>(tokens.A_log);
  const Acc* dt_bias = reinterpret_cast<const Acc*>(tokens.dt_bias);
  Gate<Acc> gate{options.gate, Acc(1), static_cast<Acc>(options.lower_bound), nullptr};
  if (options.gate == KdaGate::kActivated) {
    return gate;
  }
  if (A_log != nullptr) {
    Acc factor[kLanes<Acc>];
    store(factor, exp(set1(A_log[head])));
    gate.factor = factor[0];
  }
  if (dt_bias != nullptr) {
    gate.bias = dt_bias + head * dims.K;
  }
  return gate;
}

// From the raw gate plus bias to the log-decay.
template <KdaGate kKind, typename Acc>
SDM_INLINE Vec<Acc> log_decay(Vec<Acc> factor, Vec<Acc> lower_bound, Vec<Acc> z) {
  if constexpr (kKind == KdaGate::kSoftplus) {
    return sub(set1(Acc(0)), mul(factor, softplus(z)));
  } else if constexpr (kKind == KdaGate::kLowerBound) {
    return mul(lower_bound, sigmoid(mul(factor, z)));
  } else {
    return z;
  }
}

template <KdaGate kKind, typename Acc>
SDM_INLINE void activate_gate_of(const Gate<Acc>& gate, int64_t K, Acc* x, Acc* total, Acc* kept) {
  const Vec<Acc> factor = set1(gate.factor);
  const Vec<Acc> lower_bound = set1(gate.lower_bound);
  const Acc* bias = gate.bias;
  for (int64_t c = 0; c < K; c += kLanes<Acc>) {
    Vec<Acc> z = load(x + c);
    if (bias != nullptr) {
      z = add(z, load_n(bias + c, K - c));
    }
    if (kept != nullptr) {
      store(kept + c, z);
    }
    store(x + c, log_decay<kKind>(factor, lower_bound, z));
  }
  for (int64_t c = 0; c < K; c += kLanes<Acc>) {
    const Vec<Acc> g = load(x + c);
    store(total + c, add(load(total + c), g));
    store(x + c, exp(g));
  }
}

// The row x of K raw gates becomes the decays, total += the log-decays; kept: the raw gates plus
// bias, null where nobody needs them.
template <typename Acc>
SDM_INLINE void activate_gate(const Gate<Acc>& gate, int64_t K, Acc* x, Acc* total, Acc* kept) {
  switch (gate.kind) {
    case KdaGate::kSoftplus:
      return activate_gate_of<KdaGate::kSoftplus>(gate, K, x, total, kept);
    case KdaGate::kLowerBound:
      return activate_gate_of<KdaGate::kLowerBound>(gate, K, x, total, kept);
    case KdaGate::kActivated:
      return activate_gate_of<KdaGate::kActivated>(gate, K, x, total, kept);
  }
}

// From the gradient of the log-decay in d_g to that of the raw gate, in place; d_A += the gradient
// of A_log by channel. kept has the raw gate plus bias.
template <typename Acc>
SDM_INLINE void gate_gradient(
    const Gate<Acc>& gate, int64_t K, const Acc* kept, Acc* d_g, Acc* d_A
) {
  if (gate.kind == KdaGate::kSoftplus) {
    const Vec<Acc> minus = set1(-gate.factor);
    const Vec<Acc> one = set1(Acc(1));
    for (int64_t c = 0; c < K; c += kLanes<Acc>) {
      const Vec<Acc> z = load(kept + c);
      const Vec<Acc> scaled = mul(minus, load(d_g + c));
      const Vec<Acc> slope = select_greater(z, set1(Acc(20)), one, sigmoid(z));
      store(d_A + c, fma(softplus(z), scaled, load(d_A + c)));
      store(d_g + c, mul(scaled, slope));
    }
  } else if (gate.kind == KdaGate::kLowerBound) {
    const Vec<Acc> factor = set1(gate.factor);
    const Vec<Acc> bound = set1(gate.factor * gate.lower_bound);
    for (int64_t c = 0; c < K; c += kLanes<Acc>) {
      const Vec<Acc> z = load(kept + c);
      const Vec<Acc> d_z = mul(mul(bound, sigmoid_slope(mul(factor, z))), load(d_g + c));
      store(d_A + c, fma(d_z, z, load(d_A + c)));
      store(d_g + c, d_z);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Beta

template <typename Acc>
SDM_INLINE void load_beta(
    const KdaView& view, int64_t batch, int64_t token, int64_t head, int64_t n, Acc* beta
) {
  for (int64_t i = 0; i < kBlock; ++i) {
    beta[i] = Acc(0);
    if (i < n) {
      const int64_t at = offset_of(view, batch, token + i, head);
      beta[i] = static_cast<Acc>(load_scalar(view.data, view.dtype, at));
    }
  }
}

// beta[0, n) in place; the others become 0.
template <typename Acc>
SDM_INLINE void activate_beta(KdaBeta kind, int64_t n, Acc* beta) {
  if (kind != KdaBeta::kActivated) {
    const Vec<Acc> factor = set1(Acc(kind == KdaBeta::kTwoSigmoid ? 2 : 1));
    for (int64_t i = 0; i < kBlock; i += kLanes<Acc>) {
      store(beta + i, mul(factor, sigmoid(load(beta + i))));
    }
  }
  zero_rows(beta + n, kBlock - n);
}

// From the gradient of beta to that of its raw value, in place.
template <typename Acc>
SDM_INLINE void beta_gradient(KdaBeta kind, const Acc* raw, Acc* d_beta) {
  if (kind != KdaBeta::kActivated) {
    const Vec<Acc> factor = set1(Acc(kind == KdaBeta::kTwoSigmoid ? 2 : 1));
    for (int64_t i = 0; i < kBlock; i += kLanes<Acc>) {
      store(d_beta + i, mul(mul(factor, sigmoid_slope(load(raw + i))), load(d_beta + i)));
    }
  }
}

// ---------------------------------------------------------------------------------------------
// L2 norm

// Dot product of two rows of n elements, a multiple of the vector width.
template <typename Acc>
SDM_INLINE Acc dot_rows(const Acc* x, const Acc* y, int64_t n) {
  Vec<Acc> dot = set1(Acc(0));
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    dot = fma(load(x + c), load(y + c), dot);
  }
  return sum(dot);
}

SDM_INLINE float square_root(float x) {
  return __builtin_sqrtf(x);
}

SDM_INLINE double square_root(double x) {
  return __builtin_sqrt(x);
}

template <typename Acc>
SDM_INLINE Acc inverse_norm(const Acc* x, int64_t n) {
  return Acc(1) / square_root(dot_rows(x, x, n) + static_cast<Acc>(kNormEps));
}

template <typename Acc>
SDM_INLINE void scale_row(Acc* x, Acc factor, int64_t n) {
  const Vec<Acc> f = set1(factor);
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store(x + c, mul(f, load(x + c)));
  }
}

// From the gradient of the normalised row x to that of the raw row, in place; inverse is the factor
// of the norm. Exact with the epsilon.
template <typename Acc>
SDM_INLINE void norm_gradient(const Acc* x, Acc inverse, Acc* d_x, int64_t n) {
  const Vec<Acc> along = set1(-dot_rows(x, d_x, n));
  const Vec<Acc> factor = set1(inverse);
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store(d_x + c, mul(factor, fma(along, load(x + c), load(d_x + c))));
  }
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
