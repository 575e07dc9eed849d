# SPDX-License-Identifier: Apache-2.0
"""`kernels benchmark` runs benchmarks/benchmark.py on the kernel of a hub."""

import ast
import json
from pathlib import Path

import pytest
import torch

from .conftest import ROOT
from .helpers.hub_client import REPO_ID, Client
from .helpers.hub_server import Hub, files_of

SCRIPT = ROOT / "benchmarks" / "benchmark.py"


def workloads():
    """Names like `ChunkSdm.base`, and whether each is checked, from the source of the script."""
    found = {}
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.ClassDef) and any("Benchmark" in ast.dump(b) for b in node.bases):
            names = [
                target.id
                for item in node.body
                if isinstance(item, ast.Assign)
                for target in item.targets
            ]
            for name in names:
                if name.startswith("benchmark_"):
                    size = name.removeprefix("benchmark_")
                    found[f"{node.name}.{size}"] = f"verify_{size}" in names
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="the command takes the device of the torch build, and there is no GPU",
)
def test_benchmark_runs_and_verifies(sdm, tmp_path):
    variant = Path(sdm.__file__).parent
    files = {f"build/{variant.name}/{path}": data for path, data in files_of(variant).items()}
    files["benchmarks/benchmark.py"] = SCRIPT.read_bytes()
    hub = Hub(trusted=["org"])  # the command takes no word of trust
    hub.push(REPO_ID, files, "main", "v1")
    out = tmp_path / "out.json"
    with hub.running():
        client = Client(tmp_path, hub)
        options = ["--version", 1, "--iterations", 1, "--warmup", 0, "--output", out]
        client.kernels("benchmark", REPO_ID, *options)
    results = {r["workload"]: r for r in json.loads(out.read_text())["results"]}
    expected = workloads()
    assert set(results) == set(expected) and len(expected) >= 8
    for name, checked in expected.items():
        assert results[name].get("verified") is (True if checked else None), name
        assert results[name]["timingResults"]["mean_ms"] > 0
