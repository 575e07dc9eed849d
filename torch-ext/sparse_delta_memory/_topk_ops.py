# SPDX-License-Identifier: Apache-2.0
"""Fake implementations and autograd formulas of the product-key top-k ops."""

import math

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops


@torch.library.register_fake(add_op_namespace_prefix("product_key_topk_fwd"))
def _product_key_topk_fwd_fake(scores: Tensor, factor_dims: list[int], k: int):
    num_slots = math.prod(factor_dims)
    shape = [*scores.shape[:-1], min(k, num_slots)]
    id_type = torch.int64 if num_slots > 2**31 - 1 else torch.int32
    return scores.new_empty(shape), scores.new_empty(shape, dtype=id_type)


@torch.library.register_fake(add_op_namespace_prefix("product_key_topk_bwd"))
def _product_key_topk_bwd_fake(d_values: Tensor, indices: Tensor, factor_dims: list[int]):
    return d_values.new_empty([*d_values.shape[:-1], sum(factor_dims)])


def _fwd_setup_context(ctx, inputs, output):
    _, factor_dims, _ = inputs
    _, indices = output
    ctx.factor_dims = factor_dims
    ctx.save_for_backward(indices)
    ctx.mark_non_differentiable(indices)
    ctx.set_materialize_grads(False)


def _fwd_backward(ctx, d_values, d_indices):
    if d_values is None:
        return None, None, None
    (indices,) = ctx.saved_tensors
    return ops.product_key_topk_bwd(d_values, indices, ctx.factor_dims), None, None


def _bwd_backward(ctx, *grads):
    raise NotImplementedError(
        "product_key_topk: the gradient of a gradient is not implemented; "
        "reference.product_key_topk has one"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("product_key_topk_fwd"),
    _fwd_backward,
    setup_context=_fwd_setup_context,
)
torch.library.register_autograd(add_op_namespace_prefix("product_key_topk_bwd"), _bwd_backward)
