#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the libraries of a build folder: Python's stable ABI, manylinux, and what they need.

Nothing is let through: a development build keeps the same rules as a published one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kernel_abi_check

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devbuild import binary  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

PYTHON_ABI = "3.9"
MANYLINUX = "manylinux_2_28"


def check(path: Path) -> list[str]:
    library = kernel_abi_check.ObjectFile(path)
    problems = [
        f"not of Python's stable ABI {PYTHON_ABI}: {s}"
        for s in library.check_python_abi(PYTHON_ABI)
    ]
    for symbol in library.check_manylinux(MANYLINUX):
        problems.append(f"newer than {MANYLINUX}: {symbol.name} ({symbol.dep} {symbol.version})")
    for name in binary.needed(path):
        if not binary.ALLOWED_LIBRARIES.fullmatch(name):
            problems.append(f"needs {name}, which torch does not bring")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build")
    libraries = sorted(parser.parse_args().folder.glob("*/*.so"))
    if not libraries:
        print("check_abi: nothing built; run make build")
        return 1
    failed = False
    for path in libraries:
        problems = check(path)
        failed = failed or bool(problems)
        for problem in problems:
            print(f"check_abi: {path.parent.name}: {problem}")
        if not problems:
            print(f"check_abi: {path.parent.name} keeps Python {PYTHON_ABI} and {MANYLINUX}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
