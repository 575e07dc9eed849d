#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds this machine's variant from build.toml without nix, into build/<variant>/.

The result loads like a build from the hub:

    LOCAL_KERNELS="org/sparse-delta-memory=$PWD" python
    >>> kernels.get_kernel("org/sparse-delta-memory", version=1)

The library keeps manylinux_2_28, so others can run it too; publishing stays with kernel-builder.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from devbuild import config as build_config  # noqa: E402
from devbuild import identity, ninja_file, package, toolchain  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend",
        choices=["cpu", "cuda"],
        help="default: that of this torch, whose variant the kernels client loads",
    )
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="X.Y",
        help="compute capability to compile CUDA sources for; may be repeated; default: all",
    )
    parser.add_argument(
        "--cuda",
        metavar="X.Y",
        help="make the CUDA variant of this toolkit, whichever torch is here",
    )
    parser.add_argument("--std", type=int, choices=[17, 20], default=17, help="C++ standard")
    parser.add_argument(
        "--werror",
        action="store_true",
        default=bool(os.environ.get("CI")),
        help="a compiler warning is an error; default where CI is set",
    )
    parser.add_argument(
        "--compile-only", action="store_true", help="compile, do not link and package"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder of the variants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="show the command lines")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        return build(arguments)
    except toolchain.BuildError as error:
        print(f"dev_build: {error}", file=sys.stderr)
        return 1


def build(arguments: argparse.Namespace) -> int:
    start = time.monotonic()
    config = build_config.load(ROOT)
    torch = toolchain.find_torch()
    if arguments.cuda:
        backend, cuda = "cuda", toolchain.find_cuda_of(ROOT, arguments.cuda)
        torch = dataclasses.replace(torch, cuda=None)  # the toolkit alone names the variant
    else:
        backend, cuda = _choose_backend(arguments.backend, torch)
    options = ninja_file.Options(
        kernels="cuda" if cuda else "cpu",
        std=arguments.std,
        werror=arguments.werror,
        archs=tuple(sorted(set(arguments.arch))),
        cuda=cuda,
    )
    variant = toolchain.variant_name(backend, config.stable_abi[backend], torch, cuda)
    archs = ninja_file.compiled_archs(config, options)
    unique = identity.unique_id(config, options.kernels, [f"c++{options.std}", *archs])
    name = f"_{config.python_name}_{backend}_{unique}"

    objects = Path("_cmake_build") / _objects_name(variant, options)
    (ROOT / objects).mkdir(parents=True, exist_ok=True)
    with open(ROOT / objects / "lock", "w") as lock:
        # Two test runs that start together must not both write here.
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = ninja_file.write(config, options, objects, name, torch)
        _run_ninja(objects, arguments)
        if arguments.compile_only:
            print(f"dev_build: {variant} compiles as C++{options.std}")
            return 0
        changed = package.write(
            config,
            arguments.out / variant,
            name,
            ROOT / library,
            backend,
            archs,
            identity.git_status(ROOT),
        )
    state = "built" if changed else "up to date"
    seconds = time.monotonic() - start
    print(f"dev_build: {variant} {state}, {name}, {seconds:.1f} s")
    return 0


def _choose_backend(
    wanted: str | None, torch: toolchain.Torch
) -> tuple[str, toolchain.Cuda | None]:
    """The backend to name the variant after, and the toolkit if it gets CUDA code."""
    backend = wanted or ("cuda" if torch.cuda else "cpu")
    if backend == "cpu":
        return backend, None
    cuda = toolchain.find_cuda()
    if cuda and toolchain.fits(torch, cuda):
        return backend, cuda
    problem = (
        f"the CUDA toolkit is {cuda.version} and torch wants {torch.cuda}"
        if cuda
        else "no CUDA toolkit found (put nvcc on PATH or set CUDA_HOME)"
    )
    if wanted:
        raise toolchain.BuildError(problem)
    # A CUDA build of torch loads CUDA variants only, on a machine without a GPU too.
    print(f"dev_build: {problem}; this variant gets the CPU kernels only")
    return backend, None


def _objects_name(variant: str, options: ninja_file.Options) -> str:
    name = variant
    if options.std != 17:
        name += f"-cxx{options.std}"
    if options.werror:
        name += "-werror"
    return name


def _run_ninja(objects: Path, arguments: argparse.Namespace) -> None:
    command = [toolchain.find_ninja(), "-f", str(objects / "build.ninja")]
    command += ["-j", str(arguments.jobs)]
    if arguments.verbose:
        command.append("-v")
    if arguments.compile_only:
        command.append("objects")
    environment = dict(os.environ, NINJA_STATUS="dev_build: [%f/%t] ")
    sys.stdout.flush()
    quiet = _nothing_to_do(command)
    if not quiet and subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        raise toolchain.BuildError("compilation failed")


def _nothing_to_do(command: list[str]) -> bool:
    done = subprocess.run([*command, "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0 and "no work to do" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
