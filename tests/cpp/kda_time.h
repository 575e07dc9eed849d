// SPDX-License-Identifier: Apache-2.0
//! @file Large inputs for the timings of Kimi delta attention.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "tests/cpp/kda_device.h"

namespace sdm::test {

// `count` random bfloat16 numbers, the same 4 M again and again.
inline void fill(const DeviceBytes& to, int64_t count, double mean, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> block(static_cast<size_t>(std::min<int64_t>(count, int64_t{1} << 22)));
  for (Bf16& x : block) {
    x = from_f32<Bf16>(static_cast<float>(mean) + normal(random));
  }
  const int64_t step = static_cast<int64_t>(block.size());
  for (int64_t i = 0; i < count; i += step) {
    check(
        cudaMemcpy(
            static_cast<Bf16*>(to.data()) + i,
            block.data(),
            static_cast<size_t>(std::min(step, count - i)) * sizeof(Bf16),
            cudaMemcpyHostToDevice
        ),
        "copy in"
    );
  }
}

// Raw bfloat16 inputs with K = V = 128 and as many key heads as value heads.
struct KdaLargeInputs {
  static constexpr int64_t kK = 128, kV = 128;
  kda::KdaDims dims;
  DeviceBytes q, k, v, g, beta, A_log, dt_bias;

  KdaLargeInputs(int64_t B, int64_t T, int64_t heads)
      : dims{B, T, heads, heads, kK, kV, B, 64},
        q(rows() * kK * 2),
        k(rows() * kK * 2),
        v(rows() * kV * 2),
        g(rows() * kK * 2),
        beta(rows() * 2),
        A_log(heads * 4),
        dt_bias(heads * kK * 4) {
    fill(q, rows() * kK, 0, 1);
    fill(k, rows() * kK, 0, 2);
    fill(v, rows() * kV, 0, 3);
    fill(g, rows() * kK, -1, 4);
    fill(beta, rows(), 0, 5);
    check(cudaMemset(A_log.data(), 0, static_cast<size_t>(heads) * 4), "cudaMemset");
    check(cudaMemset(dt_bias.data(), 0, static_cast<size_t>(heads * kK) * 4), "cudaMemset");
  }

  int64_t rows() const { return dims.B * dims.T * dims.HV; }

  // Rows that the chunk states have at most.
  int64_t chunk_rows() const { return dims.B * (dims.T / dims.C + 1); }

  kda::KdaView view(const DeviceBytes& on, int64_t columns) const {
    const int64_t row = dims.HV * columns;
    return {on.data(), DType::kBf16, {dims.T * row, row, columns, 1}};
  }

  kda::KdaOptions options() const {
    return {0.088, true, KdaGate::kLowerBound, -5.0, KdaBeta::kSigmoid};
  }

  kda::KdaTokens tokens() const {
    return {
        view(q, kK),
        view(k, kK),
        view(v, kV),
        view(g, kK),
        view(beta, 1),
        static_cast<const float*>(A_log.data()),
        static_cast<const float*>(dt_bias.data())
    };
  }
};

}  // namespace sdm::test
