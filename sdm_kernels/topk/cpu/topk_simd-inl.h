// SPDX-License-Identifier: Apache-2.0
//! @file Vectors of 32-bit lanes for the top-k forward, as wide as the instruction set has them.
//! Selection is integer work, so the width changes no result.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

#if SDM_ISA_IS_AVX512
constexpr int kLanes = 16;
#elif SDM_ISA_IS_AVX2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
static_assert(kLanes <= kTopkMaxLanes, "buffers have this much slack");

typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef float VecF __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecH __attribute__((vector_size(2 * kLanes)));

inline VecI broadcast(int32_t x) {
  return x - VecI{};
}

inline VecF broadcast(float x) {
  return x - VecF{};
}

inline VecI load(const int32_t* p) {
  VecI v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline void store(int32_t* p, VecI v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

inline void store(float* p, VecF v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

inline VecF load(const float* p) {
  VecF v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline VecF load(const Bf16* p) {
  VecH half;
  __builtin_memcpy(&half, p, sizeof(half));
  return reinterpret_cast<VecF>(__builtin_convertvector(half, VecI) << 16);
}

inline VecF load(const F16* p) {
#if SDM_ISA_IS_AVX512
  return reinterpret_cast<VecF>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))
  );
#elif SDM_ISA_IS_AVX2
  return reinterpret_cast<VecF>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
  );
#else
  VecF v;
  for (int lane = 0; lane < kLanes; ++lane) {
    v[lane] = to_f32(p[lane]);
  }
  return v;
#endif
}

// 0, 1, .., kLanes - 1
inline VecI iota() {
  VecI v;
  for (int lane = 0; lane < kLanes; ++lane) {
    v[lane] = lane;
  }
  return v;
}

inline VecI select(VecI mask, VecI a, VecI b) {
  return (mask & a) | (~mask & b);
}

inline VecI max(VecI a, VecI b) {
  return a > b ? a : b;
}

// Bit l is set where a > b in lane l.
inline uint32_t mask_gt(VecI a, VecI b) {
#if SDM_ISA_IS_AVX512
  return _mm512_cmpgt_epi32_mask(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
#elif SDM_ISA_IS_AVX2
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(a > b)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(a > b)));
#else
  const VecI bits = (a > b) & VecI{1, 2, 4, 8};
  return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}

// order_key (common/order.h) of every lane.
inline VecI order_keys(VecF scores) {
  const VecI bits = reinterpret_cast<VecI>(scores);
  const VecI magnitude = bits & 0x7fffffff;
  const VecI key = bits ^ ((bits >> 31) & 0x7fffffff);
  return select(magnitude > 0x7f800000, broadcast(kNegInfKey), key);
}

inline VecF key_scores(VecI key) {
  return reinterpret_cast<VecF>(key ^ ((key >> 31) & 0x7fffffff));
}

// Number of keys >= bound (bound > kLowestKey) among `padded` keys, a multiple of kLanes.
inline int64_t count_ge(const int32_t* keys, int64_t padded, int32_t bound) {
  const VecI below = broadcast(bound - 1);
  VecI count[2] = {};
  int64_t pos = 0;
  for (; pos + 2 * kLanes <= padded; pos += 2 * kLanes) {
    count[0] -= load(keys + pos) > below;
    count[1] -= load(keys + pos + kLanes) > below;
  }
  if (pos < padded) {
    count[0] -= load(keys + pos) > below;
  }
  count[0] += count[1];
  int64_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += count[0][lane];
  }
  return total;
}

// Writes the lanes of v whose mask bit is set next to each other; may write a whole vector.
// Returns how many there are.
inline int compress_store(int32_t* out, VecI v, uint32_t mask) {
#if SDM_ISA_IS_AVX512
  _mm512_storeu_si512(
      out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(v))
  );
#else
  int32_t lanes[kLanes];
  store(lanes, v);
  int32_t* next = out;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    *next++ = lanes[__builtin_ctz(rest)];
  }
#endif
  return __builtin_popcount(mask);
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
