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
    """The commit of the sources; BENCH_COMMIT where a copy without its history is measured."""
    if os.environ.get("BENCH_COMMIT"):
        return os.environ["BENCH_COMMIT"]

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    sources = ("sdm_kernels", "torch-ext", "build.toml")
    return commit + ("+changes" if git("status", "--porcelain", "--", *sources) else "")


def command():
    """The command line, with the names only of files elsewhere."""
    arguments = [Path(x).name if os.path.isabs(x) else x for x in sys.argv[1:]]
    return " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *arguments])


def describe(device):
    """Facts to be kept with the numbers."""
    facts = {
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": load(),
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["gpu"] = found.name
        facts["multiprocessors"] = found.multi_processor_count
        facts["gpu_gib"] = round(found.total_memory / 2**30, 1)
        facts["l2_mib"] = found.L2_cache_size // 2**20
        facts["cuda"] = torch.version.cuda
        facts["driver"] = nvidia_smi("driver_version")
    return facts


def nvidia_smi(field):
    """One field of the first GPU, or None."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.strip().splitlines() or [None])[0]


def load():
    """Load average of the last minute: above the cores in use, wall times can't be trusted."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def copy_bandwidth(device, clock_kind="wall", seconds=2.0, mib=256):
    """Bytes read plus written a second by the fastest of the copies at hand, in GB/s.

    On a CPU: `Tensor.copy_` on torch's threads, and one memmove for each of as many threads (which
    uses stores that bypass the caches). On a GPU: `Tensor.copy_`.
    """
    source = torch.rand(mib << 18, device=device)  # float32, so that mib MiB
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
