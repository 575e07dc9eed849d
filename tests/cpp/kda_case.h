// SPDX-License-Identifier: Apache-2.0
//! @file Random inputs for programs that test Kimi delta attention on CUDA, and the token
//! recurrence in double that judges the answers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#include "sdm_kernels/kda/cuda/kda_cuda.h"

namespace sdm::kda::test {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::printf("%s: %s\n", what, cudaGetErrorString(error));
    std::exit(2);
  }
}

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  size_t size = 0;

  explicit DeviceArray(size_t count) : size(count) {
    check(cudaMalloc(&data, (count > 0 ? count : 1) * sizeof(T)), "cudaMalloc");
  }

  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data, host.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy in");
  }

  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  ~DeviceArray() { cudaFree(data); }

  std::vector<T> to_host() const {
    std::vector<T> host(size);
    check(cudaMemcpy(host.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost), "copy out");
    return host;
  }
};

struct Case {
  const char* name;
  int64_t B, T, H, HV, K, V;
  std::vector<int64_t> lengths = {};  // packed sequences, B = 1
  bool int64_offsets = false;
  DType dtype = DType::kBf16;
  DType gate_dtype = DType::kBf16;
  DType beta_dtype = DType::kF32;
  KdaGate gate = KdaGate::kLowerBound;
  double lower_bound = -5.0;
  double gate_mean = 0.0, gate_spread = 1.0;  // of the raw gate
  bool mixed_gates = false;                   // every third channel -60, every other third -1e-6
  bool with_A_log = true, with_bias = true;
  KdaBeta beta = KdaBeta::kSigmoid;
  double beta_mean = 0.0, beta_spread = 1.0;
  bool l2norm = true;
  double noise = -1.0;  // of keys round a common direction; negative: independent keys
  int64_t run = 1;      // so many tokens have the same key
  double v_size = 1.0;
  double outlier = 1.0;  // factor on some rows of v
  int initial = 1;       // 0 none, 1 float32, 2 bfloat16
  bool v_first = false;  // layout of all states
  int chunk_states = 1;  // 0 none, 1 bfloat16, 2 float32
  bool strided = false;  // [B, H, T, last] in memory, rows at odd offsets
  int64_t pad = 2;       // rows of NaN behind the tokens
  double limit = 2.6e-3;
};

// One tensor: values as rounded, bytes as stored, its view.
struct HostTensor {
  std::vector<double> values;  // [B, T, heads, last]
  std::vector<uint8_t> bytes;
  KdaView view;  // data null

  int64_t T = 0, heads = 0, last = 0;

  double at(int64_t b, int64_t t, int64_t h, int64_t c) const {
    return values[static_cast<size_t>(((b * T + t) * heads + h) * last + c)];
  }
};

inline HostTensor make_tensor(
    const std::vector<double>& values, const Case& c, int64_t heads, int64_t last, DType dtype
) {
  HostTensor x;
  x.T = c.T;
  x.heads = heads;
  x.last = last;
  x.values.resize(values.size());
  x.view.data = nullptr;
  x.view.dtype = dtype;
  const int64_t rows = c.T + c.pad;
  const int64_t pitch = c.strided ? last + 1 : last;
  x.view.stride[0] = rows * heads * pitch;
  x.view.stride[1] = c.strided ? pitch : heads * pitch;
  x.view.stride[2] = c.strided ? rows * pitch : pitch;
  x.view.stride[3] = 1;
  // A tensor ends with its last element.
  const int64_t count = c.B * rows * heads * pitch - (pitch - last);
  const int64_t size = element_size(dtype);
  x.bytes.resize(static_cast<size_t>(count * size));
  for (int64_t i = 0; i < count; ++i) {
    store_scalar(x.bytes.data(), dtype, i, std::numeric_limits<double>::quiet_NaN());
  }
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t t = 0; t < c.T; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < last; ++i) {
          const size_t from = static_cast<size_t>(((b * c.T + t) * heads + h) * last + i);
          const int64_t to = b * x.view.stride[0] + t * x.view.stride[1] + h * x.view.stride[2] + i;
          store_scalar(x.bytes.data(), dtype, to, values[from]);
          x.values[from] = load_scalar(x.bytes.data(), dtype, to);
        }
      }
    }
  }
  return x;
}

struct HostInputs {
  Case c;
  KdaDims dims;
  KdaOptions options;
  HostTensor q, k, v, g, beta;
  std::vector<float> A_log, dt_bias;
  std::vector<double> initial;   // [N, HV, K, V]
  std::vector<int64_t> offsets;  // [N + 1] of packed sequences
};

inline HostInputs make_inputs(const Case& c) {
  HostInputs in;
  in.c = c;
  std::mt19937_64 random(c.T * 1000003 + c.H * 101 + c.K + static_cast<int64_t>(c.lengths.size()));
  std::normal_distribution<double> normal;
  const int64_t N = c.lengths.empty() ? c.B : static_cast<int64_t>(c.lengths.size());
  in.dims = {c.B, c.T, c.H, c.HV, c.K, c.V, N, 64};
  in.options = {1.0 / std::sqrt(double(c.K)) * 1.25, c.l2norm, c.gate, c.lower_bound, c.beta};
  in.offsets.push_back(0);
  for (int64_t length : c.lengths) {
    in.offsets.push_back(in.offsets.back() + length);
  }
  const auto draw = [&](int64_t heads, int64_t last, double mean, double spread) {
    std::vector<double> x(static_cast<size_t>(c.B * c.T * heads * last));
    for (double& y : x) {
      y = mean + spread * normal(random);
    }
    return x;
  };
  const double size = c.l2norm ? 1.0 : 1.0 / std::sqrt(double(c.K));
  std::vector<double> q = draw(c.H, c.K, 0.0, size);
  std::vector<double> k = draw(c.H, c.K, 0.0, size);
  if (c.noise >= 0) {
    const std::vector<double> common = draw(1, c.K, 0.0, size);
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] = common[i % static_cast<size_t>(c.K)] + c.noise * k[i];
    }
  }
  for (size_t i = 0; i < k.size(); ++i) {
    const size_t row = static_cast<size_t>(c.H * c.K);
    const size_t first = i / row % static_cast<size_t>(c.T) % static_cast<size_t>(c.run);
    k[i] = k[i - first * row];
  }
  std::vector<double> v = draw(c.HV, c.V, 0.0, c.v_size);
  for (size_t i = 0; i < v.size(); ++i) {
    if (i / static_cast<size_t>(c.V * c.HV) % 50 == 17) {
      v[i] *= c.outlier;
    }
  }
  std::vector<double> g = draw(c.HV, c.K, c.gate_mean, c.gate_spread);
  for (size_t i = 0; i < g.size(); ++i) {
    if (c.mixed_gates) {
      g[i] = i % 3 == 0 ? -60.0 : (i % 3 == 1 ? -1e-6 : -std::abs(g[i]));
    } else if (c.gate == KdaGate::kActivated) {
      g[i] = -std::abs(g[i]);
    }
  }
  in.q = make_tensor(q, c, c.H, c.K, c.dtype);
  in.k = make_tensor(k, c, c.H, c.K, c.dtype);
  in.v = make_tensor(v, c, c.HV, c.V, c.dtype);
  in.g = make_tensor(g, c, c.HV, c.K, c.gate_dtype);
  in.beta = make_tensor(draw(c.HV, 1, c.beta_mean, c.beta_spread), c, c.HV, 1, c.beta_dtype);
  if (c.with_A_log) {
    for (int64_t h = 0; h < c.HV; ++h) {
      in.A_log.push_back(static_cast<float>(0.3 * normal(random)));
    }
  }
  if (c.with_bias) {
    for (int64_t i = 0; i < c.HV * c.K; ++i) {
      in.dt_bias.push_back(static_cast<float>(0.3 * normal(random)));
    }
  }
  if (c.initial != 0) {
    in.initial.resize(static_cast<size_t>(N * c.HV * c.K * c.V));
    for (double& x : in.initial) {
      const float y = static_cast<float>(0.5 * c.v_size * normal(random));
      x = c.initial == 2 ? to_f32(from_f32<Bf16>(y)) : y;
    }
  }
  return in;
}

struct HostAnswer {
  std::vector<double> out;           // [B, T, HV, V]
  std::vector<double> final_state;   // [N, HV, K, V]
  std::vector<double> chunk_states;  // [rows, HV, K, V]; rows without a chunk are NaN
};

inline int64_t chunk_state_rows(const KdaDims& dims, bool packed) {
  return packed ? dims.T / dims.C + dims.N
                : chunk_state_row(dims.N - 1, (dims.N - 1) * dims.T, 0, dims.C) +
                      ceil_div(dims.T, dims.C);
}

inline double host_gate(const HostInputs& in, int64_t b, int64_t t, int64_t h, int64_t c) {
  const double x = in.g.at(b, t, h, c);
  if (in.c.gate == KdaGate::kActivated) {
    return x;
  }
  const double bias = in.dt_bias.empty() ? 0.0 : in.dt_bias[static_cast<size_t>(h * in.dims.K + c)];
  const double rate = in.A_log.empty() ? 1.0 : std::exp(double(in.A_log[static_cast<size_t>(h)]));
  const double z = x + bias;
  if (in.c.gate == KdaGate::kSoftplus) {
    return -rate * (z > 0 ? z + std::log1p(std::exp(-z)) : std::log1p(std::exp(z)));
  }
  return in.c.lower_bound / (1.0 + std::exp(-rate * z));
}

inline HostAnswer reference(const HostInputs& in) {
  const KdaDims& d = in.dims;
  const bool packed = in.offsets.size() > 1;
  HostAnswer out;
  out.out.assign(static_cast<size_t>(d.B * d.T * d.HV * d.V), 0.0);
  out.final_state.resize(static_cast<size_t>(d.N * d.HV * d.K * d.V));
  out.chunk_states.assign(
      static_cast<size_t>(chunk_state_rows(d, packed) * d.HV * d.K * d.V),
      std::numeric_limits<double>::quiet_NaN()
  );
  std::vector<double> S(static_cast<size_t>(d.K * d.V));
  std::vector<double> q(static_cast<size_t>(d.K)), k(q), r(static_cast<size_t>(d.V));
  for (int64_t n = 0; n < d.N; ++n) {
    const int64_t b = packed ? 0 : n;
    const int64_t begin = packed ? in.offsets[static_cast<size_t>(n)] : 0;
    const int64_t end = packed ? in.offsets[static_cast<size_t>(n + 1)] : d.T;
    for (int64_t h = 0; h < d.HV; ++h) {
      const int64_t state0 = (n * d.HV + h) * d.K * d.V;
      for (int64_t i = 0; i < d.K * d.V; ++i) {
        S[static_cast<size_t>(i)] =
            in.initial.empty() ? 0.0 : in.initial[static_cast<size_t>(state0 + i)];
      }
      for (int64_t t = begin; t < end; ++t) {
        if ((t - begin) % d.C == 0) {
          const int64_t row = chunk_state_row(n, b * d.T + begin, (t - begin) / d.C, d.C);
          for (int64_t i = 0; i < d.K * d.V; ++i) {
            out.chunk_states[static_cast<size_t>((row * d.HV + h) * d.K * d.V + i)] =
                S[static_cast<size_t>(i)];
          }
        }
        const int64_t qh = h / (d.HV / d.H);
        double q_sum = 1e-6, k_sum = 1e-6;
        for (int64_t c = 0; c < d.K; ++c) {
          q[static_cast<size_t>(c)] = in.q.at(b, t, qh, c);
          k[static_cast<size_t>(c)] = in.k.at(b, t, qh, c);
          q_sum += q[static_cast<size_t>(c)] * q[static_cast<size_t>(c)];
          k_sum += k[static_cast<size_t>(c)] * k[static_cast<size_t>(c)];
        }
        double beta = in.beta.at(b, t, h, 0);
        if (in.c.beta != KdaBeta::kActivated) {
          beta = (in.c.beta == KdaBeta::kTwoSigmoid ? 2.0 : 1.0) / (1.0 + std::exp(-beta));
        }
        for (int64_t v = 0; v < d.V; ++v) {
          r[static_cast<size_t>(v)] = in.v.at(b, t, h, v);
        }
        for (int64_t c = 0; c < d.K; ++c) {
          if (in.c.l2norm) {
            q[static_cast<size_t>(c)] /= std::sqrt(q_sum);
            k[static_cast<size_t>(c)] /= std::sqrt(k_sum);
          }
          const double decay = std::exp(host_gate(in, b, t, h, c));
          for (int64_t v = 0; v < d.V; ++v) {
            double& s = S[static_cast<size_t>(c * d.V + v)];
            s *= decay;
            r[static_cast<size_t>(v)] -= s * k[static_cast<size_t>(c)];
          }
        }
        for (int64_t c = 0; c < d.K; ++c) {
          for (int64_t v = 0; v < d.V; ++v) {
            double& s = S[static_cast<size_t>(c * d.V + v)];
            s += k[static_cast<size_t>(c)] * beta * r[static_cast<size_t>(v)];
            out.out[static_cast<size_t>(((b * d.T + t) * d.HV + h) * d.V + v)] +=
                in.options.scale * s * q[static_cast<size_t>(c)];
          }
        }
      }
      for (int64_t i = 0; i < d.K * d.V; ++i) {
        out.final_state[static_cast<size_t>(state0 + i)] = S[static_cast<size_t>(i)];
      }
    }
  }
  return out;
}

}  // namespace sdm::kda::test
