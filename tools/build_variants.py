#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds every variant that this machine can make, tests them, and writes down what came out.

Takes long: each CUDA version compiles every kernel for every card. The test suite's part of it is
tests/test_variants.py, which runs at the end on all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devbuild import binary, identity, toolchain  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CUDA_VERSIONS = ("12.6", "12.8", "13.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cuda",
        action="append",
        choices=[*CUDA_VERSIONS, "none"],
        help="build only these CUDA versions, besides the CPU variant; may be repeated",
    )
    parser.add_argument("--arch", action="append", default=[], help="as for dev_build.py")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "_cmake_build" / "variants")
    parser.add_argument("--record", type=Path, help="JSON file to write what was built to")
    arguments = parser.parse_args()
    started = time.strftime("%Y-%m-%d", time.gmtime())
    chosen = [v for v in CUDA_VERSIONS if arguments.cuda is None or v in arguments.cuda]
    built = [build(None, arguments), *(build(version, arguments) for version in chosen)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_variants.py"]
    environment = dict(
        os.environ,
        SDM_VARIANTS=str(arguments.out),
        SDM_VARIANT_NAMES=" ".join(variant["name"] for variant in built),
        LOCAL_KERNELS=f"org/sparse-delta-memory={arguments.out}",
    )
    tests = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    print(tests.stdout)
    if arguments.record:
        record = {
            "date": started,
            "source": identity.git_status(ROOT),
            "command": " ".join(["tools/build_variants.py", *sys.argv[1:]]),
            "system": {
                "machine": platform.machine(),
                "c library": " ".join(platform.libc_ver()),
                "g++": _first_line([toolchain.find_cxx(), "--version"]),
                "torch": toolchain.find_torch().version,
            },
            "variants": built,
            "tests": {"passed": tests.returncode == 0, "said": tests.stdout.splitlines()[-1]},
        }
        arguments.record.write_text(json.dumps(record, indent=2) + "\n")
    return tests.returncode


def build(version: str | None, arguments: argparse.Namespace) -> dict:
    """Makes one variant; returns what is worth recording of it."""
    tools = ROOT / "tools"
    command = [sys.executable, str(tools / "dev_build.py"), "--jobs", str(arguments.jobs)]
    command += ["--out", str(arguments.out)]
    if version is None:
        command += ["--backend", "cpu"]
    else:
        fetched = subprocess.run(
            [sys.executable, str(tools / "fetch_toolkit.py"), version], check=False
        )
        if fetched.returncode:
            raise SystemExit(f"build_variants: no toolkit for CUDA {version}")
        command += ["--cuda", version]
        for arch in arguments.arch:
            command += ["--arch", arch]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    sys.stdout.write(done.stdout)
    name = done.stdout.split("dev_build: ")[-1].split()[0]
    (library,) = (arguments.out / name).glob("*.so")
    metadata = json.loads((arguments.out / name / "metadata.json").read_text())
    return {
        "name": name,
        "id": metadata["id"],
        "archs": metadata["backend"].get("archs", []),
        "compiler": _cuda_compiler(version) if version else "g++",
        "needs": binary.needed(library),
        "bytes": library.stat().st_size,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
    }


def _cuda_compiler(version: str) -> str:
    cuda = toolchain.find_cuda_of(ROOT, version)
    if cuda.clang:
        ptxas = _first_line([str(cuda.home / "bin" / "ptxas"), "--version"], "release")
        return f"{_first_line([str(cuda.clang), '--version'])}, ptxas {ptxas}"
    return "nvcc " + _first_line([str(cuda.nvcc), "--version"], "release")


def _first_line(command: list[str], word: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if word in line)


if __name__ == "__main__":
    sys.exit(main())
