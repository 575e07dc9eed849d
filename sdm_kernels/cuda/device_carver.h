// SPDX-License-Identifier: Apache-2.0
//! @file Cuts arrays off a workspace in device memory, on the host.
#pragma once

#include <cstdint>

#include "sdm_kernels/common/hd.h"

namespace sdm {

// Hands out 256-byte aligned pieces of the workspace; with a null block it only counts.
class DeviceCarver {
 public:
  explicit DeviceCarver(void* block) : block_(static_cast<char*>(block)) {}

  void* take(int64_t bytes) {
    const int64_t begin = used_;
    used_ += round_up(bytes, 256);
    return block_ == nullptr ? nullptr : block_ + begin;
  }

  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take(count * static_cast<int64_t>(sizeof(T))));
  }

  // The same, where the array tells the type.
  template <typename T>
  void take(int64_t count, T** array) {
    *array = take<T>(count);
  }

  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

}  // namespace sdm
