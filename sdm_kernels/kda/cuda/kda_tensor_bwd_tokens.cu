// SPDX-License-Identifier: Apache-2.0
//! @file Gradients of the tokens of Kimi delta attention from the states and what the reverse scan
//! left.

#include "sdm_kernels/kda/cuda/kda_tensor_bwd_channels.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_launch.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_planes.cuh"
#include "sdm_kernels/kda/cuda/kda_tensor_bwd_rows.cuh"

namespace sdm::kda {
namespace cuda {
namespace {

// The chunk of a block: kda_chunk_of_slot() without divisions where no sequences are packed.
__device__ __forceinline__ KdaSpan chunk_of_block(const KdaBwdWindow& w) {
  if (w.cu_seqlens.data != nullptr) {
    return kda_chunk_of_slot(w.cu_seqlens, w.window, blockIdx.y, w.dims);
  }
  KdaSpan span;
  span.sequence = kda_sequence(w.cu_seqlens, w.window.first_sequence + blockIdx.z, w.dims.T);
  span.first = w.window.first_chunk + blockIdx.y;
  span.last = span.first + 1;
  span.slot = blockIdx.z * w.window.num_chunks + blockIdx.y;
  span.valid = span.first < span.sequence.chunks();
  span.ends = span.last == span.sequence.chunks();
  return span;
}

// What a kernel is compiled for: anything, or the usual types and layouts and one form of the gate.
// It runs straight through once, so that code that is not needed costs time to fetch.
enum class Variant { kGeneral, kSoftplus, kLowerBound };

template <DType kType>
bool is_usual(const KdaBwdTokenParams& p) {
  return p.common.tokens.g.dtype == kType && p.d_out.dtype == kType && p.d_out.stride[3] == 1 &&
         p.aligned_v && p.aligned_out && p.aligned_qk && p.chunk_states.dtype == DType::kBf16 &&
         !p.chunk_states.v_first && p.group_grads == nullptr;
}

// The parameters with what the variant knows as constants.
template <DType kType, Variant kVariant>
__device__ __forceinline__ KdaBwdTokenParams known_params(const KdaBwdTokenParams& in) {
  KdaBwdTokenParams p = in;
  if constexpr (kVariant != Variant::kGeneral) {
    p.common.tokens.g.dtype = kType;
    p.common.options.gate =
        kVariant == Variant::kSoftplus ? KdaGate::kSoftplus : KdaGate::kLowerBound;
    p.d_out.dtype = kType;
    p.d_out.stride[3] = 1;
    p.aligned_v = p.aligned_out = p.aligned_qk = true;
    p.chunk_states.dtype = DType::kBf16;
    p.chunk_states.v_first = false;
    p.group_grads = nullptr;
  }
  return p;
}

// Grid: HV, chunks of a sequence (packed: rows), sequences of the window.
template <int kK, int kV, DType kType, Variant kVariant>
__global__ void __launch_bounds__(8 * kK, 1) kda_bwd_token_kernel(
    const __grid_constant__ KdaBwdTokenParams params
) {
  extern __shared__ __align__(128) char kda_shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const KdaBwdTokenParams p = known_params<kType, kVariant>(params);
  const KdaDims& dims = p.common.dims;
  const unsigned hv = blockIdx.x;
  const KdaSpan span = chunk_of_block(p.common);
  if (!span.valid) {
    return;
  }
  const int64_t left = span.sequence.length - span.first * kChunkRows;
  const TokenBlock<kK, kV> b{
      p,
      kda_shared,
      shared_address(kda_shared),
      span,
      hv,
      hv / (static_cast<unsigned>(dims.HV) / static_cast<unsigned>(dims.H)),
      span.slot * dims.HV + hv,
      span.sequence.begin + span.first * kChunkRows,
      static_cast<int>(left < kChunkRows ? left : kChunkRows)
  };
  start_copies(b);
  {
    TokenLoads<kK, kV> loads;
    loads.load(b);
    load_state_grad(b);
    load_values<kK, kV, kType>(b);
    __syncthreads();  // the maxima are 0
    loads.find_maxima(b);
    __syncthreads();
    loads.store(b);
  }
  const TokenChannels<kK, kV> channels(b);
  channels.make_operands();
  wait_copies<0>();
  __syncthreads();

  channels.make_ends();
  const TokenPlanes<kK, kV, kType> products(b);
  products.make_updates();
  products.make_score_grads();
  products.make_planes();

  ChannelRows dG;
  channels.finish_rows(dG);
  channels.finish_gate(dG);
  __syncthreads();
  channels.store_gate_sums();
  const TokenRows<kK, kV, kType> tokens{b};
  tokens.finish();
}

template <int kK, int kV, DType kType, Variant kVariant = Variant::kGeneral>
cudaError_t launch_tokens(const KdaBwdTokenParams& p, cudaStream_t stream) {
  return launch_blocks(
      &kda_bwd_token_kernel<kK, kV, kType, kVariant>,
      p,
      p.common.dims.HV,
      p.common.window.num_chunks,
      p.common.window.num_sequences,
      TokenMemory<kK, kV>::kThreads,
      TokenMemory<kK, kV>::kBytes,
      stream,
      true
  );
}

template <DType kType>
cudaError_t launch_tokens_of_size(const KdaBwdTokenParams& p, cudaStream_t stream) {
  const KdaDims& dims = p.common.dims;
  if (dims.K == 128 && dims.V == 128 && is_usual<kType>(p)) {
    if (p.common.options.gate == KdaGate::kLowerBound) {
      return launch_tokens<128, 128, kType, Variant::kLowerBound>(p, stream);
    }
    if (p.common.options.gate == KdaGate::kSoftplus) {
      return launch_tokens<128, 128, kType, Variant::kSoftplus>(p, stream);
    }
  }
  if (dims.K == 128) {
    return dims.V == 128 ? launch_tokens<128, 128, kType>(p, stream)
                         : launch_tokens<128, 64, kType>(p, stream);
  }
  return dims.V == 128 ? launch_tokens<64, 128, kType>(p, stream)
                       : launch_tokens<64, 64, kType>(p, stream);
}

}  // namespace
}  // namespace cuda

int64_t kda_tensor_bwd_shared_bytes(const KdaDims& dims) {
  if (dims.K == 128) {
    return dims.V == 128 ? cuda::TokenMemory<128, 128>::kBytes : cuda::TokenMemory<128, 64>::kBytes;
  }
  return dims.V == 128 ? cuda::TokenMemory<64, 128>::kBytes : cuda::TokenMemory<64, 64>::kBytes;
}

cudaError_t launch_kda_tensor_bwd_tokens(const KdaBwdTokenParams& p, cudaStream_t stream) {
  return p.common.tokens.q.dtype == DType::kBf16
             ? cuda::launch_tokens_of_size<DType::kBf16>(p, stream)
             : cuda::launch_tokens_of_size<DType::kF16>(p, stream);
}

}  // namespace sdm::kda
