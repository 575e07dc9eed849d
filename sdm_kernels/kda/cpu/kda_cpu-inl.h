// SPDX-License-Identifier: Apache-2.0
//! @file The CPU kernels of one instruction set, in the order of their dependence.

// clang-format off
#include "sdm_kernels/cpu/vec-inl.h"
#include "sdm_kernels/cpu/vec_math-inl.h"
#include "sdm_kernels/cpu/vec_tile-inl.h"
#include "sdm_kernels/kda/cpu/kda_rows-inl.h"
#include "sdm_kernels/kda/cpu/kda_gates-inl.h"
#include "sdm_kernels/kda/cpu/kda_tokens-inl.h"
#include "sdm_kernels/kda/cpu/kda_scan-inl.h"
#include "sdm_kernels/kda/cpu/kda_fwd-inl.h"
#include "sdm_kernels/kda/cpu/kda_bwd_scan-inl.h"
#include "sdm_kernels/kda/cpu/kda_bwd_block-inl.h"
#include "sdm_kernels/kda/cpu/kda_bwd-inl.h"
#include "sdm_kernels/kda/cpu/kda_step-inl.h"
#include "sdm_kernels/kda/cpu/kda_calls-inl.h"
// clang-format on
