# SPDX-License-Identifier: Apache-2.0
"""Puts a variant folder together: Python files, library, generated files and metadata.json."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from . import config as build_config

OPS = '''\
import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix op by namespace."""
    return f"{name}::{{op_name}}"
'''

# The hub asks for the package once more in a folder with its name: older clients look there.
BY_NAME = '''\
"""The package of the folder above, for older versions of the kernels client."""

import importlib.util
import sys
from pathlib import Path

_package = sys.modules.get("{name}")
if _package is None:
    _spec = importlib.util.spec_from_file_location(
        "{name}", Path(__file__).resolve().parent.parent / "__init__.py"
    )
    _package = importlib.util.module_from_spec(_spec)
    sys.modules["{name}"] = _package
    _spec.loader.exec_module(_package)

__all__ = _package.__all__
globals().update({{public: getattr(_package, public) for public in __all__}})
'''


def write(
    config: build_config.BuildConfig,
    variant_dir: Path,
    name: str,
    library: Path,
    backend: str,
    archs: list[str],
    provenance: dict | None,
) -> bool:
    """Brings `variant_dir` up to date; returns whether anything changed.

    A changed variant is put together beside the old one and takes its place in one step, so that
    a process starting meanwhile finds the one or the other.
    """
    files = {p.relative_to(config.package_dir).as_posix(): p for p in config.python_files()}
    content = {relative: path.read_bytes() for relative, path in files.items()}
    content["_ops.py"] = OPS.format(name=name).encode()
    content[f"{config.python_name}/__init__.py"] = BY_NAME.format(name=name).encode()
    content[f"{name}.abi3.so"] = library.read_bytes()
    metadata = _metadata(config, name, backend, archs, content, provenance)
    content["metadata.json"] = (json.dumps(metadata, indent=2) + "\n").encode()
    if _contents(variant_dir) == content:
        return False
    variant_dir.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=variant_dir.parent))
    fresh.chmod(0o755)
    for relative, data in content.items():
        path = fresh / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    old = fresh.with_name(fresh.name.replace(".new-", ".old-"))
    if variant_dir.exists():
        os.rename(variant_dir, old)
    os.rename(fresh, variant_dir)
    shutil.rmtree(old, ignore_errors=True)
    return True


def _metadata(
    config: build_config.BuildConfig,
    name: str,
    backend: str,
    archs: list[str],
    content: dict[str, bytes],
    provenance: dict | None,
) -> dict:
    info: dict = {"type": backend}
    if archs:
        info["archs"] = archs
    # The client wants the version of the builder; ours has none but that of the sources.
    source: dict = {"kernel-builder": {"version": "0.0.0+dev-build"}}
    if provenance is not None:
        source["kernel"] = provenance
    return {
        "id": name,
        "name": config.name,
        "version": config.version,
        "license": config.license,
        "python-depends": list(config.python_depends),
        "backend": info,
        "digest": {
            "algorithm": "sha256",
            "files": {
                relative: base64.b64encode(hashlib.sha256(data).digest()).decode()
                for relative, data in sorted(content.items())
            },
        },
        "provenance": source,
    }


def _contents(folder: Path) -> dict[str, bytes] | None:
    if not folder.exists():
        return None
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
