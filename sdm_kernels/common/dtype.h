// SPDX-License-Identifier: Apache-2.0
//! @file Element types of tensors and their scalar conversions, with one rounding rule everywhere:
//! round to nearest, ties to even, subnormals kept, NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "sdm_kernels/common/hd.h"

namespace sdm {

enum class DType : int32_t { kF32, kBf16, kF16, kF64 };

// Storage only: arithmetic is done in float.
struct Bf16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

SDM_HD int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
      return 4;
    default:
      return 2;
  }
}

SDM_HD uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

SDM_HD float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

SDM_HD float to_f32(float x) {
  return x;
}

SDM_HD float to_f32(Bf16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

SDM_HD float to_f32(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN (made quiet, as the hardware conversion does)
    const uint32_t payload = (magnitude & 0x3ffu) << 13;
    return bits_float(sign | 0x7f800000u | payload | (payload != 0 ? 0x400000u : 0u));
  }
  if (magnitude < 0x400u) {  // zero or subnormal: the product is exact
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return bits_float(sign | float_bits(value));
  }
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

template <typename Out>
SDM_HD Out from_f32(float x);

template <>
SDM_HD float from_f32<float>(float x) {
  return x;
}

template <>
SDM_HD Bf16 from_f32<Bf16>(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return Bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
SDM_HD F16 from_f32<F16>(float x) {
  const uint32_t bits = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return F16{static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // rounds to at least 65520: infinity
    return F16{static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below the smallest normal: adding 0.5 aligns and rounds
    const float aligned = bits_float(magnitude) + 0.5f;
    return F16{static_cast<uint16_t>(sign | (float_bits(aligned) - float_bits(0.5f)))};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t rounded = magnitude + 0xfffu + odd - (112u << 23);
  return F16{static_cast<uint16_t>(sign | (rounded >> 13))};
}

// The type that arithmetic on a storage type uses, and the conversions from and to it.
template <typename S>
struct AccOf {
  using type = float;
};

template <>
struct AccOf<double> {
  using type = double;
};

template <typename S>
inline typename AccOf<S>::type to_acc(S x) {
  if constexpr (std::is_same_v<S, double>) {
    return x;
  } else {
    return to_f32(x);
  }
}

template <typename S>
inline S from_acc(typename AccOf<S>::type x) {
  if constexpr (std::is_same_v<S, double>) {
    return x;
  } else {
    return from_f32<S>(x);
  }
}

// One element of a tensor of any type as a double (exact).
inline double load_scalar(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[offset];
    case DType::kBf16:
      return to_f32(static_cast<const Bf16*>(data)[offset]);
    case DType::kF16:
      return to_f32(static_cast<const F16*>(data)[offset]);
    default:
      return static_cast<const double*>(data)[offset];
  }
}

// Stores a value computed in the op's compute type (float, or double for kF64).
inline void store_scalar(void* data, DType dtype, int64_t offset, double value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[offset] = static_cast<float>(value);
      return;
    case DType::kBf16:
      static_cast<Bf16*>(data)[offset] = from_f32<Bf16>(static_cast<float>(value));
      return;
    case DType::kF16:
      static_cast<F16*>(data)[offset] = from_f32<F16>(static_cast<float>(value));
      return;
    default:
      static_cast<double*>(data)[offset] = value;
  }
}

}  // namespace sdm
