// SPDX-License-Identifier: Apache-2.0
//! @file The x86 intrinsics, where there are any.
#pragma once

#if defined(__x86_64__)
// GCC 12 reports the "undefined" vectors inside its own AVX-512 header as maybe uninitialised.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
