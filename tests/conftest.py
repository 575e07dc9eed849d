# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the kernel as a user loads it, a device, fixed seeds and threads."""

import importlib.util
import os
import sys
from pathlib import Path

# Waiting threads sleep instead of spinning: several test processes share the cores.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")

import pytest
import torch

REPO_ID = "org/sparse-delta-memory"
ROOT = Path(__file__).resolve().parents[1]


def kernel_path():
    """Where the build under test lies: build/, or what kernel-builder's test shell can import."""
    spec = None
    if not (ROOT / "build").is_dir():
        spec = importlib.util.find_spec("sparse_delta_memory")
    return Path(spec.origin).resolve().parent.parent if spec else ROOT


def refuse_the_network(event, arguments):
    """Let tests connect to this machine only."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise PermissionError(f"a test connects to {host}")


def pytest_configure():
    # Subprocesses inherit these; a value from outside (another build) wins.
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={kernel_path()}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.addaudithook(refuse_the_network)


@pytest.fixture(scope="session")
def sdm():
    """Load the kernel from build/, the way users load it from the hub."""
    import kernels

    return kernels.get_kernel(REPO_ID, version=1)


@pytest.fixture(scope="session")
def ops(sdm):
    """Return the namespace of the registered ops."""
    return getattr(torch.ops, sdm.__name__)


@pytest.fixture(scope="session")
def device(sdm):
    """Return the device under test: CUDA if there is one and the build has kernels for it."""
    op = f"{sdm.__name__}::sdm_chunk_fwd"
    has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")
    default = "cuda" if has_cuda and torch.cuda.is_available() else "cpu"
    return torch.device(os.environ.get("SDM_TEST_DEVICE", default))


@pytest.fixture(autouse=True)
def _settings():
    """Give every test the same seed and thread count, whatever ran before it.

    One thread: the cases are small, and test processes run side by side.
    """
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Skip what a backend says that it lacks: float64 on CUDA."""
    try:
        return (yield)
    except NotImplementedError as error:
        if "on CUDA, got float64" in str(error):
            pytest.skip(str(error))
        raise
