// SPDX-License-Identifier: Apache-2.0
//! @file Small dense products and transposes on tiles of floats or doubles.
//!
//! Every element of a product is one chain of multiply-adds in the order of the depth, whatever the
//! shape of the register tile: the shape follows the instruction set, the bits do not.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// A loop over registers. The plain copy has none to name, and its lanes are loops of their own.
#undef SDM_UNROLL_TILE
#if !(SDM_ISA_IS_AVX512 || SDM_ISA_IS_AVX2)
#define SDM_UNROLL_TILE
#elif defined(__clang__)
#define SDM_UNROLL_TILE _Pragma("clang loop unroll(full)")
#else
#define SDM_UNROLL_TILE _Pragma("GCC unroll 16")
#endif

// Side of the square tiles that transpose_tile() turns.
constexpr int64_t kTile = 16;

// ---------------------------------------------------------------------------------------------
// Sums

// out[i] = sum(x[i]) for four vectors, the same bits.
template <typename Acc>
SDM_INLINE void sum4(const Vec<Acc>* x, Acc* out) {
  SDM_UNROLL_TILE
  for (int i = 0; i < 4; ++i) {
    out[i] = sum(x[i]);
  }
}

#if SDM_ISA_IS_AVX512

SDM_INLINE void sum4(const Vec<float>* x, float* out) {
  const __m512 ab = _mm512_add_ps(
      _mm512_shuffle_f32x4(x[0].v, x[1].v, 0x44), _mm512_shuffle_f32x4(x[0].v, x[1].v, 0xee)
  );
  const __m512 cd = _mm512_add_ps(
      _mm512_shuffle_f32x4(x[2].v, x[3].v, 0x44), _mm512_shuffle_f32x4(x[2].v, x[3].v, 0xee)
  );
  // one block of four lanes for each vector
  const __m512 y =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  const __m512 pairs = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
  const __m512 all = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
  const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, all)));
}

#endif

// ---------------------------------------------------------------------------------------------
// Transpose

template <typename Acc>
SDM_INLINE void transpose_tile(const Acc* src, int64_t ld_src, Acc* dst, int64_t ld_dst) {
  for (int64_t i = 0; i < kTile; ++i) {
    for (int64_t j = 0; j < kTile; ++j) {
      dst[j * ld_dst + i] = src[i * ld_src + j];
    }
  }
}

#if SDM_ISA_IS_AVX512

SDM_INLINE __m512 unpack_pairs_low(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

SDM_INLINE __m512 unpack_pairs_high(__m512 a, __m512 b) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
}

SDM_INLINE void transpose_tile(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  __m512 a[16], b[16];
  SDM_UNROLL_TILE
  for (int i = 0; i < 8; ++i) {
    const __m512 x = _mm512_loadu_ps(src + (2 * i) * ld_src);
    const __m512 y = _mm512_loadu_ps(src + (2 * i + 1) * ld_src);
    a[2 * i] = _mm512_unpacklo_ps(x, y);
    a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
  }
  // b[4 i + c], block L of four lanes: column 4 L + c of rows 4 i to 4 i + 3
  SDM_UNROLL_TILE
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = unpack_pairs_low(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = unpack_pairs_high(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = unpack_pairs_low(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = unpack_pairs_high(a[4 * i + 1], a[4 * i + 3]);
  }
  SDM_UNROLL_TILE
  for (int c = 0; c < 4; ++c) {
    const __m512 even_top = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    const __m512 odd_top = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    const __m512 even_end = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const __m512 odd_end = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    _mm512_storeu_ps(dst + c * ld_dst, _mm512_shuffle_f32x4(even_top, even_end, 0x88));
    _mm512_storeu_ps(dst + (4 + c) * ld_dst, _mm512_shuffle_f32x4(odd_top, odd_end, 0x88));
    _mm512_storeu_ps(dst + (8 + c) * ld_dst, _mm512_shuffle_f32x4(even_top, even_end, 0xdd));
    _mm512_storeu_ps(dst + (12 + c) * ld_dst, _mm512_shuffle_f32x4(odd_top, odd_end, 0xdd));
  }
}

#elif SDM_ISA_IS_AVX2

SDM_INLINE __m256 unpack_pairs_low(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

SDM_INLINE __m256 unpack_pairs_high(__m256 a, __m256 b) {
  return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

// Eight rows and columns.
SDM_INLINE void transpose_quarter(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  __m256 a[8], b[8];
  SDM_UNROLL_TILE
  for (int i = 0; i < 4; ++i) {
    const __m256 x = _mm256_loadu_ps(src + (2 * i) * ld_src);
    const __m256 y = _mm256_loadu_ps(src + (2 * i + 1) * ld_src);
    a[2 * i] = _mm256_unpacklo_ps(x, y);
    a[2 * i + 1] = _mm256_unpackhi_ps(x, y);
  }
  SDM_UNROLL_TILE
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = unpack_pairs_low(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = unpack_pairs_high(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = unpack_pairs_low(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = unpack_pairs_high(a[4 * i + 1], a[4 * i + 3]);
  }
  SDM_UNROLL_TILE
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(dst + c * ld_dst, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    _mm256_storeu_ps(dst + (4 + c) * ld_dst, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}

SDM_INLINE void transpose_tile(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  transpose_quarter(src, ld_src, dst, ld_dst);
  transpose_quarter(src + 8, ld_src, dst + 8 * ld_dst, ld_dst);
  transpose_quarter(src + 8 * ld_src, ld_src, dst + 8, ld_dst);
  transpose_quarter(src + 8 * ld_src + 8, ld_src, dst + 8 * ld_dst + 8, ld_dst);
}

#endif

// dst[columns, kTile] = transpose of src[kTile, columns]; columns is a multiple of kTile.
template <typename Acc>
void transpose_rows(const Acc* src, int64_t ld_src, int64_t columns, Acc* dst, int64_t ld_dst) {
  for (int64_t c = 0; c < columns; c += kTile) {
    transpose_tile(src + c, ld_src, dst + c * ld_dst, ld_dst);
  }
}

// dst[kTile, columns] = transpose of src[columns, kTile].
template <typename Acc>
void transpose_columns(const Acc* src, int64_t ld_src, int64_t columns, Acc* dst, int64_t ld_dst) {
  for (int64_t c = 0; c < columns; c += kTile) {
    transpose_tile(src + c * ld_src, ld_src, dst + c, ld_dst);
  }
}

// ---------------------------------------------------------------------------------------------
// Product

// What a product adds to: nothing, C itself, or a matrix with a factor for each of its rows.
enum class Start { kZero, kAdd, kScaled };

#if SDM_ISA_IS_AVX512
constexpr int kProductRows = 8;
constexpr int kProductVecs = 2;
#else
constexpr int kProductRows = 4;
constexpr int kProductVecs = 1;
#endif

// One register tile; c and from have rows of kColumns elements.
template <Start kStart, int kColumns, int kRows, int kVecs, typename Acc>
SDM_INLINE void product_tile(
    int64_t depth,
    const Acc* a,
    int64_t a_row,
    int64_t a_depth,
    const Acc* b,
    Acc* c,
    const Acc* scale,
    const Acc* from
) {
  constexpr int64_t lanes = kLanes<Acc>;
  Vec<Acc> acc[kRows][kVecs];
  SDM_UNROLL_TILE
  for (int i = 0; i < kRows; ++i) {
    SDM_UNROLL_TILE
    for (int j = 0; j < kVecs; ++j) {
      if constexpr (kStart == Start::kZero) {
        acc[i][j] = set1(Acc(0));
      } else if constexpr (kStart == Start::kAdd) {
        acc[i][j] = load(c + i * kColumns + j * lanes);
      } else {
        acc[i][j] = mul(set1(scale[i]), load(from + i * kColumns + j * lanes));
      }
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    Vec<Acc> x[kVecs];
    SDM_UNROLL_TILE
    for (int j = 0; j < kVecs; ++j) {
      x[j] = load(b + d * kColumns + j * lanes);
    }
    const Acc* factors = a + d * a_depth;
    SDM_UNROLL_TILE
    for (int i = 0; i < kRows; ++i) {
      const Vec<Acc> y = set1(factors[i * a_row]);
      SDM_UNROLL_TILE
      for (int j = 0; j < kVecs; ++j) {
        acc[i][j] = fma(y, x[j], acc[i][j]);
      }
    }
  }
  SDM_UNROLL_TILE
  for (int i = 0; i < kRows; ++i) {
    SDM_UNROLL_TILE
    for (int j = 0; j < kVecs; ++j) {
      store(c + i * kColumns + j * lanes, acc[i][j]);
    }
  }
}

// C[rows, kColumns] = start + A[rows, depth] B[depth, kColumns], A by strides of which one should
// be a constant 1. rows is a multiple of 16, kColumns of the vector width.
template <Start kStart, int kColumns, typename Acc>
SDM_INLINE void product(
    int64_t rows,
    int64_t depth,
    const Acc* a,
    int64_t a_row,
    int64_t a_depth,
    const Acc* b,
    Acc* c,
    const Acc* scale = nullptr,
    const Acc* from = nullptr
) {
  constexpr int vecs = kColumns / static_cast<int>(kLanes<Acc>);
  constexpr int tile_vecs = vecs < kProductVecs ? vecs : kProductVecs;
  constexpr int tile_rows = kProductRows * kProductVecs / tile_vecs;  // the same registers
  constexpr int tile_columns = tile_vecs * static_cast<int>(kLanes<Acc>);
  static_assert(vecs % tile_vecs == 0 && 16 % tile_rows == 0, "whole tiles only");
  for (int64_t j = 0; j < kColumns; j += tile_columns) {
    for (int64_t i = 0; i < rows; i += tile_rows) {
      product_tile<kStart, kColumns, tile_rows, tile_vecs>(
          depth,
          a + i * a_row,
          a_row,
          a_depth,
          b + j,
          c + i * kColumns + j,
          kStart == Start::kScaled ? scale + i : nullptr,
          kStart == Start::kScaled ? from + i * kColumns + j : nullptr
      );
    }
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
