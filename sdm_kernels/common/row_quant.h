// SPDX-License-Identifier: Apache-2.0
//! @file The 8-bit and 4-bit codes of saved bank rows; the scale of a row is chosen by the caller.
#pragma once

#include <cstdint>
#include <math.h>

#include "sdm_kernels/common/dtype.h"

namespace sdm {

constexpr float kFp8Max = 448.0f;
constexpr float kInt4Max = 7.0f;

// e4m3fn: 4 exponent bits (bias 7), 3 mantissa bits, no infinity, 0x7f is NaN. Round to nearest
// even, saturating.
SDM_HD uint8_t fp8_from_f32(float x) {
  const uint32_t bits = float_bits(x);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint8_t>(sign | 0x7fu);
  }
  if (magnitude >= 0x43e00000u) {  // 448 and above
    return static_cast<uint8_t>(sign | 0x7eu);
  }
  if (magnitude < 0x3c800000u) {  // below 2^-6: adding 2^14 rounds to a multiple of 2^-9
    const float aligned = bits_float(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(sign | (float_bits(aligned) - float_bits(0x1p14f)));
  }
  const uint32_t odd = (magnitude >> 20) & 1u;
  const uint32_t rounded = magnitude + 0x7ffffu + odd - (120u << 23);
  return static_cast<uint8_t>(sign | (rounded >> 20));
}

SDM_HD float fp8_to_f32(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) {
    return bits_float(sign | 0x7fc00000u);
  }
  if (magnitude < 8u) {
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * 0x1p-9f));
  }
  return bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

// Two's complement, -8 to 7; NaN becomes 0.
SDM_HD uint8_t int4_from_f32(float x) {
  const float low = x > -8.0f ? x : -8.0f;
  const float clamped = low < 7.0f ? low : 7.0f;
  const int code = x != x ? 0 : static_cast<int>(rintf(clamped));
  return static_cast<uint8_t>(code & 0xf);
}

SDM_HD float int4_to_f32(uint8_t code) {
  return static_cast<float>(code >= 8u ? static_cast<int>(code) - 16 : static_cast<int>(code));
}

}  // namespace sdm
