// SPDX-License-Identifier: Apache-2.0
//! @file Which instruction set the CPU kernels run with: the best one this machine has, found once.
//! Every choice gives the same bits (vec-inl.h).
#pragma once

namespace sdm {
namespace cpu {

enum class Isa { kPlain, kAvx2, kAvx512 };

// The environment variable SDM_FORCE_ISA (plain, avx2 or avx512; read once) selects a lower one for
// tests; a request beyond what the machine has is ignored.
Isa active_isa();

}  // namespace cpu
}  // namespace sdm
