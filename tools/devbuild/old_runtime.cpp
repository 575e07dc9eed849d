// SPDX-License-Identifier: Apache-2.0
//! @file
// What g++ 9 and newer would take from a C or C++ library that is newer than manylinux_2_28.
//
// A development build links this file, so that a library made with today's compiler loads where the
// oldest supported system libraries are. The names are hidden: they are for this library alone.
#include <new>
#include <sstream>

#define SDM_HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32: whether the process has one thread only, which lets std::shared_ptr count without
// atomics. "No" is always right.
extern "C" SDM_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// libstdc++ 9: the default constructors of string streams, which torch's headers use for error
// texts. The constructors that take a mode are older.
SDM_HIDDEN void construct_ostringstream(void* at) __asm__(
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev"
);

void construct_ostringstream(void* at) {
  ::new (at) std::ostringstream(std::ios_base::out);
}

SDM_HIDDEN void construct_stringstream(void* at) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev"
);

void construct_stringstream(void* at) {
  ::new (at) std::stringstream(std::ios_base::in | std::ios_base::out);
}
