// SPDX-License-Identifier: Apache-2.0
//! @file The top-k forward on the CPU: blocks of rows over threads, one scratch per worker.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/common/order.h"
#include "sdm_kernels/cpu/intrinsics.h"
#include "sdm_kernels/cpu/isa.h"
#include "sdm_kernels/cpu/parallel.h"
#include "sdm_kernels/topk/cpu/topk_choose.h"
#include "sdm_kernels/topk/cpu/topk_f64.h"
#include "sdm_kernels/topk/cpu/topk_plan.h"
#include "sdm_kernels/topk/cpu/topk_scratch.h"
#include "sdm_kernels/topk/topk_launch.h"

#define SDM_ISA_SOURCE "sdm_kernels/topk/cpu/topk_fwd-inl.h"
#include "sdm_kernels/cpu/foreach_isa.h"

namespace sdm {
namespace {

// Rows claimed at a time: tens of microseconds of work, against one atomic addition.
constexpr int64_t kBlockRows = 32;

int64_t block_rows(const TopkPlan& plan) {
  return std::max<int64_t>(1, std::min(kBlockRows, 64 * 1024 / plan.num_columns));
}

template <typename F>
void for_each_block(
    const TopkFwdParams& params, const cpu::ParallelFor& parallel, int64_t rows, F&& f
) {
  cpu::for_each_item(parallel, ceil_div(params.num_rows, rows), [&](int64_t worker, int64_t block) {
    f(worker, block * rows, std::min(params.num_rows, (block + 1) * rows));
  });
}

template <typename Id, typename Function>
Status run_float(
    const TopkFwdParams& params,
    const TopkPlan& plan,
    const cpu::ParallelFor& parallel,
    Function select_rows
) {
  const int64_t rows = block_rows(plan);
  const int64_t workers = cpu::num_workers(parallel, ceil_div(params.num_rows, rows));
  TopkScratch<Id> probe{};
  const int64_t bytes = carve_topk_scratch(plan, nullptr, &probe);
  std::unique_ptr<TopkScratch<Id>[]> scratch(new (std::nothrow) TopkScratch<Id>[workers]);
  std::unique_ptr<char[]> memory(new (std::nothrow) char[bytes * workers + 64]);
  if (scratch == nullptr || memory == nullptr) {
    return Status::kOutOfMemory;
  }
  char* aligned = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  for (int64_t worker = 0; worker < workers; ++worker) {
    carve_topk_scratch(plan, aligned + worker * bytes, &scratch[worker]);
  }
  for_each_block(params, parallel, rows, [&](int64_t worker, int64_t begin, int64_t end) {
    select_rows(params, plan, scratch[worker], begin, end);
  });
  return Status::kOk;
}

template <typename Id>
Status run_double(
    const TopkFwdParams& params, const TopkPlan& plan, const cpu::ParallelFor& parallel
) {
  const int64_t rows = block_rows(plan);
  const int64_t workers = cpu::num_workers(parallel, ceil_div(params.num_rows, rows));
  std::vector<TopkScratchF64> scratch;
  try {
    scratch.resize(static_cast<size_t>(workers));
    for (TopkScratchF64& one : scratch) {
      one.reserve(plan);
    }
  } catch (const std::bad_alloc&) {
    return Status::kOutOfMemory;
  }
  for_each_block(params, parallel, rows, [&](int64_t worker, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      select_row_f64(
          plan,
          static_cast<const double*>(params.scores) + params.scores_rows.offset(row),
          scratch[static_cast<size_t>(worker)],
          static_cast<double*>(params.values) + row * params.num_selected,
          static_cast<Id*>(params.indices) + row * params.num_selected
      );
    }
  });
  return Status::kOk;
}

}  // namespace

Status topk_fwd_cpu(const TopkFwdParams& params, const cpu::ParallelFor& parallel) {
  if (params.num_rows == 0) {
    return Status::kOk;
  }
  const TopkPlan plan = make_topk_plan(params);
  if (plan.max_width > INT32_MAX - 2 * kTopkMaxLanes) {
    return Status::kTooLarge;  // columns are 32-bit inside a factor
  }
  if (params.dtype == DType::kF64) {
    return params.wide_ids ? run_double<int64_t>(params, plan, parallel)
                           : run_double<int32_t>(params, plan, parallel);
  }
  if (params.wide_ids) {
    return run_float<int64_t>(params, plan, parallel, SDM_ISA_DISPATCH(topk_impl::topk_rows_wide));
  }
  return run_float<int32_t>(params, plan, parallel, SDM_ISA_DISPATCH(topk_impl::topk_rows_narrow));
}

}  // namespace sdm
