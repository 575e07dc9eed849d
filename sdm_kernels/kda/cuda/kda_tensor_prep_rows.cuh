// SPDX-License-Identifier: Apache-2.0
//! @file What a lane of the preparation loads: four rows of K / 16 neighbouring channels of the
//! queries, keys and gates; the decays of its gates.
#pragma once

#include <cstdint>

#include "sdm_kernels/kda/cuda/kda_tensor_load.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_prep.cuh"

namespace sdm::kda::cuda {

constexpr int kPrepThreads = 256;
constexpr int kLaneRows = 4;

struct KdaPrepArgs {
  KdaPrepParams params;
  int group;                       // value heads of a query and key head
  float inverse_bound;             // of the gate with a lower bound, in log2 units
  bool whole_q, whole_k, whole_g;  // a lane's channels of a row may be loaded at once
  bool whole_bias;
  int ahead_chunks, ahead_heads;  // to the chunk that a block fetches for a later one
};

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&x)[kWords], const void* from) {
  static_assert(kWords == 2 || kWords % 4 == 0);
  if constexpr (kWords == 2) {
    const uint2 y = *static_cast<const uint2*>(from);
    x[0] = y.x;
    x[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 y = static_cast<const uint4*>(from)[i / 4];
      x[i] = y.x;
      x[i + 1] = y.y;
      x[i + 2] = y.z;
      x[i + 3] = y.w;
    }
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(void* to, const uint32_t (&x)[kWords]) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 2) {
    *static_cast<uint2*>(to) = make_uint2(x[0], x[1]);
  } else {
    *static_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  }
}

// x *= y, pairs of fp16.
template <int kPairs>
__device__ __forceinline__ void multiply_by(uint32_t (&x)[kPairs], const uint32_t (&y)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    x[i] = multiply_f16(x[i], y[i]);
  }
}

template <int kPairs>
__device__ __forceinline__ void pack_pairs(uint32_t (&to)[kPairs], const float (&x)[2 * kPairs]) {
#pragma unroll
  for (int c = 0; c < kPairs; ++c) {
    to[c] = pack_f16(x[2 * c], x[2 * c + 1]);
  }
}

// The lane's rows of a tensor of 16-bit elements; `left` rows are there, the others are zero.
template <int kPairs>
__device__ __forceinline__ void load_rows(
    uint32_t (&x)[kLaneRows][kPairs], const uint16_t* from, int64_t stride, int left, bool whole
) {
  if (whole && left >= kLaneRows) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      load_words(x[r], from);
      from += stride;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      x[r][i] = 0;
    }
    if (r < left) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        x[r][i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
      }
    }
    from += stride;
  }
}

// The same of floats.
template <int kCount>
__device__ __forceinline__ void load_float_rows(
    float (&x)[kLaneRows][kCount], const float* from, int64_t stride, int left, bool whole
) {
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
    if (r < left) {
      if (whole) {
        uint32_t y[kCount];
        load_words(y, from + r * stride);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          x[r][c] = __uint_as_float(y[c]);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          x[r][c] = from[r * stride + c];
        }
      }
    }
  }
}

template <DType kType, int kPairs>
__device__ __forceinline__ void widen_rows(
    float (&x)[kLaneRows][2 * kPairs], const uint32_t (&raw)[kLaneRows][kPairs]
) {
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 y = unpack_pair<kType>(raw[r][i]);
      x[r][2 * i] = y.x;
      x[r][2 * i + 1] = y.y;
    }
  }
}

// What a gate needs of its head and channels.
template <int kCount>
struct GateConstants {
  float log_rate;  // A_log
  float bias[kCount];

  __device__ __forceinline__ void load(const KdaPrepArgs& args, int hv, int channel) {
    const KdaTokens& tokens = args.params.tokens;
    log_rate = 0.0f;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      bias[c] = 0.0f;
    }
    if (args.params.options.gate == KdaGate::kActivated) {
      return;
    }
    if (tokens.A_log != nullptr) {
      log_rate = tokens.A_log[hv];
    }
    if (tokens.dt_bias != nullptr) {
      const float* from = tokens.dt_bias + hv * args.params.dims.K + channel;
      if (args.whole_bias) {
#pragma unroll
        for (int c = 0; c < kCount; c += 4) {
          const float4 x = *reinterpret_cast<const float4*>(from + c);
          bias[c] = x.x;
          bias[c + 1] = x.y;
          bias[c + 2] = x.z;
          bias[c + 3] = x.w;
        }
      } else {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          bias[c] = from[c];
        }
      }
    }
  }
};

// Turns elements of g into decays.
template <KdaGate kGate, int kCount>
__device__ __forceinline__ void apply_gate(
    float (&x)[kLaneRows][kCount], const GateConstants<kCount>& gate, float inverse_bound
) {
  if constexpr (kGate == KdaGate::kLowerBound) {
    // bound * sigmoid(rate z) = 1 / (1 / bound + 1 / bound * exp(-rate z)), in log2 units
    const float rate = -kLog2e * fast_exp2(gate.log_rate * kLog2e);
    float bias[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      bias[c] = gate.bias[c] * rate;
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const float e = fast_exp2(fmaf(rate, x[r][c], bias[c]));
        x[r][c] = fast_exp2(fast_reciprocal(fmaf(inverse_bound, e, inverse_bound)));
      }
    }
  } else if constexpr (kGate == KdaGate::kSoftplus) {
    const float rate = fast_exp2(gate.log_rate * kLog2e);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        x[r][c] = fast_exp2(-rate * softplus2(fmaf(x[r][c], kLog2e, gate.bias[c] * kLog2e)));
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        x[r][c] = fast_exp2(x[r][c] * kLog2e);
      }
    }
  }
}

// Decays of the lane's rows; `raw` has been loaded if the gates have 16 bits, else they are at
// `floats`. Rows that are not there decay by 1.
template <DType kUsual, int kPairs>
__device__ __forceinline__ void make_decays(
    float (&x)[kLaneRows][2 * kPairs],
    const uint32_t (&raw)[kLaneRows][kPairs],
    const GateConstants<2 * kPairs>& gate,
    const KdaPrepArgs& args,
    const float* floats,
    int left
) {
  const KdaPrepParams& p = args.params;
  switch (kUsual != DType::kF32 ? kUsual : p.tokens.g.dtype) {
    case DType::kBf16:
      widen_rows<DType::kBf16>(x, raw);
      break;
    case DType::kF16:
      widen_rows<DType::kF16>(x, raw);
      break;
    default:
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2 * kPairs; ++c) {
          x[r][c] = 0.0f;
        }
      }
      load_float_rows(x, floats, p.tokens.g.stride[1], left, args.whole_g);
  }
  switch (p.options.gate) {
    case KdaGate::kActivated:
      apply_gate<KdaGate::kActivated>(x, gate, args.inverse_bound);
      break;
    case KdaGate::kSoftplus:
      apply_gate<KdaGate::kSoftplus>(x, gate, args.inverse_bound);
      break;
    default:
      apply_gate<KdaGate::kLowerBound>(x, gate, args.inverse_bound);
  }
  if (left < kLaneRows) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < 2 * kPairs; ++c) {
        x[r][c] = r < left ? x[r][c] : 1.0f;
      }
    }
  }
}

// Raw 16-bit elements times the rows' factors, in fp16.
template <DType kType, int kPairs>
__device__ __forceinline__ void normalise_rows(
    uint32_t (&x)[kLaneRows][kPairs], const float (&norm)[kLaneRows]
) {
#pragma unroll
  for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 y = unpack_pair<kType>(x[r][i]);
      x[r][i] = pack_f16(y.x * norm[r], y.y * norm[r]);
    }
  }
}

}  // namespace sdm::kda::cuda
