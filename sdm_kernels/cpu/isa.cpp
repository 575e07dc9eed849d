// SPDX-License-Identifier: Apache-2.0
//! @file Detection of the instruction set.

#include "sdm_kernels/cpu/isa.h"

#include <cstdlib>
#include <cstring>

namespace sdm {
namespace cpu {
namespace {

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kPlain;
#else
  return Isa::kPlain;
#endif
}

Isa choose_isa() {
  const Isa best = best_isa();
  const char* forced = std::getenv("SDM_FORCE_ISA");
  if (forced == nullptr) {
    return best;
  }
  if (std::strcmp(forced, "plain") == 0) {
    return Isa::kPlain;
  }
  if (std::strcmp(forced, "avx2") == 0 && best == Isa::kAvx512) {
    return Isa::kAvx2;
  }
  return best;
}

}  // namespace

Isa active_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

}  // namespace cpu
}  // namespace sdm
