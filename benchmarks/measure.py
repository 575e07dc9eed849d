# SPDX-License-Identifier: Apache-2.0
"""Times the kernels and their yardsticks side by side and puts the numbers into one file.

    python benchmarks/measure.py [--device cpu|cuda] [--shape NAME ...] [--quick] [--out FILE]

Every result is checked in the same run: values and gradients of the kernel against an eager version
(CPU) or another chunk size (GPU) and against the float64 reference at a small size; the bits of one
thread against those of all, of one run against the next. A shape with a failed check gets no figures.
Inputs are random, slots are picked by product keys. The file is written after every shape.
docs/performance.md says how to read the table.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import kernels
import torch
from inputs import load_shapes
from machine import ROOT, describe
from measure_kda import measure_kda, measure_kda_step
from measure_sdm import measure_sdm, measure_step
from measure_topk import measure_topk
from run import Run, load_targets
from tables import markdown

REPO = "org/sparse-delta-memory"
KINDS = {
    "sdm": measure_sdm,
    "step": measure_step,
    "topk": measure_topk,
    "kda": measure_kda,
    "kda_step": measure_kda_step,
}


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", default=[], help="names from shapes.json")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--threads", nargs="+", type=int, help="CPU thread counts")
    parser.add_argument("--seconds", type=float, help="time for each measurement; 3, on a GPU 0.5")
    parser.add_argument("--quick", action="store_true", help="few repeats, no memory section")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"],
                        help="cpu: process time on one thread, for a machine that is busy")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="the eager yardsticks on a GPU too")
    parser.add_argument("--peers", action="store_true", help="public packages that are installed")
    parser.add_argument("--budget-seconds", type=float, help="start no shape after this time")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    if options.clock == "cpu":
        options.threads = [1]
    options.threads = options.threads or sorted({1, torch.get_num_threads()})
    if options.seconds is None:
        options.seconds = 3.0 if options.device == "cpu" else 0.5
    return options


def main():
    start = time.monotonic()
    options = parse_options()
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO}={ROOT}")
    kernel = kernels.get_kernel(REPO, version=1)
    run = Run(kernel, options, load_targets(ROOT / "benchmarks" / "targets.json"))
    facts = {**describe(run.device), "build": kernel.__name__, "clock": options.clock}

    def write():
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(run.report(facts), indent=1) + "\n")

    run.measure_ceilings()
    write()
    for kind, shapes in load_shapes(run.device.type, options.shape).items():
        if kind not in options.kind:
            continue
        if kind.startswith("kda") and not options.shape and not hasattr(kernel, "chunk_kda"):
            run.failures.append({"shape": kind, "error": "skipped: this build has no chunk_kda"})
            continue
        for name, shape in shapes.items():
            used = time.monotonic() - start
            if options.budget_seconds and used > options.budget_seconds:
                run.failures.append({"shape": name, "error": f"skipped: {used:.0f} s were used"})
            else:
                run.shape(KINDS[kind], name, shape)
            write()
    write()
    print("\n" + markdown(run.report(facts)))
    sys.exit(any(not failure["error"].startswith("skipped") for failure in run.failures))


if __name__ == "__main__":
    main()
