# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a call, on a CPU each in a fresh process, and the bytes kept for the backward.

    python benchmarks/memory.py [--device cpu|cuda] [--shape NAME]

Peak: the highest resident (CPU) or allocated (GPU) memory during the call, over what was there before
it, inputs included. Kept: the storages that autograd saves and that are no inputs, as
`saved_tensors_hooks` sees them; on a GPU what is allocated after the forward, without its result.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

# name: (what runs, factor on T)
MODES = {
    "inference": ("inference", 1),
    "inference, 4 T": ("inference", 4),
    "training, replay": ("replay", 1),
    "training, replay, 4 T": ("replay", 4),
    "training, rows": ("rows", 1),
    "training, eager bags": ("eager", 1),
}


def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


class Peak:
    """`with Peak(device) as peak: ...` then `peak.bytes`."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            self.before = status("VmRSS")
        return self

    def __exit__(self, *_):
        if self.cuda:
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        else:
            self.bytes = status("VmHWM") - self.before


def run_mode(mode, shape_name, device):
    """Runs in the fresh process: return the bytes of one mode."""
    import kernels
    from eager_sdm import eager_chunk_sdm
    from inputs import draw_sdm, load_shapes, with_grad

    kernel = kernels.get_kernel("org/sparse-delta-memory", version=1)
    what, factor = MODES[mode]
    shape = load_shapes(device.type, [shape_name])["sdm"][shape_name]

    def call(inputs, d_out):
        if what == "inference":
            with torch.no_grad():
                kernel.chunk_sdm(*inputs)
            return
        if what == "eager":
            out, _ = eager_chunk_sdm(*inputs, chunk_size=64)
        else:
            out, _ = kernel.chunk_sdm(*inputs, save=what)
        out.backward(d_out)

    def arguments(shape):
        inputs = draw_sdm(kernel, shape, device)
        d_out = torch.randn_like(inputs[2])
        return (inputs if what == "inference" else with_grad(inputs)), d_out

    call(*arguments({**shape, "T": 64, "factor_dims": [16, 16], "W": 8, "R": 8}))  # loads code
    inputs, d_out = arguments({**shape, "T": factor * shape["T"]})
    known = {x.untyped_storage().data_ptr() for x in (*inputs, d_out)}
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with Peak(device) as peak, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call(inputs, d_out)
    results = sum(x.numel() * x.element_size() for x in inputs if x.requires_grad)
    results += d_out.numel() * d_out.element_size()
    return {
        "shape": shape_name,
        "mode": mode,
        "peak_bytes": peak.bytes,
        "result_bytes": results,  # out and the gradients, part of the peak
        "kept_bytes": sum(kept.values()),
    }


def measure_training_on_gpu(forward, leaves, d_out):
    """Bytes of one training call: `forward()` returns `out`, `leaves` are what gradients are for.

    torch's allocator counts them exactly, so no fresh process is needed.
    """
    device = d_out.device
    torch.autograd.grad(forward(), leaves, d_out)  # loads code
    before = torch.cuda.memory_allocated(device)
    with Peak(device) as peak:
        out = forward()
        kept = torch.cuda.memory_allocated(device) - before - out.untyped_storage().nbytes()
        gradients = torch.autograd.grad(out, leaves, d_out)
        results = sum(x.untyped_storage().nbytes() for x in (out, *gradients))
        del out, gradients
    return {"peak_bytes": peak.bytes, "result_bytes": results, "kept_bytes": kept}


def measure_call_on_gpu(function, device):
    """Bytes of one call without gradients."""
    function()
    with Peak(device) as peak:
        results = function()
        size = sum(x.untyped_storage().nbytes() for x in results if x is not None)
        del results
    return {"peak_bytes": peak.bytes, "result_bytes": size, "kept_bytes": 0}


def measure_memory(shape_name, device_type):
    """Return the figures of every mode, each in a process; of a mode that fails, the reason."""
    results = []
    for mode in MODES:
        command = [sys.executable, __file__, "--one", mode]
        command += ["--shape", shape_name, "--device", device_type]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["failed"])[-1]
            results.append({"shape": shape_name, "mode": mode, "error": reason})
            continue
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="cpu")
    parser.add_argument("--one", choices=list(MODES), help="measure this one in this process")
    options = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    os.environ.setdefault("LOCAL_KERNELS", f"org/sparse-delta-memory={root}")
    if options.one:
        print(json.dumps(run_mode(options.one, options.shape, torch.device(options.device))))
        return
    from tables import memory_table

    print(memory_table(measure_memory(options.shape, options.device)))


if __name__ == "__main__":
    main()
