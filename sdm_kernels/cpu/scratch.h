// SPDX-License-Identifier: Apache-2.0
//! @file Working memory of a CPU call: one block, carved into arrays by a first pass that only adds
//! up sizes and a second that hands out pointers.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "sdm_kernels/common/hd.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sdm {
namespace cpu {

// Asks the kernel for 2 MiB pages on the whole pages inside [data, data + bytes). Gathers of random
// rows from a bank of some megabytes are otherwise bound by address translation. Only a hint.
inline void hint_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  if (begin < end) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

// Hands out aligned pieces of a block; with a null block it only counts.
class Carver {
 public:
  explicit Carver(void* block) : block_(static_cast<char*>(block)) {}

  template <typename T>
  T* take(int64_t count) {
    const int64_t begin = used_;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + begin);
  }

  int64_t used() const { return used_; }

  static constexpr int64_t kAlignment = 64;  // one cache line, one vector

 private:
  char* block_;
  int64_t used_ = 0;
};

// Owns an aligned block; data() is null when the memory is not to be had.
class Block {
 public:
  explicit Block(int64_t bytes) {
    constexpr int64_t huge_page = int64_t{2} << 20;
    const int64_t alignment = bytes >= huge_page ? huge_page : Carver::kAlignment;
    const int64_t size = round_up(bytes > 0 ? bytes : 1, alignment);
    data_ = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(size));
    if (data_ != nullptr && alignment == huge_page) {
      hint_huge_pages(data_, size);
    }
  }

  ~Block() { std::free(data_); }

  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data() const { return data_; }

 private:
  void* data_;
};

}  // namespace cpu
}  // namespace sdm
