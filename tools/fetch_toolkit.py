#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts a CUDA toolkit together from wheels of PyPI, for `dev_build.py --cuda X.Y`.

The wheels have exact versions and hashes (tools/toolkits/), for Linux on x86-64. Those of CUDA 12 lack
nvcc, so that its front end is a clang here, with the headers, ptxas and runtime of that CUDA.
This is the only tool here that uses the network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devbuild import toolchain  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "toolkits"
PARTS = ("bin", "include", "lib", "nvvm")

CLANG = """\
#!/bin/sh
exec "$(dirname "$0")/../zig/zig" clang "$@"
"""
# clang's own header includes this file of cuRAND for a type that nothing here uses.
CURAND = "// Empty: stands for the header of cuRAND that clang includes.\n"


def main() -> int:
    known = sorted(path.stem for path in LISTS.glob("[0-9]*.txt"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", choices=known)
    version = parser.parse_args().version
    home = toolchain.fetched_toolkit(ROOT, version)
    if home.exists():
        print(f"fetch_toolkit: {home.relative_to(ROOT)} is there")
        return 0
    home.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=home.parent))
    try:
        assemble(version, fresh)
        fresh.rename(home)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    print(f"fetch_toolkit: {home.relative_to(ROOT)} made")
    return 0


def assemble(version: str, home: Path) -> None:
    """Makes a folder as the CUDA installer would: bin, include, lib, nvvm side by side."""
    wheels = _download(LISTS / f"{version}.txt", home / "wheels")
    # CUDA 12 has a folder for each wheel, CUDA 13 one for all.
    for part in sorted(wheels.glob("nvidia/*/*")):
        if part.name in PARTS:
            shutil.copytree(part, home / part.name, dirs_exist_ok=True)
    for library in (home / "lib").glob("libcudart.so.*"):
        (home / "lib" / "libcudart.so").symlink_to(library.name)
    if not (home / "bin" / "nvcc").exists():
        _add_clang(home)
    for program in (home / "bin").iterdir():
        program.chmod(0o755)
    cicc = home / "nvvm" / "bin" / "cicc"
    if cicc.exists():
        cicc.chmod(0o755)
    for folder in ("wheels", "clang/wheels"):
        shutil.rmtree(home / folder, ignore_errors=True)


def _add_clang(home: Path) -> None:
    clang = home / "clang"
    wheels = _download(LISTS / "clang.txt", clang / "wheels")
    shutil.copy(wheels / "nvidia/cu13/bin/fatbinary", home / "bin" / "fatbinary")
    shutil.move(wheels / "ziglang", clang / "zig")
    (clang / "zig" / "zig").chmod(0o755)
    (headers,) = wheels.glob("clang_tidy/data/lib/clang/*/include")
    shutil.copytree(headers, clang / "lib" / "include")
    (clang / "bin").mkdir()
    (clang / "bin" / "clang").write_text(CLANG)
    (clang / "bin" / "clang").chmod(0o755)
    (home / "include" / "curand_mtgp32_kernel.h").write_text(CURAND)


def _download(requirements: Path, folder: Path) -> Path:
    """Unpacks the wheels of a list, whose hashes pip has checked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    with tempfile.TemporaryDirectory() as files:
        subprocess.run([*command, "-d", files], check=True)
        for wheel in sorted(Path(files).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
