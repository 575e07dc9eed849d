# SPDX-License-Identifier: Apache-2.0
"""What is in the package: its names, its metadata, its ops, and the symbols of its library."""

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kernels
import pytest
import torch
from kernels._rust import Backend, Build, Metadata
from kernels.variants import get_variants_local, resolve_variant

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_tree  # noqa: E402
from devbuild import config as build_config  # noqa: E402

API = [
    "SparseDeltaMemory",
    "SparseDeltaMemoryConfig",
    "SparseDeltaMemoryState",
    "check_indices",
    "chunk_kda",
    "chunk_sdm",
    "chunk_sdm_",
    "fused_recurrent_kda",
    "layers",
    "product_key_topk",
    "recurrent_kda_",
    "recurrent_sdm_",
    "reference",
]

OPS = [
    "kda_chunk_bwd",
    "kda_chunk_fwd",
    "kda_recurrent_fwd",
    "kda_step_",
    "product_key_topk_bwd",
    "product_key_topk_fwd",
    "sdm_check_indices",
    "sdm_chunk_",
    "sdm_chunk_bwd",
    "sdm_chunk_fwd",
    "sdm_step_",
]

# What a library may ask of the process that loads it: torch's C functions, the function of Python
# that makes a module, CUDA's runtime, and the C and C++ runtime by versioned names.
ALLOWED_SYMBOLS = re.compile(
    r"^(aoti_torch_\w+|torch_\w+|PyModule_Create2|_?_?cuda\w+(@.*)?"
    r"|[^@]+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+)$"
)


@pytest.fixture(scope="module")
def variant(sdm):
    return Path(sdm.__file__).parent


@pytest.fixture(scope="module")
def library(variant):
    (path,) = variant.glob("*.so")
    return path


@pytest.fixture(scope="module")
def metadata(variant):
    return Metadata.read_from_file(variant / "metadata.json")


def _symbols(library, option):
    """Pairs of the kind (one letter) and the name with its version."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    command = ["nm", "-D", option, str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[-2:] for line in text.splitlines()]


@pytest.mark.kernels_ci
def test_all_is_the_public_api(sdm):
    assert sorted(sdm.__all__) == sorted(API)
    for name in API:
        assert getattr(sdm, name) is not None


@pytest.mark.kernels_ci
def test_metadata_is_complete(metadata, variant):
    assert str(metadata.name) == "sparse-delta-memory"
    assert metadata.version == 1
    assert metadata.license == "Apache-2.0"
    assert metadata.python_depends == []
    assert metadata.kernel_depends == []
    backend = metadata.backend.backend_type
    assert backend in (Backend.CPU, Backend.CUDA)
    assert metadata.id.startswith(f"_sparse_delta_memory_{str(backend).lower()}_")
    assert metadata.provenance is not None
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", metadata.provenance.kernel.commit)
    assert "archs" not in json.loads((variant / "metadata.json").read_text())["backend"] or (
        backend == Backend.CUDA
    )


def test_the_client_finds_the_variant(variant):
    backend = "cpu" if "-cpu-" in variant.name else None
    found, trace = resolve_variant(get_variants_local(variant.parent), backend)
    assert found is not None, trace
    assert found.variant_str == variant.name


def test_local_kernel_is_the_same_module(sdm, variant):
    backend = "cpu" if "-cpu-" in variant.name else None
    assert kernels.get_local_kernel(variant.parent.parent, backend=backend) is sdm


def test_build_toml_is_accepted_by_the_client():
    build = Build.open(ROOT)
    assert set(build.general.backends) == {Backend.CPU, Backend.CUDA}
    for backend in build.general.backends:
        assert build.all_kernel_depends(backend) == []


def test_build_toml_lists_every_file():
    problems = []
    check_tree.check_lists(problems)
    assert problems == []


def test_package_imports_only_torch_and_itself():
    problems = []
    for path in build_config.load(ROOT).python_files():
        check_tree.check_package_module(path.name, path.read_text(), problems)
    assert problems == []


def test_package_is_of_python_3_9():
    for path in build_config.load(ROOT).python_files():
        ast.parse(path.read_text(), path.name, feature_version=(3, 9))


def test_ops_are_all_in_the_namespace_of_the_build(metadata):
    names = torch._C._dispatch_get_all_op_names()
    own = sorted(n for n in names if n.startswith(f"{metadata.id}::"))
    assert own == [f"{metadata.id}::{op}" for op in OPS]
    stray = [n for n in names if n not in own and re.search("sdm|kda|product_key|delta_mem", n)]
    assert stray == []


@pytest.mark.parametrize("op", OPS)
def test_op_has_a_cpu_kernel_and_a_fake(metadata, op):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"{metadata.id}::{op}", "CPU")
    if op != "sdm_check_indices":  # returns a number that depends on the data
        assert has_kernel(f"{metadata.id}::{op}", "Meta")


def test_op_names_are_not_spelled_out_in_the_package():
    for path in build_config.load(ROOT).python_files():
        text = path.read_text()
        assert "torch.ops." not in text, path.name
        assert not re.search(r"sparse_delta_memory\w*::", text), path.name


def test_library_needs_only_stable_symbols(library):
    symbols = _symbols(library, "--undefined-only")
    # Weak ones may stay undefined.
    unknown = [n for kind, n in symbols if kind == "U" and not ALLOWED_SYMBOLS.match(n)]
    assert unknown == []


def test_library_exports_only_its_module(library, metadata):
    strong = [name for kind, name in _symbols(library, "--defined-only") if kind == "T"]
    assert strong == [f"PyInit_{metadata.id}"]


def test_wide_instructions_stay_in_their_namespace(library):
    """An older processor runs this library too, so only code chosen at run time may be wide.

    An inline function of a header that is compiled inside a target pragma by accident would be the
    copy that the linker keeps for everyone.
    """
    if platform.machine() != "x86_64" or shutil.which("objdump") is None:
        pytest.skip("needs objdump on x86-64")
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    function, found = "", set()
    wide = re.compile(r":\s+(v\w+ .*%[xyz]mm|.*%[yz]mm|\w+x\s.*%k[0-7])")
    for line in text.splitlines():
        header = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if header:
            function = header.group(1)
        elif "isa_avx" not in function and wide.search(line):
            found.add(function)
    assert text
    assert not found


BY_NAME = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("by_name", sys.argv[1] + "/__init__.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
values, indices = module.product_key_topk(torch.tensor([[3.0, 1.0, 2.0, 5.0]]), (2, 2), 1)
assert (values.item(), indices.item()) == (8.0, 1)
print(*module.__all__)
"""


def test_package_by_its_name(sdm, variant):
    # The folder that older clients import instead of the variant itself.
    folder = variant / "sparse_delta_memory"
    command = [sys.executable, "-c", BY_NAME, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sdm.__all__


def run_offline(variant, code):
    """What code prints in a fresh process that finds the build and no network."""
    environment = dict(
        os.environ,
        HF_HUB_OFFLINE="1",
        LOCAL_KERNELS=f"org/sparse-delta-memory={variant.parent.parent}",
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loads_offline_without_touching_the_network(variant):
    code = f"""
import socket
def refuse(*args, **kwargs):
    raise AssertionError("network used")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import kernels
backend = {"cpu" if "-cpu-" in variant.name else None!r}
print(kernels.get_kernel("org/sparse-delta-memory", version=1, backend=backend).__file__)
"""
    assert Path(run_offline(variant, code).strip()).parent == variant


def test_loads_without_the_compiler_of_torch(variant):
    # torch._dynamo and sympy are a second of imports that only torch.compile needs.
    code = """
import sys
import kernels
import torch
before = set(sys.modules)
kernels.get_kernel("org/sparse-delta-memory", version=1)
print(*sorted({"torch._dynamo", "torch._inductor", "sympy", "triton"} & set(sys.modules) - before))
"""
    assert run_offline(variant, code).split() == []
