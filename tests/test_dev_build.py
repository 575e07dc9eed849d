# SPDX-License-Identifier: Apache-2.0
"""tools/dev_build.py: incremental, repeatable, and builds that do not collide.

A small kernel of one op is built with the real tool, so that a test takes seconds.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from devbuild import binary, ninja_file, toolchain  # noqa: E402
from devbuild import config as build_config  # noqa: E402

from .helpers.hub_server import files_of  # noqa: E402

BUILD_TOML = """\
[general]
name = "tiny-kernel"
version = 1
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "org/tiny-kernel"

[torch]
src = ["torch-ext/torch_binding.cpp"]
include = ["."]

[torch.stable-abi]
cpu = "2.11"
cuda = "2.11"

[kernel.cpu]
backend = "cpu"
depends = ["torch"]
include = ["."]
src = ["answer.h", "answer.cpp"]

[kernel.cpu_in_cuda]
backend = "cuda"
depends = ["torch"]
include = ["."]
src = ["answer.h", "answer.cpp"]

[kernel.cuda_base]
backend = "cuda"
depends = ["torch"]
include = ["."]
cuda-capabilities = ["8.0", "9.0"]
src = ["add_one.cu"]

[kernel.cuda_sm90]
backend = "cuda"
depends = ["torch"]
include = ["."]
cuda-capabilities = ["9.0a"]
src = ["add_two.cu"]
"""

BINDING = """\
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "answer.h"
#include "registration.h"

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#include <torch/headeronly/util/shim_utils.h>

cudaError_t add_one(float* x, cudaStream_t stream);
cudaError_t add_two(float* x, cudaStream_t stream);

int64_t answer_cuda(const torch::stable::Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  float* data = static_cast<float*>(x.mutable_data_ptr());
  return add_one(data, static_cast<cudaStream_t>(stream)) ||
         add_two(data, static_cast<cudaStream_t>(stream));
}
#endif

int64_t answer_cpu(const torch::stable::Tensor&) { return answer(); }

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, ops) { ops.def("answer(Tensor x) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("answer", TORCH_BOX(&answer_cpu));
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("answer", TORCH_BOX(&answer_cuda));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

CUDA = """\
#include <cuda_runtime.h>
__global__ void {name}_kernel(float* x) {{ *x += 1; }}
cudaError_t {name}(float* x, cudaStream_t stream) {{
  {name}_kernel<<<1, 1, 0, stream>>>(x);
  return cudaGetLastError();
}}
"""

PACKAGE = """\
from ._ops import ops


def answer(x):
    return ops.answer(x)
"""


def make_tree(root):
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    package = root / "torch-ext" / "tiny_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    (root / "torch-ext" / "torch_binding.cpp").write_text(BINDING)
    (root / "build.toml").write_text(BUILD_TOML)
    (root / "answer.h").write_text("#pragma once\n#include <cstdint>\nint64_t answer();\n")
    (root / "answer.cpp").write_text('#include "answer.h"\nint64_t answer() { return 1; }\n')
    for name in ("add_one", "add_two"):
        (root / f"{name}.cu").write_text(CUDA.format(name=name))
    return root


def build(root, *arguments):
    """Runs the tool of the tree at `root`; returns what it printed and the variant folder."""
    environment = {k: v for k, v in os.environ.items() if k != "CI"}
    command = [sys.executable, str(root / "tools" / "dev_build.py"), "--jobs", "1", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    variants = [p for p in (root / "build").glob("torch-*") if p.name in done.stdout]
    return done.stdout, variants[0] if variants else None


def compiled(text):
    """The sources of the tree that were compiled; what the tool adds is not among them."""
    found = re.findall(r"(?:CXX|NVCC|CLANG) (\S+)", text)
    return [source for source in found if not source.startswith("tools/")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = make_tree(tmp_path_factory.mktemp("dev_build") / "one")
    text, variant = build(root, "--backend", "cpu")
    assert sorted(compiled(text)) == ["answer.cpp", "torch-ext/torch_binding.cpp"]
    return root, variant


def copy_of(tiny, path):
    """The built tree once more, with its objects; nothing in it is out of date."""
    shutil.copytree(tiny[0], path)
    return path


def test_second_build_does_nothing(tiny):
    root, variant = tiny
    before = {p.name: p.stat().st_mtime_ns for p in variant.iterdir()}
    text, _ = build(root, "--backend", "cpu")
    assert compiled(text) == []
    assert "up to date" in text
    assert {p.name: p.stat().st_mtime_ns for p in variant.iterdir()} == before


def test_changes_compile_what_depends_on_them(tiny, tmp_path):
    root = copy_of(tiny, tmp_path / "tree")
    package = root / "torch-ext" / "tiny_kernel" / "__init__.py"
    package.write_text(PACKAGE + "\n\nextra = 1\n")
    text, variant = build(root, "--backend", "cpu")
    # Another Python file is another build, and the op namespace says so.
    assert compiled(text) == ["torch-ext/torch_binding.cpp"]
    assert "extra" in (variant / "__init__.py").read_text()
    assert len(list(variant.glob("*.so"))) == 1
    (root / "answer.h").write_text("#pragma once\n#include <cstdint>\nint64_t answer();  // two\n")
    text, _ = build(root, "--backend", "cpu")
    assert sorted(compiled(text)) == ["answer.cpp", "torch-ext/torch_binding.cpp"]


def test_same_sources_give_the_same_bytes_anywhere(tiny, tmp_path):
    other = make_tree(tmp_path / "another" / "place")
    _, variant = build(other, "--backend", "cpu")
    assert files_of(variant) == files_of(tiny[1])


def test_two_builds_load_into_one_process(tiny, tmp_path):
    root = copy_of(tiny, tmp_path / "tree")
    (root / "answer.cpp").write_text('#include "answer.h"\nint64_t answer() { return 2; }\n')
    build(root, "--backend", "cpu")
    code = """
import kernels, torch
x = torch.zeros(1)
one = kernels.get_kernel("org/one", version=1, backend="cpu")
two = kernels.get_kernel("org/two", version=1, backend="cpu")
again = kernels.get_kernel("org/one", version=1, backend="cpu")
compiled = [torch.compile(k.answer, backend="eager") for k in (one, two)]
print(one.answer(x), two.answer(x), *(f(x) for f in compiled), again is one)
"""
    environment = dict(os.environ, LOCAL_KERNELS=f"org/one={tiny[0]}:org/two={root}")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "2", "1", "2", "True"]


def test_compile_error_fails_the_build(tiny, tmp_path):
    root = copy_of(tiny, tmp_path / "tree")
    (root / "answer.cpp").write_text('#include "answer.h"\nint64_t answer() { return no; }\n')
    command = [sys.executable, str(root / "tools" / "dev_build.py"), "--backend", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "answer.cpp" in done.stdout


@pytest.mark.skipif(toolchain.find_cuda() is None, reason="no CUDA toolkit")
def test_cuda_variant_compiles_for_the_chosen_cards(tmp_path):
    root = make_tree(tmp_path / "tree")
    text, variant = build(root, "--backend", "cuda", "--arch", "9.0")
    assert {"add_one.cu", "add_two.cu"} < set(compiled(text))
    assert re.fullmatch(r"torch-stable-abi211-cu\d+-\w+-linux", variant.name)
    backend = json.loads((variant / "metadata.json").read_text())["backend"]
    assert backend == {"type": "cuda", "archs": ["9.0", "9.0a"]}
    (library,) = variant.glob("*.so")
    assert binary.cards(library) == {frozenset({"90"})}
    # libtorch.so stands for the CUDA part of a CUDA torch, whatever torch this one is.
    assert "libtorch.so" in binary.needed(library)
    assert [n for n in binary.needed(library) if not binary.ALLOWED_LIBRARIES.fullmatch(n)] == []
    if torch.cuda.is_available():
        code = """
import kernels, torch
x = torch.zeros(1, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    status = kernels.get_kernel("org/tiny", version=1, check_arch=False).answer(x)
torch.cuda.synchronize()
print(status, x.item())
"""
        environment = dict(os.environ, LOCAL_KERNELS=f"org/tiny={root}")
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # PTX of another card does not run; with the right one both kernels added one.
        if torch.cuda.get_device_capability()[0] == 9:
            assert done.stdout.split() == ["0", "2.0"]


def test_cuda_torch_without_a_toolkit_gets_the_cpu_kernels(tmp_path):
    # A stand-in for the torch that a plain machine gets: a CUDA build, and no nvcc anywhere.
    root = make_tree(tmp_path / "tree")
    tool = root / "tools" / "devbuild" / "toolchain.py"
    text = tool.read_text() + "\n\ndef find_cuda():\n    return None\n"
    text = text.replace('facts.get("cuda")', '"13.0"')
    tool.write_text(text)
    text, variant = build(root)
    assert "CPU kernels only" in text
    assert sorted(compiled(text)) == ["answer.cpp", "torch-ext/torch_binding.cpp"]
    assert "-cu130-" in variant.name
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda"}
    assert metadata["id"].startswith("_tiny_kernel_cuda_")
    with pytest.raises(AssertionError, match="no CUDA toolkit"):
        build(root, "--backend", "cuda")


def test_choose_archs():
    listed = ("8.0", "9.0", "9.0a", "10.0+PTX")
    assert ninja_file.choose_archs(listed, ()) == listed
    assert ninja_file.choose_archs(listed, ("9.0",)) == ("9.0", "9.0a")
    assert ninja_file.choose_archs(listed, ("9.0a",)) == ("9.0a",)
    assert ninja_file.choose_archs(listed, ("10.0",)) == ("10.0+PTX",)
    assert ninja_file.choose_archs(listed, ("12.0",)) == listed


def test_variant_name():
    name = toolchain.variant_name
    cpu = toolchain.Torch(Path("torch"), "2.13.0", None)
    gpu = toolchain.Torch(Path("torch"), "2.11.0", "13.0")
    toolkit = toolchain.Cuda(Path("cuda"), "13.1")
    assert re.fullmatch(r"torch-stable-abi211-cpu-\w+-linux", name("cpu", "2.11", cpu, None))
    assert re.fullmatch(r"torch-stable-abi211-cu131-\w+-linux", name("cuda", "2.11", cpu, toolkit))
    assert re.fullmatch(r"torch-stable-abi211-cu130-\w+-linux", name("cuda", "2.11", gpu, toolkit))
    assert name("cuda", "2.11", gpu, None) == name("cuda", "2.11", gpu, toolkit)
    assert toolchain.fits(gpu, toolkit)
    assert not toolchain.fits(gpu, toolchain.Cuda(Path("cuda"), "12.8"))


def test_toolkit_of_a_version(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "find_cuda", lambda: toolchain.Cuda(Path("cuda"), "13.0"))
    assert toolchain.find_cuda_of(tmp_path, "13.0").home == Path("cuda")
    with pytest.raises(toolchain.BuildError, match=r"no CUDA toolkit 12\.8 here"):
        toolchain.find_cuda_of(tmp_path, "12.8")
    home = toolchain.fetched_toolkit(tmp_path, "12.8")
    (home / "clang" / "bin").mkdir(parents=True)
    (home / "clang" / "bin" / "clang").touch()
    cuda = toolchain.find_cuda_of(tmp_path, "12.8")
    assert cuda == toolchain.Cuda(home, "12.8") and cuda.clang is not None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["12.6", "12.8", "13.0"])
def test_variant_of_a_fetched_toolkit(tmp_path, version):
    home = toolchain.fetched_toolkit(ROOT, version)
    if not home.exists():
        pytest.skip("tools/fetch_toolkit.py has not been run")
    root = make_tree(tmp_path / "tree")
    link = toolchain.fetched_toolkit(root, version)
    link.parent.mkdir(parents=True)
    link.symlink_to(home)
    text, variant = build(root, "--cuda", version, "--arch", "9.0")
    assert re.fullmatch(
        rf"torch-stable-abi211-cu{version.replace('.', '')}-\w+-linux", variant.name
    )
    (library,) = variant.glob("*.so")
    assert f"libcudart.so.{version.split('.')[0]}" in binary.needed(library)
    assert binary.cards(library) == {frozenset({"90"})}


def test_cards_that_a_toolkit_is_too_old_for(tmp_path):
    root = make_tree(tmp_path / "tree")
    sections = {section.name: section for section in build_config.load(root).sections}
    old, new = (toolchain.Cuda(Path("cuda"), version) for version in ("12.6", "12.8"))
    listed = dataclasses.replace(
        sections["cuda_base"], cuda_capabilities=("9.0", "9.0a", "10.0", "12.0+PTX")
    )

    def archs(cuda, section):
        options = ninja_file.Options(kernels="cuda", std=17, werror=False, archs=(), cuda=cuda)
        return ninja_file.section_archs(section, options)

    assert archs(new, listed) == listed.cuda_capabilities
    assert archs(old, listed) == ("9.0", "9.0a")
    with pytest.raises(toolchain.BuildError, match="too new"):
        archs(old, dataclasses.replace(listed, cuda_capabilities=("10.0",)))
