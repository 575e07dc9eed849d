// SPDX-License-Identifier: Apache-2.0
//! @file Where an op runs. The ops are written once, as templates over one of these types
//! (sdm_ops.h, kda_ops.h, topk_ops.h); overloads for it launch the kernels (*_cpu.cpp,
//! *_cuda.cpp).
#pragma once

#include <cstddef>
#include <optional>

#include "torch-ext/torch_util.h"

#ifdef CUDA_KERNEL
#include "sdm_kernels/cuda/device_integers.h"
#endif

namespace sdm::ext {

struct Cpu {
  static constexpr bool kLogsRows = false;  // SdmSaveArgs

  explicit Cpu(const Tensor&) {}
};

#ifdef CUDA_KERNEL
// The device of a tensor, the current one while this lives.
class Cuda {
 public:
  static constexpr bool kLogsRows = true;

  explicit Cuda(const Tensor& like) : like_(like), guard_(like.get_device_index()) {}

  cudaStream_t stream() const { return current_stream(like_); }

  // Freed when the call returns; torch's allocator keeps the order of the stream.
  Tensor workspace(size_t bytes) const {
    return new_empty(like_, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  }

  // Integers that the host never reads.
  DeviceIntegers integers(const char* op, const char* name, const std::optional<Tensor>& t) const {
    if (!t.has_value()) {
      return {nullptr, false};
    }
    check_same_device(op, name, *t, like_);
    check_contiguous(op, name, *t);
    return {t->const_data_ptr(), is_int64(op, name, *t)};
  }

 private:
  const Tensor& like_;
  DeviceGuard guard_;
};

// Launches with a workspace of the size that `size` names.
template <typename Params>
void launch_in_workspace(
    const Cuda& backend,
    const char* op,
    const Params& params,
    cudaError_t (*size)(const Params&, size_t* bytes),
    cudaError_t (*launch)(const Params&, void* workspace, cudaStream_t)
) {
  size_t bytes = 0;
  check_cuda(op, size(params, &bytes));
  Tensor workspace = backend.workspace(bytes);
  check_cuda(op, launch(params, workspace.mutable_data_ptr(), backend.stream()));
}
#endif

}  // namespace sdm::ext
