# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command and one file: build, tests, sanitizer, times.

    python benchmarks/gpu.py [--sections ...] [--budget-seconds 540] [--out FILE] [--logs FOLDER]

Sections, in this order: build (if there is no CUDA variant), first (the first calls of a fresh
process), times (measure.py on all shapes), units (the programs of tests/cpp), tests (the suite) and
sanitizer (memcheck, initcheck and racecheck on small cases). Each runs in its own process within what
is left of the budget. The file is written after each, so that a run that is cut short keeps what it
has. The exit status is 1 if a section failed or did not end.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import ROOT, describe, nvidia_smi
from tables import markdown

BENCHMARKS = ROOT / "benchmarks"
# The most seconds that a section may take, whatever is left.
LIMITS = {"build": 420, "first": 60, "times": 150, "units": 300, "tests": 300}
# Whether on tiny cases only, and the seconds.
SANITIZERS = {"memcheck": (False, 90), "initcheck": (False, 150), "racecheck": (True, 120)}
# Files that never touch a GPU and build or need much: a machine without one runs them.
NO_GPU = (
    "test_aarch64.py",
    "test_cuda_sources.py",
    "test_cuda_units.py",  # a section of its own
    "test_dev_build.py",
    "test_hub_loading.py",
    "test_hub_release.py",
    "test_hub_versions.py",
    "test_reproducible.py",
    "test_variants.py",
)
WORDS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
# A line of `pytest -v` with xdist, and one without.
OUTCOME = re.compile(
    rf"^\[gw\d+\] \[ *\d+%\] ({WORDS}) (tests/.*?) *$|^(tests/.*?) ({WORDS})\b", re.M
)


class Session:
    """The report, where it goes, and what is left of the time."""

    def __init__(self, options):
        self.options = options
        self.start = time.monotonic()
        self.logs = (options.logs or Path(tempfile.mkdtemp(prefix="gpu-"))).resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.report = {"machine": describe(torch.device("cuda")), "sections": {}}
        self.report["machine"]["nvcc"] = nvcc_version()
        self.out = options.out or default_out(self.report["machine"])

    def left(self):
        return self.options.budget_seconds - (time.monotonic() - self.start)

    def run(self, name, command, limit, env=None):
        """Run a command with a limit; return (exit status or None if it was cut, its output)."""
        limit = min(limit, self.left() - 20)
        log = self.logs / f"{name}.log"
        if limit < 5:
            return None, "no time was left"
        print(f"== {name}: {' '.join(map(str, command))}", flush=True)
        with open(log, "w") as output:
            # A group of its own: at the limit its workers end with it.
            process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})}, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                end(process)
        return status, log.read_text(errors="replace")

    def keep(self, name, ok, seconds, **facts):
        self.report["sections"][name] = {"ok": ok, "seconds": round(seconds, 1), **facts}
        self.write()
        print(f"== {name}: {'ok' if ok else 'FAILED'}, {seconds:.0f} s", flush=True)

    def write(self):
        self.report["seconds"] = round(time.monotonic() - self.start, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.report, indent=1) + "\n")


def end(process):
    """End a process and its group; pytest gets a moment to say what has failed so far."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def default_out(facts):
    slug = re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    date = facts["date"].replace(" UTC", "").replace(" ", "-").replace(":", "")
    return BENCHMARKS / "results" / f"{slug}-{date}-{facts['commit'].split('+')[0]}.json"


def nvcc_version():
    if shutil.which("nvcc") is None:
        return None
    done = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\S+),", done.stdout)
    return found.group(1) if found else None


def tail(text, lines=30):
    return text.strip().splitlines()[-lines:]


def cuda_variant():
    """The metadata of a CUDA variant in build/ that this torch loads, or None."""
    for path in sorted((ROOT / "build").glob("*/metadata.json")):
        metadata = json.loads(path.read_text())
        if metadata.get("backend", {}).get("type") == "cuda":
            return {"folder": path.parent.name, "id": metadata["id"], **metadata["backend"]}
    return None


def section_build(session):
    start = time.monotonic()
    status, output = 0, ""
    if cuda_variant() is None or session.options.rebuild:
        arch = session.options.arch or nvidia_smi("compute_cap")
        command = [sys.executable, "tools/dev_build.py", "--backend", "cuda", "--arch", arch]
        status, output = session.run("build", command, LIMITS["build"])
    variant = cuda_variant()
    ok = status == 0 and variant is not None
    session.keep("build", ok, time.monotonic() - start, variant=variant, tail=tail(output))


def section_first(session):
    start = time.monotonic()
    command = [sys.executable, BENCHMARKS / "first_call.py", "--device", "cuda"]
    status, output = session.run("first", command, LIMITS["first"])
    found = [line for line in output.splitlines() if line.startswith('{"load"')]
    seconds = json.loads(found[-1]) if status == 0 and found else None
    facts = {"first_call_seconds": seconds} if seconds else {"tail": tail(output)}
    session.keep("first", seconds is not None, time.monotonic() - start, **facts)


def section_times(session):
    start = time.monotonic()
    report = session.logs / "times.json"
    limit = min(LIMITS["times"], session.left() - 20)
    command = [sys.executable, BENCHMARKS / "measure.py", "--device", "cuda", "--out", report]
    command += ["--budget-seconds", f"{max(1.0, limit - 25):.0f}"]
    command += session.options.measure.split()
    status, output = session.run("times", command, limit)
    found = json.loads(report.read_text()) if report.exists() else None
    facts = {"tail": tail(output)} if status != 0 or found is None else {}
    if found:
        session.report["times"] = found
        print(markdown(found), flush=True)
    session.keep("times", status == 0, time.monotonic() - start, **facts)


def parse_tests(output):
    """Counts, failures and the slowest tests of pytest's output, also of one that was cut."""
    outcomes = {}
    for match in OUTCOME.finditer(output):
        first, name, other, second = match.groups()
        outcomes[name or other] = first or second
    counts = {}
    for outcome in outcomes.values():
        counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - (.*))?$", output, re.M))
    bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    failures = {name: reasons.get(name, "")[:300] for name in {**dict.fromkeys(bad), **reasons}}
    slowest = re.findall(r"^\s*(\d+\.\d+s) (?:call|setup)\s+(tests/.*)$", output, re.M)
    summary = re.findall(r"^=+ (.* in [\d.]+s.*?) =+$", output, re.M)
    return {
        "counts": counts,
        "summary": summary[-1] if summary else None,
        "failures": failures,
        "slowest": [" ".join(pair) for pair in slowest[:20]],
    }


def pytest_command(workers, *arguments):
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=20"]
    command += ["-p", "no:cacheprovider"]
    if workers and has_module("xdist"):
        command += ["-n", workers]
    return [*command, *arguments]


def has_module(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


def run_tests(session, name, command):
    start = time.monotonic()
    # One thread each: there is a process a core already.
    env = {"SDM_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    status, output = session.run(name, command, LIMITS[name], env)
    facts = parse_tests(output)
    if status != 0:
        facts["tail"] = tail(output, 60)
    facts["status"] = "cut at the limit" if status is None else status
    for test, reason in list(facts["failures"].items())[:40]:
        print(f"   {test}: {reason}")
    print("  ", facts["summary"] or facts["counts"], flush=True)
    session.keep(name, status == 0, time.monotonic() - start, **facts)


def section_units(session):
    run_tests(session, "units", pytest_command(8, "tests/test_cuda_units.py"))


def section_tests(session):
    arguments = [f"--ignore=tests/{name}" for name in NO_GPU] + session.options.pytest.split()
    run_tests(session, "tests", pytest_command(session.options.workers, *arguments))


def section_sanitizer(session):
    start = time.monotonic()
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        session.keep("sanitizer", False, 0, error="there is no compute-sanitizer")
        return
    usage = subprocess.run([tool, "--help"], capture_output=True, text=True, check=False).stdout
    only_ours = ["--kernel-regex", "kns=sdm"] if "kns" in usage else []
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    found = {}
    for name in session.options.sanitizers:
        tiny, limit = SANITIZERS[name]
        command = [tool, "--tool", name, "--error-exitcode", 9, "--print-limit", 20]
        if name != "initcheck":  # which must see torch's kernels write what ours read
            command += only_ours
        command += [sys.executable, BENCHMARKS / "sanitize.py", *(["--tiny"] if tiny else [])]
        status, output = session.run(name, command, limit, env)
        summary = re.findall(r"^=+ ((?:ERROR|RACECHECK|LEAK) SUMMARY: .*)$", output, re.M)
        found[name] = {
            "ok": status == 0,
            "status": "cut at the limit" if status is None else status,
            "summary": summary,
            "cases": re.findall(r"^case (\S+):", output, re.M),
            "reports": [x for x in output.splitlines() if x.startswith("=========")][:60],
            "tail": [] if status == 0 else tail(output, 10),
        }
        print("  ", name, found[name]["status"], summary, len(found[name]["cases"]), "cases")
        ok = all(x["ok"] for x in found.values())
        session.keep("sanitizer", ok, time.monotonic() - start, tools=found)


SECTION = {
    "build": section_build,
    "first": section_first,
    "times": section_times,
    "units": section_units,
    "tests": section_tests,
    "sanitizer": section_sanitizer,
}


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", default=list(SECTION), choices=SECTION)
    parser.add_argument("--budget-seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, help="the JSON file; default: in benchmarks/results")
    parser.add_argument("--logs", type=Path, help="folder of the full output of each section")
    parser.add_argument("--rebuild", action="store_true", help="build whatever is there")
    parser.add_argument("--arch", help="compute capability to build for; default: the card's")
    parser.add_argument("--workers", default=os.cpu_count(), help="processes of the suite")
    parser.add_argument("--measure", default="", help="more options for measure.py, one string")
    parser.add_argument("--pytest", default="", help="more options for the suite, one string")
    parser.add_argument("--sanitizers", nargs="+", default=list(SANITIZERS), choices=SANITIZERS)
    return parser.parse_args()


def main():
    options = parse_options()
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py: torch sees no GPU")
    os.environ.setdefault("LOCAL_KERNELS", f"org/sparse-delta-memory={ROOT}")
    session = Session(options)
    session.write()
    for name in SECTION:
        if name not in options.sections:
            continue
        if session.left() < 30:
            session.keep(name, False, 0, error="no time was left")
            continue
        SECTION[name](session)
    failed = [name for name, x in session.report["sections"].items() if not x["ok"]]
    print(f"gpu.py: {session.report['seconds']:.0f} s, {session.out}", end="")
    print(f", failed: {', '.join(failed)}" if failed else ", everything ok")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
