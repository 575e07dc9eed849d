# SPDX-License-Identifier: Apache-2.0
"""Product-key top-k: the public function."""

import math
from collections.abc import Sequence

from torch import Tensor

from . import _topk_ops  # noqa: F401  registers the fake implementations and the autograd formulas
from ._checks import (
    FLOATING,
    check_backend,
    check_dtype,
    check_tensor,
    is_int,
    type_name,
)
from ._ops import ops
from ._transforms import check_transforms

_FUNC = "product_key_topk"
_MAX_K = 1024

# Columns are 32-bit inside a factor, with room for a vector behind the last one.
_MAX_WIDTH = 2**31 - 64

# What the parameters of a CUDA kernel hold.
_MAX_CUDA_FACTORS = 512


def product_key_topk(scores: Tensor, factor_dims: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """Select the k best slots of a product of factors, exactly.

    A slot is one column ``c_f`` from each factor. Its id and its score are::

        id    = (..(c_0 * n_1 + c_1) * n_2 + ..) * n_{F-1} + c_{F-1}
        score = scores[offset_0 + c_0] + .. + scores[offset_{F-1} + c_{F-1}]

    and the ``k`` slots with the largest scores among all ``prod(factor_dims)`` are returned in
    ascending order of id. Equal scores, NaN and -0 follow the rule in ``docs/topk.md``, the same on
    every device: -0 is below +0, NaN counts as -inf, and among equal sums the pair further down in
    the ranks of its factors is taken.

    Args:
        scores: ``[..., sum(factor_dims)]`` float32, bfloat16, float16 or (CPU) float64; the factors
            side by side. Any number of leading dimensions of any size, 0 included, and any strides;
            a last dimension that is not contiguous costs one copy.
        factor_dims: the columns ``n_f`` of each factor, at least one factor of at least one column,
            the most significant first. Their product must fit int64.
        k: slots to select, from 1 to 1024.

    Returns:
        values: ``[..., min(k, prod(factor_dims))]`` in the dtype of ``scores``; differentiable.
        indices: the same shape, int32, or int64 if ``prod(factor_dims) > 2**31 - 1``; strictly
            ascending along the last dimension, hence distinct.

    Effects: none; the outputs are new and contiguous.

    Gradients: ``scores`` gets, at every column, the sum of the gradients of the values whose slot
    uses it, and exact zeros elsewhere; roundings count as the identity. Kept for the backward: the
    indices, ``4 * rows * k`` bytes (8 if int64). The gradient of a gradient is not
    implemented; ``reference.product_key_topk`` has one.

    Precision: sums are float32 (float64 for float64), added in factor order; with 16-bit scores and
    more than two factors the running sum is rounded to their dtype between additions. Selection
    compares the unrounded sum and the value is rounded once. With one factor the value is the score
    itself. Gradients are summed in float32 (float64) and rounded once.

    Determinism: the same bits from run to run, for any number of threads, any instruction set and
    any other rows in the call; forward and backward.

    Support: CPU and CUDA (float32, bfloat16, float16 and at most 512 factors; NotImplementedError
    otherwise). TypeError and ValueError name the argument that is wrong.

    ``torch.compile``: one graph, also with dynamic leading dimensions. CUDA graphs: no
    synchronisation, no dependence on values. Autocast: the dtype of ``scores`` decides.

    Example:
        >>> scores = torch.randn(2, 16, 4, 32 + 32, requires_grad=True)
        >>> values, indices = product_key_topk(scores, (32, 32), k=8)
        >>> values.shape, indices.dtype
        (torch.Size([2, 16, 4, 8]), torch.int32)
        >>> values.softmax(-1).square().sum().backward()

    """
    dims = _check_arguments(scores, factor_dims, k)
    check_transforms(_FUNC, scores)
    if scores.shape[-1] > 1 and scores.stride(-1) != 1:
        scores = scores.contiguous()
    return ops.product_key_topk_fwd(scores, dims, k)


def _check_arguments(scores: Tensor, factor_dims: Sequence[int], k: int) -> list[int]:
    """Raise on wrong arguments; return factor_dims as a list."""
    check_tensor(_FUNC, "scores", scores)
    check_dtype(_FUNC, "scores", scores, FLOATING)
    check_backend(_FUNC, "scores", scores)
    if isinstance(factor_dims, (str, bytes, Tensor)) or not isinstance(factor_dims, Sequence):
        raise TypeError(
            f"{_FUNC}: factor_dims must be a sequence of ints, got {type_name(factor_dims)}"
        )
    dims = list(factor_dims)
    for width in dims:
        if not is_int(width):
            raise TypeError(
                f"{_FUNC}: factor_dims must be a sequence of ints, got one with {type_name(width)}"
            )
    if not is_int(k):
        raise TypeError(f"{_FUNC}: k must be an int, got {type_name(k)}")
    if not dims:
        raise ValueError(f"{_FUNC}: factor_dims must have at least one factor, got {dims}")
    if min(dims) < 1:
        raise ValueError(f"{_FUNC}: factor_dims must be at least 1 each, got {dims}")
    if max(dims) > _MAX_WIDTH:
        raise ValueError(f"{_FUNC}: factor_dims must be at most {_MAX_WIDTH} each, got {dims}")
    if math.prod(dims) > 2**63 - 1:
        raise ValueError(f"{_FUNC}: factor_dims must have a product below 2**63, got {dims}")
    if not 1 <= k <= _MAX_K:
        raise ValueError(f"{_FUNC}: k must be from 1 to {_MAX_K}, got {k}")
    if scores.dim() == 0 or scores.shape[-1] != sum(dims):
        raise ValueError(
            f"{_FUNC}: scores must be [..., {sum(dims)}] (the sum of factor_dims), "
            f"got shape {list(scores.shape)}"
        )
    if scores.is_cuda and len(dims) > _MAX_CUDA_FACTORS:
        raise NotImplementedError(
            f"{_FUNC}: factor_dims must have at most {_MAX_CUDA_FACTORS} factors on CUDA, "
            f"got {len(dims)}"
        )
    return dims
