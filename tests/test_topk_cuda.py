# SPDX-License-Identifier: Apache-2.0
"""product_key_topk on CUDA: the bits of the CPU, layouts, graphs and what has no kernel."""

import pytest
import torch

from .test_topk_oracle import KINDS, same_values

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A warp per row, then a block per row.
SHAPES = [
    ((256, 256), 64),
    ((256, 256), 128),
    ((31, 33), 32),
    ((512, 300), 200),
    ((1024, 1024), 256),
    ((1, 3), 2),
    ((256, 256), 1000),
    ((300,), 33),
    ((70000, 3), 64),
    ((8, 9, 10), 32),
    ((1000, 1000, 1000, 1000), 16),
]


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_as_the_cpu(sdm, device, kind, dtype):
    for dims, k in SHAPES:
        scores = KINDS[kind](5, sum(dims)).to(dtype)
        on_cpu = scores.clone().requires_grad_()
        on_cuda = scores.to(device).requires_grad_()
        values, ids = sdm.product_key_topk(on_cpu, dims, k)
        cuda_values, cuda_ids = sdm.product_key_topk(on_cuda, dims, k)
        assert cuda_ids.dtype == ids.dtype and torch.equal(cuda_ids.cpu(), ids)
        assert same_values(cuda_values.detach().cpu(), values.detach())
        weight = torch.randn(values.shape).to(dtype)
        values.backward(weight)
        cuda_values.backward(weight.to(device))
        assert same_values(on_cuda.grad.cpu(), on_cpu.grad)


@pytest.mark.parametrize("dims, k", (((40, 30), 24), ((20, 5, 6), 24)), ids=str)
def test_layouts(sdm, device, dims, k):
    base = torch.randn(3, 4, 5, sum(dims) + 1, device=device)
    for scores in (
        base[..., 1:],
        base[..., :-1].transpose(0, 2),
        base[1:2, :, :, 1:].expand(6, 4, 5, sum(dims)),
        base[:0, ..., 1:],
        base[0, 0, 0, 1:],
    ):
        values, ids = sdm.product_key_topk(scores, dims, k)
        cpu_values, cpu_ids = sdm.product_key_topk(scores.cpu(), dims, k)
        assert torch.equal(ids.cpu(), cpu_ids) and torch.equal(values.cpu(), cpu_values)


def test_graph(sdm, device):
    scores = torch.randn(64, 512, device=device)
    sdm.product_key_topk(scores, (256, 256), 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, ids = sdm.product_key_topk(scores, (256, 256), 64)
    scores.normal_()
    graph.replay()
    expected = sdm.product_key_topk(scores, (256, 256), 64)
    assert torch.equal(values, expected[0]) and torch.equal(ids, expected[1])


def test_not_implemented(sdm, device):
    with pytest.raises(NotImplementedError, match="product_key_topk: scores .*float64"):
        sdm.product_key_topk(torch.randn(2, 8, device=device).double(), (4, 4), 3)
    with pytest.raises(NotImplementedError, match="product_key_topk: factor_dims .* 512"):
        sdm.product_key_topk(torch.randn(2, 600, device=device), (1,) * 600, 1)
