# SPDX-License-Identifier: Apache-2.0
"""Finds torch, the compilers and the toolkit, and names the variant; torch is not imported."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


class BuildError(Exception):
    """Something that the person at the keyboard can put right."""


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str  # "2.13.0"
    cuda: str | None  # "13.0" in a CUDA build of torch


# The first toolkit that knows a card; the others are older than any toolkit used here.
FIRST_TOOLKIT = {"10.0": "12.8", "12.0": "12.8", "10.3": "12.9", "11.0": "13.0", "12.1": "12.9"}


@dataclass(frozen=True)
class Cuda:
    home: Path
    version: str  # "13.0"

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def clang(self) -> Path | None:
        """The front end of a toolkit without nvcc, which tools/fetch_toolkit.py puts there."""
        path = self.home / "clang" / "bin" / "clang"
        return path if path.exists() else None

    def knows(self, arch: str) -> bool:
        """Whether the toolkit compiles for a card, such as "9.0a" or "12.0+PTX"."""
        first = FIRST_TOOLKIT.get(re.sub(r"[af]?(\+PTX)?$", "", arch), "0")
        return _version_key(self.version) >= _version_key(first)


def fetched_toolkit(root: Path, version: str) -> Path:
    """Where tools/fetch_toolkit.py puts the toolkit of a version."""
    return root / "_cmake_build" / "toolkits" / version


def find_torch() -> Torch:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{sys.executable} has no torch; install requirements-dev.txt")
    root = Path(spec.submodule_search_locations[0])
    facts = runpy.run_path(str(root / "version.py"))
    return Torch(root, facts["__version__"].split("+")[0], facts.get("cuda"))


def find_cuda_of(root: Path, version: str) -> Cuda:
    """The toolkit of exactly this version: the machine's, or the fetched one."""
    cuda = find_cuda()
    if cuda and cuda.version == version:
        return cuda
    home = fetched_toolkit(root, version)
    if home.exists():
        return Cuda(home, version)
    raise BuildError(
        f"no CUDA toolkit {version} here; `python tools/fetch_toolkit.py {version}` fetches one"
    )


def find_cuda() -> Cuda | None:
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(_home_of(on_path))
    candidates.append("/usr/local/cuda")
    for home in candidates:
        if home and (Path(home) / "bin" / "nvcc").exists():
            text = _output([str(Path(home) / "bin" / "nvcc"), "--version"])
            match = re.search(r"release (\d+\.\d+)", text)
            if match:
                return Cuda(Path(home), match.group(1))
    return None


def _home_of(nvcc: str) -> str:
    """The toolkit behind an nvcc on PATH, which may be a wrapper script somewhere else."""
    text = _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], stderr=True)
    match = re.search(r"^#\$ TOP=(.*)$", text, re.MULTILINE)
    if match:
        return os.path.realpath(match.group(1).strip())
    return str(Path(nvcc).resolve().parent.parent)


def find_cxx() -> str:
    cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not cxx:
        raise BuildError("no C++ compiler found; install g++ or set CXX")
    return cxx


def find_ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except (ImportError, AttributeError):
        pass
    on_path = shutil.which("ninja")
    if on_path is None:
        raise BuildError("ninja not found; install requirements-dev.txt")
    return on_path


def gcc_folder(cxx: str) -> str:
    """Where g++ keeps its own part, from which clang takes headers and libraries."""
    text = _output([cxx, "-print-libgcc-file-name"]).strip()
    if not text:
        raise BuildError(f"{cxx} does not say where its libraries are; clang needs those of g++")
    return str(Path(text).parent)


def python_include() -> str:
    path = sysconfig.get_paths()["include"]
    if not (Path(path) / "Python.h").exists():
        raise BuildError("the headers of this Python are missing; install its dev package")
    return path


def fits(torch: Torch, cuda: Cuda) -> bool:
    """Whether what this toolkit makes runs on this torch: both speak one major version of CUDA."""
    return torch.cuda is None or _version_key(torch.cuda)[0] == _version_key(cuda.version)[0]


def variant_name(backend: str, stable_abi: str, torch: Torch, cuda: Cuda | None) -> str:
    """The folder name that the kernels client looks for."""
    abi = stable_abi.replace(".", "")
    arch = backend
    if backend == "cuda":
        # An older minor version of the same major runs on a newer one, so the lower one is named.
        versions = [v for v in (torch.cuda, cuda.version if cuda else None) if v]
        arch = "cu" + min(versions, key=_version_key).replace(".", "")
    return f"torch-stable-abi{abi}-{arch}-{platform.machine()}-{platform.system().lower()}"


def _version_key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _output(command: list[str], stderr: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout + (done.stderr if stderr else "")
