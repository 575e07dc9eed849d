# SPDX-License-Identifier: Apache-2.0
"""What product_key_topk selects: against all sums, the rule and the reference."""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_topk_oracle import DTYPES, KINDS, check_row, same_values, select

# One to five factors, widths around the vector lengths, k above and below the widths.
SHAPES = [
    ((1,), 1),
    ((70,), 9),
    ((257,), 256),
    ((16, 16), 16),
    ((31, 33), 64),
    ((3, 100), 40),
    ((100, 1), 30),
    ((129, 65), 200),
    ((8, 9, 10), 32),
    ((40, 1, 33), 100),
    ((5, 4, 3, 6), 50),
    ((3, 2, 4, 2, 5), 24),
]


def same_as_reference(sdm, scores, dims, k):
    values, ids = sdm.product_key_topk(scores, dims, k)
    ref_values, ref_ids = sdm.reference.product_key_topk(scores, dims, k)
    assert ids.dtype == ref_ids.dtype and values.dtype == scores.dtype
    assert values.is_contiguous() and ids.is_contiguous()
    assert torch.equal(ids, ref_ids)
    assert same_values(values, ref_values)
    return values, ids


@pytest.mark.kernels_ci
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selection(sdm, kind, dtype):
    for dims, k in SHAPES:
        scores = KINDS[kind](3, sum(dims)).to(dtype)
        values, ids = same_as_reference(sdm, scores, dims, k)
        check_row(scores[0], dims, k, values[0], ids[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rule_in_python(sdm, dtype):
    for dims, k in (((300,), 33), ((30, 20), 17), ((5, 6, 7), 20), ((3, 3, 3, 3), 10)):
        for kind in ("eight_levels", "specials", "equal"):
            scores = KINDS[kind](2, sum(dims)).to(dtype)
            _, ids = sdm.product_key_topk(scores, dims, k)
            for row, index in zip(scores, ids):
                assert index.tolist() == select(row, dims, k)


@pytest.mark.parametrize("k", (1, 8, 32, 128))
@pytest.mark.parametrize("kind", ("equal", "eight_levels", "bf16"))
def test_ties_are_the_same_everywhere(sdm, kind, k):
    dims = (256, 256)
    scores = torch.randn(4, 512).bfloat16() if kind == "bf16" else KINDS[kind](4, 512)
    values, ids = same_as_reference(sdm, scores, dims, k)
    assert all(len(set(row)) == k for row in ids.tolist())
    for _ in range(20):
        again = sdm.product_key_topk(scores, dims, k)
        assert torch.equal(again[0], values) and torch.equal(again[1], ids)
    one = sdm.product_key_topk(scores[2], dims, k)  # a single row, as in decoding
    assert torch.equal(one[0], values[2]) and torch.equal(one[1], ids[2])
    check_row(scores[0], dims, k, values[0], ids[0])


@pytest.mark.parametrize("k", (1, 2, 15, 64, 65, 255, 256, 511, 1000, 1024))
def test_every_size_of_k(sdm, k):
    scores = torch.randn(2, 512)
    values, ids = same_as_reference(sdm, scores, (256, 256), k)
    check_row(scores[1], (256, 256), k, values[1], ids[1])
    same_as_reference(sdm, scores.half(), (512,), k)
    same_as_reference(sdm, scores[:, :300], (100, 100, 100), k)


@pytest.mark.parametrize("dims", ((70000,), (70000, 3), (2, 65537), (4099, 31)), ids=str)
@pytest.mark.parametrize("k", (1, 64, 1024))
def test_wide_factors(sdm, dims, k):
    for kind in ("normal", "equal", "eight_levels"):
        scores = KINDS[kind](1, sum(dims))
        values, ids = sdm.product_key_topk(scores, dims, k)
        check_row(scores[0], dims, k, values[0], ids[0])
    values, ids = sdm.product_key_topk(scores.bfloat16(), dims, k)
    check_row(scores[0].bfloat16(), dims, k, values[0], ids[0])


@pytest.mark.parametrize(
    "dims, dtype",
    (
        ((46340, 46341), torch.int32),
        ((2**15, 2**16), torch.int64),
        ((1000, 1000, 1000, 1000), torch.int64),
        ((512,) * 6 + (511,), torch.int64),
    ),
    ids=lambda x: "x".join(map(str, x)) if isinstance(x, tuple) else str(x),
)
def test_index_dtype(sdm, dims, dtype):
    for kind in ("normal", "equal"):
        scores = KINDS[kind](2, sum(dims))
        _, ids = same_as_reference(sdm, scores, dims, 16)
        assert ids.dtype == dtype
    # The largest id there is.
    scores = torch.cat([torch.arange(n) == n - 1 for n in dims]).float()
    _, ids = sdm.product_key_topk(scores, dims, 1)
    assert ids.item() == math.prod(dims) - 1


def test_k_above_the_number_of_slots(sdm):
    scores = torch.randn(3, 7)
    for dims in ((3, 4), (7,), (2, 4, 1), (1,) * 7):
        values, ids = same_as_reference(sdm, scores, dims, 1000)
        assert ids.tolist() == [list(range(math.prod(dims)))] * 3


def test_many_factors(sdm):
    same_as_reference(sdm, torch.randn(2, 300), (1,) * 300, 5)
    dims = (2,) * 30
    values, ids = same_as_reference(sdm, torch.randn(2, 60), dims, 64)
    assert ids.dtype == torch.int32
    same_as_reference(sdm, torch.randn(2, 62).bfloat16(), (2,) * 31, 64)


def test_adversarial_spacing(sdm):
    # Keys spread over the whole exponent range: the search for the k-th must still end quickly.
    scores = torch.ldexp(torch.ones(512), torch.arange(512) % 254 - 126)
    for k in (5, 64, 300):
        same_as_reference(sdm, torch.stack([scores, -scores]), (256, 256), k)
        same_as_reference(sdm, torch.stack([scores, -scores]), (512,), k)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_shape_and_value(sdm, data):
    num_factors = data.draw(st.integers(1, 5))
    width = {1: 300, 2: 80, 3: 30, 4: 12, 5: 8}[num_factors]
    dims = data.draw(st.lists(st.integers(1, width), min_size=num_factors, max_size=num_factors))
    k = data.draw(st.integers(1, 1024 if num_factors == 1 else 150))
    rows = data.draw(st.integers(0, 3))
    dtype = data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    levels = data.draw(st.sampled_from((1, 2, 5, 100, 10**6)))
    scale = data.draw(st.sampled_from((1e-42, 1e-3, 1.0, 1e4, 3e38)))
    scores = torch.randint(-levels, levels + 1, (rows, sum(dims)), generator=generator)
    scores = scores / levels * scale
    special = data.draw(st.sampled_from((None, math.nan, math.inf, -math.inf, -0.0)))
    if special is not None:
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = special
    same_as_reference(sdm, scores.to(dtype), dims, k)


@pytest.mark.parametrize("threads", (1, 3, 7))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_number_of_threads(sdm, threads, dtype):
    scores = torch.randn(150, 64, dtype=dtype)
    scores.requires_grad_()
    expected = sdm.product_key_topk(scores, (32, 32), 20)
    (gradient,) = torch.autograd.grad(expected[0].cos().sum(), scores)
    torch.set_num_threads(threads)
    values, ids = sdm.product_key_topk(scores, (32, 32), 20)
    assert torch.equal(values, expected[0]) and torch.equal(ids, expected[1])
    assert torch.equal(torch.autograd.grad(values.cos().sum(), scores)[0], gradient)


_SCRIPT = """
import hashlib, sys, kernels, torch
sdm = kernels.get_kernel("org/sparse-delta-memory", version=1)
torch.manual_seed(0)
digest = hashlib.sha256()
for dims, k in (((256, 256), 64), ((100, 37), 300), ((1000,), 50), ((20, 30, 10), 40)):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scores in (torch.randn(20, sum(dims)), torch.randint(-3, 4, (5, sum(dims))).log()):
            values, ids = sdm.product_key_topk(scores.to(dtype), dims, k)
            digest.update(values.float().nan_to_num(nan=9.0).numpy().tobytes())
            digest.update(ids.numpy().tobytes())
print(digest.hexdigest())
"""


def test_instruction_sets(sdm):
    digests = set()
    for isa in ("plain", "avx2", "avx512"):
        env = {**os.environ, "SDM_FORCE_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], env=env, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
