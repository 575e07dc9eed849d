# SPDX-License-Identifier: Apache-2.0
"""Several builds of the kernel in one process: versions, commits, and a local build beside the hub's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from devbuild import toolchain  # noqa: E402

from .helpers.hub_client import REPO_ID, Client
from .helpers.hub_server import Hub, files_of
from .test_reproducible import copy_of_the_tree

# What version 2 does otherwise: the values of its top-k are larger by one.
CHANGED = '''

_product_key_topk = product_key_topk


def product_key_topk(scores, factor_dims, k):
    """Return the values plus one, and the indices."""
    values, indices = _product_key_topk(scores, factor_dims, k)
    return values + 1, indices
'''


@pytest.fixture(scope="module")
def first(sdm):
    return Path(sdm.__file__).parent


@pytest.fixture(scope="module")
def second(first, tmp_path_factory):
    """Version 2, built from the same tree with a change in one Python file."""
    tree = tmp_path_factory.mktemp("version2") / "tree"
    copy_of_the_tree(tree)
    # With the objects that are there already, only the file with the op namespace is compiled.
    for objects in (ROOT / "_cmake_build").glob(f"{first.name}*"):
        shutil.copytree(objects, tree / "_cmake_build" / objects.name)
    for path in tree.rglob("*"):
        original = ROOT / path.relative_to(tree)
        if path.is_file() and original.is_file():
            shutil.copystat(original, path)
    init = tree / "torch-ext" / "sparse_delta_memory" / "__init__.py"
    init.write_text(init.read_text() + CHANGED)
    toml = tree / "build.toml"
    toml.write_text(toml.read_text().replace("version = 1\n", "version = 2\n", 1))
    command = [sys.executable, str(tree / "tools" / "dev_build.py")]
    if "-cpu-" in first.name:
        command += ["--backend", "cpu"]
    # For the cards of the first one alone, whose objects are there.
    archs = json.loads((first / "metadata.json").read_text())["backend"].get("archs", [])
    if "-cpu-" not in first.name and not archs and toolchain.find_cuda() is not None:
        pytest.skip("the build has no CUDA kernels, and a toolkit here would add them all")
    for arch in archs:
        command += ["--arch", arch]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "build" / first.name


@pytest.fixture
def client(first, second, tmp_path):
    """A hub with both versions, and on version 1's branch an older commit."""
    hub = Hub(trusted=["org"])
    for version, variant in ((1, first), (2, second)):
        files = {f"build/{first.name}/{path}": data for path, data in files_of(variant).items()}
        hub.push(REPO_ID, files, "main", f"v{version}")
    with hub.running():
        yield Client(tmp_path, hub)


@pytest.mark.slow
def test_two_versions_live_in_one_process(client):
    code = f"""
import kernels, torch
repo = {REPO_ID!r}
one = kernels.get_kernel(repo, version=1)
two = kernels.get_kernel(repo, version=2)
assert one is not two and one.__name__ != two.__name__
assert kernels.get_kernel(repo, version=1) is one
scores = torch.randn(4, 8)

def values(kernel, function=None):
    return (function or kernel.product_key_topk)(scores, (4, 4), 2)[0]

assert torch.equal(values(two), values(one) + 1)
assert torch.equal(values(one), one.reference.product_key_topk(scores, (4, 4), 2)[0])

# Compiled graphs of the one are not taken for those of the other, with one cache on disk.
def stepped(kernel):
    return lambda s, dims, k: kernel.product_key_topk(s * 2, dims, k)

for kernel in (one, two, one):
    compiled = torch.compile(stepped(kernel), backend="aot_eager", fullgraph=True)
    assert torch.equal(values(kernel, compiled), values(kernel, stepped(kernel)))

layers = [
    kernels.LayerRepository(repo, layer_name="SparseDeltaMemory", version=version).load()
    for version in (1, 2)
]
assert layers == [one.layers.SparseDeltaMemory, two.layers.SparseDeltaMemory]
assert [k.metadata.version for k in kernels.get_loaded_kernels()][:2] == [1, 2]
# The gradient of an op comes from its own build.
for kernel in (one, two):
    leaf = scores.clone().requires_grad_()
    kernel.product_key_topk(leaf, (4, 4), 2)[0].sum().backward()
    assert leaf.grad.sum() == 2 * 2 * 4
"""
    client.run(code)


@pytest.mark.slow
def test_local_build_lives_beside_the_hubs(client, second):
    code = f"""
import kernels, torch
from pathlib import Path
hubs = kernels.get_kernel({REPO_ID!r}, version=1)
local = kernels.get_local_kernel(Path({str(second)!r}))
scores = torch.randn(4, 8)
got, expected = (k.product_key_topk(scores, (4, 4), 2)[0] for k in (local, hubs))
assert torch.equal(got, expected + 1)
assert [k.repo_info is None for k in kernels.get_loaded_kernels()] == [False, True]
"""
    client.run(code)


@pytest.mark.slow
def test_newer_version_is_pointed_out(client, first):
    done = client.run(f"import kernels\nkernels.get_kernel({REPO_ID!r}, version=1)")
    assert "but version 2 is available" in done.stderr
    # A version without a build for this system names the one that has it.
    hub = client.hub
    other = first.name.replace("-cpu-", "-cu99-").replace("-cu13", "-cu99")
    hub.push(REPO_ID, {f"build/{other}/metadata.json": b"{}"}, "v1")
    code = f"import kernels\nkernels.get_kernel({REPO_ID!r}, version=1)"
    done = client.run(code, check=False)
    assert done.returncode != 0
    assert "version v2" in done.stderr and "compatible with your system" in done.stderr


@pytest.mark.slow
def test_name_of_the_package_stays_free(client, tmp_path):
    (tmp_path / "sparse_delta_memory.py").write_text("mine = True\n")
    code = f"""
import kernels
k = kernels.get_kernel({REPO_ID!r}, version=1)
sys.path.insert(0, {str(tmp_path)!r})
import sparse_delta_memory
assert sparse_delta_memory.mine and sparse_delta_memory is not k
"""
    client.run(code)
