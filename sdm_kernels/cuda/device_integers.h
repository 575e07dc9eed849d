// SPDX-License-Identifier: Apache-2.0
//! @file A vector of integers in device memory, which the host never reads.
#pragma once

namespace sdm {

// int32 or int64; data null: absent.
struct DeviceIntegers {
  const void* data;
  bool is_int64;
};

}  // namespace sdm
