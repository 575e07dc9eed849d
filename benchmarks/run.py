# SPDX-License-Identifier: Apache-2.0
"""What the measurements of one run share: device, clock, results, checks."""

import json
import time

import torch
from machine import copy_bandwidth, load
from timing import Clock, measure

TARGETS = "targets.json"


class WrongResult(Exception):
    """A check has failed: the figures of this shape mean nothing."""


class Run:
    """One run: its options and the results so far."""

    def __init__(self, kernel, options, targets):
        self.kernel = kernel
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.seconds = 0.3 if options.quick else options.seconds
        self.quick = options.quick
        self.eager = options.eager or not self.cuda
        self.peers = options.peers
        self.clock_kind = options.clock
        self.clock = Clock(self.device, options.clock)
        self.threads = [None] if self.cuda else options.threads
        self.all_threads = torch.get_num_threads()
        self.targets = targets if self.cuda else {}
        self.results, self.checks, self.ceilings, self.memory = [], [], [], []
        self.failures = []

    def use_threads(self, count):
        if count is not None:
            torch.set_num_threads(count)

    def measure_ceilings(self):
        for threads in self.threads:
            self.use_threads(threads)
            mib = 4096 if self.cuda else 256
            self.ceilings.append(copy_bandwidth(self.device, self.clock_kind, self.seconds, mib))

    def ceiling(self, threads):
        found = [c["gb_s"] for c in self.ceilings if c["threads"] == threads]
        return found[0] if found else None

    def time(self, shape_name, functions, threads=None, moved=None, calls=1, items=None):
        """Time {(op, who): function} and keep the figures; `moved` is {(op, who): bytes}."""
        figures = measure(functions, self.clock, self.seconds, calls)
        for (op, who), figure in figures.items():
            record = {"shape": shape_name, "op": op, "who": who, "threads": threads, **figure}
            size = (moved or {}).get((op, who))
            if size and "median_ms" in figure:
                record["gb"] = size / 1e9
                record["gb_s"] = size / figure["median_ms"] / 1e6
                if self.ceiling(threads):
                    record["share"] = record["gb_s"] / self.ceiling(threads)
            if items and "median_ms" in figure:
                record["items_per_s"] = items / figure["median_ms"] * 1e3
            record.update(self.targets.get(shape_name, {}).get(op, {}))
            self.results.append(record)
            shown = f"{figure['median_ms']:10.4f} ms" if "median_ms" in figure else figure["error"]
            print(f"  {shown}  {shape_name}, {op}, {who}", end="", flush=True)
            print("" if threads is None else f", threads {threads}", flush=True)

    def remember_memory(self, shape_name, mode, figures):
        known = self.targets.get(shape_name, {}).get("memory", {})
        self.memory.append({"shape": shape_name, "mode": mode, **figures, **known})

    def check(self, shape_name, what, error, limit):
        """Keep a comparison; figures of wrong numbers must not end in a table."""
        ok = error <= limit
        self.checks.append(
            {"shape": shape_name, "what": what, "error": error, "limit": limit, "ok": ok}
        )
        if not ok:
            raise WrongResult(f"{shape_name}: {what}: {error:.2e} is over {limit:.0e}")

    def shape(self, function, name, shape):
        """Measure one shape; what goes wrong is kept, and the shape's figures are not."""
        kept = len(self.results), len(self.memory)
        start = time.monotonic()
        try:
            function(self, name, shape)
        except (WrongResult, RuntimeError) as error:
            del self.results[kept[0] :], self.memory[kept[1] :]
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            self.failures.append({"shape": name, "error": reason})
            print(f"  FAILED  {name}: {reason}", flush=True)
        if self.cuda:
            torch.cuda.empty_cache()
        print(f"  {name}: {time.monotonic() - start:.1f} s", flush=True)

    def report(self, facts):
        return {
            "machine": {**facts, "load_at_end": load()},
            "ceilings": self.ceilings,
            "results": self.results,
            "memory": self.memory,
            "checks": self.checks,
            "failures": self.failures,
        }


def load_targets(path):
    return json.loads(path.read_text())["figures"]


def relative_error(x, reference):
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm().clamp_min(1e-300)).item()
