// SPDX-License-Identifier: Apache-2.0
//! @file Typed loads and stores of token rows and of states.
//!
//! A state is held as panels: kPanel value columns of all key channels, [panels, Kp, kPanel], so
//! that a panel is contiguous and fits into the first-level cache. Kp is K rounded up to whole
//! tiles; what lies beyond K and V is zero and stays so. Value columns never meet in the
//! recurrence: panels are independent work with the same bits however they are spread over threads.
//!
//! Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {
namespace kda {

using ::sdm::kda::KdaBeta;
using ::sdm::kda::KdaBwdParams;
using ::sdm::kda::KdaChunkStates;
using ::sdm::kda::KdaDims;
using ::sdm::kda::KdaFwdParams;
using ::sdm::kda::KdaGate;
using ::sdm::kda::KdaOptions;
using ::sdm::kda::KdaSequence;
using ::sdm::kda::KdaStateView;
using ::sdm::kda::KdaStepParams;
using ::sdm::kda::KdaTokens;
using ::sdm::kda::KdaView;

// Tokens of a block: the pieces of a chunk within which pairs of tokens are looked at.
constexpr int64_t kBlock = 16;
static_assert(kBlock == kTile, "a block's rows are turned tile by tile");

// Value columns of a panel: two vectors.
template <typename Acc>
constexpr int kPanel = 2 * static_cast<int>(kLanes<Acc>);

template <typename Acc>
SDM_INLINE int64_t num_panels(int64_t V) {
  return ceil_div(V, kPanel<Acc>);
}

template <typename Acc>
SDM_INLINE void zero_rows(Acc* x, int64_t count) {
  std::memset(x, 0, sizeof(Acc) * static_cast<size_t>(count));
}

// ---------------------------------------------------------------------------------------------
// Rows

template <typename Acc, typename S>
SDM_INLINE void convert_row(const S* src, int64_t n, Acc* dst) {
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store(dst + c, load_n(src + c, n - c));
  }
}

// Element by element, for pairs of types that no fast path is worth.
template <typename Acc>
SDM_INLINE void convert_row_slowly(
    const void* src, DType dtype, int64_t offset, int64_t n, Acc* dst
) {
  for (int64_t c = 0; c < n; ++c) {
    dst[c] = static_cast<Acc>(load_scalar(src, dtype, offset + c));
  }
  for (int64_t c = n; c % kLanes<Acc> != 0; ++c) {
    dst[c] = Acc(0);
  }
}

// dst[0, n) = elements at src + offset; lanes up to the next vector boundary are zeroed.
inline void load_row(const void* src, DType dtype, int64_t offset, int64_t n, float* dst) {
  switch (dtype) {
    case DType::kF32:
      return convert_row(static_cast<const float*>(src) + offset, n, dst);
    case DType::kBf16:
      return convert_row(static_cast<const Bf16*>(src) + offset, n, dst);
    case DType::kF16:
      return convert_row(static_cast<const F16*>(src) + offset, n, dst);
    case DType::kF64:
      return convert_row_slowly(src, dtype, offset, n, dst);
  }
}

inline void load_row(const void* src, DType dtype, int64_t offset, int64_t n, double* dst) {
  if (dtype == DType::kF64) {
    convert_row(static_cast<const double*>(src) + offset, n, dst);
  } else {
    convert_row_slowly(src, dtype, offset, n, dst);
  }
}

template <typename Acc, typename S>
SDM_INLINE void round_row(const Acc* src, int64_t n, S* dst) {
  for (int64_t c = 0; c < n; c += kLanes<Acc>) {
    store_n(dst + c, load(src + c), n - c);
  }
}

template <typename Acc>
SDM_INLINE void round_row_slowly(
    const Acc* src, DType dtype, int64_t offset, int64_t n, void* dst
) {
  for (int64_t c = 0; c < n; ++c) {
    store_scalar(dst, dtype, offset + c, src[c]);
  }
}

inline void store_row(const float* src, DType dtype, int64_t offset, int64_t n, void* dst) {
  switch (dtype) {
    case DType::kF32:
      return round_row(src, n, static_cast<float*>(dst) + offset);
    case DType::kBf16:
      return round_row(src, n, static_cast<Bf16*>(dst) + offset);
    case DType::kF16:
      return round_row(src, n, static_cast<F16*>(dst) + offset);
    case DType::kF64:
      return round_row_slowly(src, dtype, offset, n, dst);
  }
}

inline void store_row(const double* src, DType dtype, int64_t offset, int64_t n, void* dst) {
  if (dtype == DType::kF64) {
    round_row(src, n, static_cast<double*>(dst) + offset);
  } else {
    round_row_slowly(src, dtype, offset, n, dst);
  }
}

SDM_INLINE int64_t offset_of(const KdaView& view, int64_t batch, int64_t token, int64_t head) {
  return batch * view.stride[0] + token * view.stride[1] + head * view.stride[2];
}

// Columns [begin, begin + width) of n tokens into the second-level cache: a token's row lies in a
// page of its own where there are many heads, and no hardware looks that far ahead.
SDM_INLINE void prefetch_rows(
    const KdaView& view,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t n,
    int64_t begin,
    int64_t width
) {
  const int64_t size = element_size(view.dtype);
  for (int64_t i = 0; i < n; ++i) {
    const char* row = static_cast<const char*>(view.data) +
                      (offset_of(view, batch, token + i, head) + begin) * size;
    for (int64_t at = 0; at < width * size; at += 64) {
      __builtin_prefetch(row + at, 0, 2);
    }
  }
}

// A contiguous output [B, T, heads, columns] as a view, to fetch its lines before they are written.
SDM_INLINE KdaView
output_view(const void* data, DType dtype, const KdaDims& dims, int64_t heads, int64_t columns) {
  return {data, dtype, {dims.T * heads * columns, heads * columns, columns, 1}};
}

// The part of panel `panel` in rows of V columns.
template <typename Acc>
SDM_INLINE int64_t panel_width(int64_t panel, int64_t V) {
  const int64_t rest = V - panel * kPanel<Acc>;
  return rest < kPanel<Acc> ? rest : kPanel<Acc>;
}

// x[kBlock, kPanel] = the panel's columns of n tokens; the rest is zero.
template <typename Acc>
SDM_INLINE void load_panel_rows(
    const KdaView& view,
    int64_t batch,
    int64_t token,
    int64_t head,
    int64_t n,
    int64_t panel,
    int64_t V,
    Acc* x
) {
  const int64_t width = panel_width<Acc>(panel, V);
  if (width < kPanel<Acc>) {
    zero_rows(x, n * kPanel<Acc>);
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = offset_of(view, batch, token + i, head) + panel * kPanel<Acc>;
    load_row(view.data, view.dtype, at, width, x + i * kPanel<Acc>);
  }
  zero_rows(x + n * kPanel<Acc>, (kBlock - n) * kPanel<Acc>);
}

// ---------------------------------------------------------------------------------------------
// States

// panel[Kp, kPanel] from a state of K x V in any layout; zero without data.
template <typename Acc>
void load_state_panel(
    const KdaStateView& view,
    int64_t row,
    int64_t head,
    int64_t panel,
    int64_t K,
    int64_t V,
    Acc* dst
) {
  constexpr int64_t ld = kPanel<Acc>;
  const int64_t width = panel_width<Acc>(panel, V);
  const bool whole = width == ld && K % kTile == 0;
  if (!whole || view.data == nullptr) {
    zero_rows(dst, round_up(K, kTile) * ld);
  }
  if (view.data == nullptr) {
    return;
  }
  const int64_t base = row * view.stride[0] + head * view.stride[1] + panel * ld * view.stride[3];
  if (view.stride[3] == 1) {
    for (int64_t k = 0; k < K; ++k) {
      load_row(view.data, view.dtype, base + k * view.stride[2], width, dst + k * ld);
    }
  } else if (view.stride[2] == 1) {
    Acc tile[kTile * kTile];
    for (int64_t v = 0; v < width; v += kTile) {
      const int64_t columns = width - v < kTile ? width - v : kTile;
      for (int64_t k = 0; k < K; k += kTile) {
        const int64_t rows = K - k < kTile ? K - k : kTile;
        if (rows < kTile || columns < kTile) {
          zero_rows(tile, kTile * kTile);
        }
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t at = base + (v + j) * view.stride[3] + k;
          load_row(view.data, view.dtype, at, rows, tile + j * kTile);
        }
        transpose_tile(tile, kTile, dst + k * ld + v, ld);
      }
    }
  } else {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t v = 0; v < width; ++v) {
        const int64_t at = base + k * view.stride[2] + v * view.stride[3];
        dst[k * ld + v] = static_cast<Acc>(load_scalar(view.data, view.dtype, at));
      }
    }
  }
}

template <typename Acc>
void store_state_panel(
    const Acc* src,
    const KdaStateView& view,
    int64_t row,
    int64_t head,
    int64_t panel,
    int64_t K,
    int64_t V
) {
  if (view.data == nullptr) {
    return;
  }
  constexpr int64_t ld = kPanel<Acc>;
  const int64_t width = panel_width<Acc>(panel, V);
  const int64_t base = row * view.stride[0] + head * view.stride[1] + panel * ld * view.stride[3];
  if (view.stride[3] == 1) {
    for (int64_t k = 0; k < K; ++k) {
      store_row(src + k * ld, view.dtype, base + k * view.stride[2], width, view.data);
    }
  } else if (view.stride[2] == 1) {
    Acc tile[kTile * kTile];
    for (int64_t v = 0; v < width; v += kTile) {
      const int64_t columns = width - v < kTile ? width - v : kTile;
      for (int64_t k = 0; k < K; k += kTile) {
        const int64_t rows = K - k < kTile ? K - k : kTile;
        transpose_tile(src + k * ld + v, ld, tile, kTile);
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t at = base + (v + j) * view.stride[3] + k;
          store_row(tile + j * kTile, view.dtype, at, rows, view.data);
        }
      }
    }
  } else {
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t v = 0; v < width; ++v) {
        const int64_t at = base + k * view.stride[2] + v * view.stride[3];
        store_scalar(view.data, view.dtype, at, src[k * ld + v]);
      }
    }
  }
}

// Saved chunk states as a state with the rows of chunk_state_row().
SDM_INLINE KdaStateView state_view(const KdaChunkStates& states, const KdaDims& dims) {
  const int64_t size = dims.K * dims.V;
  return {
      states.data,
      states.dtype,
      {dims.HV * size, size, states.v_first ? 1 : dims.V, states.v_first ? dims.K : 1}
  };
}

}  // namespace kda
}  // namespace SDM_ISA
}  // namespace sdm
