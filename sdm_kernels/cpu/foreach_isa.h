// SPDX-License-Identifier: Apache-2.0
//! @file Compiles one algorithm once per instruction set.
//!
//! A .cpp file includes every header it needs, defines SDM_ISA_SOURCE as the path of an "-inl.h"
//! file and includes this one. The -inl.h file puts everything into
//! `namespace sdm { namespace SDM_ISA { ... } }` and includes only other -inl.h files. The result
//! is up to three copies, sdm::isa_plain, sdm::isa_avx2 and sdm::isa_avx512, of which
//! SDM_ISA_DISPATCH(function) picks one at run time. -inl.h files have no include guard; the macros
//! SDM_ISA_IS_AVX512 and SDM_ISA_IS_AVX2 say which copy is being compiled. No header of the
//! standard library may be included first inside: its inline functions would be compiled for the
//! wrong target.
//!
//! Meant to be included several times in a program, once per .cpp file.

#ifndef SDM_ISA_SOURCE
#error "define SDM_ISA_SOURCE before including foreach_isa.h"
#endif

#define SDM_ISA isa_plain
#define SDM_ISA_IS_AVX512 0
#define SDM_ISA_IS_AVX2 0
#include SDM_ISA_SOURCE
#undef SDM_ISA
#undef SDM_ISA_IS_AVX512
#undef SDM_ISA_IS_AVX2

#if defined(__x86_64__)

#define SDM_ISA isa_avx2
#define SDM_ISA_IS_AVX512 0
#define SDM_ISA_IS_AVX2 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#include SDM_ISA_SOURCE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef SDM_ISA
#undef SDM_ISA_IS_AVX512
#undef SDM_ISA_IS_AVX2

#define SDM_ISA isa_avx512
#define SDM_ISA_IS_AVX512 1
#define SDM_ISA_IS_AVX2 0
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function                                                          \
)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#include SDM_ISA_SOURCE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef SDM_ISA
#undef SDM_ISA_IS_AVX512
#undef SDM_ISA_IS_AVX2

#define SDM_ISA_DISPATCH(function)                                                     \
  (::sdm::cpu::active_isa() == ::sdm::cpu::Isa::kAvx512 ? &::sdm::isa_avx512::function \
   : ::sdm::cpu::active_isa() == ::sdm::cpu::Isa::kAvx2 ? &::sdm::isa_avx2::function   \
                                                        : &::sdm::isa_plain::function)

#else

#define SDM_ISA_DISPATCH(function) (&::sdm::isa_plain::function)

#endif

#undef SDM_ISA_SOURCE
