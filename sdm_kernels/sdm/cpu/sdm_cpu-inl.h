// SPDX-License-Identifier: Apache-2.0
//! @file The CPU kernels of one instruction set, in the order of their dependence.

// clang-format off
#include "sdm_kernels/cpu/vec-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_rows-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_entries-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_save-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_banks-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_fwd-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_fwd_loop-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_bwd-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_pairs-inl.h"
#include "sdm_kernels/sdm/cpu/sdm_bwd_loop-inl.h"
// clang-format on
