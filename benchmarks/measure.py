# SPDX-License-Identifier: Apache-2.0
"""Times the public functions and prints the medians; `make bench` runs it on the local build.

Each time is the median of repeated calls after a warm-up, with the lowest and the highest beside
it, on the threads that torch uses. `--json FILE` keeps the numbers with what they were measured on.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import kernels
import torch

# name: B, T, H, W = R, D, S
SDM_SHAPES = {
    "debug": (2, 512, 4, 32, 128, 4096),
    "small heads": (1, 1024, 8, 32, 128, 16384),
    "wide rows": (1, 512, 1, 64, 1024, 16384),
}
# name: rows, factor_dims, k
TOPK_SHAPES = {"256 x 256, k 64": (4096, (256, 256), 64), "64^3, k 32": (4096, (64, 64, 64), 32)}


def sdm_inputs(shape, dtype, device):
    b, t, h, w, d, s = shape

    def ids():
        return torch.randint(0, s, (b, t, h, w), dtype=torch.int32, device=device)

    def weights():
        return torch.randn(b, t, h, w, device=device).softmax(-1).to(dtype)

    v = torch.randn(b, t, h, d, device=device).to(dtype)
    beta = torch.rand(b, t, h, device=device)
    g = -torch.rand(b, t, h, device=device)
    bank = torch.randn(h, s, d, device=device).to(dtype)
    return ids(), weights(), v, beta, g, ids(), weights(), bank


def cases(k, dtype, device):
    """Yield (name, function of no arguments) for every measurement."""
    for name, shape in SDM_SHAPES.items():
        args = sdm_inputs(shape, dtype, device)
        yield f"chunk_sdm, {name}, forward", lambda args=args: k.chunk_sdm(*args)
        grads = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
        for save in ("replay", "rows"):

            def train(grads=grads, save=save):
                out, _ = k.chunk_sdm(*grads, save=save)
                out.backward(torch.ones_like(out))

            yield f"chunk_sdm, {name}, forward + backward, {save}", train
        state = args[-1].repeat(shape[0], 1, 1, 1)
        token = [a[:, :1].contiguous() for a in args[:-1]]
        yield f"recurrent_sdm_, {name}, one token", lambda s=state, x=token: k.recurrent_sdm_(s, *x)
    for name, (rows, dims, top) in TOPK_SHAPES.items():
        scores = torch.randn(rows, sum(dims), device=device).to(dtype)
        yield (
            f"product_key_topk, {name}",
            lambda scores=scores, dims=dims, top=top: k.product_key_topk(scores, list(dims), top),
        )


def measure(function, device, seconds):
    """Return the times in ms of calls that fill about `seconds`, at least five of them."""

    def once():
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    first = max(once(), once())
    repeats = min(200, max(5, round(seconds * 1e3 / first)))
    return [once() for _ in range(repeats)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--only", default="", help="measure the names that contain this text")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    k = kernels.get_kernel("org/sparse-delta-memory", version=1)
    torch.manual_seed(0)
    results = {}
    print(f"{k.__name__}, torch {torch.__version__}, {device}, {torch.get_num_threads()} threads")
    print(f"{'median':>9} {'lowest':>9} {'highest':>9}  ms, {options.dtype}")
    for name, function in cases(k, getattr(torch, options.dtype), device):
        if options.only not in name:
            continue
        times = measure(function, device, options.seconds)
        results[name] = times
        median = statistics.median(times)
        print(f"{median:9.3f} {min(times):9.3f} {max(times):9.3f}  {name}", flush=True)
    if options.json:
        facts = {
            "build": k.__name__,
            "torch": torch.__version__,
            "device": str(device),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "dtype": options.dtype,
            "ms": results,
        }
        options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
