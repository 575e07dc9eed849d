// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of the tokens of Kimi delta attention from the states and what the reverse scan
//! left.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_channels.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_inputs.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_planes.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_rows.cuh"

namespace sdm::kda {
namespace cuda {
namespace {

// What a kernel is compiled for: anything, or the usual types and layouts and one form of the gate.
// Code that is not needed costs time to fetch, and values that are not known registers.
enum class Variant { kGeneral, kSoftplus, kLowerBound };

template <DType kType>
bool is_usual(const KdaBwdTokenParams& p) {
  return p.common.tokens.g.dtype == kType && p.d_out.dtype == kType && p.d_out.stride[3] == 1 &&
         p.aligned_v && p.aligned_out && p.aligned_qk && p.aligned_g &&
         p.chunk_states.dtype == DType::kBf16 && !p.chunk_states.v_first &&
         p.group_grads == nullptr;
}

// The parameters with what the variant knows as constants.
template <DType kType, Variant kVariant>
__device__ __forceinline__ KdaBwdTokenParams known_params(const KdaBwdTokenParams& in) {
  KdaBwdTokenParams p = in;
  p.common.tokens.q.dtype = p.common.tokens.k.dtype = p.common.tokens.v.dtype = kType;
  if constexpr (kVariant != Variant::kGeneral) {
    p.common.tokens.g.dtype = kType;
    p.common.options.gate =
        kVariant == Variant::kSoftplus ? KdaGate::kSoftplus : KdaGate::kLowerBound;
    p.d_out.dtype = kType;
    p.d_out.stride[3] = 1;
    p.aligned_v = p.aligned_out = p.aligned_qk = p.aligned_g = true;
    p.chunk_states.dtype = DType::kBf16;
    p.chunk_states.v_first = false;
    p.group_grads = nullptr;
  }
  return p;
}

// Grid: HV, chunks of a sequence (packed: rows), sequences of the window.
template <int kK, int kV, DType kType, Variant kVariant>
__global__ void __launch_bounds__(kTokenThreads, 2) kda_bwd_token_kernel(
    const __grid_constant__ KdaBwdTokenParams params
) {
  using Memory = TokenMemory<kK, kV>;
  extern __shared__ __align__(1024) char kda_shared[];
  allow_next_kernel();
  const KdaBwdTokenParams p = known_params<kType, kVariant>(params);
  const KdaDims& dims = p.common.dims;
  const unsigned hv = blockIdx.x;
  const KdaSpan span =
      kda_chunk_of_window(p.common.cu_seqlens, p.common.window, blockIdx.z, blockIdx.y, dims);
  if (!span.valid) {
    end_after_previous_kernel();
    return;
  }
  const int64_t left = span.sequence.length - span.first * kChunkRows;
  const TokenBlock<kK, kV> b{
      p,
      kda_shared,
      shared_address(kda_shared),
      span,
      hv,
      // without groups the heads are the same
      kVariant == Variant::kGeneral
          ? hv / (static_cast<unsigned>(dims.HV) / static_cast<unsigned>(dims.H))
          : hv,
      span.slot * dims.HV + hv,
      span.sequence.begin + span.first * kChunkRows,
      static_cast<int>(left < kChunkRows ? left : kChunkRows)
  };
  start_copies(b);
  {
    StateLoads<kK, kV> state;
    state.load(b);
    RowLoads<kK, kV, kType> rows;
    rows.load(b);
    state.store(b);
    rows.store_out(b);
    rows.store_values(b);
  }
  publish_operands();
  wait_for_copies<0>();
  __syncthreads();
  const TokenPlanes<kK, kV, kType> products(b);
  products.make_updates();
  products.make_score_grads();

  const float unit = products.grad_unit();
  const int64_t state = b.state();
  TokenChannels<kK, kV> channels(b);
  channels.start_pass();
  PassLoads<kK, kV> states;
  states.load(b, state, 0);
#pragma unroll 1
  for (int pass = 0; pass < kK / kPass; ++pass) {
    states.store(b, state, pass);
    publish_operands();
    channels.make_operands(pass);
    __syncthreads();
    if (pass > 0) {
      channels.store_gate_sums(pass - 1);
    }
    products.make_planes(pass * kPass);
    __syncthreads();
    PairRows dG;
    {
      PairRows dq, dk;
      channels.finish_rows(dq, dk, dG);
      if (p.group_grads != nullptr) {
        channels.keep_of_head(0, dq, unit);
        channels.keep_of_head(1, dk, unit);
      } else {
        channels.keep_queries(dq);
        channels.template store_keys<kType>(dk, unit);
      }
    }
    if (pass + 1 < kK / kPass) {
      __syncwarp();  // the warp is done with the operands of its rows
      channels.start_pass();
      states.load(b, state, pass + 1);
    }
    channels.finish_gate(dG, unit);
  }
  channels.store_units();
  __syncwarp();
  TokenRows<kK, kV, kType> rows{b, channels, unit};
  rows.load();
  __syncthreads();
  channels.store_gate_sums(kK / kPass - 1);
  rows.finish();
  end_after_previous_kernel();
}

template <int kK, int kV, DType kType, Variant kVariant = Variant::kGeneral>
cudaError_t launch_tokens(const KdaBwdTokenParams& p, cudaStream_t stream, bool overlap) {
  return launch_blocks(
      &kda_bwd_token_kernel<kK, kV, kType, kVariant>,
      p,
      p.common.dims.HV,
      p.common.window.num_chunks,
      p.common.window.num_sequences,
      kTokenThreads,
      TokenMemory<kK, kV>::kBytes,
      stream,
      overlap
  );
}

template <DType kType>
cudaError_t launch_tokens_of_size(const KdaBwdTokenParams& p, cudaStream_t stream, bool overlap) {
  const KdaDims& dims = p.common.dims;
  if (dims.K == 128 && dims.V == 128 && is_usual<kType>(p)) {
    if (p.common.options.gate == KdaGate::kLowerBound) {
      return launch_tokens<128, 128, kType, Variant::kLowerBound>(p, stream, overlap);
    }
    if (p.common.options.gate == KdaGate::kSoftplus) {
      return launch_tokens<128, 128, kType, Variant::kSoftplus>(p, stream, overlap);
    }
  }
  if (dims.K == 128) {
    return dims.V == 128 ? launch_tokens<128, 128, kType>(p, stream, overlap)
                         : launch_tokens<128, 64, kType>(p, stream, overlap);
  }
  return dims.V == 128 ? launch_tokens<64, 128, kType>(p, stream, overlap)
                       : launch_tokens<64, 64, kType>(p, stream, overlap);
}

}  // namespace
}  // namespace cuda

int64_t kda_tensor_bwd_shared_bytes(const KdaDims& dims) {
  if (dims.K == 128) {
    return dims.V == 128 ? cuda::TokenMemory<128, 128>::kBytes : cuda::TokenMemory<128, 64>::kBytes;
  }
  return dims.V == 128 ? cuda::TokenMemory<64, 128>::kBytes : cuda::TokenMemory<64, 64>::kBytes;
}

cudaError_t launch_kda_tensor_bwd_tokens(
    const KdaBwdTokenParams& p, cudaStream_t stream, bool overlap
) {
  return p.common.tokens.q.dtype == DType::kBf16
             ? cuda::launch_tokens_of_size<DType::kBf16>(p, stream, overlap)
             : cuda::launch_tokens_of_size<DType::kF16>(p, stream, overlap);
}

}  // namespace sdm::kda
