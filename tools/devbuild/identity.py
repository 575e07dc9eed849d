# SPDX-License-Identifier: Apache-2.0
"""What a build is made of: a hash of the sources, and the git commit."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from . import config as build_config
from . import ninja_file


def unique_id(config: build_config.BuildConfig, backend: str, options: Iterable[str]) -> str:
    """Eight hex digits of everything that goes into a variant, behind the word dev.

    The op namespace and the module name carry it, so two builds of different sources load into
    one process, and a build from equal sources has an equal name. The Python files count too:
    their fake and autograd functions are registered on the ops of this namespace.
    """
    digest = hashlib.sha256()
    names = {"build.toml", ninja_file.OLD_RUNTIME}
    for section in config.sections_of(backend):
        names.update(section.src)
    names.update(p.relative_to(config.root).as_posix() for p in config.python_files())
    for name in sorted(names):
        content = (config.root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    for option in options:
        digest.update(f"{option}\0".encode())
    return "dev" + digest.hexdigest()[:8]


def git_status(root: Path) -> dict | None:
    """The commit and whether tracked files differ from it; None outside a git repository."""
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
