// SPDX-License-Identifier: Apache-2.0
//! @file A problem of Kimi delta attention on the device: inputs, guarded outputs, parameters.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <cuda_runtime.h>

#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "tests/cpp/kda_problem.h"

namespace sdm::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}

// Bytes on the device between guards that must not change; NaN until something is written.
class DeviceBytes {
 public:
  explicit DeviceBytes(int64_t size) : size_(static_cast<size_t>(size)) {
    check(cudaMalloc(reinterpret_cast<void**>(&block_), size_ + 2 * kGuard), "cudaMalloc");
    check(cudaMemset(block_, 0xff, size_ + 2 * kGuard), "cudaMemset");
  }

  explicit DeviceBytes(const std::vector<uint8_t>& host)
      : DeviceBytes(static_cast<int64_t>(host.size())) {
    check(cudaMemcpy(data(), host.data(), size_, cudaMemcpyHostToDevice), "copy in");
  }

  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  ~DeviceBytes() { cudaFree(block_); }

  void* data() const { return block_ + kGuard; }

  // All bytes; fails the program if a guard has changed.
  std::vector<uint8_t> fetch(const char* name) const {
    std::vector<uint8_t> all(size_ + 2 * kGuard);
    check(cudaMemcpy(all.data(), block_, all.size(), cudaMemcpyDeviceToHost), "copy out");
    for (size_t i = 0; i < kGuard; ++i) {
      if (all[i] != 0xff || all[all.size() - 1 - i] != 0xff) {
        std::printf("FAIL %s: written outside\n", name);
        std::exit(1);
      }
    }
    return {all.begin() + kGuard, all.end() - kGuard};
  }

 private:
  static constexpr size_t kGuard = 256;
  uint8_t* block_ = nullptr;
  size_t size_;
};

inline std::vector<double> to_doubles(const std::vector<uint8_t>& bytes, DType dtype) {
  std::vector<double> values(bytes.size() / static_cast<size_t>(element_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = load_scalar(bytes.data(), dtype, static_cast<int64_t>(i));
  }
  return values;
}

inline std::vector<uint8_t> to_bytes(const std::vector<double>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * static_cast<size_t>(element_size(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    store_scalar(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
  return bytes;
}

// [rows, K, V] <-> [rows, V, K].
inline std::vector<double> swap_last(const std::vector<double>& x, int64_t rows, int64_t columns) {
  std::vector<double> y(x.size());
  const int64_t each = rows * columns;
  for (int64_t e = 0; e < static_cast<int64_t>(x.size()); ++e) {
    const int64_t at = e / each * each + e % each % columns * rows + e % each / columns;
    y[static_cast<size_t>(at)] = x[static_cast<size_t>(e)];
  }
  return y;
}

inline kda::KdaStateView state_view(void* data, DType dtype, const KdaCase& c) {
  const int64_t key = c.v_first ? 1 : c.V, column = c.v_first ? c.K : 1;
  return {data, dtype, {c.HV * c.K * c.V, c.K * c.V, key, column}};
}

inline std::vector<uint8_t> state_bytes(
    const std::vector<double>& x, DType dtype, const KdaCase& c
) {
  return to_bytes(c.v_first ? swap_last(x, c.K, c.V) : x, dtype);
}

struct KdaDevice {
  const KdaProblem& p;
  DeviceBytes q, k, v, g, beta, d_out, A_log, dt_bias, initial, d_final, offsets;

  explicit KdaDevice(const KdaProblem& problem)
      : p(problem),
        q(p.q.bytes),
        k(p.k.bytes),
        v(p.v.bytes),
        g(p.g.bytes),
        beta(p.beta.bytes),
        d_out(
            p.c.expanded
                ? to_bytes({p.d_out.values.empty() ? 0 : p.d_out.values[0]}, p.c.d_out_dtype)
                : p.d_out.bytes
        ),
        A_log(to_bytes(p.A_log, DType::kF32)),
        dt_bias(to_bytes(p.dt_bias, DType::kF32)),
        initial(state_bytes(p.initial, p.c.state_dtype, p.c)),
        d_final(state_bytes(p.d_final, DType::kF32, p.c)),
        offsets(offset_bytes(p)) {}

  static std::vector<uint8_t> offset_bytes(const KdaProblem& p) {
    std::vector<uint8_t> bytes(p.offsets.size() * sizeof(int64_t));
    if (!bytes.empty()) {
      std::memcpy(bytes.data(), p.offsets.data(), bytes.size());
    }
    return bytes;
  }

  static kda::KdaView view(const KdaTensor& t, const DeviceBytes& on) {
    return {on.data(), t.dtype, {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}};
  }

  kda::KdaDims dims() const {
    const KdaCase& c = p.c;
    return {c.B, c.T, c.H, c.HV, c.K, c.V, p.N, c.C};
  }

  kda::KdaOptions options() const {
    return {p.scale, p.c.l2norm, p.c.gate, p.c.lower_bound, p.c.beta};
  }

  kda::KdaTokens tokens() const {
    return {
        view(p.q, q),
        view(p.k, k),
        view(p.v, v),
        view(p.g, g),
        view(p.beta, beta),
        p.c.A_log ? static_cast<const float*>(A_log.data()) : nullptr,
        p.c.dt_bias ? static_cast<const float*>(dt_bias.data()) : nullptr
    };
  }

  DeviceIntegers cu_seqlens() const { return {p.offsets.empty() ? nullptr : offsets.data(), true}; }

  kda::KdaStateView initial_view() const {
    return state_view(p.c.initial ? initial.data() : nullptr, p.c.state_dtype, p.c);
  }

  kda::KdaView d_out_view() const {
    if (p.c.expanded) {
      return {d_out.data(), p.c.d_out_dtype, {0, 0, 0, 0}};
    }
    return view(p.d_out, d_out);
  }

  // Rows that the chunk states may have.
  int64_t chunk_rows() const {
    return p.offsets.empty() ? p.N * ((p.c.T + p.c.C - 1) / p.c.C + 1) : p.c.T / p.c.C + p.N;
  }
};

}  // namespace sdm::test
