# SPDX-License-Identifier: Apache-2.0
"""Fixtures: the kernel as a user loads it, a device, fixed seeds and threads."""

import os
from pathlib import Path

# Waiting threads sleep instead of spinning: several test processes share the cores.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")

import pytest
import torch

REPO_ID = "org/sparse-delta-memory"
ROOT = Path(__file__).resolve().parents[1]


def pytest_configure():
    # Subprocesses inherit this; a value from outside (another build) wins.
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")


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
