# SPDX-License-Identifier: Apache-2.0
"""What a run was measured on, and the machine's own copy bandwidth, the ceiling of this memory."""

import ctypes
import datetime
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from timing import Clock, measure

ROOT = Path(__file__).resolve().parent.parent


def cpu_name():
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_commit():
    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    sources = ("sdm_kernels", "torch-ext", "build.toml")
    return commit + ("+changes" if git("status", "--porcelain", "--", *sources) else "")


def describe(device):
    """Facts to be kept with the numbers."""
    facts = {
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": load(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def load():
    """Load average of the last minute: above the cores in use, wall times can't be trusted."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def copy_bandwidth(device, clock_kind="wall", seconds=2.0, mib=256):
    """Bytes read plus written a second by the fastest of the copies at hand, in GB/s.

    On a CPU: `Tensor.copy_` on torch's threads, and one memmove for each of as many threads (which
    uses stores that bypass the caches). On a GPU: `Tensor.copy_`.
    """
    source = torch.ones(mib << 18, device=device)  # float32, so that mib MiB
    target = torch.empty_like(source)
    target.copy_(source)
    functions = {"copy_": lambda: target.copy_(source)}
    pool = None
    if device.type == "cpu":
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(threads)
        size = source.numel() * 4 // threads

        def move(k):
            ctypes.memmove(target.data_ptr() + k * size, source.data_ptr() + k * size, size)

        functions["memmove"] = lambda: list(pool.map(move, range(threads)))
    times = measure(functions, Clock(device, clock_kind, flush=False), seconds)
    if pool is not None:
        pool.shutdown()
    moved = 2 * source.numel() * 4
    best = min(times, key=lambda name: times[name]["median_ms"])
    return {
        "gb_s": moved / times[best]["median_ms"] / 1e6,
        "best_gb_s": moved / min(t["min_ms"] for t in times.values()) / 1e6,
        "method": best,
        "buffer_mib": mib,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
