//! @file What the CUDA bindings of all ops share: integers that the host never reads, and the
//! workspace.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>

#include "sdm_kernels/cuda/device_integers.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

inline DeviceIntegers device_integers(
    const char* op, const char* name, const std::optional<Tensor>& t, const Tensor& like
) {
  if (!t.has_value()) {
    return {nullptr, false};
  }
  check_same_device(op, name, *t, like);
  check_contiguous(op, name, *t);
  return {t->const_data_ptr(), is_int64(op, name, *t)};
}

// Freed when the call returns; torch's allocator keeps the order of the stream.
inline Tensor new_workspace(const Tensor& like, size_t bytes) {
  return new_empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

}  // namespace sdm::ext
