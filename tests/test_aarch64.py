# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels compile for 64-bit Arm, where a cross compiler is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPILER = "aarch64-linux-gnu-g++"
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "sdm_kernels").rglob("*.cpp"))


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}")
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_compiles_for_aarch64(source):
    flags = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    done = subprocess.run(
        [COMPILER, *flags, "-I.", str(source)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
