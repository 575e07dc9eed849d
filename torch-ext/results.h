//! @file What the bindings of all ops share: new results, offsets, and integers that the host
//! reads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sdm_kernels/common/status.h"
#include "sdm_kernels/cpu/scratch.h"
#include "torch-ext/torch_util.h"

namespace sdm::ext {

// A new result. Large ones on the CPU get 2 MiB pages: touching fresh memory page by page would
// cost more than the work on it.
template <typename Type>
Tensor new_result(const Tensor& like, const std::vector<int64_t>& sizes, Type type) {
  Tensor t = new_empty(like, sizes, type);
  if (t.is_cpu()) {
    cpu::hint_huge_pages(t.mutable_data_ptr(), t.numel() * static_cast<int64_t>(t.element_size()));
  }
  return t;
}

// N: one less than the offsets, or the batch.
inline int64_t num_sequences(
    const char* op, const std::optional<Tensor>& cu_seqlens, int64_t batch
) {
  if (!cu_seqlens.has_value()) {
    return batch;
  }
  check_dim(op, "cu_seqlens", *cu_seqlens, 1);
  check_contiguous(op, "cu_seqlens", *cu_seqlens);
  check(cu_seqlens->size(0) >= 1, op, ": cu_seqlens must have at least one element");
  check(batch == 1, op, ": cu_seqlens needs a batch of 1, got ", batch);
  return cu_seqlens->size(0) - 1;
}

// Host copy of a short CPU tensor of int32 or int64.
inline std::vector<int64_t> host_integers(
    const char* op, const char* name, const std::optional<Tensor>& t
) {
  std::vector<int64_t> values;
  if (!t.has_value()) {
    return values;
  }
  check(t->is_cpu(), op, ": ", name, " must be on the CPU");
  const bool wide = is_int64(op, name, *t);
  const int64_t stride = t->stride(0);
  const void* data = t->const_data_ptr();
  for (int64_t i = 0; i < t->size(0); ++i) {
    values.push_back(
        wide ? static_cast<const int64_t*>(data)[i * stride]
             : static_cast<const int32_t*>(data)[i * stride]
    );
  }
  return values;
}

inline const int64_t* data_or_null(
    const std::vector<int64_t>& values, const std::optional<Tensor>& t
) {
  return t.has_value() ? values.data() : nullptr;
}

inline void check_status(const char* op, Status status) {
  check(status == Status::kOk, op, ": ", status_message(status));
}

}  // namespace sdm::ext
