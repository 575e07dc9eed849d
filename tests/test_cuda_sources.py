# SPDX-License-Identifier: Apache-2.0
"""Rules of the CUDA sources that a machine with one GPU, or none, can't see by running them."""

import re

import pytest

from .conftest import ROOT

KERNELS = sorted(p for p in (ROOT / "sdm_kernels").rglob("*") if "cuda" in p.parts and p.is_file())
CUDA_TORCH = sorted((ROOT / "torch-ext").glob("*_cuda.cpp"))
BINDING = ROOT / "torch-ext" / "torch_binding.cpp"

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
LAUNCH = re.compile(r"<<<(.*?)>>>", re.S)
WAITS = re.compile(
    r"\bcuda(Device|Stream|Event)Synchronize\b|\bcudaMemcpy(2D|3D|ToSymbol|FromSymbol)?\s*\(|"
    r"\bcudaMemset\s*\(|cudaMemcpyDeviceToHost|cudaMemcpyDefault"
)
ALLOCATES = re.compile(r"\bcuda(Malloc|Free|HostAlloc|HostRegister)\w*")
# A variable that outlives its function: the property of one device, kept for all.
KEPT = re.compile(r"\bstatic\s+(?!constexpr|__device__|inline)[\w:<>, ]+?[\s&*]\w+\s*(=|\{|;|\[)")


def source(path):
    return COMMENT.sub("", path.read_text())


def arguments(text):
    """Split at the commas that no bracket encloses."""
    depth, part, parts = 0, "", []
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [*parts, part.strip()]


def rel(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*KERNELS, *CUDA_TORCH], ids=rel)
def test_nothing_waits_allocates_or_is_kept(path):
    text = source(path)
    for rule in (WAITS, ALLOCATES, KEPT):
        found = rule.search(text)
        assert found is None, f"{rel(path)}: {found.group(0)!r}"


@pytest.mark.parametrize("path", KERNELS, ids=rel)
def test_launches_name_a_stream_and_are_checked(path):
    text = source(path)
    for launch in LAUNCH.finditer(text):
        parts = arguments(launch.group(1))
        assert len(parts) == 4 and "stream" in parts[3], f"{rel(path)}: <<<{launch.group(1)}>>>"
        # Here or in a function further down that calls this one: errors wait until they are taken.
        checked = re.search(r"cuda(Get|PeekAt)LastError\(\)", text[launch.end() :])
        assert checked, f"{rel(path)}: {launch.group(0)}"
    for call in re.finditer(r"cudaLaunch(Cooperative)?Kernel\w*\s*\(", text):
        before = re.split(r"^\}", text[: call.start()], flags=re.M)[-1]
        after = re.split(r"^\}", text[call.end() :], maxsplit=1, flags=re.M)[0]
        assert "stream" in before + after, f"{rel(path)}: {call.group(0)}"


def functions(pattern, text):
    """Return {name: body} of the functions whose name fits."""
    found = re.finditer(rf"^[^\n;]*\b({pattern})\((?:[^;{{]*)\) \{{\n(.*?)^\}}", text, re.S | re.M)
    return {match.group(1): match.group(2) for match in found}


def test_every_op_guards_its_device_and_takes_its_stream():
    block = re.search(
        r"_IMPL\(TORCH_EXTENSION_NAME, CUDA, ops\) \{(.*?)^\}", source(BINDING), re.S | re.M
    )
    names = re.findall(r"TORCH_BOX\(&sdm::ext::(\w+)<sdm::ext::Cuda>\)", block.group(1))
    assert len(names) == block.group(1).count("ops.impl") >= 11
    backend = source(ROOT / "torch-ext" / "backend.h")
    assert re.search(
        r"class Cuda \{.*guard_\(like\.get_device_index\(\)\).*DeviceGuard guard_;", backend, re.S
    )
    ops = "\n".join(source(path) for path in sorted((ROOT / "torch-ext").glob("*_ops.h")))
    bodies = functions(r"\w+", ops)
    assert sorted(names) == sorted(bodies)
    shared = re.search(r"void launch_in_workspace\((.*?)^\}", backend, re.S | re.M)
    assert "launch(params, workspace.mutable_data_ptr(), backend.stream())" in shared.group(1)
    launches = functions(r"run_\w+", "\n".join(source(path) for path in CUDA_TORCH))
    for name, body in bodies.items():
        guard, launch = body.find("const Backend backend("), re.search(r"\b(run_\w+)\(", body)
        assert 0 <= guard < launch.start(), f"{name} guards no device"
        launched = launches[launch.group(1)]
        named = "backend.stream()" in launched or "launch_in_workspace(backend, " in launched
        assert named, f"{launch.group(1)}: which stream?"


def test_the_rules_find_what_they_are_for():
    assert WAITS.search("cudaDeviceSynchronize();") and WAITS.search("cudaMemcpy(a, b, n, kind)")
    assert ALLOCATES.search("cudaMallocAsync(&p, n, s)")
    assert KEPT.search("  static int processors = 0;") and KEPT.search(
        "static std::once_flag flag;"
    )
    assert not KEPT.search("static constexpr int kLanes = 4;")
    assert not KEPT.search("__device__ static void wait() {")
    assert arguments("dim3(a, b), 256, 0, stream") == ["dim3(a, b)", "256", "0", "stream"]
