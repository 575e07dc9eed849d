# SPDX-License-Identifier: Apache-2.0
"""Times the kernels and their eager yardsticks side by side and puts the numbers into one file.

    python benchmarks/measure.py [--device cpu|cuda] [--shape NAME ...] [--quick] [--out FILE]

Every result is checked in the same run: values and gradients of the kernel and the eager version
against each other, and on a CPU the bits of one thread against those of all. Inputs are random,
slots are picked by product keys. docs/performance.md says how to read the table.
"""

import argparse
import json
import os
from pathlib import Path

import kernels
import torch
from eager_sdm import (
    eager_chunk_sdm,
    eager_chunk_sdm_,
    eager_product_key_topk,
    eager_recurrent_sdm_,
)
from inputs import draw_sdm, load_shapes, num_slots, with_grad
from machine import ROOT, copy_bandwidth, describe, load
from memory import measure_memory
from tables import markdown
from timing import Clock, graphed, measure
from traffic import count_rows, sdm_bytes, step_bytes

REPO = "org/sparse-delta-memory"
CHUNK = 64  # what chunk_size=None stands for; the traffic is counted for it
EAGER_CHUNKS = (64, 128, 256, 512)
STEPS = 16  # decode steps in one timed call, each with its own token
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative L2


class Run:
    """One run: its options and the results so far."""

    def __init__(self, kernel, options):
        self.kernel = kernel
        self.device = torch.device(options.device)
        self.seconds = 0.3 if options.quick else options.seconds
        self.quick = options.quick
        self.clock_kind = options.clock
        self.clock = Clock(self.device, options.clock)
        self.threads = options.threads if self.device.type == "cpu" else [None]
        self.all_threads = torch.get_num_threads()
        self.results, self.checks, self.ceilings = [], [], []

    def use_threads(self, count):
        if count is not None:
            torch.set_num_threads(count)

    def ceiling(self, threads):
        found = [c["gb_s"] for c in self.ceilings if c["threads"] == threads]
        return found[0] if found else None

    def time(self, shape_name, functions, threads, moved=None, calls=1, items=None):
        """Time {(op, who): function} and keep the figures; `moved` is {(op, who): bytes}."""
        figures = measure(functions, self.clock, self.seconds, calls)
        for (op, who), figure in figures.items():
            record = {"shape": shape_name, "op": op, "who": who, "threads": threads, **figure}
            size = (moved or {}).get((op, who))
            if size and "median_ms" in figure:
                record["bank_gb"] = size / 1e9
                record["gb_s"] = size / figure["median_ms"] / 1e6
                if self.ceiling(threads):
                    record["share"] = record["gb_s"] / self.ceiling(threads)
            if items and "median_ms" in figure:
                record["items_per_s"] = items / figure["median_ms"] * 1e3
            self.results.append(record)
            shown = f"{figure['median_ms']:10.3f} ms" if "median_ms" in figure else figure["error"]
            print(f"  {shown}  {shape_name}, {op}, {who}, threads {threads}", flush=True)

    def check(self, shape_name, what, error, limit):
        """Keep a comparison; a run whose numbers are wrong must not end in a table."""
        ok = error <= limit
        self.checks.append(
            {"shape": shape_name, "what": what, "error": error, "limit": limit, "ok": ok}
        )
        if not ok:
            raise SystemExit(f"{shape_name}: {what}: {error:.2e} is over {limit:.0e}")


def relative_error(x, reference):
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def train_function(function, leaves, d_out, **options):
    """A function that does forward and backward and returns out and all gradients."""
    wanted = [x for x in leaves if x.requires_grad]

    def call():
        out, _ = function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, wanted, d_out)]

    return call


def check_sdm(run, name, shape, inputs, d_out):
    """Kernel against eager at the real size, both against the token loop at a small one."""
    limit = LIMITS[inputs[2].dtype]
    labels = ("out", "d_write_val", "d_v", "d_beta", "d_g", "d_read_val", "d_initial_state")
    leaves = with_grad(inputs)
    ours = train_function(run.kernel.chunk_sdm, leaves, d_out)()
    try:
        eager = train_function(eager_chunk_sdm, leaves, d_out, chunk_size=512)()
    except torch.OutOfMemoryError:
        eager = []
        print(f"  {name}: eager autograd does not fit into memory, compared at the small size only")
    for label, a, b in zip(labels, ours, eager):
        run.check(name, f"{label}, kernel and eager", relative_error(a, b), limit)
    del eager
    rows = train_function(run.kernel.chunk_sdm, leaves, d_out, save="rows")()
    same = all(torch.equal(a, b) for a, b in zip(ours, rows))
    run.check(name, "bits of replay and rows differ", float(not same), 0)
    if run.device.type == "cpu":
        threads = torch.get_num_threads()
        for count in sorted({1, run.all_threads}):
            run.use_threads(count)
            again = train_function(run.kernel.chunk_sdm, leaves, d_out)()
            same = all(torch.equal(a, b) for a, b in zip(ours, again))
            run.check(name, f"bits with {count} threads differ", float(not same), 0)
        run.use_threads(threads)

    small = {**shape, "T": 128, "D": 32, "factor_dims": [32, 32], "W": 8, "R": 8}
    inputs = draw_sdm(run.kernel, small, run.device, seed=1)
    d_out = torch.randn_like(inputs[2])
    exact_inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    reference = train_function(run.kernel.reference.sdm, with_grad(exact_inputs), d_out.double())()
    for who, function, options in (
        ("kernel", run.kernel.chunk_sdm, {}),
        ("eager", eager_chunk_sdm, {"bags": False}),
        ("eager bags", eager_chunk_sdm, {"bags": True}),
    ):
        results = train_function(function, with_grad(inputs), d_out, **options)()
        for label, a, b in zip(labels, results, reference):
            run.check(name, f"{label}, {who} and reference, small", relative_error(a, b), limit)


def fastest_chunk(run, make):
    """Return the chunk size at which an eager function is fastest, by one call each."""
    times = {}
    for chunk in EAGER_CHUNKS:
        try:
            function = make(chunk)
            times[chunk] = min(run.clock(function) for _ in range(2))
        except torch.OutOfMemoryError:
            continue
    return min(times, key=times.get, default=EAGER_CHUNKS[0])


def measure_sdm(run, name, shape):
    kernel = run.kernel
    inputs = draw_sdm(kernel, shape, run.device)
    d_out = torch.randn_like(inputs[2])
    check_sdm(run, name, shape, inputs, d_out)
    rows = count_rows(inputs[0], inputs[5], num_slots(shape), CHUNK)
    sizes = sdm_bytes(*rows, shape["D"], inputs[-1].dtype, run.device.type == "cuda")
    state = inputs[-1].clone()
    leaves = with_grad(inputs)
    eager_styles = {"eager": False, "eager bags": True}

    def eager_in_place(chunk):
        return lambda: eager_chunk_sdm_(state, *inputs[:-1], chunk_size=chunk)

    def eager_forward(chunk, bags):
        return lambda: eager_chunk_sdm(*inputs, chunk_size=chunk, bags=bags)

    def eager_train(chunk, bags):
        return train_function(eager_chunk_sdm, leaves, d_out, chunk_size=chunk, bags=bags)

    run.use_threads(run.threads[-1])
    with torch.no_grad():
        forward_chunk = {
            who: fastest_chunk(run, lambda c, bags=bags: eager_forward(c, bags))
            for who, bags in eager_styles.items()
        }
    train_chunk = {
        who: fastest_chunk(run, lambda c, bags=bags: eager_train(c, bags))
        for who, bags in eager_styles.items()
    }
    for threads in run.threads:
        run.use_threads(threads)
        forward = {
            ("forward", "kernel"): lambda: kernel.chunk_sdm(*inputs),
            ("forward", "kernel, in place"): lambda: kernel.chunk_sdm_(state, *inputs[:-1]),
        }
        for who, bags in eager_styles.items():
            chunk = forward_chunk[who]
            forward["forward", f"{who}, chunk {chunk}"] = eager_forward(chunk, bags)
        chunk = forward_chunk["eager bags"]
        forward["forward", f"eager bags, in place, chunk {chunk}"] = eager_in_place(chunk)
        moved = dict.fromkeys(list(forward)[:2], sizes["forward"])
        with torch.no_grad():
            run.time(name, forward, threads, moved)
        train, moved = {}, {}
        for save in ("replay", "rows"):
            key = ("forward + backward", f"kernel, {save}")
            train[key] = train_function(kernel.chunk_sdm, leaves, d_out, save=save)
            moved[key] = sizes[save]
        for who, bags in eager_styles.items():
            chunk = train_chunk[who]
            train["forward + backward", f"{who}, chunk {chunk}"] = eager_train(chunk, bags)
        run.time(name, train, threads, moved)


def measure_step(run, name, shape):
    """The decode step: each of STEPS tokens in its own call, banks larger than the caches."""
    inputs = draw_sdm(run.kernel, shape, run.device)
    tokens = [[x[:, t : t + 1].contiguous() for x in inputs[:-1]] for t in range(STEPS)]
    states = [inputs[-1].clone() for _ in range(2)]
    outs = [
        [step(state, *token) for token in tokens]
        for step, state in zip((run.kernel.recurrent_sdm_, eager_recurrent_sdm_), states)
    ]
    error = relative_error(torch.cat(outs[0], 1), torch.cat(outs[1], 1))
    run.check(name, "out, kernel and eager", error, LIMITS[inputs[2].dtype])
    size = step_bytes(inputs[0], inputs[5], num_slots(shape), shape["D"], inputs[-1].dtype)

    def decode(step, state):
        return graphed(lambda: [step(state, *token) for token in tokens], run.device)

    functions = {
        ("decode step", "kernel"): decode(run.kernel.recurrent_sdm_, states[0]),
        ("decode step", "eager"): decode(eager_recurrent_sdm_, states[1]),
    }
    moved = {("decode step", "kernel"): size}
    for threads in run.threads:
        run.use_threads(threads)
        with torch.no_grad():
            run.time(name, functions, threads, moved, calls=STEPS)


def measure_topk(run, name, shape):
    torch.manual_seed(0)
    dims, k = shape["factor_dims"], shape["k"]
    scores = torch.randn(shape["rows"], sum(dims)).to(getattr(torch, shape["dtype"]))
    scores = scores.to(run.device)
    ours, eager = (
        run.kernel.product_key_topk(scores, dims, k),
        eager_product_key_topk(scores, dims, k),
    )
    if scores.dtype == torch.float32:  # no ties: the same slots and sums
        run.check(name, "slots differ", float((ours[1] != eager[1]).sum()), 0)
    error = relative_error(ours[0].sort(-1)[0], eager[0].sort(-1)[0])
    run.check(name, "values, kernel and eager", error, LIMITS[scores.dtype])
    functions = {
        ("top-k", "kernel"): lambda: run.kernel.product_key_topk(scores, dims, k),
        ("top-k", "eager"): lambda: eager_product_key_topk(scores, dims, k),
    }
    for threads in run.threads:
        run.use_threads(threads)
        with torch.no_grad():
            run.time(name, functions, threads, items=shape["rows"])


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", default=[], help="names from shapes.json")
    parser.add_argument("--threads", nargs="+", type=int, help="CPU thread counts")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each measurement")
    parser.add_argument("--quick", action="store_true", help="few repeats, no memory section")
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"],
                        help="cpu: process time on one thread, for a machine that is busy")  # fmt: skip
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    options = parser.parse_args()
    if options.clock == "cpu":
        options.threads = [1]
    options.threads = options.threads or sorted({1, torch.get_num_threads()})
    return options


def main():
    options = parse_options()
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO}={ROOT}")
    kernel = kernels.get_kernel(REPO, version=1)
    run = Run(kernel, options)
    facts = {**describe(run.device), "build": kernel.__name__, "clock": options.clock}
    shapes = load_shapes(run.device.type, options.shape)
    for threads in run.threads:
        run.use_threads(threads)
        run.ceilings.append(copy_bandwidth(run.device, run.clock_kind, run.seconds))
    for kind, function in (("sdm", measure_sdm), ("step", measure_step), ("topk", measure_topk)):
        for name, shape in shapes[kind].items():
            function(run, name, shape)
    memory = []
    if not run.quick:
        for name in shapes["sdm"]:
            memory += measure_memory(name, run.device.type)
    facts["load_at_end"] = load()
    report = {
        "machine": facts,
        "ceilings": run.ceilings,
        "results": run.results,
        "memory": memory,
        "checks": run.checks,
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n" + markdown(report))


if __name__ == "__main__":
    main()
