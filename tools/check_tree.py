#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of docs/architecture.md that a compiler does not: layers, lists, imports.

`--fix` first writes the src lists of build.toml from the tree.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devbuild import config as build_config  # noqa: E402
from devbuild import sources  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

MAX_LINES = 500
# Where an include may point: the folders to the left of each one in the layer rule.
LAYERS = {
    "common": {"common"},
    "cpu": {"common", "cpu"},
    "cuda": {"common", "cuda"},
    "sdm": {"common", "cpu", "cuda", "sdm"},
    "topk": {"common", "cpu", "cuda", "topk"},
    "kda": {"common", "cpu", "cuda", "kda"},
    "torch-ext": {"common", "cpu", "cuda", "sdm", "topk", "kda", "torch-ext"},
    # Programs that test kernels without torch.
    "tests": {"common", "cpu", "cuda", "sdm", "topk", "kda", "tests"},
}
STABLE_TORCH = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
TORCH_HEADER = re.compile(r"^(torch/|ATen/|c10/|Python\.h$)")
CUDA_HEADER = re.compile(r"^(cuda|cub/|cute/|cutlass/|cooperative_groups|mma\.h|nv/)")
STREAMS = {"sstream", "iostream", "ostream", "istream", "fstream", "iomanip", "locale", "regex"}
MAY_NAME_CUDA = {"sdm_kernels/common/hd.h", "torch-ext/torch_util.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
TEXT = {".py", ".h", ".cuh", ".cpp", ".cu", ".md", ".toml", ".ini", ".nix", ".yaml", ".txt", ""}
# A path that exists on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work|Users|mnt|opt)/\w")
INDEX_OPTION = re.compile(r"--(extra-)?index-url|--find-links")


def tracked_files() -> list[str]:
    """The files of the repository: tracked and not yet tracked, without the ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(n for n in set(done.stdout.splitlines()) if (ROOT / n).is_file())


def check_lists(problems: list[str]) -> None:
    config = build_config.load(ROOT)
    lists = {section.name: section for section in config.sections}
    for name, files in sources.expected(ROOT).items():
        listed = list(lists[name].src) if name in lists else []
        for file in sorted(set(files) - set(listed)):
            problems.append(f"build.toml: [{name}] does not list {file}")
        for file in sorted(set(listed) - set(files)):
            problems.append(f"build.toml: [{name}] lists {file}, which does not belong there")
        if len(listed) != len(set(listed)):
            problems.append(f"build.toml: [{name}] lists a file twice")
    if lists["cpu"].src != lists["cpu_in_cuda"].src:
        problems.append("build.toml: [kernel.cpu] and [kernel.cpu_in_cuda] differ")
    for section in config.sections:
        for file in section.src:
            if not (ROOT / file).is_file():
                problems.append(f"build.toml: [{section.name}] lists {file}, which does not exist")


def layer_of(name: str) -> str:
    parts = name.split("/")
    return parts[1] if parts[0] == "sdm_kernels" else parts[0]


def check_cxx(name: str, text: str, problems: list[str]) -> None:
    in_kernels = name.startswith("sdm_kernels/")
    in_tests = name.startswith("tests/")
    folders = name.split("/")[:-1]
    layer = layer_of(name)
    if layer not in LAYERS:
        problems.append(f"{name}: {layer} is no layer; see LAYERS in tools/check_tree.py")
        return
    if "//! @file" not in "\n".join(text.splitlines()[:3]):
        problems.append(f"{name}: no '//! @file' comment at the top")
    for kind, header in INCLUDE.findall(text):
        if kind == '"':
            if header == "registration.h":
                continue
            if not (ROOT / header).is_file():
                problems.append(f'{name}: include "{header}" by its path from the root')
            elif layer_of(header) not in LAYERS[layer]:
                problems.append(f"{name}: layer {layer} must not include {header}")
            elif "cpu" in folders and "/cuda/" in header:
                problems.append(f"{name}: CPU code must not include {header}")
            continue
        if (in_kernels or in_tests) and TORCH_HEADER.match(header):
            problems.append(f"{name}: no torch or Python header in kernels and tests: <{header}>")
        if TORCH_HEADER.match(header) and not header.startswith((*STABLE_TORCH, "Python.h")):
            problems.append(f"{name}: <{header}> is not part of the stable ABI")
        names_cuda = CUDA_HEADER.match(header) and "cuda" not in folders and not in_tests
        if names_cuda and name not in MAY_NAME_CUDA:
            problems.append(f"{name}: CUDA header <{header}> outside a cuda/ folder")
        if header in STREAMS:
            problems.append(f"{name}: no streams (<{header}>): they tie the library to one runtime")
        if name.endswith("-inl.h"):
            problems.append(f"{name}: a -inl.h is included inside a namespace: no <{header}> in it")
    if re.search(r"^\s*#\s*pragma\s+omp", text, re.M):
        problems.append(f"{name}: threads only through ParallelFor, not OpenMP")
    if "STD_TORCH_CHECK" in text:
        problems.append(f"{name}: check() of torch_util.h instead of STD_TORCH_CHECK (a stream)")
    if not in_tests and re.search(r"^using namespace", text, re.M):
        problems.append(f"{name}: no using namespace at file scope")


def check_package_module(name: str, text: str, problems: list[str]) -> None:
    allowed = set(getattr(sys, "stdlib_module_names", ())) | {"torch", "__future__"}
    for node in ast.walk(ast.parse(text)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        for module in modules:
            if module.split(".")[0] not in allowed:
                problems.append(f"{name}: the package may import the standard library and torch")
                problems.append(f"{name}: and itself by relative imports, not {module}")


def check_text(name: str, text: str, problems: list[str]) -> None:
    head = "\n".join(text.splitlines()[:20])
    if (
        name.endswith((".py", *sources.SOURCE))
        and "SPDX-License-Identifier: Apache-2.0" not in head
    ):
        problems.append(f"{name}: no SPDX licence line at the top")
    if text and name != "LICENSE":
        if not text.endswith("\n") or text.endswith("\n\n"):
            problems.append(f"{name}: must end in one newline")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip():
                problems.append(f"{name}:{number}: blanks at the end of the line")
            if MACHINE_PATH.search(line):
                problems.append(f"{name}:{number}: a path of one machine")
    if INDEX_OPTION.search(text) and name.startswith("requirements"):
        problems.append(f"{name}: leave the package index to the machine's settings")
    if name.endswith((".py", *sources.SOURCE)) and len(text.splitlines()) > MAX_LINES:
        problems.append(f"{name}: more than {MAX_LINES} lines; split it by stage")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="write the src lists of build.toml")
    if parser.parse_args().fix and sources.rewrite(ROOT):
        print("check_tree: build.toml rewritten")
    problems: list[str] = []
    check_lists(problems)
    files = tracked_files()
    for name in files:
        if Path(name).suffix not in TEXT:
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        check_text(name, text, problems)
        if name.startswith(("sdm_kernels/", "torch-ext/", "tests/")) and name.endswith(
            sources.SOURCE
        ):
            check_cxx(name, text, problems)
        if name.startswith("torch-ext/") and name.endswith(".py"):
            check_package_module(name, text, problems)
    for problem in problems:
        print(f"check_tree: {problem}")
    if not problems:
        print(f"check_tree: {len(files)} files in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
