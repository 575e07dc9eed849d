# SPDX-License-Identifier: Apache-2.0
"""Reads build.toml, the one source of truth of what is compiled into which variant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python before 3.11
    import tomli as tomllib

COMPILED = (".cpp", ".cu")


@dataclass(frozen=True)
class Section:
    """One [torch] or [kernel.*] table."""

    name: str
    backend: str | None  # None: compiled into every variant
    src: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    cuda_capabilities: tuple[str, ...]


@dataclass(frozen=True)
class BuildConfig:
    """The contents of build.toml that a build needs."""

    root: Path
    name: str
    version: int
    license: str
    repo_id: str
    backends: tuple[str, ...]
    python_depends: tuple[str, ...]
    stable_abi: dict[str, str]
    sections: tuple[Section, ...]

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package_dir(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    def sections_of(self, backend: str) -> list[Section]:
        return [s for s in self.sections if s.backend in (None, backend)]

    def python_files(self) -> list[Path]:
        """The files of the Python package, sorted; generated ones are left out."""
        generated = self.package_dir / "_ops.py"
        return sorted(p for p in self.package_dir.rglob("*.py") if p != generated)


def load(root: Path) -> BuildConfig:
    with open(root / "build.toml", "rb") as file:
        table = tomllib.load(file)
    general = table["general"]
    torch = table["torch"]
    backends = tuple(general["backends"])
    stable_abi = torch["stable-abi"]
    if isinstance(stable_abi, str):
        stable_abi = dict.fromkeys(backends, stable_abi)
    sections = [_section("torch", None, torch)]
    for name, kernel in table.get("kernel", {}).items():
        sections.append(_section(name, kernel["backend"], kernel))
    return BuildConfig(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        repo_id=general["hub"]["repo-id"],
        backends=backends,
        python_depends=tuple(general.get("python-depends", ())),
        stable_abi=dict(stable_abi),
        sections=tuple(sections),
    )


def _section(name: str, backend: str | None, table: dict) -> Section:
    return Section(
        name=name,
        backend=backend,
        src=tuple(table.get("src", ())),
        include=tuple(table.get("include", ())),
        cxx_flags=tuple(table.get("cxx-flags", ())),
        cuda_flags=tuple(table.get("cuda-flags", ())),
        cuda_capabilities=tuple(table.get("cuda-capabilities", ())),
    )
