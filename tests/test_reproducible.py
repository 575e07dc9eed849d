# SPDX-License-Identifier: Apache-2.0
"""The same commit, built anew in another folder, gives the same bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT
from .helpers.hub_server import files_of


def copy_of_the_tree(path):
    """The checkout as it is, with its history but without anything that was built."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path / name)
            shutil.copymode(ROOT / name, path / name)
    shutil.copytree(ROOT / ".git", path / ".git")


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_cpu_variant_is_the_same_from_another_folder(sdm, tmp_path):
    built = Path(sdm.__file__).parent
    if "-cpu-" not in built.name:
        pytest.skip("a CUDA variant takes too long to build twice")
    copy = tmp_path / "a longer way" / "to the tree"
    copy_of_the_tree(copy)
    # Other surroundings too: another time zone, language, home, and order of compilation.
    environment = dict(os.environ, TZ="Asia/Tokyo", LC_ALL="C", HOME=str(tmp_path))
    command = [sys.executable, str(copy / "tools" / "dev_build.py"), "--backend", "cpu"]
    command += ["--jobs", "2"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    (variant,) = (copy / "build").glob("torch-*")
    assert variant.name == built.name
    first, second = files_of(built), files_of(variant)
    assert sorted(first) == sorted(second), "build/ is older than the sources: make build"
    for name in first:
        assert first[name] == second[name], name
