// SPDX-License-Identifier: Apache-2.0
//! @file Decode: the exact token recurrence. One block a sequence, value head and slice of 32
//! value columns, its part of the state in registers from the first token to the last.
//!
//! Bound by the bytes of the state, read and written once, or by latency when there are few
//! sequences. So all of a block's state is requested at once, the tokens while it comes, and a
//! token costs two barriers: with Sd the decayed state, S^T q = Sd^T q + (k.q) u, hence both
//! products with the state are made in one pass before u is known. Registers are limited so that
//! six blocks a multiprocessor wait for memory at a time, and a step may be launched while the
//! one before it ends.
#pragma once

#include "sdm_kernels/kda/cuda/kda_cuda.h"
#include "sdm_kernels/kda/cuda/kda_plain_tile.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_launch.cuh"

namespace sdm::kda::plain {

constexpr int kStepColumns = 32;  // of a block
constexpr int kStepParts = 16;    // groups of threads that share out the keys

struct StepParams {
  KdaCudaStepParams call;
  int64_t slices;
  bool initial_runs, final_runs;  // runs of 4 elements are aligned pieces of that state
};

// A thread's part of the state: kHold keys of 4 value columns, in runs of 4 elements. With
// kColumnsLast, for states [.., K, V], a run is 4 columns of a key and neighbouring lanes have
// neighbouring columns; else, for [.., V, K], it is 4 keys of a column and they have neighbouring
// keys.
template <int kHold, bool kColumnsLast>
struct StepState {
  float s[kHold][4];
  int part;    // of the keys
  int column;  // first of the thread's columns, in the slice

  __device__ __forceinline__ StepState() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    part = kColumnsLast ? lane / 8 + 4 * warp : lane % kStepParts;
    column = 4 * (kColumnsLast ? lane % 8 : lane / kStepParts + 2 * warp);
  }

  __device__ __forceinline__ int key(int m) const {
    return 4 * (part + kStepParts * (m / 4)) + m % 4;
  }

  // Element e of run r.
  __device__ __forceinline__ float& element(int r, int e) {
    return kColumnsLast ? s[r][e] : s[r / 4 * 4 + e][r % 4];
  }

  // Where a run begins, if it is inside.
  __device__ __forceinline__ bool find_run(
      int r, const KdaStateView& view, int first_column, int64_t K, int64_t V, int64_t* offset
  ) const {
    const int own_key = kColumnsLast ? key(r) : key(r / 4 * 4);
    const int own_column = first_column + column + (kColumnsLast ? 0 : r % 4);
    *offset = own_key * view.stride[2] + own_column * view.stride[3];
    return own_key < K && own_column < V;
  }

  static __device__ __forceinline__ int64_t run_stride(const KdaStateView& view) {
    return view.stride[kColumnsLast ? 3 : 2];
  }

  __device__ __forceinline__ void load(
      const KdaStateView& view, bool runs, int64_t base, int first_column, int64_t K, int64_t V
  ) {
    with_dtype(view.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      struct alignas(4 * sizeof(T)) Run {
        T x[4];
      };
      const T* from = static_cast<const T*>(view.data) + base;
      const int64_t stride = run_stride(view);
      Run held[kHold];
#pragma unroll
      for (int r = 0; r < kHold; ++r) {
        int64_t at;
        held[r] = Run{};
        if (find_run(r, view, first_column, K, V, &at)) {
          if (runs) {
            held[r] = *reinterpret_cast<const Run*>(from + at);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              held[r].x[e] = from[at + e * stride];
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kHold; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          element(r, e) = widen(held[r].x[e]);
        }
      }
    });
  }

  __device__ __forceinline__ void store(
      const KdaStateView& view, bool runs, int64_t base, int first_column, int64_t K, int64_t V
  ) {
    with_dtype(view.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      struct alignas(4 * sizeof(T)) Run {
        T x[4];
      };
      T* to = static_cast<T*>(view.data) + base;
      const int64_t stride = run_stride(view);
#pragma unroll
      for (int r = 0; r < kHold; ++r) {
        int64_t at;
        if (!find_run(r, view, first_column, K, V, &at)) {
          continue;
        }
        Run run;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          run.x[e] = narrow<T>(element(r, e));
        }
        if (runs) {
          *reinterpret_cast<Run*>(to + at) = run;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            to[at + e * stride] = run.x[e];
          }
        }
      }
    });
  }
};

// What a thread brings of a token, as it is in memory.
template <int kOwn>
struct StepToken {
  uint32_t q[kOwn], k[kOwn], g[kOwn];  // key columns thread + m * kThreads
  uint32_t v[4];                       // its columns of the slice
  uint32_t beta;
};

// Of a token, for all threads; two of each, so that a token may be put while others still read the
// one before.
template <int kKeys>
struct alignas(16) StepShared {
  float q[2][kKeys], k[2][kKeys], decay[2][kKeys];
  float dots[2][kWarps][3];  // q.q, k.k, q.k by warp
  float sums[2][kWarps][2][kStepColumns];
};

template <int kOwn>
__device__ __forceinline__ void load_step_token(
    const StepParams& p, int64_t batch, int64_t t, int hv, int first_column, StepToken<kOwn>* token
) {
  const KdaTokens& in = p.call.base.tokens;
  const KdaDims& dims = p.call.base.dims;
  const unsigned h = static_cast<unsigned>(hv) / static_cast<unsigned>(dims.HV / dims.H);
  const int thread = static_cast<int>(threadIdx.x);
  load_raw_row(in.q, row_of(in.q, batch, t, h), thread, kThreads, dims.K, token->q);
  load_raw_row(in.k, row_of(in.k, batch, t, h), thread, kThreads, dims.K, token->k);
  load_raw_row(in.g, row_of(in.g, batch, t, hv), thread, kThreads, dims.K, token->g);
  const int64_t row = row_of(in.v, batch, t, hv);
  load_raw_row(in.v, row, first_column, 1, dims.V, token->v);
  token->beta = load_raw(in.beta.data, in.beta.dtype, row_of(in.beta, batch, t, hv));
}

static_assert(kWarps == 4 && kStepParts == 16);

// Sums over the keys of x[0..3] and y[0..3], which each part has for its columns. Parts are added
// in pairs, pairs of pairs and so on: the bits do not depend on the layout of the state.
template <bool kColumnsLast>
__device__ __forceinline__ void sum_parts(
    float (*sums)[2][kStepColumns], int column, float (&x)[4], float (&y)[4]
) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  // lanes of a warp that share columns: 4, eight apart, or 16 side by side
  constexpr int kFirst = kColumnsLast ? 8 : 1, kEnd = kColumnsLast ? 32 : kStepParts;
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      x[b] += __shfl_xor_sync(kAllLanes, x[b], step);
      y[b] += __shfl_xor_sync(kAllLanes, y[b], step);
    }
  }
  if (!kColumnsLast) {
    return;
  }
  if (lane < 8) {
    store4(&sums[warp][0][column], x[0], x[1], x[2], x[3]);
    store4(&sums[warp][1][column], y[0], y[1], y[2], y[3]);
  }
  __syncthreads();  // all warps' sums are there
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const int c = column + b;
    x[b] = (sums[0][0][c] + sums[1][0][c]) + (sums[2][0][c] + sums[3][0][c]);
    y[b] = (sums[0][1][c] + sums[1][1][c]) + (sums[2][1][c] + sums[3][1][c]);
  }
}

struct StepSequence {
  int64_t batch, begin, length;
};

__device__ __forceinline__ int64_t load_integer(const DeviceIntegers& x, int64_t at) {
  return x.is_int64 ? static_cast<const int64_t*>(x.data)[at]
                    : static_cast<const int32_t*>(x.data)[at];
}

// Clamped, so that no offset leads outside.
__device__ __forceinline__ StepSequence step_sequence(const StepParams& p, int64_t n) {
  const int64_t T = p.call.base.dims.T;
  if (p.call.cu_seqlens.data == nullptr) {
    return {n, 0, T};
  }
  const auto clamped = [&](int64_t x) { return x < 0 ? 0 : (x > T ? T : x); };
  const int64_t begin = clamped(load_integer(p.call.cu_seqlens, n));
  const int64_t end = clamped(load_integer(p.call.cu_seqlens, n + 1));
  return {0, begin, end > begin ? end - begin : 0};
}

template <int kHold, bool kColumnsLast>
__global__ void __launch_bounds__(kThreads, kHold == 16 ? 3 : 6) kda_step_kernel(
    const __grid_constant__ StepParams p
) {
  constexpr int kKeys = kHold * kStepParts;
  constexpr int kOwn = kKeys <= kThreads ? 1 : kKeys / kThreads;
  __shared__ StepShared<kKeys> shared;
  const KdaStepParams& base = p.call.base;
  const KdaDims& dims = base.dims;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // a grid has at most 2^31 blocks
  const unsigned slices = static_cast<unsigned>(p.slices), heads = static_cast<unsigned>(dims.HV);
  const int first_column = static_cast<int>(blockIdx.x % slices) * kStepColumns;
  const int hv = static_cast<int>(blockIdx.x / slices % heads);
  const int n = static_cast<int>(blockIdx.x / slices / heads);

  cuda::allow_next_kernel();
  cuda::wait_for_previous_kernel();
  StepState<kHold, kColumnsLast> state;
  const int own_column = first_column + state.column;
  const bool owner = state.part == 0 && own_column < dims.V;  // of the outputs of its columns
  const StepSequence sequence = step_sequence(p, n);
  int64_t row = n;
  if (p.call.state_indices.data != nullptr) {
    row = load_integer(p.call.state_indices, n);
  }
  const auto store_out = [&](int64_t t, const float (&o)[4]) {
    const int64_t token = sequence.batch * dims.T + sequence.begin + t;
    with_dtype(base.tokens.q.dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* to = static_cast<T*>(base.out) + (token * dims.HV + hv) * dims.V + own_column;
      store_run(to, 1, o[0], o[1], o[2], o[3]);
    });
  };
  StepToken<kOwn> token{};
  const auto load_token = [&](int64_t t) {
    if (t < sequence.length) {
      load_step_token(p, sequence.batch, sequence.begin + t, hv, own_column, &token);
    }
  };
  load_token(0);
  // what the gate needs, asked for with the rest
  const KdaTokens& in = base.tokens;
  const float log_rate = in.A_log != nullptr ? in.A_log[hv] : 0.0f;
  float bias[kOwn];
#pragma unroll
  for (int m = 0; m < kOwn; ++m) {
    const int c = thread + m * kThreads;
    bias[m] = in.dt_bias != nullptr && c < dims.K ? in.dt_bias[hv * dims.K + c] : 0.0f;
  }
  if (row < 0 || row >= base.pool) {
    const float zeros[4] = {};
    for (int64_t t = 0; owner && t < sequence.length; ++t) {
      store_out(t, zeros);
    }
    return;
  }
  if (base.initial.data != nullptr) {
    const int64_t at = row * base.initial.stride[0] + hv * base.initial.stride[1];
    state.load(base.initial, p.initial_runs, at, first_column, dims.K, dims.V);
  } else {
#pragma unroll
    for (int m = 0; m < kHold; ++m) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        state.s[m][b] = 0.0f;
      }
    }
  }

  const Gate gate{
      base.options.gate, expf(log_rate), static_cast<float>(base.options.lower_bound), nullptr
  };
  const float scale = static_cast<float>(base.options.scale);
  for (int64_t t = 0; t < sequence.length; ++t) {
    const int turn = static_cast<int>(t % 2);
    float dots[3] = {};
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
      const int c = thread + m * kThreads;
      if (c < kKeys) {
        const float q = from_raw(in.q.dtype, token.q[m]), k = from_raw(in.k.dtype, token.k[m]);
        const float g = gate.of_biased(from_raw(in.g.dtype, token.g[m]) + bias[m]);
        shared.q[turn][c] = q;
        shared.k[turn][c] = k;
        shared.decay[turn][c] = c < dims.K ? expf(g) : 0.0f;
        dots[0] = fmaf(q, q, dots[0]);
        dots[1] = fmaf(k, k, dots[1]);
        dots[2] = fmaf(q, k, dots[2]);
      }
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      dots[i] = warp_sum(dots[i]);
      if (lane == 0) {
        shared.dots[turn][warp][i] = dots[i];
      }
    }
    float v[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      v[b] = from_raw(in.v.dtype, token.v[b]);
    }
    const float beta = beta_value(base.options.beta, from_raw(in.beta.dtype, token.beta));
    load_token(t + 1);
    __syncthreads();  // the token is there

    float total[3] = {};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total[i] += shared.dots[turn][w][i];
      }
    }
    const bool l2norm = base.options.l2norm;
    const float q_factor = l2norm ? 1.0f / sqrtf(total[0] + kNormEps) : 1.0f;
    const float k_factor = l2norm ? 1.0f / sqrtf(total[1] + kNormEps) : 1.0f;
    float by_k[4] = {}, by_q[4] = {};
#pragma unroll
    for (int m = 0; m < kHold; ++m) {
      const int c = state.key(m);
      const float decay = shared.decay[turn][c], k = shared.k[turn][c], q = shared.q[turn][c];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        state.s[m][b] *= decay;
        by_k[b] = fmaf(state.s[m][b], k, by_k[b]);
        by_q[b] = fmaf(state.s[m][b], q, by_q[b]);
      }
    }
    sum_parts<kColumnsLast>(shared.sums[turn], state.column, by_k, by_q);
    float write[4], o[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float u = beta * fmaf(-k_factor, by_k[b], v[b]);
      write[b] = k_factor * u;
      o[b] = scale * q_factor * fmaf(total[2], write[b], by_q[b]);
    }
    if (owner) {
      store_out(t, o);
    }
#pragma unroll
    for (int m = 0; m < kHold; ++m) {
      const float k = shared.k[turn][state.key(m)];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        state.s[m][b] = fmaf(k, write[b], state.s[m][b]);
      }
    }
  }
  if (base.final_state.data != nullptr) {
    const int64_t at = row * base.final_state.stride[0] + hv * base.final_state.stride[1];
    state.store(base.final_state, p.final_runs, at, first_column, dims.K, dims.V);
  }
}

}  // namespace sdm::kda::plain
