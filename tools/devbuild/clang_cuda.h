// SPDX-License-Identifier: Apache-2.0
//! @file
// Intrinsics of nvcc that clang's CUDA headers lack. Included before every file that clang
// compiles.
#pragma once

#if defined(__clang__) && defined(__CUDA__)
// Stores that leave the first-level cache alone.
static __device__ __forceinline__ void __stcg(uint4* at, uint4 x) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)),
               "r"(x.x),
               "r"(x.y),
               "r"(x.z),
               "r"(x.w)
               : "memory");
}

static __device__ __forceinline__ void __stcg(float4* at, float4 x) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)),
               "f"(x.x),
               "f"(x.y),
               "f"(x.z),
               "f"(x.w)
               : "memory");
}

static __device__ __forceinline__ void __stcg(float2* at, float2 x) {
  asm volatile("st.global.cg.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(at)),
               "f"(x.x),
               "f"(x.y)
               : "memory");
}

static __device__ __forceinline__ void __stcg(unsigned* at, unsigned x) {
  asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "r"(x) : "memory");
}

// Stores that are the first to leave the caches.
static __device__ __forceinline__ void __stcs(uint4* at, uint4 x) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)),
               "r"(x.x),
               "r"(x.y),
               "r"(x.z),
               "r"(x.w)
               : "memory");
}

static __device__ __forceinline__ void __stcs(unsigned* at, unsigned x) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "r"(x) : "memory");
}

static __device__ __forceinline__ void __stcs(unsigned short* at, unsigned short x) {
  asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(__cvta_generic_to_global(at)), "h"(x) : "memory");
}
#endif
