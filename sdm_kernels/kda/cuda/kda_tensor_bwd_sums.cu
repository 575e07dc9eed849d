// SPDX-License-Identifier: Apache-2.0
//! @file The small kernels of the tensor backward: sums over the heads of a group, sums over all
//! tokens, zeroes.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_rows.cuh"

namespace sdm::kda {
namespace cuda {
namespace {

// Grid: slots x H; a warp takes a row at a time.
template <int kK, DType kType>
__global__ void __launch_bounds__(256) kda_bwd_group_kernel(
    const __grid_constant__ KdaBwdTokenParams p
) {
  wait_for_previous_kernel();
  allow_next_kernel();
  constexpr int kCount = kK / 32;
  const KdaDims& dims = p.common.dims;
  const KdaTokens& tokens = p.common.tokens;
  const int64_t slot = blockIdx.x / dims.H, h = blockIdx.x % dims.H;
  const KdaSpan span = kda_chunk_of_slot(p.common.cu_seqlens, p.common.window, slot, dims);
  if (!span.valid) {
    return;
  }
  const int64_t group = dims.HV / dims.H;
  const int64_t entry = slot * dims.HV + h * group;
  const char* record = p.common.records.data + entry * p.common.records.stride;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int row = static_cast<int>(threadIdx.x / 32); row < kChunkRows; row += 8) {
    const int64_t position = span.first * kChunkRows + row;
    if (position >= span.sequence.length) {
      return;
    }
    const int64_t token = span.sequence.begin + position;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float sum[kCount] = {}, raw[kCount], dot[1] = {0.0f};
      for (int64_t i = 0; i < group; ++i) {
        const float* from =
            p.group_grads + (((entry + i) * 2 + which) * kChunkRows + row) * kK + lane * kCount;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          sum[c] += from[c];
        }
      }
      const KdaView& view = which == 0 ? tokens.q : tokens.k;
      const int64_t at = element_of(view, span.sequence.batch, token, h) + lane * kCount;
      load_floats<kType, kCount>(raw, view.data, at, p.aligned_qk);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        dot[0] += sum[c] * raw[c];
      }
      const float* norms = reinterpret_cast<const float*>(
          record + (which == 0 ? KdaRecord<kK>::kQueryNorm : KdaRecord<kK>::kKeyNorm)
      );
      store_row<kType, kCount>(
          which == 0 ? p.d_q : p.d_k,
          ((span.sequence.batch * dims.T + token) * dims.H + h) * kK + lane * kCount,
          sum,
          raw,
          norms[row],
          p.common.options.l2norm ? sum_spread(dot) * norms[row] * norms[row] : 0.0f,
          true
      );
    }
  }
}

constexpr int kSumThreads = 512;

// Grid: HV. Rows go round robin to the threads of a channel, whose sums are added in order.
__global__ void __launch_bounds__(kSumThreads) kda_bwd_sum_kernel(
    const __grid_constant__ KdaBwdSumParams p
) {
  extern __shared__ __align__(128) char kda_shared[];
  float* bias = reinterpret_cast<float*>(kda_shared);
  float* rate = bias + kSumThreads;
  const int64_t hv = blockIdx.x;
  const int K = static_cast<int>(p.K), tid = static_cast<int>(threadIdx.x);
  const int c = tid % K, first = tid / K, step = kSumThreads / K;
  float bias_sum = 0.0f, rate_sum = 0.0f;
  for (int64_t row = first; row < p.rows; row += step) {
    const float* from = p.gate_sums + (row * p.HV + hv) * 2 * K + c;
    bias_sum += from[0];
    rate_sum += from[K];
  }
  bias[tid] = bias_sum;
  rate[tid] = rate_sum;
  __syncthreads();
  if (first == 0) {
    for (int i = 1; i < step; ++i) {
      bias_sum += bias[i * K + c];
      rate_sum += rate[i * K + c];
    }
    if (p.d_dt_bias != nullptr) {
      p.d_dt_bias[hv * K + c] = bias_sum;
    }
    rate[tid] = rate_sum;
  }
  for (int half = K / 2; half > 0; half /= 2) {
    __syncthreads();
    if (tid < half) {
      rate[tid] += rate[tid + half];
    }
  }
  if (tid == 0 && p.d_A_log != nullptr) {
    p.d_A_log[hv] = p.has_rate ? rate[0] : 0.0f;
  }
}

// Zeroes for the tokens that no packed sequence covers. Grid: tokens.
__global__ void __launch_bounds__(128) kda_bwd_clear_kernel(
    const __grid_constant__ KdaBwdTokenParams p
) {
  const KdaDims& dims = p.common.dims;
  const DeviceIntegers& cu = p.common.cu_seqlens;
  const int64_t token = blockIdx.x;
  if (token >= kda_offset(cu, 0, dims.T) && token < kda_offset(cu, dims.N, dims.T)) {
    return;
  }
  const auto clear = [&](void* data, int64_t columns, DType dtype) {
    for (int64_t i = threadIdx.x; i < columns; i += 128) {
      store_element(data, dtype, token * columns + i, 0.0f);
    }
  };
  const KdaTokens& tokens = p.common.tokens;
  clear(p.d_q, dims.H * dims.K, tokens.q.dtype);
  clear(p.d_k, dims.H * dims.K, tokens.k.dtype);
  clear(p.d_v, dims.HV * dims.V, tokens.v.dtype);
  clear(p.d_g, dims.HV * dims.K, tokens.g.dtype);
  clear(p.d_beta, dims.HV, tokens.beta.dtype);
}

template <int kK, DType kType>
cudaError_t launch_groups(const KdaBwdTokenParams& p, cudaStream_t stream) {
  return launch_blocks(
      &kda_bwd_group_kernel<kK, kType>,
      p,
      p.common.window.slots() * p.common.dims.H,
      1,
      1,
      256,
      0,
      stream,
      true
  );
}

}  // namespace
}  // namespace cuda

cudaError_t launch_kda_tensor_bwd_groups(const KdaBwdTokenParams& p, cudaStream_t stream) {
  const bool wide = p.common.dims.K == 128;
  if (p.common.tokens.q.dtype == DType::kBf16) {
    return wide ? cuda::launch_groups<128, DType::kBf16>(p, stream)
                : cuda::launch_groups<64, DType::kBf16>(p, stream);
  }
  return wide ? cuda::launch_groups<128, DType::kF16>(p, stream)
              : cuda::launch_groups<64, DType::kF16>(p, stream);
}

cudaError_t launch_kda_tensor_bwd_sums(const KdaBwdSumParams& p, cudaStream_t stream) {
  return launch_blocks(
      &cuda::kda_bwd_sum_kernel,
      p,
      p.HV,
      1,
      1,
      cuda::kSumThreads,
      2 * cuda::kSumThreads * 4,
      stream,
      false
  );
}

cudaError_t launch_kda_tensor_bwd_clear(const KdaBwdTokenParams& p, cudaStream_t stream) {
  return launch_blocks(
      &cuda::kda_bwd_clear_kernel, p, p.common.dims.T, 1, 1, 128, 0, stream, false
  );
}

}  // namespace sdm::kda
