# SPDX-License-Identifier: Apache-2.0
"""Strides, offsets, empty shapes, and which axis is which in product_key_topk."""

import pytest
import torch

from .helpers import poison
from .helpers.compare import assert_same_bits

DIMS, K = (24, 17), 11


def run(sdm, scores):
    """Values, ids and the gradient with respect to `scores` as laid out."""
    leaf = scores.detach().requires_grad_()  # shares the storage and the strides
    assert leaf.data_ptr() == scores.data_ptr() and leaf.stride() == scores.stride()
    values, ids = sdm.product_key_topk(leaf, DIMS, K)
    weight = torch.linspace(-1, 2, values.numel(), dtype=torch.float64).view(values.shape)
    (gradient,) = torch.autograd.grad((values.double() * weight).sum(), leaf)
    return values.detach(), ids, gradient.contiguous()


@pytest.mark.parametrize("layout", poison.LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
def test_layout(sdm, layout, dtype):
    scores = torch.randn(2, 5, 3, sum(DIMS)).to(dtype)
    assert_same_bits(run(sdm, layout(scores)), run(sdm, scores))


@pytest.mark.parametrize("offset", (1, 2, 4, 7))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_storage_offset(sdm, offset, dtype):
    scores = torch.randn(6, sum(DIMS)).to(dtype)
    buffer = torch.full((scores.numel() + 8,), float("nan"), dtype=dtype)
    view = buffer[offset : offset + scores.numel()].view(scores.shape).copy_(scores)
    assert_same_bits(run(sdm, view), run(sdm, scores))


def test_expanded(sdm):
    scores = torch.randn(3, 1, sum(DIMS))
    expanded = scores.expand(3, 4, -1)
    assert_same_bits(run(sdm, expanded), run(sdm, expanded.contiguous()))
    row = torch.randn(1).expand(2, sum(DIMS))  # stride 0 along the columns as well
    assert_same_bits(run(sdm, row), run(sdm, row.contiguous()))


def test_overlapping_windows(sdm):
    windows = torch.randn(100).unfold(0, sum(DIMS), 2)
    values, ids = sdm.product_key_topk(windows, DIMS, K)
    assert_same_bits([values, ids], list(sdm.product_key_topk(windows.contiguous(), DIMS, K)))


def test_many_dimensions(sdm):
    scores = torch.randn(2, 1, 3, 1, 2, 2, sum(DIMS)).permute(4, 2, 1, 0, 5, 3, 6)
    assert_same_bits(run(sdm, scores), run(sdm, scores.contiguous()))


@pytest.mark.parametrize("shape", ((0,), (2, 0, 3), (0, 0), (3, 0)), ids=str)
def test_empty_rows(sdm, shape):
    scores = torch.randn(*shape, sum(DIMS), requires_grad=True)
    values, ids = sdm.product_key_topk(scores, DIMS, K)
    assert values.shape == ids.shape == (*shape, K)
    assert ids.dtype == torch.int32
    values.sum().backward()
    assert scores.grad.shape == scores.shape


def test_one_row(sdm):
    scores = torch.randn(sum(DIMS))
    values, ids = sdm.product_key_topk(scores, DIMS, K)
    assert values.shape == ids.shape == (K,)
    batch = sdm.product_key_topk(scores[None, None], DIMS, K)
    assert_same_bits([values, ids], [x[0, 0] for x in batch])


@pytest.mark.parametrize("heads, width, k", ((3, 5, 4), (2, 2, 2)))
def test_heads_are_not_factors(sdm, heads, width, k):
    scores = torch.randn(2, 4, heads, 2 * width)
    scores += 100 * torch.arange(heads)[:, None]
    scores.requires_grad_()
    values, ids = sdm.product_key_topk(scores, (width, width), k)
    weight = torch.randn_like(values)
    (gradient,) = torch.autograd.grad((values * weight).sum(), scores)
    expected = torch.zeros_like(scores)
    for at in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(heads)).tolist():
        row, index = scores[tuple(at)].detach(), ids[tuple(at)].long()
        total = (row[:width, None] + row[None, width:]).flatten()
        assert torch.equal(index, total.topk(k).indices.sort().values)
        assert torch.equal(values[tuple(at)], total[index])
        for lane, slot in enumerate(index.tolist()):
            expected[tuple(at)][slot // width] += weight[tuple(at)][lane]
            expected[tuple(at)][width + slot % width] += weight[tuple(at)][lane]
    assert torch.equal(gradient, expected)


def test_nothing_outside_is_touched(sdm):
    scores = torch.randn(4, sum(DIMS))
    before = scores.clone()
    run(sdm, scores)
    assert torch.equal(scores, before)
