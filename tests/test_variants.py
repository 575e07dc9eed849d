# SPDX-License-Identifier: Apache-2.0
"""Variants: which one a system gets, and what must be true of each that was built.

Looks at build/, and with `make variants` at the whole matrix: SDM_VARIANTS names its folder.
"""

import base64
import hashlib
import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest
from kernels._rust import Backend, Digest, Metadata
from kernels.backends import CPU, CUDA
from kernels.variants import _resolve_variant_for_system, parse_variant
from packaging.version import Version

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import build_variants  # noqa: E402
from devbuild import binary, ninja_file, toolchain  # noqa: E402
from devbuild import config as build_config  # noqa: E402

CONFIG = build_config.load(ROOT)
MACHINE = f"{platform.machine()}-linux"
MATRIX_FOLDER = os.environ.get("SDM_VARIANTS")

# What the hub requires of metadata.json; archs for CUDA besides.
REQUIRED_KEYS = {"id", "name", "version", "license", "backend", "digest"}
OPTIONAL_KEYS = {"python-depends", "provenance"}


def local_builds():
    """The folder of variants that the other tests load from."""
    pairs = (entry.split("=", 1) for entry in os.environ["LOCAL_KERNELS"].split(":"))
    path = Path(dict(pairs)[CONFIG.repo_id])
    return path / "build" if (path / "build").is_dir() else path


def pytest_generate_tests(metafunc):
    """One test for each variant that is there."""
    if "variant" in metafunc.fixturenames:
        folders = [local_builds(), *([Path(MATRIX_FOLDER)] if MATRIX_FOLDER else [])]
        found = [path for folder in folders for path in sorted(folder.glob("torch-*"))]
        names = [f"{path.parent.name}/{path.name}" for path in found]
        metafunc.parametrize("variant", found, ids=names, scope="module")


@pytest.fixture(scope="module")
def metadata(variant):
    return json.loads((variant / "metadata.json").read_text())


@pytest.fixture(scope="module")
def library(variant):
    (path,) = variant.glob("*.so")
    return path


def matrix_names():
    """The names of the variants of this machine that the development build can make."""
    torch = toolchain.Torch(Path("torch"), "2.13.0", None)
    names = [toolchain.variant_name("cpu", CONFIG.stable_abi["cpu"], torch, None)]
    for version in build_variants.CUDA_VERSIONS:
        cuda = toolchain.Cuda(Path("cuda"), version)
        names.append(toolchain.variant_name("cuda", CONFIG.stable_abi["cuda"], torch, cuda))
    return names


@pytest.mark.kernels_ci
def test_matrix_names():
    arch = "torch-stable-abi211-{}-" + MACHINE
    assert matrix_names() == [arch.format(b) for b in ("cpu", "cu126", "cu128", "cu130")]
    for name in matrix_names():
        assert parse_variant(name).variant_str == name


@pytest.mark.parametrize("torch", ["2.11", "2.12", "2.13", "3.0"])
@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        (None, "cpu"),
        ("12.6", "cu126"),
        ("12.8", "cu128"),
        ("12.9", "cu128"),
        ("13.0", "cu130"),
        ("13.2", "cu130"),
        ("12.4", None),
        ("14.0", None),
    ],
)
def test_which_variant_a_system_gets(torch, cuda, expected):
    variants = [parse_variant(name) for name in matrix_names()]
    accepted, trace = _resolve_variant_for_system(
        variants,
        selected_backend=CUDA(version=Version(cuda)) if cuda else CPU(),
        cpu=platform.machine(),
        os="linux",
        torch_version=Version(torch),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    chosen = accepted[0].arch.backend.variant_str if accepted else None
    assert chosen == expected, trace


def test_torch_below_the_lowest_gets_none():
    accepted, trace = _resolve_variant_for_system(
        [parse_variant(name) for name in matrix_names()],
        selected_backend=CPU(),
        cpu=platform.machine(),
        os="linux",
        torch_version=Version("2.10"),
        torch_cxx11_abi=True,
        tvm_ffi_version=None,
    )
    assert accepted == []
    assert any("is too new for environment Torch version" in d.reason for d in trace)


@pytest.mark.skipif(not MATRIX_FOLDER, reason="make variants builds the matrix")
def test_matrix_is_complete():
    built = {path.name for path in Path(MATRIX_FOLDER).glob("torch-*")}
    assert built >= set(os.environ.get("SDM_VARIANT_NAMES", " ".join(matrix_names())).split())


@pytest.mark.kernels_ci
def test_metadata_has_what_the_hub_requires(variant, metadata):
    assert REQUIRED_KEYS <= set(metadata) <= REQUIRED_KEYS | OPTIONAL_KEYS
    assert metadata["name"] == CONFIG.name and metadata["version"] == CONFIG.version
    assert metadata["license"] == CONFIG.license
    parsed = Metadata.read_from_file(variant / "metadata.json")
    assert parsed.python_depends == [] and parsed.kernel_depends == []
    backend = metadata["backend"]["type"]
    assert Backend.from_str(backend) == parsed.backend.backend_type
    assert parse_variant(variant.name).arch.backend.name == backend
    assert re.fullmatch(rf"_{CONFIG.python_name}_{backend}_dev[0-9a-f]{{8}}", metadata["id"])
    assert parse_variant(variant.name).framework.version == Version(CONFIG.stable_abi[backend])


def test_digest_is_that_of_the_files(variant, metadata):
    files = {
        path.relative_to(variant).as_posix(): path.read_bytes()
        for path in variant.rglob("*")
        if path.is_file() and path.name != "metadata.json" and "__pycache__" not in path.parts
    }
    assert metadata["digest"]["algorithm"] == "sha256"
    assert metadata["digest"]["files"] == {
        path: base64.b64encode(hashlib.sha256(data).digest()).decode()
        for path, data in files.items()
    }
    # The client counts the same files and comes to the same.
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(digest.algorithm, variant))


def test_files_are_the_package_and_one_library(sdm, variant, metadata):
    if variant not in (Path(sdm.__file__).parent, *Path(MATRIX_FOLDER or ".").glob("torch-*")):
        pytest.skip("not the build under test; it may be of older sources")
    name = metadata["id"]
    sources = {p.relative_to(CONFIG.package_dir).as_posix() for p in CONFIG.python_files()}
    generated = {"_ops.py", f"{CONFIG.python_name}/__init__.py", f"{name}.abi3.so"}
    assert set(metadata["digest"]["files"]) == sources | generated
    for source in sources:
        assert (variant / source).read_bytes() == (CONFIG.package_dir / source).read_bytes()


@pytest.mark.kernels_ci
def test_library_keeps_the_abis(library):
    # Python 3.9, manylinux_2_28, and no library that torch does not bring.
    pytest.importorskip("kernel_abi_check", reason="of requirements-dev.txt")
    import check_abi

    assert check_abi.check(library) == []


def test_library_is_for_its_cuda(variant, library):
    backend = parse_variant(variant.name).arch.backend
    runtime = [name for name in binary.needed(library) if "cudart" in name]
    has_kernels = bool(binary.cards(library))
    assert runtime == ([f"libcudart.so.{backend.version.major}"] if has_kernels else [])


def test_library_has_code_for_the_cards_it_names(variant, library, metadata):
    archs = metadata["backend"].get("archs", [])
    backend = parse_variant(variant.name).arch.backend
    cards = binary.cards(library)
    if not archs:
        assert cards == set()
        return
    cuda = toolchain.Cuda(Path("cuda"), f"{backend.version.major}.{backend.version.minor}")
    options = ninja_file.Options(
        kernels="cuda", std=17, werror=False, archs=tuple(archs), cuda=cuda
    )
    assert ninja_file.compiled_archs(CONFIG, options) == archs
    expected = set()
    for section in CONFIG.sections_of("cuda"):
        if any(name.endswith(".cu") for name in section.src):
            listed = ninja_file.section_archs(section, options)
            numbers = (arch.replace(".", "").rstrip("af") for arch in listed)
            expected.add(frozenset(numbers))
    assert cards == expected


def test_library_holds_no_path_of_a_machine(library):
    content = library.read_bytes()
    assert str(ROOT).encode() not in content
    assert str(Path(sys.prefix)).encode() not in content
    assert b"/tmp/" not in content
