// SPDX-License-Identifier: Apache-2.0
//! @file A problem of Kimi delta attention on the device: inputs, guarded outputs, parameters.
#pragma once

#include <memory>
#include <string>

#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "tests/cpp/device.h"
#include "tests/cpp/kda_case.h"
#include "tests/cpp/kda_solution.h"

namespace sdm::test {

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
    const size_t size = p.c.int64_offsets ? 8 : 4;
    std::vector<uint8_t> bytes(p.offsets.size() * size);
    for (size_t i = 0; i < p.offsets.size(); ++i) {
      const int32_t narrow = static_cast<int32_t>(p.offsets[i]);
      const void* from = p.c.int64_offsets ? static_cast<const void*>(&p.offsets[i]) : &narrow;
      std::memcpy(bytes.data() + i * size, from, size);
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

  DeviceIntegers cu_seqlens() const {
    return {p.offsets.empty() ? nullptr : offsets.data(), p.c.int64_offsets};
  }

  kda::KdaStateView initial_view() const {
    return state_view(p.c.initial ? initial.data() : nullptr, p.c.state_dtype, p.c);
  }

  kda::KdaView d_out_view() const {
    if (p.c.expanded) {
      return {d_out.data(), p.c.d_out_dtype, {0, 0, 0, 0}};
    }
    return view(p.d_out, d_out);
  }
};

// One forward: outputs between guards and the parameters that name them.
struct KdaForward {
  DeviceBytes out, final_state, chunk_states;
  DType saved_dtype;
  kda::KdaCudaFwdParams params{};

  explicit KdaForward(const KdaDevice& d)
      : out(d.p.c.B * d.p.c.T * d.p.c.HV * d.p.c.V * element_size(d.p.c.dtype)),
        final_state(d.p.N * d.p.c.HV * d.p.c.K * d.p.c.V * 4),
        chunk_states(
            d.p.c.saved == 0
                ? 0
                : chunk_rows(d.p) * d.p.c.HV * d.p.c.K * d.p.c.V * (d.p.c.saved == 2 ? 2 : 4)
        ),
        saved_dtype(d.p.c.saved == 2 ? DType::kBf16 : DType::kF32) {
    const KdaCase& c = d.p.c;
    params.base.dims = d.dims();
    params.base.options = d.options();
    params.base.tokens = d.tokens();
    params.base.initial = d.initial_view();
    params.base.final_state =
        state_view(c.final_state ? final_state.data() : nullptr, DType::kF32, c);
    params.base.chunk_states = {
        c.saved == 0 ? nullptr : chunk_states.data(), saved_dtype, c.v_first
    };
    params.base.out = out.data();
    params.cu_seqlens = d.cu_seqlens();
  }
};

// One backward, with the chunk states of a forward.
struct KdaBackward {
  DeviceBytes d_q, d_k, d_v, d_g, d_beta, d_A_log, d_dt_bias, d_initial;
  kda::KdaCudaBwdParams params{};

  KdaBackward(const KdaDevice& d, const kda::KdaChunkStates& chunk_states)
      : d_q(tokens(d) * d.p.c.H * d.p.c.K * element_size(d.p.c.dtype)),
        d_k(tokens(d) * d.p.c.H * d.p.c.K * element_size(d.p.c.dtype)),
        d_v(tokens(d) * d.p.c.HV * d.p.c.V * element_size(d.p.c.dtype)),
        d_g(tokens(d) * d.p.c.HV * d.p.c.K * element_size(d.p.c.gate_dtype)),
        d_beta(tokens(d) * d.p.c.HV * element_size(d.p.c.beta_dtype)),
        d_A_log(d.p.c.HV * 4),
        d_dt_bias(d.p.c.HV * d.p.c.K * 4),
        d_initial(d.p.N * d.p.c.HV * d.p.c.K * d.p.c.V * 4) {
    const KdaCase& c = d.p.c;
    params.base.dims = d.dims();
    params.base.options = d.options();
    params.base.tokens = d.tokens();
    params.base.initial = d.initial_view();
    params.base.chunk_states = chunk_states;
    params.base.d_out = d.d_out_view();
    params.base.d_final = state_view(c.d_final ? d.d_final.data() : nullptr, DType::kF32, c);
    params.base.d_q = d_q.data();
    params.base.d_k = d_k.data();
    params.base.d_v = d_v.data();
    params.base.d_g = d_g.data();
    params.base.d_beta = d_beta.data();
    params.base.d_A_log = c.A_log ? static_cast<float*>(d_A_log.data()) : nullptr;
    params.base.d_dt_bias = c.dt_bias ? static_cast<float*>(d_dt_bias.data()) : nullptr;
    params.base.d_initial = state_view(c.initial ? d_initial.data() : nullptr, DType::kF32, c);
    params.cu_seqlens = d.cu_seqlens();
  }

  static int64_t tokens(const KdaDevice& d) { return d.p.c.B * d.p.c.T; }
};

}  // namespace sdm::test
