// SPDX-License-Identifier: Apache-2.0
//! @file Backward, second stage of a chunk: gradients of the values.
//!
//! dv = inverse^T * gathered + (qk * inverse)^T * dy (sdm_merge.cu): both products add up in the
//! same registers, and nothing waits in between. A block takes all tokens of a few columns, which
//! never mix; bits do not depend on how many. Bytes per block: the triangles of both matrices, 139
//! KB each at Cp = 256, from L2.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_product.cuh"
#include "sdm_kernels/sdm/cuda/sdm_token_record.cuh"

namespace sdm::cuda {

template <int kColumns>
constexpr int64_t bwd_solve_smem(int64_t Cp) {
  return 2 * FragmentRows<kColumns>::bytes(Cp);
}

struct BwdSolveBlocks {
  MatrixBlock<true> inverse, product;
};

// Rows of dy of a block's columns into the token record.
template <int kColumns>
__device__ __forceinline__ void record_dy(
    const SdmChunkParams& p, const StreamChunk& c, int64_t first, int columns
) {
  constexpr int kPieces = kColumns / 8;
  const TokenRecord record(p, c.stream);
  const RowTiles cut(p.dims.D);
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  for (int at = static_cast<int>(threadIdx.x); at < num_tokens * kPieces; at += kSolveThreads) {
    const int row = at / kPieces, column = at % kPieces * 8;
    if (column < columns) {
      float x[8];
      load_token_columns<__half>(
          p.d_out, view_row(p.d_out, c.place, row), {first + column, 8}, p.token_vectors, x
      );
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        most = max(most, finite_bits(x[i]));
      }
      const uint32_t exponent = half_exponent(most);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] *= half_factor(exponent);
      }
      const int64_t to = p.records.Cp + row;
      const int piece = static_cast<int>(first + column) / 8;
      __stcg(
          reinterpret_cast<uint4*>(record.halves + to * p.dims.D + first + column),
          pack<__half>(x).raw
      );
      *record.scale(cut, static_cast<int>(to), piece) = static_cast<uint8_t>(exponent);
    }
  }
}

// kTerms: 1 for 16-bit banks, 3 for float32 (mma.cuh).
template <int kTerms, int kColumns>
__global__ void __launch_bounds__(kSolveThreads, 1) sdm_bwd_solve_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  using Shape = ProductShape<kTerms, kColumns>;
  using Rows = FragmentRows<kColumns>;
  using Task = SolveTask<Shape>;
  using Block = MatrixBlock<true>;
  const SolvePlace<kColumns> at(p);
  const StreamChunk c(p, at.stream);
  if (!c.exists) {
    wait_for_previous();
    return;
  }
  const int64_t D = p.dims.D;
  const int Cp = p.records.Cp;
  const int num_tokens = static_cast<int>(c.place.num_tokens);
  const int row_blocks = (num_tokens + 15) / 16;  // the matrices are zero beyond
  const float* inverse = p.records.inverse + c.q * Cp * Cp;
  const float* product = p.product + c.q * Cp * Cp;
  const bool vectors = p.token_vectors && at.columns == kColumns;
  // Blocks of both matrices; those of the first task are on their way while the rows are fetched.
  StepRing<Shape::kDepth, BwdSolveBlocks> ring;
  const auto steps_of = [&](const Task& task) {
    return task.block < row_blocks ? row_blocks - task.block : 0;
  };
  const auto loader = [&](const Task& task) {
    const float* inverse_lane = Block::lane(inverse, Cp, task.block * 16, task.block * 16);
    const float* product_lane = Block::lane(product, Cp, task.block * 16, task.block * 16);
    return [=](BwdSolveBlocks* blocks, int step) {
      blocks->inverse.load(inverse_lane, Cp, step);
      blocks->product.load(product_lane, Cp, step);
    };
  };
  ring.start(steps_of(Task(0)), loader(Task(0)));
  const bool recorded = kTerms == 1 && p.token_halves != nullptr;
  if (recorded) {  // the walk that read the record of another chunk is over: the gather waited
    record_dy<kColumns>(p, c, at.first, at.columns);
  }
  wait_for_previous();
  const Rows gathered(smem), dy(smem + Cp * kColumns);
  bool found = gathered.template load<kTerms>(
      float_rows(p.x),
      [&](int i) { return c.scratch(p) + at.first + i * D; },
      0,
      num_tokens,
      row_blocks * 16,
      at.columns,
      vectors
  );
  found |= dy.template load<kTerms>(
      p.d_out,
      [&](int i) { return view_row(p.d_out, c.place, i) + at.first; },
      0,
      num_tokens,
      row_blocks * 16,
      at.columns,
      vectors
  );
  const bool bad = __syncthreads_or(found) != 0;  // all is there

#pragma unroll 1
  for (int j = 0; j < Shape::kTasks; ++j) {
    const Task task(j);
    const int block = task.block, first_tile = task.first_tile;
    if (block >= row_blocks) {
      continue;
    }
    float acc[Shape::kTiles][4] = {};
    const auto load = loader(task);
    if (j > 0) {
      ring.start(steps_of(task), load);
    }
    const auto run = [&](auto with_bad) {
      constexpr bool kBad = decltype(with_bad)::value;
      ring.run(steps_of(task), load, [&](const BwdSolveBlocks& blocks, int step) {
        float4 rows[Shape::kTiles];
#pragma unroll
        for (int n = 0; n < Shape::kTiles; ++n) {
          rows[n] = gathered.template fragment<kBad>(block + step, first_tile + n);
        }
        blocks.inverse.template multiply<kTerms>(rows, acc);
#pragma unroll
        for (int n = 0; n < Shape::kTiles; ++n) {
          rows[n] = dy.template fragment<kBad>(block + step, first_tile + n);
        }
        blocks.product.template multiply<kTerms>(rows, acc);
      });
    };
    if (bad) {
      run(std::true_type());
    } else {
      run(std::false_type());
    }
#pragma unroll
    for (int n = 0; n < Shape::kTiles; ++n) {
      const int column = (first_tile + n) * 8 + 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block * 16 + Block::row(half);
        float dv[2] = {acc[n][2 * half], acc[n][2 * half + 1]};
        if (bad && row < num_tokens) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            dv[i] =
                add_bad_terms<true>(inverse, Cp, gathered, 0, num_tokens, row, column + i, dv[i]);
            dv[i] = add_bad_terms<true>(product, Cp, dy, 0, num_tokens, row, column + i, dv[i]);
          }
        }
        uint32_t most = 0;  // of the eight columns that four lanes have
        if (recorded) {
          most = max(finite_bits(dv[0]), finite_bits(dv[1]));
          most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
          most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
        }
        if (row >= num_tokens) {
          continue;
        }
        const int count = at.columns - column;
        const int64_t token = token_row(p.dims, c.place, row) + at.first + column;
        const int64_t kept = (c.q * p.dims.C + row) * D + at.first + column;
        store_two(p.d_v, p.d_out.dtype, token, count, vectors, dv);
        store_two(p.dots.d_v, DType::kF32, kept, count, vectors, dv);
        if (recorded && count > 0) {
          const TokenRecord record(p, c.stream);
          const uint32_t exponent = half_exponent(most);
          const float factor = half_factor(exponent);
          __stcg(
              reinterpret_cast<unsigned*>(record.halves + row * D + at.first + column),
              pack_pair(dv[0] * factor, dv[1] * factor, __half())
          );
          if (threadIdx.x % 4 == 0) {
            *record.scale(RowTiles(D), row, static_cast<int>(at.first + column) / 8) =
                static_cast<uint8_t>(exponent);
          }
        }
      }
    }
  }
}

}  // namespace sdm::cuda
