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


def capability():
    """The compute capability of the first GPU as nvidia-smi gives it ("9.0"), or None."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"\d+\.\d+", done.stdout)
    return found.group(0) if done.returncode == 0 and found else None


def architecture(capability):
    """nvcc's name of a card: from 9.0 on with the instructions that only this card has."""
    major, minor = capability.split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


def compile_command(nvcc, arch, unit, program):
    flags = ["-I.", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-DCCCL_DISABLE_NVTX"]
    flags.append("--threads=4")  # a source each
    return [nvcc, *flags, f"-arch={arch}", "-o", program, *sources_of(unit)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_comment_names_the_sources(unit):
    assert len(sources_of(unit)) > 1


@pytest.mark.parametrize("card, arch", [("8.0", "sm_80"), ("9.0", "sm_90a"), ("12.0", "sm_120a")])
def test_architecture(card, arch):
    assert architecture(card) == arch


@pytest.mark.gpu
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_unit(unit, tmp_path):
    card, cuda = capability(), toolchain.find_cuda()
    if card is None:
        pytest.skip("no GPU")
    if cuda is None:
        pytest.skip("no CUDA toolkit (nvcc)")
    program = tmp_path / unit.stem
    command = compile_command(cuda.nvcc, architecture(card), unit, program)
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    done = subprocess.run(
        [program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
