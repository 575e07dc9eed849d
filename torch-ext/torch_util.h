// SPDX-License-Identifier: Apache-2.0
//! @file The only file that touches the raw C shims of torch: dtype map, argument checks,
//! allocation, the parallel loop, and in a CUDA build the current stream and the device guard.
//!
//! The checks here are the second line: readable TypeError and ValueError come from the Python
//! wrappers, these keep a direct call of an op from reading memory that is not there. They throw
//! std::runtime_error, which torch turns into RuntimeError. Check everything before a parallel
//! loop: the text of an exception thrown inside one is lost.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

#include "sdm_kernels/common/dtype.h"
#include "sdm_kernels/cpu/parallel.h"

namespace sdm::ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---------------------------------------------------------------------------------------------
// Errors

// Text is put together without streams: those read the locale, whose state a library that carries
// its own copy of the C++ runtime would mix up with that of the process.

inline void append(std::string& text, const char* part) {
  text += part;
}

inline void append(std::string& text, const std::string& part) {
  text += part;
}

template <typename Int, typename = std::enable_if_t<std::is_integral_v<Int>>>
inline void append(std::string& text, Int part) {
  text += std::to_string(part);
}

// Throws std::runtime_error with the arguments (texts and integers) one after the other.
template <typename... Args>
[[noreturn]] inline void fail(const Args&... args) {
  std::string message;
  (append(message, args), ...);
  throw std::runtime_error(message);
}

// check(ok, "sdm_step_: k must be positive, got ", k): joined on failure only, but the arguments
// themselves are evaluated always.
template <typename... Args>
inline void check(bool ok, const Args&... args) {
  if (!ok) {
    fail(args...);
  }
}

inline std::string shape_string(const int64_t* sizes, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) {
    text += i == 0 ? "" : ", ";
    text += sizes[i] < 0 ? "*" : std::to_string(sizes[i]);
  }
  return text + "]";
}

inline std::string shape_string(const Tensor& t) {
  const auto sizes = t.sizes();
  return shape_string(sizes.data(), sizes.size());
}

// ---------------------------------------------------------------------------------------------
// Dtypes

// The dtype of the kernels for a floating tensor; anything else fails naming the argument.
inline DType dtype_of(const char* op, const char* name, const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::BFloat16:
      return DType::kBf16;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::Double:
      return DType::kF64;
    default:
      fail(op, ": ", name, " must be float32, bfloat16, float16 or float64");
  }
}

inline ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ScalarType::Float;
    case DType::kBf16:
      return ScalarType::BFloat16;
    case DType::kF16:
      return ScalarType::Half;
    case DType::kF64:
      return ScalarType::Double;
  }
  fail("unknown dtype of the kernels");
}

// True for int64 ids, false for int32 ones; anything else fails naming the argument.
inline bool is_int64(const char* op, const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  check(
      type == ScalarType::Int || type == ScalarType::Long, op, ": ", name, " must be int32 or int64"
  );
  return type == ScalarType::Long;
}

inline void check_scalar_type(
    const char* op, const char* name, const Tensor& t, ScalarType wanted
) {
  check(
      t.scalar_type() == wanted,
      op,
      ": ",
      name,
      " has the wrong dtype (torch scalar type ",
      static_cast<int>(t.scalar_type()),
      ", wanted ",
      static_cast<int>(wanted),
      ")"
  );
}

// ---------------------------------------------------------------------------------------------
// Shapes and layouts

// Matches any size in check_shape.
constexpr int64_t kAnySize = -1;

inline void check_dim(const char* op, const char* name, const Tensor& t, int64_t dim) {
  if (t.dim() != dim) {
    fail(op, ": ", name, " must have ", dim, " dimensions, got shape ", shape_string(t));
  }
}

inline void check_shape(
    const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> wanted
) {
  const auto sizes = t.sizes();
  bool equal = sizes.size() == wanted.size();
  for (size_t i = 0; equal && i < wanted.size(); ++i) {
    const int64_t want = wanted.begin()[i];
    equal = want == kAnySize || want == sizes[i];
  }
  if (!equal) {
    const std::string text = shape_string(wanted.begin(), wanted.size());
    fail(op, ": ", name, " must have shape ", text, ", got ", shape_string(t));
  }
}

// The last dimension is dense: its stride is 1, or it has at most one element; or there is none at
// all (an empty expanded tensor counts as contiguous for torch, so the caller could not make it
// dense).
inline void check_last_dense(const char* op, const char* name, const Tensor& t) {
  check(
      t.dim() > 0 && (t.size(-1) <= 1 || t.stride(-1) == 1 || t.numel() == 0),
      op,
      ": the last dimension of ",
      name,
      " must be contiguous"
  );
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  check(t.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline void check_same_device(
    const char* op, const char* name, const Tensor& t, const Tensor& like
) {
  check(
      t.is_cpu() == like.is_cpu() && t.get_device_index() == like.get_device_index(),
      op,
      ": ",
      name,
      " must be on the device of the other tensors"
  );
}

// ---------------------------------------------------------------------------------------------
// Allocation: uninitialised, contiguous, on the device of `like`

inline Tensor new_empty(
    const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype
) {
  return torch::stable::new_empty(
      like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), dtype
  );
}

inline Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  return new_empty(like, sizes, scalar_type_of(dtype));
}

inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType dtype) {
  return torch::stable::new_empty(
      like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), dtype
  );
}

inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& sizes, DType dtype) {
  return new_empty(like, sizes, scalar_type_of(dtype));
}

// The same, filled with zeros.
inline Tensor new_zeros(
    const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype
) {
  Tensor t = new_empty(like, sizes, dtype);
  torch::stable::zero_(t);
  return t;
}

inline Tensor new_zeros(const Tensor& like, std::initializer_list<int64_t> sizes, DType dtype) {
  return new_zeros(like, sizes, scalar_type_of(dtype));
}

// ---------------------------------------------------------------------------------------------
// Threads

namespace detail {

struct LoopBody {
  void (*body)(void* ctx, int64_t begin, int64_t end);
  void* ctx;
};

inline void run_torch_loop(
    int64_t begin,
    int64_t end,
    int64_t grain,
    void (*body)(void* ctx, int64_t begin, int64_t end),
    void* ctx
) {
  LoopBody loop{body, ctx};
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      begin,
      end,
      grain,
      [](int64_t b, int64_t e, void* opaque) {
        const LoopBody* inner = static_cast<const LoopBody*>(opaque);
        inner->body(inner->ctx, b, e);
      },
      &loop
  ));
}

}  // namespace detail

// The parallel loop of the CPU kernels on torch's own threads: respects torch.set_num_threads.
inline cpu::ParallelFor torch_parallel_for() {
  uint32_t num_threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&num_threads));
  cpu::ParallelFor loop{};
  loop.run = &detail::run_torch_loop;
  loop.num_threads = static_cast<int>(num_threads);
  return loop;
}

// ---------------------------------------------------------------------------------------------
// CUDA

#ifdef USE_CUDA
using torch::stable::accelerator::DeviceGuard;

// The stream that torch uses now on the device of `t`.
inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Turns the result of a launcher into an exception.
inline void check_cuda(const char* op, cudaError_t error) {
  check(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}
#endif

}  // namespace sdm::ext
