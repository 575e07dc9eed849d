# SPDX-License-Identifier: Apache-2.0
"""The kernel as its users load it: from a hub, in a clean process, online, locked and offline."""

import json
from pathlib import Path

import pytest

from .helpers.hub_client import REPO_ID, Client
from .helpers.hub_server import Hub, files_of

OTHER_CUDA = "torch-stable-abi211-cu99-x86_64-linux"

# Uses the kernel `k`: an op, its gradient and a layer.
USE = """
import torch

def use(k):
    scores = torch.randn(5, 8, requires_grad=True)
    values, indices = k.product_key_topk(scores, (4, 4), 3)
    expected, expected_indices = k.reference.product_key_topk(scores, (4, 4), 3)
    assert torch.equal(values, expected) and torch.equal(indices, expected_indices)
    values.sum().backward()
    assert scores.grad.sum() == 2 * 3 * 5  # each pick counts once in both factors
    config = k.SparseDeltaMemoryConfig(dim=16, num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
    y, _ = k.SparseDeltaMemory(config)(torch.randn(1, 6, 16))
    assert y.shape == (1, 6, 16) and y.isfinite().all()
    q, key, v = (torch.randn(1, 7, 2, 16) for _ in range(3))
    g, beta = -torch.rand(1, 7, 2, 16), torch.rand(1, 7, 2)
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    got = k.chunk_kda(q, key, v, g, beta, **options)
    for a, b in zip(got, k.reference.kda(q, key, v, g, beta, **options)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


@pytest.fixture(scope="module")
def variant(sdm):
    return Path(sdm.__file__).parent


def repository(variant):
    """The files of a repository with one variant that fits and one that fits nobody."""
    files = {f"build/{variant.name}/{path}": data for path, data in files_of(variant).items()}
    files[f"build/{OTHER_CUDA}/metadata.json"] = files_of(variant)["metadata.json"]
    files["README.md"] = b"# card\n"
    return files


@pytest.fixture
def hub(variant):
    """A hub where the kernel is published and its publisher not trusted."""
    hub = Hub()
    hub.push(REPO_ID, repository(variant), "main", "v1")
    with hub.running():
        yield hub


@pytest.fixture
def client(hub, tmp_path):
    return Client(tmp_path, hub)


@pytest.mark.kernels_ci
def test_loads_by_version_in_a_clean_process(client, hub, variant):
    code = f"""
import kernels
repo = {REPO_ID!r}
assert kernels.has_kernel(repo, version=1, trust_remote_code=True)
k = kernels.get_kernel(repo, version=1, trust_remote_code=True)
assert k is kernels.get_kernel(repo, version=1, trust_remote_code=[repo])
assert k is kernels.get_kernel(repo, revision="main", trust_remote_code=True)
use(k)
layers = kernels.LayerRepository(
    repo, layer_name="SparseDeltaMemory", version=1, trust_remote_code=True
)
assert layers.load() is k.layers.SparseDeltaMemory
for name in ("chunk_kda", "fused_recurrent_kda"):
    layers = kernels.LayerRepository(repo, layer_name=name, version=1, trust_remote_code=True)
    assert layers.load() is getattr(k.layers, name)
function = kernels.FuncRepository(
    repo, func_name="product_key_topk", version=1, trust_remote_code=True
)
module = function.load()()
scores = torch.randn(2, 8)
assert torch.equal(module(scores, (4, 4), 2)[1], k.product_key_topk(scores, (4, 4), 2)[1])
loaded = kernels.get_loaded_kernels()[-1]
assert loaded.repo_info.repo_id == repo
accepted = kernels.get_kernel_variants(repo, version=1)
print(k.__file__, loaded.repo_info.revision, *(d.variant.variant_str for d in accepted))
"""
    file, revision, *variants = client.run(USE + code).stdout.split()
    assert Path(file).parent.name == variant.name and client.home in Path(file).parents
    assert revision == hub.repositories[REPO_ID]["branches"]["v1"]
    assert variants == [variant.name, OTHER_CUDA]
    # What was loaded is what was built, and the variant that fits nobody was left on the hub.
    assert files_of(Path(file).parent) == files_of(variant)
    assert not [path for _, path in hub.requests if f"/build/{OTHER_CUDA}/" in path]


def test_publisher_that_nobody_trusts_is_refused(client, hub):
    code = f"import kernels\nkernels.get_kernel({REPO_ID!r}, version=1)"
    done = client.run(code, check=False)
    assert done.returncode != 0
    assert "is not from a trusted publisher" in done.stderr
    assert not [path for _, path in hub.requests if "resolve" in path]


def test_missing_version_and_missing_variant_are_named(client, hub, variant):
    hub.push(REPO_ID, {f"build/{OTHER_CUDA}/metadata.json": b"{}"}, "v2")
    code = f"""
import kernels
for version in (2, 3):
    try:
        kernels.get_kernel({REPO_ID!r}, version=version, trust_remote_code=True)
    except Exception as error:
        print(type(error).__name__, error)
print(kernels.has_kernel({REPO_ID!r}, version=2, trust_remote_code=True))
"""
    printed = client.run(code).stdout
    missing_variant, missing_version = printed.split("ValueError")
    assert "FileNotFoundError Cannot find a build variant for this system" in missing_variant
    assert OTHER_CUDA in missing_variant and REPO_ID in missing_variant
    assert "Version 3 not found, available versions: 1, 2" in missing_version
    assert printed.split()[-1] == "False"


LOCKED = f"""
import kernels
from pathlib import Path
lock = Path("kernels.lock")
k = kernels.get_locked_kernel({REPO_ID!r}, lockfile=lock)
use(k)
layer = kernels.LockedLayerRepository({REPO_ID!r}, lockfile=lock, layer_name="SparseDeltaMemory")
assert layer.load() is k.layers.SparseDeltaMemory
"""


def test_lock_file_keeps_the_revision(client, hub, variant, tmp_path):
    # `kernels lock` takes no word of trust, so it is for publishers that the hub trusts.
    hub.trusted.add("org")
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO_ID}" = 1\n')
    client.kernels("lock", ".", cwd=project)
    first = hub.repositories[REPO_ID]["branches"]["v1"]
    assert first in (project / "kernels.lock").read_text()
    # A newer commit of the same version does not reach those who have the lock.
    hub.push(REPO_ID, {**repository(variant), "README.md": b"# newer\n"}, "main", "v1")
    assert hub.repositories[REPO_ID]["branches"]["v1"] != first
    printed = client.run(USE + LOCKED + "print(k.__file__)", cwd=project).stdout
    assert first in printed
    client.kernels("download", ".", cwd=project)
    # Nothing but the lock is needed once the whole commit is cached.
    code = f"""
import huggingface_hub
huggingface_hub.snapshot_download({REPO_ID!r}, repo_type="kernel", revision={first!r})
"""
    client.run(code, cwd=project)
    asked = len(hub.requests)
    code = f"{LOCKED}\nassert kernels.load_kernel({REPO_ID!r}, lockfile=lock) is k\n"
    client.run(USE + code, cwd=project, offline=True)
    assert len(hub.requests) == asked


def test_loads_offline_from_the_cache(client, hub, variant):
    # The recipe of docs/building.md: the whole snapshot, by the name of the version.
    code = f"""
import huggingface_hub
huggingface_hub.snapshot_download({REPO_ID!r}, repo_type="kernel", revision="v1")
"""
    client.run(code)
    asked = len(hub.requests)
    before = {path for path in client.home.rglob("*") if "__pycache__" not in path.parts}
    revision = hub.repositories[REPO_ID]["branches"]["v1"]
    code = f"""
import time
import kernels
start = time.monotonic()
k = kernels.get_kernel({REPO_ID!r}, version=1, trust_remote_code=True)
assert time.monotonic() - start < 10
assert k is kernels.get_kernel({REPO_ID!r}, revision={revision!r}, trust_remote_code=True)
assert kernels.has_kernel({REPO_ID!r}, version=1)
use(k)
"""
    client.run(USE + code, offline=True)
    assert len(hub.requests) == asked
    # No compiler ran and nothing was written beside the cached files.
    after = {path for path in client.home.rglob("*") if "__pycache__" not in path.parts}
    assert not [path for path in after - before if "inductor" not in path.parts]


def test_offline_without_the_snapshot_says_so(client, hub):
    code = f"import kernels\nkernels.get_kernel({REPO_ID!r}, version=1, trust_remote_code=True)"
    done = client.run(code, offline=True, check=False)
    assert done.returncode != 0
    assert "is not available in the local cache" in done.stderr
    assert hub.requests == []


def test_commands_describe_the_kernel(client, hub, variant):
    described = json.loads(client.kernels("info", REPO_ID, "--version", 1, "--json").stdout)
    assert described["name"] == "sparse-delta-memory" and described["version"] == 1
    assert described["license"] == "Apache-2.0" and described["python_depends"] == []
    printed = client.kernels("versions", REPO_ID).stdout
    assert f"{variant.name} compatible, preferred" in printed
