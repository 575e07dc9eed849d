// SPDX-License-Identifier: Apache-2.0
//! @file Vectors of 32-bit lanes for the top-k forward, as wide as the instruction set has them.
//! Selection is integer work, so the width changes no result.

namespace sdm {
namespace SDM_ISA {
namespace topk_impl {

// 8 lanes with AVX-512 too: the lists are short, so half of a longer vector is often idle, and a
// comparison to a mask register is slower to count than one to a vector.
#define SDM_TOPK_AVX2 (SDM_ISA_IS_AVX2 || SDM_ISA_IS_AVX512)

#if SDM_TOPK_AVX2
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
static_assert(kLanes <= kTopkMaxLanes, "buffers have this much slack");

typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
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
#if SDM_TOPK_AVX2
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

// v - 1, wrapping.
inline VecI less_one(VecI v) {
  return reinterpret_cast<VecI>(reinterpret_cast<VecU>(v) - 1u);
}

// Bit l is set where lane l of a comparison is true.
inline uint32_t mask_bits(VecI truth) {
#if SDM_TOPK_AVX2
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(truth)));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(truth)));
#else
  const VecI bits = truth & VecI{1, 2, 4, 8};
  return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}

inline int popcount(uint32_t mask) {
#if SDM_TOPK_AVX2
  return __builtin_popcount(mask);
#else
  return static_cast<int>(0x4332322132212110u >> (4 * mask) & 7);  // of 4 bits, 4 bits each
#endif
}

inline uint32_t mask_gt(VecI a, VecI b) {
  return mask_bits(a > b);
}

inline uint32_t mask_eq(VecI a, VecI b) {
  return mask_bits(a == b);
}

// count + 1 in the lanes where a > b.
inline VecI count_gt(VecI count, VecI a, VecI b) {
  return count - (a > b);
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

inline int32_t sum_lanes(VecI v) {
#if SDM_TOPK_AVX2
  const __m256i all = reinterpret_cast<__m256i>(v);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#else
  return v[0] + v[1] + v[2] + v[3];
#endif
}

// Writes kLowestKey behind the last key, as far as any loop reads.
inline void pad_keys(int32_t* end) {
  store(end, broadcast(kLowestKey));
  store(end + kLanes, broadcast(kLowestKey));
}

// Number of keys >= bound (bound > kLowestKey) among `padded` keys, a multiple of kLanes.
inline int64_t count_ge(const int32_t* keys, int64_t padded, int32_t bound) {
  const VecI below = broadcast(bound - 1);
  VecI count[2] = {};
  int64_t pos = 0;
  for (; pos + 2 * kLanes <= padded; pos += 2 * kLanes) {
    count[0] = count_gt(count[0], load(keys + pos), below);
    count[1] = count_gt(count[1], load(keys + pos + kLanes), below);
  }
  if (pos < padded) {
    count[0] = count_gt(count[0], load(keys + pos), below);
  }
  return sum_lanes(count[0] + count[1]);
}

#if SDM_TOPK_AVX2
// For every mask the lanes to bring to the front, 4 bits each.
struct CompressTable {
  uint32_t lanes[256];

  constexpr CompressTable() : lanes() {
    for (uint32_t mask = 0; mask < 256; ++mask) {
      uint32_t packed = 0;
      int shift = 0;
      for (uint32_t lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) {
          packed |= lane << shift;
          shift += 4;
        }
      }
      lanes[mask] = packed;
    }
  }
};

constexpr CompressTable kCompressTable;
#endif

// Writes the lanes of v whose mask bit is set next to each other; may write a whole vector.
inline void compress_store(int32_t* out, VecI v, uint32_t mask) {
#if SDM_TOPK_AVX2
  // The permutation looks at the low three bits of each lane only.
  const __m256i packed = _mm256_set1_epi32(static_cast<int32_t>(kCompressTable.lanes[mask]));
  const __m256i lanes = _mm256_srlv_epi32(packed, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
  const __m256i moved = _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(v), lanes);
  store(out, reinterpret_cast<VecI>(moved));
#else
  int next = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    out[next] = v[lane];
    next += mask >> lane & 1;
  }
#endif
}

}  // namespace topk_impl
}  // namespace SDM_ISA
}  // namespace sdm
