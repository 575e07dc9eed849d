# SPDX-License-Identifier: Apache-2.0
"""Runs each op once on the GPU; meant to run under compute-sanitizer (gpu.py does).

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/sanitize.py

Without the cache of torch's allocator every tensor has its own allocation, so that accesses behind
its end and reads before its first write are seen. `--tiny`: cases for racecheck, which is slow.
"""

import argparse
import os
import sys
import time
from dataclasses import replace

import torch
from machine import ROOT

sys.path.insert(0, str(ROOT))

from tests.helpers.calls import CALLS  # noqa: E402

REPO = "org/sparse-delta-memory"
TINY = {"B": 1, "T": 20, "H": 1, "S": 24, "D": 40, "W": 3, "R": 2, "chunk": 16}
TINY_NAMES = ("backward_rows", "backward_replay", "recurrent_sdm_", "product_key_topk",
              "chunk_kda_backward", "chunk_kda_plain", "recurrent_kda_")  # fmt: skip


def cases(tiny):
    if not tiny:
        return CALLS
    found = [call for call in CALLS if call.name in TINY_NAMES]
    for call in found:
        if hasattr(call, "case"):
            call.case = replace(call.case, **{**TINY, "T": min(call.case.T, TINY["T"])})
        elif hasattr(call, "T"):
            call.T = min(call.T, 70)  # more than one chunk
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO}={ROOT}")
    import kernels

    kernel = kernels.get_kernel(REPO, version=1)
    for call in cases(options.tiny):
        start = time.monotonic()
        results = call.run(kernel, call.draw(options.device))
        if options.device == "cuda":
            torch.cuda.synchronize()
        finite = all(x.isfinite().all() for x in results if x.is_floating_point())
        print(f"case {call.name}: {time.monotonic() - start:.1f} s, finite {finite}", flush=True)
        if not finite:
            sys.exit(3)


if __name__ == "__main__":
    main()
