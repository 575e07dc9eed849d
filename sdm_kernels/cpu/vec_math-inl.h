// SPDX-License-Identifier: Apache-2.0
//! @file Division, selection, exponential and logarithm on the vectors of vec-inl.h, with the same
//! bits on every instruction set.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// max and min return b where either is NaN; select_greater returns a > b ? x : y.

#if SDM_ISA_IS_AVX512

SDM_INLINE Vec<float> max(Vec<float> a, Vec<float> b) {
  return {_mm512_max_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> max(Vec<double> a, Vec<double> b) {
  return {_mm512_max_pd(a.v, b.v)};
}

SDM_INLINE Vec<float> min(Vec<float> a, Vec<float> b) {
  return {_mm512_min_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> min(Vec<double> a, Vec<double> b) {
  return {_mm512_min_pd(a.v, b.v)};
}

SDM_INLINE Vec<float> divide(Vec<float> a, Vec<float> b) {
  return {_mm512_div_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> divide(Vec<double> a, Vec<double> b) {
  return {_mm512_div_pd(a.v, b.v)};
}

SDM_INLINE Vec<float> select_greater(Vec<float> a, Vec<float> b, Vec<float> x, Vec<float> y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}

SDM_INLINE Vec<double> select_greater(Vec<double> a, Vec<double> b, Vec<double> x, Vec<double> y) {
  return {_mm512_mask_blend_pd(_mm512_cmp_pd_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}

// x * 2^n for whole n, rounded once.
SDM_INLINE Vec<float> scale_by_power(Vec<float> x, Vec<float> n) {
  return {_mm512_scalef_ps(x.v, n.v)};
}

SDM_INLINE Vec<double> scale_by_power(Vec<double> x, Vec<double> n) {
  return {_mm512_scalef_pd(x.v, n.v)};
}

#else

#if SDM_ISA_IS_AVX2

SDM_INLINE Vec<float> max(Vec<float> a, Vec<float> b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> max(Vec<double> a, Vec<double> b) {
  return {_mm256_max_pd(a.lo, b.lo), _mm256_max_pd(a.hi, b.hi)};
}

SDM_INLINE Vec<float> min(Vec<float> a, Vec<float> b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> min(Vec<double> a, Vec<double> b) {
  return {_mm256_min_pd(a.lo, b.lo), _mm256_min_pd(a.hi, b.hi)};
}

SDM_INLINE Vec<float> divide(Vec<float> a, Vec<float> b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> divide(Vec<double> a, Vec<double> b) {
  return {_mm256_div_pd(a.lo, b.lo), _mm256_div_pd(a.hi, b.hi)};
}

SDM_INLINE Vec<float> select_greater(Vec<float> a, Vec<float> b, Vec<float> x, Vec<float> y) {
  return {
      _mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
      _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))
  };
}

SDM_INLINE Vec<double> select_greater(Vec<double> a, Vec<double> b, Vec<double> x, Vec<double> y) {
  return {
      _mm256_blendv_pd(y.lo, x.lo, _mm256_cmp_pd(a.lo, b.lo, _CMP_GT_OQ)),
      _mm256_blendv_pd(y.hi, x.hi, _mm256_cmp_pd(a.hi, b.hi, _CMP_GT_OQ))
  };
}

// The bits of every lane, moved up: the low bits of a number become its exponent.
SDM_INLINE Vec<float> bits_to_exponent(Vec<float> x) {
  return {
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.lo), 23)),
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.hi), 23))
  };
}

SDM_INLINE Vec<double> bits_to_exponent(Vec<double> x) {
  return {
      _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(x.lo), 52)),
      _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(x.hi), 52))
  };
}

#else

#define SDM_VEC_LANES(T) for (int i = 0; i < static_cast<int>(kLanes<T>); ++i)

template <typename T>
SDM_INLINE Vec<T> max(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    b.a[i] = a.a[i] > b.a[i] ? a.a[i] : b.a[i];
  }
  return b;
}

template <typename T>
SDM_INLINE Vec<T> min(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    b.a[i] = a.a[i] < b.a[i] ? a.a[i] : b.a[i];
  }
  return b;
}

template <typename T>
SDM_INLINE Vec<T> divide(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    a.a[i] /= b.a[i];
  }
  return a;
}

template <typename T>
SDM_INLINE Vec<T> select_greater(Vec<T> a, Vec<T> b, Vec<T> x, Vec<T> y) {
  SDM_VEC_LANES(T) {
    y.a[i] = a.a[i] > b.a[i] ? x.a[i] : y.a[i];
  }
  return y;
}

SDM_INLINE Vec<float> bits_to_exponent(Vec<float> x) {
  SDM_VEC_LANES(float) {
    x.a[i] = bits_float(float_bits(x.a[i]) << 23);
  }
  return x;
}

SDM_INLINE Vec<double> bits_to_exponent(Vec<double> x) {
  SDM_VEC_LANES(double) {
    uint64_t bits;
    std::memcpy(&bits, &x.a[i], sizeof(bits));
    bits <<= 52;
    std::memcpy(&x.a[i], &bits, sizeof(bits));
  }
  return x;
}

#undef SDM_VEC_LANES

#endif

// Adding it leaves a rounded whole number in the low bits.
template <typename Acc>
constexpr Acc kRoundShift = sizeof(Acc) == 4 ? Acc(0x1.8p23) : Acc(0x1.8p52);

// In two halves, of which the first is exact, so that results below the normal range round once.
template <typename Acc>
SDM_INLINE Vec<Acc> scale_by_power(Vec<Acc> x, Vec<Acc> n) {
  constexpr Acc bias = sizeof(Acc) == 4 ? Acc(127) : Acc(1023);
  const Vec<Acc> shift = set1(kRoundShift<Acc>);
  const Vec<Acc> biased = set1(kRoundShift<Acc> + bias);
  const Vec<Acc> half = sub(fma(n, set1(Acc(0.5)), shift), shift);
  const Vec<Acc> first = mul(x, bits_to_exponent(add(half, biased)));
  return mul(first, bits_to_exponent(add(sub(n, half), biased)));
}

#endif

// exp within about one unit in the last place: Cody-Waite reduction, Taylor series on |r| <=
// ln(2)/2 (degree 7 in float, remainder 5e-9; 13 in double, remainder 4e-18). Overflow is infinity,
// underflow is gradual, NaN stays NaN.
SDM_INLINE Vec<float> exp(Vec<float> x) {
  x = min(set1(89.0f), max(set1(-104.5f), x));
  const Vec<float> shift = set1(0x1.8p23f);
  const Vec<float> n = sub(fma(x, set1(0x1.715476p0f), shift), shift);
  Vec<float> r = fma(n, set1(-0x1.62e430p-1f), x);
  r = fma(n, set1(0x1.05c610p-29f), r);
  Vec<float> p = set1(1.0f / 5040.0f);
  p = fma(p, r, set1(1.0f / 720.0f));
  p = fma(p, r, set1(1.0f / 120.0f));
  p = fma(p, r, set1(1.0f / 24.0f));
  p = fma(p, r, set1(1.0f / 6.0f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale_by_power(p, n);
}

SDM_INLINE Vec<double> exp(Vec<double> x) {
  x = min(set1(710.0), max(set1(-746.0), x));
  const Vec<double> shift = set1(0x1.8p52);
  const Vec<double> n = sub(fma(x, set1(0x1.71547652b82fep0), shift), shift);
  Vec<double> r = fma(n, set1(-0x1.62e42fefa39efp-1), x);
  r = fma(n, set1(-0x1.abc9e3b39803fp-56), r);
  Vec<double> p = set1(1.0 / 6227020800.0);
  p = fma(p, r, set1(1.0 / 479001600.0));
  p = fma(p, r, set1(1.0 / 39916800.0));
  p = fma(p, r, set1(1.0 / 3628800.0));
  p = fma(p, r, set1(1.0 / 362880.0));
  p = fma(p, r, set1(1.0 / 40320.0));
  p = fma(p, r, set1(1.0 / 5040.0));
  p = fma(p, r, set1(1.0 / 720.0));
  p = fma(p, r, set1(1.0 / 120.0));
  p = fma(p, r, set1(1.0 / 24.0));
  p = fma(p, r, set1(1.0 / 6.0));
  p = fma(p, r, set1(0.5));
  p = fma(p, r, set1(1.0));
  p = fma(p, r, set1(1.0));
  return scale_by_power(p, n);
}

// log(1 + x) for 0 <= x <= 1, within about two units in the last place also for tiny x: twice the
// series of atanh at x / (2 + x) <= 1/3.
template <typename Acc>
SDM_INLINE Vec<Acc> log1p_unit(Vec<Acc> x) {
  const Vec<Acc> s = divide(x, add(set1(Acc(2)), x));
  const Vec<Acc> s2 = mul(s, s);
  constexpr int kTerms = sizeof(Acc) == 4 ? 8 : 17;  // next term below 1e-9, 5e-18 of the sum
  Vec<Acc> p = set1(Acc(1) / Acc(2 * kTerms + 1));
  for (int i = kTerms - 1; i > 0; --i) {
    p = fma(p, s2, set1(Acc(1) / Acc(2 * i + 1)));
  }
  const Vec<Acc> twice = add(s, s);
  return fma(mul(p, s2), twice, twice);
}

template <typename Acc>
SDM_INLINE Vec<Acc> sigmoid(Vec<Acc> x) {
  const Vec<Acc> one = set1(Acc(1));
  return divide(one, add(one, exp(sub(set1(Acc(0)), x))));
}

// sigmoid(x) * sigmoid(-x), the derivative of sigmoid, with full relative accuracy in both tails.
template <typename Acc>
SDM_INLINE Vec<Acc> sigmoid_slope(Vec<Acc> x) {
  const Vec<Acc> t = exp(min(x, sub(set1(Acc(0)), x)));
  const Vec<Acc> u = add(set1(Acc(1)), t);
  return divide(t, mul(u, u));
}

// log(1 + exp(x)); the identity above 20, as torch has it.
template <typename Acc>
SDM_INLINE Vec<Acc> softplus(Vec<Acc> x) {
  const Vec<Acc> zero = set1(Acc(0));
  const Vec<Acc> t = exp(min(x, sub(zero, x)));
  const Vec<Acc> y = add(max(zero, x), log1p_unit(t));
  return select_greater(x, set1(Acc(20)), x, y);
}

}  // namespace SDM_ISA
}  // namespace sdm
