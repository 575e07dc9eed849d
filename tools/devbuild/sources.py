# SPDX-License-Identifier: Apache-2.0
"""Which file of the tree belongs into which src list of build.toml."""

from __future__ import annotations

import re
from pathlib import Path

from . import config

SOURCE = (".h", ".cuh", ".cpp", ".cu")
GENERATED = {"torch-ext/registration.h"}


def tree_sources(root: Path) -> list[str]:
    """Every C++ and CUDA file below torch-ext/ and sdm_kernels/."""
    found = []
    for top in ("torch-ext", "sdm_kernels"):
        found += [p.relative_to(root).as_posix() for p in (root / top).rglob("*")]
    return sorted(n for n in found if n.endswith(SOURCE) and n not in GENERATED)


def section_of(name: str) -> str:
    """The kind of section: "cuda", "cpu" or "torch"."""
    folders = name.split("/")[:-1]
    if "cuda" in folders:
        return "cuda"
    # parallel.h is the one block of cpu/ that torch-ext and the launch headers speak of.
    if "cpu" in folders and name != "sdm_kernels/cpu/parallel.h":
        return "cpu"
    return "torch"


def expected(root: Path) -> dict[str, list[str]]:
    """The lists that follow from the tree.

    CUDA files belong into [kernel.cuda_base] unless another CUDA section, for one card, lists them.
    """
    lists: dict[str, list[str]] = {"torch": [], "cpu": [], "cuda": []}
    for name in tree_sources(root):
        lists[section_of(name)].append(name)
    lists["cpu_in_cuda"] = lists["cpu"]
    sections = config.load(root).sections
    special = {
        name
        for section in sections
        if section.backend == "cuda" and section.name not in ("cpu_in_cuda", "cuda_base")
        for name in section.src
    }
    cuda = [name for name in lists.pop("cuda") if name not in special]
    if cuda or any(section.name == "cuda_base" for section in sections):
        lists["cuda_base"] = cuda
    return lists


def rewrite(root: Path) -> bool:
    """Writes the expected lists into build.toml; returns whether it changed."""
    path = root / "build.toml"
    before = text = path.read_text()
    for name, files in expected(root).items():
        header = "[torch]" if name == "torch" else f"[kernel.{name}]"
        body = "".join(f'  "{file}",\n' for file in files)
        pattern = re.compile(
            rf"(^{re.escape(header)}\n(?:(?!\[).*\n)*?src = \[\n)[^\]]*(\]\n)", re.M
        )
        text, count = pattern.subn(lambda m, body=body: m.group(1) + body + m.group(2), text)
        if count != 1:
            raise ValueError(f"build.toml: no src list found in {header}")
    path.write_text(text)
    return text != before
