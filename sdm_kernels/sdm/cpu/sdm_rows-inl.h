// SPDX-License-Identifier: Apache-2.0
//! @file Work on pieces of rows: typed loads and stores, the saved forms of a bank row, and the
//! triangular products of a chunk. A slice is some tiles of D; every column goes through the same
//! operations in the same order whatever the slice.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// Columns that stay in registers together. Dot products of rows are summed inside a tile; the parts
// of the tiles are added in order.
constexpr int64_t kTileColumns = 128;

// Groups whose rows are fetched ahead of use.
constexpr int64_t kPrefetchGroups = 6;

// A loop over vectors that are to stay in registers.
#if defined(__clang__)
#define SDM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SDM_UNROLL _Pragma("GCC unroll 8")
#endif

// Calls f(vectors, c, n) for the tiles [c, c + n) of `width` columns. The type of `vectors` has the
// number of vectors as a constant where the tile fits into the registers, so that a row is loaded
// once for all tokens that touch it, and 0 for any other width. The operations and their order are
// the same either way.
template <typename Acc, typename F>
SDM_INLINE void for_each_tile(int64_t width, F&& f) {
  for (int64_t c = 0; c < width; c += kTileColumns) {
    const int64_t n = width - c < kTileColumns ? width - c : kTileColumns;
    if (n == 8 * kLanes<Acc>) {
      f(std::integral_constant<int, 8>{}, c, n);
    } else if (n == 4 * kLanes<Acc>) {
      f(std::integral_constant<int, 4>{}, c, n);
    } else {
      f(std::integral_constant<int, 0>{}, c, n);
    }
  }
}

// Into the second-level cache: the first-level one is full of token rows, and the rows on their way
// would fill the few buffers that its misses have.
SDM_INLINE void prefetch_row(const void* row, int64_t bytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(p + at, 0, 2);
  }
}

// dst[0, n) = elements of any dtype at src + offset; lanes up to the next vector boundary are
// zeroed.
template <typename Acc, typename S>
SDM_INLINE void convert_row(const S* src, int64_t n, Acc* dst) {
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store(dst + c, load_n(src + c, n - c));
  }
}

inline void load_row(const void* src, DType dtype, int64_t offset, int64_t n, float* dst) {
  switch (dtype) {
    case DType::kF32:
      return convert_row(static_cast<const float*>(src) + offset, n, dst);
    case DType::kBf16:
      return convert_row(static_cast<const Bf16*>(src) + offset, n, dst);
    default:
      return convert_row(static_cast<const F16*>(src) + offset, n, dst);
  }
}

inline void load_row(const void* src, DType, int64_t offset, int64_t n, double* dst) {
  convert_row(static_cast<const double*>(src) + offset, n, dst);
}

template <typename Acc, typename S>
SDM_INLINE void round_row(const Acc* src, int64_t n, S* dst) {
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store_n(dst + c, load(src + c), n - c);
  }
}

inline void store_row(const float* src, DType dtype, int64_t offset, int64_t n, void* dst) {
  switch (dtype) {
    case DType::kF32:
      return round_row(src, n, static_cast<float*>(dst) + offset);
    case DType::kBf16:
      return round_row(src, n, static_cast<Bf16*>(dst) + offset);
    default:
      return round_row(src, n, static_cast<F16*>(dst) + offset);
  }
}

inline void store_row(const double* src, DType, int64_t offset, int64_t n, void* dst) {
  round_row(src, n, static_cast<double*>(dst) + offset);
}

template <typename Acc>
SDM_INLINE void zero_rows(Acc* x, int64_t count) {
  std::memset(x, 0, sizeof(Acc) * static_cast<size_t>(count));
}

// acc += a * x over nv vectors.
template <typename Acc>
SDM_INLINE void axpy(Acc a, const Acc* x, Acc* acc, int64_t nv) {
  const Vec<Acc> scale = set1(a);
  for (int64_t j = 0; j < nv; ++j) {
    Acc* p = acc + j * kLanes<Acc>;
    store(p, fma(scale, load(x + j * kLanes<Acc>), load(p)));
  }
}

// The triangular loops skip zero factors: most pairs of tokens share no slot, and a row that is not
// finite must not reach tokens that do not touch it.

// x[i] += sum over j < i of m[i][j] x[j], in increasing i: forward substitution.
template <typename Acc>
void solve_lower(const Acc* m, int64_t C, int64_t num_tokens, Acc* x, int64_t ld) {
  const int64_t nv = ld / kLanes<Acc>;
  for (int64_t i = 1; i < num_tokens; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      if (m[i * C + j] != Acc(0)) {
        axpy(m[i * C + j], x + j * ld, x + i * ld, nv);
      }
    }
  }
}

// y[i] += sum over j <= i of m[i][j] x[j].
template <typename Acc>
void add_lower(const Acc* m, int64_t C, int64_t num_tokens, const Acc* x, Acc* y, int64_t ld) {
  const int64_t nv = ld / kLanes<Acc>;
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      if (m[i * C + j] != Acc(0)) {
        axpy(m[i * C + j], x + j * ld, y + i * ld, nv);
      }
    }
  }
}

// x[i] += sum over j > i of m[j][i] x[j], in decreasing i: substitution with the transpose.
template <typename Acc>
void solve_lower_transposed(const Acc* m, int64_t C, int64_t num_tokens, Acc* x, int64_t ld) {
  const int64_t nv = ld / kLanes<Acc>;
  for (int64_t j = num_tokens - 1; j > 0; --j) {
    for (int64_t i = 0; i < j; ++i) {
      if (m[j * C + i] != Acc(0)) {
        axpy(m[j * C + i], x + j * ld, x + i * ld, nv);
      }
    }
  }
}

// y[i] += sum over j >= i of m[j][i] x[j].
template <typename Acc>
void add_lower_transposed(
    const Acc* m, int64_t C, int64_t num_tokens, const Acc* x, Acc* y, int64_t ld
) {
  const int64_t nv = ld / kLanes<Acc>;
  for (int64_t j = 0; j < num_tokens; ++j) {
    for (int64_t i = 0; i <= j; ++i) {
      if (m[j * C + i] != Acc(0)) {
        axpy(m[j * C + i], x + j * ld, y + i * ld, nv);
      }
    }
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
