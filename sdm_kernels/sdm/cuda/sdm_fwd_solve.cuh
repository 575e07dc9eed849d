// SPDX-License-Identifier: Apache-2.0
//! @file Forward, second stage of a chunk: errors and outputs from what its tokens retrieved.
//!
//! With u = v - retrieved: e = inverse * u, out = readings + (qk * inverse) * u (sdm_merge.cu), so
//! that both products share u and nothing waits in between. A block takes all tokens of a few
//! columns, which never mix; bits do not depend on how many. Bytes per block: the triangles of both
//! matrices, 139 KB each at Cp = 256, from L2.
#pragma once

#include "sdm_kernels/sdm/cuda/sdm_product.cuh"

namespace sdm::cuda {

template <int kColumns>
constexpr int64_t fwd_solve_smem(int64_t Cp) {
  return FragmentRows<kColumns>::bytes(Cp);
}

struct FwdSolveBlocks {
  MatrixBlock<false> inverse, product;
};

// kTerms: 1 for 16-bit banks, 3 for float32 (mma.cuh).
template <int kTerms, int kColumns>
__global__ void __launch_bounds__(kSolveThreads, 1) sdm_fwd_solve_kernel(
    const __grid_constant__ SdmChunkParams p
) {
  extern __shared__ __align__(16) float smem[];
  using Shape = ProductShape<kTerms, kColumns>;
  using Rows = FragmentRows<kColumns>;
  using Task = SolveTask<Shape>;
  using Block = MatrixBlock<false>;
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
  const int64_t scratch = c.scratch(p) + at.first;
  // Blocks of both matrices; those of the first task are on their way while the rows are fetched.
  StepRing<Shape::kDepth, FwdSolveBlocks> ring;
  const auto steps_of = [&](const Task& task) {
    return task.block < row_blocks ? task.block + 1 : 0;
  };
  const auto loader = [&](const Task& task) {
    const float* inverse_lane = Block::lane(inverse, Cp, task.block * 16, 0);
    const float* product_lane = Block::lane(product, Cp, task.block * 16, 0);
    return [=](FwdSolveBlocks* blocks, int step) {
      blocks->inverse.load(inverse_lane, Cp, step);
      blocks->product.load(product_lane, Cp, step);
    };
  };
  ring.start(steps_of(Task(0)), loader(Task(0)));
  wait_for_previous();
  const auto first_column_of = [](const Task& task) {
    return task.first_tile * 8 + 2 * (static_cast<int>(threadIdx.x) % 4);
  };
  const auto load_readings = [&](const Task& task, float (&out)[Shape::kTiles][4]) {
    const int row = task.block * 16 + Block::row(0), column = first_column_of(task);
    const float* from = p.y + scratch + row * D + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = row + 8 * half < num_tokens;
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        const int count = inside ? at.columns - column - n * 8 : 0;
        const float* two_from = from + (half != 0 ? 8 * D : 0) + n * 8;
        float2 two = make_float2(0.0f, 0.0f);
        if (vectors && count >= 2) {
          two = __ldcg(reinterpret_cast<const float2*>(two_from));
        } else if (count > 0) {
          two.x = __ldcg(two_from);
          two.y = count > 1 ? __ldcg(two_from + 1) : 0.0f;
        }
        out[n][2 * half] = two.x;
        out[n][2 * half + 1] = two.y;
      }
    }
  };
  float out[Shape::kTiles][4];
  load_readings(Task(0), out);
  const Rows u(smem);
  const bool found = u.template load<kTerms>(
      float_rows(p.x),
      [&](int i) { return scratch + i * D; },
      0,
      num_tokens,
      row_blocks * 16,
      at.columns,
      vectors
  );
  const bool in_errors = p.errors != nullptr && p.log.rows != nullptr;  // the update reads those
  const bool bad = __syncthreads_or(found) != 0;  // all is there, and p.x may be overwritten

#pragma unroll 1
  for (int j = 0; j < Shape::kTasks; ++j) {
    const Task task(j);
    const int block = task.block, first_tile = task.first_tile;
    if (block >= row_blocks) {
      continue;
    }
    const int first_column = first_column_of(task);
    float errors[Shape::kTiles][4] = {};
    if (j > 0) {
      load_readings(task, out);
    }
    const auto load = loader(task);
    if (j > 0) {
      ring.start(steps_of(task), load);
    }
    const auto run = [&](auto with_bad) {
      ring.run(steps_of(task), load, [&](const FwdSolveBlocks& blocks, int step) {
        float4 rows[Shape::kTiles];
#pragma unroll
        for (int n = 0; n < Shape::kTiles; ++n) {
          rows[n] = u.template fragment<decltype(with_bad)::value>(step, first_tile + n);
        }
        blocks.inverse.template multiply<kTerms>(rows, errors);
        blocks.product.template multiply<kTerms>(rows, out);
      });
    };
    if (bad) {
      run(std::true_type());
    } else {
      run(std::false_type());
    }
    const int first_row = block * 16 + Block::row(0);
    const int64_t in_scratch = scratch + first_row * D + first_column;
    const int64_t in_tokens = token_row(p.dims, c.place, first_row) + at.first + first_column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      if (row >= num_tokens) {
        continue;
      }
      const int64_t x_row = in_scratch + half * 8 * D;
      const int64_t token = in_tokens + half * 8 * D * p.dims.H;
#pragma unroll
      for (int n = 0; n < Shape::kTiles; ++n) {
        const int column = first_column + n * 8, count = at.columns - column;
        float e[2] = {errors[n][2 * half], errors[n][2 * half + 1]};
        float y[2] = {out[n][2 * half], out[n][2 * half + 1]};
        if (bad) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            e[i] = add_bad_terms<false>(inverse, Cp, u, 0, num_tokens, row, column + i, e[i]);
            y[i] = add_bad_terms<false>(product, Cp, u, 0, num_tokens, row, column + i, y[i]);
          }
        }
        if (!in_errors) {
          store_two(p.x, DType::kF32, x_row + n * 8, count, vectors, e);
        }
        if (p.errors != nullptr) {
          store_two(p.errors, DType::kF32, token + n * 8, count, vectors, e);
        }
        store_two(p.out, p.v.dtype, token + n * 8, count, vectors, y);
      }
    }
  }
}

}  // namespace sdm::cuda
