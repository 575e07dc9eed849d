# SPDX-License-Identifier: Apache-2.0
"""The examples run, and write what they say."""

import json
import subprocess
import sys

import pytest

from .conftest import ROOT


def run(*arguments):
    """Run a script of this checkout on one thread; returns what it printed."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example():
    lines = run("example.py").splitlines()
    errors = [float(line.split()[-1]) for line in lines if "largest difference" in line]
    assert len(errors) == 8 and max(errors) < 1e-4
    assert any(line.startswith("SparseDeltaMemory") for line in lines)


@pytest.mark.slow
def test_byte_lm(tmp_path):
    printed = run(
        "examples/byte_lm.py", "--steps", 4, "--batch-size", 2, "--seq-len", 64, "--eval-every", 2,
        "--eval-windows", 8, "--generate", 8, "--device", "cpu", "--out", tmp_path / "out",
        "--prompt", "def main():\n    ",
    )  # fmt: skip
    names = {"loss.png", "results.json", "model.safetensors", "config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results) == {"with memory", "without memory"}
    for result in results.values():
        curve = [loss for _, loss in result["curves"]["train"]]
        assert len(curve) == 4 and curve[-1] < curve[0]
        assert 1 < result["bits_per_byte"] < 9
    assert "Same text from the chunked path: yes" in printed
    assert "bits per byte" in printed
