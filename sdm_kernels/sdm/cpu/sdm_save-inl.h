// SPDX-License-Identifier: Apache-2.0
//! @file Saved bank rows: exact, or rounded to bf16, fp8 or int4 with one scale a row
//! (docs/numerics.md). Compiled per instruction set.

namespace sdm {
namespace SDM_ISA {

// Scale of a row: its largest magnitude over the largest code, rounded to bf16 so that the product
// code * scale is exact in float. NaN does not count, infinity does.
template <typename S>
float row_scale(const S* row, int64_t n, float largest_code) {
  float amax = 0.0f;
  for (int64_t c = 0; c < n; ++c) {
    const float magnitude = __builtin_fabsf(static_cast<float>(to_acc(row[c])));
    amax = magnitude > amax ? magnitude : amax;
  }
  const float scale = amax * (1.0f / largest_code);
  return to_f32(from_f32<Bf16>(scale > 1e-12f ? scale : 1e-12f));
}

template <typename S>
SDM_INLINE float scaled_code(S x, float scale) {
  return to_f32(from_f32<Bf16>(static_cast<float>(to_acc(x)) / scale));
}

// Saves columns [c0, c0 + n) of a row, of which `row` is the piece. The lossy forms have one scale
// a row, so for them the piece is the whole row.
template <typename S>
void save_row(
    const SdmSaved& saved, int64_t c0, int64_t n, int64_t row_bytes, int64_t index, const S* row
) {
  unsigned char* dst = static_cast<unsigned char*>(saved.rows) + index * row_bytes;
  switch (saved.mode) {
    case SdmSave::kBf16:
      for (int64_t c = 0; c < n; ++c) {
        const Bf16 x = from_f32<Bf16>(static_cast<float>(to_acc(row[c])));
        std::memcpy(dst + 2 * c, &x, sizeof(x));
      }
      return;
    case SdmSave::kFp8: {
      const float scale = row_scale(row, n, kFp8Max);
      saved.scales[index] = scale;
      for (int64_t c = 0; c < n; ++c) {
        dst[c] = fp8_from_f32(scaled_code(row[c], scale));
      }
      return;
    }
    case SdmSave::kInt4: {
      const float scale = row_scale(row, n, kInt4Max);
      saved.scales[index] = scale;
      for (int64_t c = 0; c < n; c += 2) {
        const uint8_t high = int4_from_f32(scaled_code(row[c], scale));
        const uint8_t low = c + 1 < n ? int4_from_f32(scaled_code(row[c + 1], scale)) : 0;
        dst[c / 2] = static_cast<uint8_t>(high << 4 | low);
      }
      return;
    }
    default:
      std::memcpy(dst + c0 * sizeof(S), row, sizeof(S) * static_cast<size_t>(n));
  }
}

// Zeroes columns [c0, c0 + n) of the saved rows [begin, end). element_bytes is that of exact rows;
// the other forms are always cleared whole.
inline void clear_saved_rows(
    const SdmSaved& saved,
    int64_t c0,
    int64_t n,
    int64_t row_bytes,
    int64_t begin,
    int64_t end,
    int64_t element_bytes
) {
  const bool exact = saved.mode <= SdmSave::kRows;
  for (int64_t row = begin; row < end; ++row) {
    char* dst = static_cast<char*>(saved.rows) + row * row_bytes;
    std::memset(
        exact ? dst + c0 * element_bytes : dst,
        0,
        static_cast<size_t>(exact ? n * element_bytes : row_bytes)
    );
    if (saved.scales != nullptr) {
      saved.scales[row] = 0.0f;
    }
  }
}

// dst[0, n) = columns [c0, c0 + n) of a saved row, as the bank would hold them. c0 is even.
template <typename S, typename Acc>
void load_saved_row(
    const SdmSaved& saved, int64_t row_bytes, int64_t index, int64_t c0, int64_t n, Acc* dst
) {
  const unsigned char* src = static_cast<const unsigned char*>(saved.rows) + index * row_bytes;
  switch (saved.mode) {
    case SdmSave::kBf16:
      for (int64_t c = 0; c < n; ++c) {
        Bf16 x;
        std::memcpy(&x, src + 2 * (c0 + c), sizeof(x));
        dst[c] = static_cast<Acc>(to_acc(from_acc<S>(to_f32(x))));
      }
      break;
    case SdmSave::kFp8:
      for (int64_t c = 0; c < n; ++c) {
        const float x = fp8_to_f32(src[c0 + c]) * saved.scales[index];
        dst[c] = static_cast<Acc>(to_acc(from_acc<S>(x)));
      }
      break;
    case SdmSave::kInt4:
      for (int64_t c = 0; c < n; ++c) {
        const uint8_t pair = src[(c0 + c) / 2];
        const uint8_t code = (c0 + c) % 2 == 0 ? pair >> 4 : pair & 0xfu;
        dst[c] = static_cast<Acc>(to_acc(from_acc<S>(int4_to_f32(code) * saved.scales[index])));
      }
      break;
    default:
      convert_row(reinterpret_cast<const S*>(src) + c0, n, dst);
      return;
  }
  for (int64_t c = n; c % kLanes<Acc> != 0; ++c) {
    dst[c] = Acc(0);
  }
}

}  // namespace SDM_ISA
}  // namespace sdm
