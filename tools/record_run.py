#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the test suite on the build that is there and writes down on what it ran and what came out.

For the runs that CI does not do: the lowest torch, a GPU. What follows `--` goes to pytest.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from devbuild import identity  # noqa: E402


class Recorder:
    """A pytest plugin that counts outcomes and keeps the names of what failed."""

    def __init__(self):
        self.outcomes = collections.Counter()
        self.failed, self.skipped = [], collections.Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            self.failed.append(f"{report.nodeid} ({report.when})")
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(f"{report.nodeid} (collect)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--commit", help="the commit, where there is no git repository")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest; default: the whole suite")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    recorder = Recorder()
    start = time.monotonic()
    status = pytest.main(["-q", *arguments.pytest], plugins=[recorder])
    seconds = time.monotonic() - start
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "source": identity.git_status(ROOT) or {"commit": arguments.commit},
        "command": " ".join(["pytest", "-q", *arguments.pytest]),
        "machine": machine(),
        "variant": variant(),
        "outcomes": dict(recorder.outcomes),
        "failed": recorder.failed,
        "skipped": dict(recorder.skipped),
        "seconds": round(seconds),
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"record_run: {arguments.out}")
    return int(status)


def machine() -> dict:
    """Versions, processor and card."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": importlib.metadata.version("kernels"),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processors": os.cpu_count(),
    }
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def variant() -> dict:
    """The build that the tests loaded."""
    import kernels

    os.environ.setdefault("LOCAL_KERNELS", f"org/sparse-delta-memory={ROOT}")
    kernel = kernels.get_kernel("org/sparse-delta-memory", version=1)
    metadata = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())
    source = metadata["provenance"].get("kernel")
    return {"name": Path(kernel.__file__).parent.name, "id": metadata["id"], "source": source}


if __name__ == "__main__":
    sys.exit(main())
