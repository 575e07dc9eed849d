#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the libraries below build/ against the stable ABIs of Python, torch and manylinux.

A local build may use the few symbols of newer system libraries listed below, because it is made
on the developer's machine; builds by kernel-builder may not, and have an old C library to link.
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernel_abi_check

ROOT = Path(__file__).resolve().parent.parent

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"
# Symbol -> why a local build may need it.
_STREAM = "torch's headers make one, and libstdc++ 9 and later construct it out of line (3.4.26)"
LOCAL_ONLY = {
    "__libc_single_threaded": "libstdc++ 11 and later read it in std::shared_ptr (glibc 2.32)",
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev": _STREAM,
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev": _STREAM,
}


def check(path: Path) -> list[str]:
    library = kernel_abi_check.ObjectFile(path)
    problems = [
        f"not of Python's stable ABI {PYTHON_ABI}: {s}"
        for s in library.check_python_abi(PYTHON_ABI)
    ]
    for symbol in library.check_manylinux(MANYLINUX):
        if symbol.name not in LOCAL_ONLY:
            problems.append(
                f"newer than {MANYLINUX}: {symbol.name} ({symbol.dep} {symbol.version})"
            )
    return problems


def main() -> int:
    libraries = sorted((ROOT / "build").glob("*/*.so"))
    if not libraries:
        print("check_abi: nothing built; run make build")
        return 1
    failed = False
    for path in libraries:
        problems = check(path)
        failed = failed or bool(problems)
        for problem in problems:
            print(f"check_abi: {path.name}: {problem}")
        if not problems:
            print(f"check_abi: {path.parent.name} keeps Python {PYTHON_ABI} and {MANYLINUX}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
