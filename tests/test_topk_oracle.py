# SPDX-License-Identifier: Apache-2.0
"""The top-k rule in plain Python, checked against all sums; the other top-k tests use it."""

import itertools
import math

import pytest
import torch


def score_keys(x):
    """Integers in the order of the scores: -0 < +0, NaN equals -inf."""
    kind = torch.int64 if x.dtype == torch.float64 else torch.int32
    x = torch.where(x.isnan(), torch.full_like(x, -math.inf), x)
    bits = x.contiguous().view(kind).long()
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)


def all_scores(row, dims):
    """Scores of all slots of one row by id, unrounded, in float32 (float64)."""
    total = None
    exact = row.to(torch.float64 if row.dtype == torch.float64 else torch.float32)
    for f, factor in enumerate(exact.split(list(dims))):
        if f > 1:
            total = total.to(row.dtype).to(exact.dtype)
        total = factor if total is None else (total[:, None] + factor).flatten()
    return total


def select(row, dims, k):
    """Ids selected in one row, by the rule of docs/topk.md, in Python integers."""
    exact = row.to(torch.float64 if row.dtype == torch.float64 else torch.float32)
    ranked = []
    for factor in exact.split(list(dims)):
        keys = score_keys(factor).tolist()
        order = sorted(range(len(keys)), key=lambda c: (keys[c], c), reverse=True)[:k]
        ranked.append([(c, factor[c]) for c in order])
    running = ranked[0]
    for f in range(1, len(dims)):
        c = min(k, len(running) * len(ranked[f]))
        pairs = [
            (i, j)
            for i, j in itertools.product(range(len(running)), range(len(ranked[f])))
            if (i + 1) * (j + 1) <= c
        ]
        left = torch.stack([running[i][1] for i, _ in pairs])
        if f > 1:
            left = left.to(row.dtype).to(exact.dtype)
        sums = left + torch.stack([ranked[f][j][1] for _, j in pairs])
        keys = score_keys(sums).tolist()
        best = sorted(
            range(len(pairs)),
            key=lambda p: (keys[p], pairs[p][0] + pairs[p][1], pairs[p][0]),
            reverse=True,
        )[:c]
        running = [
            (running[pairs[p][0]][0] * dims[f] + ranked[f][pairs[p][1]][0], sums[p]) for p in best
        ]
    return sorted(slot for slot, _ in running[:k])


def same_values(a, b):
    """Equal bits, any NaN for any NaN."""
    nan = a.isnan()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    bits_a = torch.where(nan, torch.zeros_like(a), a).contiguous().view(kind)
    bits_b = torch.where(nan, torch.zeros_like(b), b).contiguous().view(kind)
    return torch.equal(nan, b.isnan()) and torch.equal(bits_a, bits_b)


def check_row(row, dims, k, values, ids):
    """The selected scores are the k largest of all; values are theirs."""
    total = all_scores(row, dims)
    kept = min(k, total.numel())
    assert values.shape == ids.shape == (kept,)
    assert (ids[1:] > ids[:-1]).all()
    assert ids[0] >= 0 and ids[-1] < total.numel()
    keys = score_keys(total)
    assert torch.equal(keys[ids.long()].sort().values, keys.topk(kept).values.sort().values)
    assert same_values(values, total[ids.long()].to(row.dtype))


KINDS = {
    "normal": lambda n, m: torch.randn(n, m),
    "equal": lambda n, m: torch.full((n, m), 0.25),
    "eight_levels": lambda n, m: torch.randint(0, 8, (n, m)) / 4,
    "zeros": lambda n, m: torch.where(torch.rand(n, m) < 0.5, -0.0, 0.0),
    "tiny": lambda n, m: torch.randn(n, m) * 1e-40,
    "huge": lambda n, m: torch.randn(n, m) * 2e38,
    "minus_inf": lambda n, m: torch.where(torch.rand(n, m) < 0.9, -math.inf, torch.randn(n, m)),
    "all_nan": lambda n, m: torch.full((n, m), math.nan),
    "specials": lambda n, m: torch.tensor(
        [math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0]
    )[torch.randint(0, 7, (n, m))],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_is_exact(kind):
    for dims in ((9,), (7, 5), (4, 3, 5), (2, 3, 2, 3), (2, 1, 2, 2, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            row = KINDS[kind](1, sum(dims))[0].to(dtype)
            for k in (1, 4, 11, 100):
                ids = torch.tensor(select(row, dims, k))
                check_row(row, dims, k, all_scores(row, dims)[ids].to(dtype), ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_follows_the_rule(sdm, kind, dtype):
    for dims, k in (((20,), 7), ((13, 17), 24), ((6, 5, 7), 16), ((3, 4, 1, 3), 9), ((5, 3), 99)):
        scores = KINDS[kind](3, sum(dims)).to(dtype)
        values, ids = sdm.reference.product_key_topk(scores, dims, k)
        for row, value, index in zip(scores, values, ids):
            assert index.tolist() == select(row, dims, k)
            check_row(row, dims, k, value, index)
