// SPDX-License-Identifier: Apache-2.0
//! @file Small vectors for CPU kernels: 16 floats or 8 doubles on every instruction set.
//!
//! The width is fixed so that sums over lanes have one order everywhere, and a multiply-add is
//! always fused (the plain copy calls fmaf): results are the same bits on every machine. Loads and
//! stores convert from and to the storage types of dtype.h with its rounding rule; `_n` forms touch
//! only the first n lanes of memory (n at least 1; lanes beyond n read as zero).
//!
//! Compiled per instruction set: included by other -inl.h files only, see foreach_isa.h.

#define SDM_INLINE inline __attribute__((always_inline))

namespace sdm {
namespace SDM_ISA {

template <typename Acc>
struct Vec;

template <typename Acc>
constexpr int64_t kLanes = 64 / sizeof(Acc);

#if SDM_ISA_IS_AVX512

template <>
struct Vec<float> {
  __m512 v;
};

template <>
struct Vec<double> {
  __m512d v;
};

SDM_INLINE Vec<float> set1(float x) {
  return {_mm512_set1_ps(x)};
}

SDM_INLINE Vec<double> set1(double x) {
  return {_mm512_set1_pd(x)};
}

SDM_INLINE Vec<float> load(const float* p) {
  return {_mm512_loadu_ps(p)};
}

SDM_INLINE Vec<double> load(const double* p) {
  return {_mm512_loadu_pd(p)};
}

SDM_INLINE void store(float* p, Vec<float> x) {
  _mm512_storeu_ps(p, x.v);
}

SDM_INLINE void store(double* p, Vec<double> x) {
  _mm512_storeu_pd(p, x.v);
}

SDM_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}

SDM_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {_mm512_fmadd_pd(a.v, b.v, c.v)};
}

SDM_INLINE Vec<float> mul(Vec<float> a, Vec<float> b) {
  return {_mm512_mul_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> mul(Vec<double> a, Vec<double> b) {
  return {_mm512_mul_pd(a.v, b.v)};
}

SDM_INLINE Vec<float> add(Vec<float> a, Vec<float> b) {
  return {_mm512_add_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> add(Vec<double> a, Vec<double> b) {
  return {_mm512_add_pd(a.v, b.v)};
}

SDM_INLINE Vec<float> sub(Vec<float> a, Vec<float> b) {
  return {_mm512_sub_ps(a.v, b.v)};
}

SDM_INLINE Vec<double> sub(Vec<double> a, Vec<double> b) {
  return {_mm512_sub_pd(a.v, b.v)};
}

SDM_INLINE float sum(Vec<float> x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

SDM_INLINE double sum(Vec<double> x) {
  const __m256d a = _mm256_add_pd(_mm512_castpd512_pd256(x.v), _mm512_extractf64x4_pd(x.v, 1));
  const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
}

SDM_INLINE __m512 bf16_to_f32(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

SDM_INLINE __m256i f32_to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

SDM_INLINE Vec<float> load(const Bf16* p) {
  return {bf16_to_f32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

SDM_INLINE Vec<float> load(const F16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

SDM_INLINE void store(Bf16* p, Vec<float> x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), f32_to_bf16(x.v));
}

SDM_INLINE void store(F16* p, Vec<float> x) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)
  );
}

SDM_INLINE __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
}

SDM_INLINE Vec<float> load_n(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}

SDM_INLINE Vec<double> load_n(const double* p, int64_t n) {
  return {_mm512_maskz_loadu_pd(static_cast<__mmask8>(first_lanes(n)), p)};
}

SDM_INLINE Vec<float> load_n(const Bf16* p, int64_t n) {
  return {bf16_to_f32(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}

SDM_INLINE Vec<float> load_n(const F16* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}

SDM_INLINE void store_n(float* p, Vec<float> x, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), x.v);
}

SDM_INLINE void store_n(double* p, Vec<double> x, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first_lanes(n)), x.v);
}

SDM_INLINE void store_n(Bf16* p, Vec<float> x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), f32_to_bf16(x.v));
}

SDM_INLINE void store_n(F16* p, Vec<float> x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

#else  // two 256-bit halves, or arrays that the compiler vectorises

#if SDM_ISA_IS_AVX2

template <>
struct Vec<float> {
  __m256 lo, hi;
};

template <>
struct Vec<double> {
  __m256d lo, hi;
};

SDM_INLINE Vec<float> set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

SDM_INLINE Vec<double> set1(double x) {
  return {_mm256_set1_pd(x), _mm256_set1_pd(x)};
}

SDM_INLINE Vec<float> load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

SDM_INLINE Vec<double> load(const double* p) {
  return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
}

SDM_INLINE void store(float* p, Vec<float> x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}

SDM_INLINE void store(double* p, Vec<double> x) {
  _mm256_storeu_pd(p, x.lo);
  _mm256_storeu_pd(p + 4, x.hi);
}

SDM_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

SDM_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return {_mm256_fmadd_pd(a.lo, b.lo, c.lo), _mm256_fmadd_pd(a.hi, b.hi, c.hi)};
}

SDM_INLINE Vec<float> mul(Vec<float> a, Vec<float> b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> mul(Vec<double> a, Vec<double> b) {
  return {_mm256_mul_pd(a.lo, b.lo), _mm256_mul_pd(a.hi, b.hi)};
}

SDM_INLINE Vec<float> add(Vec<float> a, Vec<float> b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> add(Vec<double> a, Vec<double> b) {
  return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)};
}

SDM_INLINE Vec<float> sub(Vec<float> a, Vec<float> b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

SDM_INLINE Vec<double> sub(Vec<double> a, Vec<double> b) {
  return {_mm256_sub_pd(a.lo, b.lo), _mm256_sub_pd(a.hi, b.hi)};
}

SDM_INLINE float sum(Vec<float> x) {
  const __m256 a = _mm256_add_ps(x.lo, x.hi);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

SDM_INLINE double sum(Vec<double> x) {
  const __m256d a = _mm256_add_pd(x.lo, x.hi);
  const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
  return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
}

SDM_INLINE __m256 bf16_to_f32(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

SDM_INLINE __m128i f32_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_packus_epi32(high, high);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

SDM_INLINE Vec<float> load(const Bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {bf16_to_f32(_mm_loadu_si128(q)), bf16_to_f32(_mm_loadu_si128(q + 1))};
}

SDM_INLINE Vec<float> load(const F16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}

SDM_INLINE void store(Bf16* p, Vec<float> x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, f32_to_bf16(x.lo));
  _mm_storeu_si128(q + 1, f32_to_bf16(x.hi));
}

SDM_INLINE void store(F16* p, Vec<float> x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}

#else

template <>
struct Vec<float> {
  float a[16];
};

template <>
struct Vec<double> {
  double a[8];
};

#define SDM_VEC_LANES(T) for (int i = 0; i < static_cast<int>(kLanes<T>); ++i)

template <typename T>
SDM_INLINE Vec<T> set1(T x) {
  Vec<T> y;
  SDM_VEC_LANES(T) {
    y.a[i] = x;
  }
  return y;
}

template <typename T>
SDM_INLINE Vec<T> load(const T* p) {
  Vec<T> y;
  SDM_VEC_LANES(T) {
    y.a[i] = p[i];
  }
  return y;
}

SDM_INLINE Vec<float> load(const Bf16* p) {
  Vec<float> y;
  SDM_VEC_LANES(float) {
    y.a[i] = to_f32(p[i]);
  }
  return y;
}

SDM_INLINE Vec<float> load(const F16* p) {
  Vec<float> y;
  SDM_VEC_LANES(float) {
    y.a[i] = to_f32(p[i]);
  }
  return y;
}

template <typename T>
SDM_INLINE void store(T* p, Vec<T> x) {
  SDM_VEC_LANES(T) {
    p[i] = x.a[i];
  }
}

SDM_INLINE void store(Bf16* p, Vec<float> x) {
  SDM_VEC_LANES(float) {
    p[i] = from_f32<Bf16>(x.a[i]);
  }
}

SDM_INLINE void store(F16* p, Vec<float> x) {
  SDM_VEC_LANES(float) {
    p[i] = from_f32<F16>(x.a[i]);
  }
}

SDM_INLINE float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}

SDM_INLINE double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

template <typename T>
SDM_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
  SDM_VEC_LANES(T) {
    c.a[i] = fused(a.a[i], b.a[i], c.a[i]);
  }
  return c;
}

template <typename T>
SDM_INLINE Vec<T> mul(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    a.a[i] *= b.a[i];
  }
  return a;
}

template <typename T>
SDM_INLINE Vec<T> add(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    a.a[i] += b.a[i];
  }
  return a;
}

template <typename T>
SDM_INLINE Vec<T> sub(Vec<T> a, Vec<T> b) {
  SDM_VEC_LANES(T) {
    a.a[i] -= b.a[i];
  }
  return a;
}

template <typename T>
SDM_INLINE T sum(Vec<T> x) {
  for (int half = static_cast<int>(kLanes<T>) / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      x.a[i] += x.a[i + half];
    }
  }
  return x.a[0];
}

#undef SDM_VEC_LANES

#endif

template <typename S>
SDM_INLINE auto load_n(const S* p, int64_t n) -> Vec<typename AccOf<S>::type> {
  constexpr int64_t lanes = kLanes<typename AccOf<S>::type>;
  if (n >= lanes) {
    return load(p);
  }
  S part[lanes] = {};
  std::memcpy(part, p, static_cast<size_t>(n) * sizeof(S));
  return load(static_cast<const S*>(part));
}

template <typename S, typename Acc>
SDM_INLINE void store_n(S* p, Vec<Acc> x, int64_t n) {
  if (n >= kLanes<Acc>) {
    store(p, x);
    return;
  }
  S part[kLanes<Acc>];
  store(static_cast<S*>(part), x);
  std::memcpy(p, part, static_cast<size_t>(n) * sizeof(S));
}

#endif

// exp in double precision, within about one unit in the last place; the same bits on every
// instruction set and independent of the C library. Cody-Waite reduction, Taylor series of degree
// 13 on |r| <= ln(2)/2 (remainder 4e-18).
SDM_INLINE double exp_f64(double x) {
  if (!(x < 709.782712893384)) {  // overflow, and NaN stays NaN
    return x != x ? x : __builtin_inf();
  }
  if (x < -745.2) {
    return 0.0;
  }
  const double shift = 0x1.8p52;  // adding it leaves the rounded integer in the low bits
  const double n = __builtin_fma(x, 0x1.71547652b82fep0, shift) - shift;
  double r = __builtin_fma(n, -0x1.62e42fefa39efp-1, x);
  r = __builtin_fma(n, -0x1.abc9e3b39803fp-56, r);
  double p = 1.0 / 6227020800.0;
  p = __builtin_fma(p, r, 1.0 / 479001600.0);
  p = __builtin_fma(p, r, 1.0 / 39916800.0);
  p = __builtin_fma(p, r, 1.0 / 3628800.0);
  p = __builtin_fma(p, r, 1.0 / 362880.0);
  p = __builtin_fma(p, r, 1.0 / 40320.0);
  p = __builtin_fma(p, r, 1.0 / 5040.0);
  p = __builtin_fma(p, r, 1.0 / 720.0);
  p = __builtin_fma(p, r, 1.0 / 120.0);
  p = __builtin_fma(p, r, 1.0 / 24.0);
  p = __builtin_fma(p, r, 1.0 / 6.0);
  p = __builtin_fma(p, r, 0.5);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  // 2^n in two halves, so that results below the normal range round once, at the end
  const int64_t exponent = static_cast<int64_t>(n);
  const int64_t half = exponent / 2;
  const uint64_t a = static_cast<uint64_t>(half + 1023) << 52;
  const uint64_t b = static_cast<uint64_t>(exponent - half + 1023) << 52;
  double scale_a, scale_b;
  std::memcpy(&scale_a, &a, sizeof(a));
  std::memcpy(&scale_b, &b, sizeof(b));
  return (p * scale_a) * scale_b;
}

}  // namespace SDM_ISA
}  // namespace sdm
