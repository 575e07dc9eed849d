# SPDX-License-Identifier: Apache-2.0
"""Repeated timing of several functions side by side."""

import statistics
import time

import torch

# About 0.2 ms: the host queues the first kernels of a call while the device spins, so that times
# are those of the device and not of the way there.
HEAD_START_CYCLES = 400_000


class Clock:
    """Times one call in ms: wall or process CPU time; on a GPU device time by CUDA events.

    On a GPU the L2 cache is overwritten and the device kept busy before every call; `host_ms` is
    how long the last call kept the host.
    """

    def __init__(self, device, kind="wall", flush=True):
        self.device = device
        self.kind = kind
        self.cuda = device.type == "cuda"
        self.host_ms = None
        if self.cuda:
            if kind != "wall":
                raise ValueError("CPU time says nothing about a GPU")
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.empty(2 * cache if flush else 0, dtype=torch.int8, device=device)

    def __call__(self, function):
        if self.cuda:
            self.flush.zero_()
            torch.cuda._sleep(HEAD_START_CYCLES)
            self.events[0].record()
            start = time.perf_counter()
            function()
            self.host_ms = (time.perf_counter() - start) * 1e3
            self.events[1].record()
            self.events[1].synchronize()
            return self.events[0].elapsed_time(self.events[1])
        now = time.process_time if self.kind == "cpu" else time.perf_counter
        start = now()
        function()
        return (now() - start) * 1e3


def measure(functions, clock, seconds, calls=1):
    """Time {name: function} in turns, so that a disturbance meets all of them alike.

    About `seconds` for each function, at least five rounds. A function that makes `calls` calls has
    its times divided by that. Returns {name: figures}, or {name: {"error": reason}} where it can't run.
    """
    results, times, host = {}, {}, {}
    for name, function in functions.items():
        try:
            for _ in range(2 if clock.cuda else 1):
                function()
            times[name] = [clock(function)]
            host[name] = [clock.host_ms]
        except (NotImplementedError, torch.OutOfMemoryError) as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    rounds = 5
    if times:
        slowest = sum(first[0] for first in times.values()) / len(times)
        if clock.cuda:
            slowest += 0.3  # what comes before each call
        rounds = min(200, max(5, round(seconds * 1e3 / slowest)))
    for _ in range(rounds - 1):
        for name in times:
            times[name].append(clock(functions[name]))
            host[name].append(clock.host_ms)
    for name, samples in times.items():
        results[name] = {
            "median_ms": statistics.median(samples) / calls,
            "min_ms": min(samples) / calls,
            "max_ms": max(samples) / calls,
            "repeats": len(samples),
        }
        if clock.cuda:
            results[name]["host_ms"] = statistics.median(host[name]) / calls
    return {name: results[name] for name in functions}


def graphed(function, device):
    """The same function replayed from a CUDA graph; itself on a CPU."""
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
