// SPDX-License-Identifier: Apache-2.0
//! @file Outcome of host-side planning and CPU launches; exceptions exist only in torch-ext.
#pragma once

namespace sdm {

enum class [[nodiscard]] Status {
  kOk,
  kOutOfMemory,
  kTooLarge,
  kBadSequences,
  kBadStateIndices,
};

inline const char* status_message(Status status) {
  switch (status) {
    case Status::kOk:
      return "ok";
    case Status::kOutOfMemory:
      return "not enough memory for the working buffers";
    case Status::kTooLarge:
      return "a size is beyond what the kernels address";
    case Status::kBadSequences:
      return "cu_seqlens must start at 0, never decrease and end at the number of tokens";
    case Status::kBadStateIndices:
      return "state_indices must be -1 or distinct rows of state";
  }
  return "unknown status";
}

}  // namespace sdm
