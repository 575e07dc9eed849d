# SPDX-License-Identifier: Apache-2.0
"""Definition of the product-key top-k in plain PyTorch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def product_key_topk(scores: Tensor, factor_dims: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Exact top-k over all sums of one score from each factor: the definition of the op.

    The rule is stated in ``docs/topk.md``; every line below is one sentence of it. Ordinary
    autograd differentiates the values, also twice.

    Args:
        scores: ``[..., sum(factor_dims)]`` floating, the factors side by side.
        factor_dims: columns of each factor, the most significant first.
        k: slots to select.

    Returns:
        ``values [..., min(k, prod(factor_dims))]`` in the dtype of ``scores``, and ``indices`` of
        the same shape, int32 (int64 if the product passes ``2**31 - 1``), ascending.

    """
    dims = [int(n) for n in factor_dims]
    num_slots = math.prod(dims)
    wide = num_slots > 2**31 - 1
    exact = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        ids = _select(exact, scores.dtype, dims, min(k, num_slots))
    values = _slot_scores(exact, scores.dtype, dims, ids)
    return values.to(scores.dtype), ids.to(torch.int64 if wide else torch.int32)


def _select(exact: Tensor, dtype: torch.dtype, dims: list[int], k: int) -> Tensor:
    """Ids of the selected slots, ascending."""
    factors = exact.split(dims, dim=-1)
    ids = _ranked_columns(factors[0], k)
    running = factors[0].gather(-1, ids)
    for f in range(1, len(dims)):
        columns = _ranked_columns(factors[f], k)
        scores = factors[f].gather(-1, columns)
        n, m = running.shape[-1], scores.shape[-1]
        c = min(k, n * m)
        pairs = [(i, j) for i in range(n) for j in range(min(m, c // (i + 1)))]
        pairs.sort(key=lambda pair: (pair[0] + pair[1], pair[0]), reverse=True)
        i, j = torch.tensor(pairs, device=exact.device).unbind(-1)
        if f > 1:
            running = running.to(dtype).to(exact.dtype)
        sums = running[..., i] + scores[..., j]
        best = _descending(sums)[..., :c]
        running = sums.gather(-1, best)
        ids = (ids[..., i] * dims[f] + columns[..., j]).gather(-1, best)
    return ids.sort(dim=-1).values


def _slot_scores(exact: Tensor, dtype: torch.dtype, dims: list[int], ids: Tensor) -> Tensor:
    """Scores of the slots ``ids``: added in factor order, rounded between additions."""
    digits = []
    for n in reversed(dims):
        digits.append(ids % n)
        ids = ids // n
    digits.reverse()
    total = None
    for f, factor in enumerate(exact.split(dims, dim=-1)):
        score = factor.gather(-1, digits[f])
        if f > 1:
            total = total.to(dtype).to(exact.dtype)
        total = score if total is None else total + score
    return total


def _ranked_columns(factor: Tensor, k: int) -> Tensor:
    """Columns of a factor by descending score, the larger column first among equals."""
    width = factor.shape[-1]
    return (width - 1 - _descending(factor.flip(-1)))[..., : min(k, width)]


def _descending(scores: Tensor) -> Tensor:
    """Positions by descending score, keeping the order of equals: -0 < +0, NaN equals -inf."""
    bits_type = torch.int64 if scores.dtype == torch.float64 else torch.int32
    scores = torch.where(scores.isnan(), -math.inf, scores)
    bits = scores.contiguous().view(bits_type)
    key = torch.where(bits < 0, bits ^ torch.iinfo(bits_type).max, bits)
    return key.sort(dim=-1, descending=True, stable=True).indices
