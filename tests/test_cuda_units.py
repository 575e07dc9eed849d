# SPDX-License-Identifier: Apache-2.0
"""The programs of tests/cpp, which test single stages of the CUDA kernels without torch.

The comment at the top of each names the sources to compile it with; what it prints is shown by
`make test-cuda-units`.
"""

import re
import shutil
import subprocess
import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from devbuild import toolchain  # noqa: E402

UNITS = sorted((ROOT / "tests" / "cpp").glob("test_*.cu"))
SOURCE = re.compile(r"sdm_kernels/[\w/*.]+\.(?:cu|cpp)")


def sources_of(unit):
    """The unit and the sources that the comment at its top names; a name may be a pattern."""
    comment = unit.read_text().split("#include", 1)[0]
    found = [path for pattern in SOURCE.findall(comment) for path in sorted(ROOT.glob(pattern))]
    return [path.relative_to(ROOT).as_posix() for path in (unit, *found)]


def why_not():
    """The reason why CUDA code cannot be compiled and run here, or None."""
    if toolchain.find_cuda() is None:
        return "no CUDA toolkit (nvcc)"
    listed = shutil.which("nvidia-smi") and subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    return None if listed and "GPU" in listed.stdout else "no GPU"


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_comment_names_the_sources(unit):
    assert len(sources_of(unit)) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_unit(unit, tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    program = tmp_path / unit.stem
    nvcc = toolchain.find_cuda().nvcc
    command = [nvcc, "-I.", "-std=c++17", "-O3", "-arch=native", "-o", program, *sources_of(unit)]
    subprocess.run(command, cwd=ROOT, check=True)
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
