# SPDX-License-Identifier: Apache-2.0
"""Work done in fresh processes: peak memory, other environments."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, os, resource, sys
import torch, kernels
torch.set_num_threads(1)
sdm = kernels.get_kernel("org/sparse-delta-memory", version=1)

def peak():
    # VmHWM, not ru_maxrss: the latter starts at the peak of the process that forked this one.
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))

def current():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))
"""


def run_python(code, env=None, timeout=300):
    """Run code after PRELUDE in a fresh process and return the JSON it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
