# SPDX-License-Identifier: Apache-2.0
"""The same values in other layouts, with everything around them poisoned."""

import torch


def _filler(x):
    # A valid slot that is wrong: an id out of range would be taken for an unused lane.
    return 0 if not x.is_floating_point() else float("nan")


def poisoned(x):
    """Return ``x`` cut out of a larger buffer that is NaN elsewhere; last dimension dense."""
    big = torch.full([n + 2 for n in x.shape], _filler(x), dtype=x.dtype, device=x.device)
    view = big[tuple(slice(1, n + 1) for n in x.shape)]
    return view.copy_(x)


def fused(x):
    """Return ``x`` as one of three tensors fused before the head dimension."""
    big = torch.full((*x.shape[:-2], 3, *x.shape[-2:]), _filler(x), dtype=x.dtype, device=x.device)
    return big[..., 1, :, :].copy_(x)


def transposed(x):
    """Return ``x`` stored with its second and third dimension swapped."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide(x):
    """Return ``x`` as the first columns of a wider buffer."""
    big = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), _filler(x), dtype=x.dtype)
    return big.to(x.device)[..., : x.shape[-1]].copy_(x)


def shifted(x):
    """Return ``x`` starting one element into its storage."""
    big = torch.full((x.numel() + 2,), _filler(x), dtype=x.dtype, device=x.device)
    return big[1:-1].view(x.shape).copy_(x)


def sparse_last(x):
    """Return ``x`` with a last dimension of stride 2: needs a copy inside."""
    big = torch.full((*x.shape[:-1], 2 * x.shape[-1]), _filler(x), dtype=x.dtype)
    return big.to(x.device)[..., ::2].copy_(x)


LAYOUTS = (poisoned, fused, transposed, wide, shifted, sparse_last)
