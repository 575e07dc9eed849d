# SPDX-License-Identifier: Apache-2.0
"""Fake implementations and autograd formulas of the KDA ops."""

from typing import Any, Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops
from ._sdm_ops import dense_rows

# How `g` and `beta` reach the ops; the numbers are part of the op schemas.
GATE_ACTIVATED, GATE_SOFTPLUS, GATE_LOWER_BOUND = range(3)
BETA_ACTIVATED, BETA_SIGMOID, BETA_TWO_SIGMOID = range(3)

# Chunk length of the backward of the token recurrence.
DEFAULT_CHUNK = 64


def compute_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of states and gate parameters beside ``q``."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _new_state(q: Tensor, v: Tensor, rows: int, v_first: bool, dtype: torch.dtype) -> Tensor:
    heads, columns = v.shape[2:]
    dims = (columns, q.shape[3]) if v_first else (q.shape[3], columns)
    return q.new_empty((rows, heads, *dims), dtype=dtype)


def _num_sequences(q: Tensor, cu_seqlens: Optional[Tensor]) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


@torch.library.register_fake(add_op_namespace_prefix("kda_chunk_fwd"))
def _kda_chunk_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    l2norm: bool,
    gate: int,
    lower_bound: float,
    beta_mode: int,
    v_first: bool,
    chunk_size: int,
    output_final_state: bool,
    output_chunk_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    compute = compute_dtype(q)
    saved = torch.bfloat16 if q.dtype == torch.float16 else q.dtype
    num = _num_sequences(q, cu_seqlens)
    final_state = q.new_empty(0, dtype=compute)
    if output_final_state:
        final_state = _new_state(q, v, num, v_first, compute)
    chunk_states = q.new_empty(0, dtype=saved)
    if output_chunk_states:
        rows = q.shape[0] * q.shape[1] // chunk_size + num
        chunk_states = _new_state(q, v, rows, v_first, saved)
    return q.new_empty(v.shape), final_state, chunk_states


@torch.library.register_fake(add_op_namespace_prefix("kda_chunk_bwd"))
def _kda_chunk_bwd_fake(
    d_out: Tensor,
    d_final_state: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    chunk_states: Optional[Tensor],
    scale: float,
    l2norm: bool,
    gate: int,
    lower_bound: float,
    beta_mode: int,
    v_first: bool,
    chunk_size: int,
    need_gate_grad: bool,
    need_state_grad: bool,
) -> tuple[Tensor, ...]:
    compute = compute_dtype(q)
    gate_grads = [
        q.new_empty(0 if x is None or not need_gate_grad else x.shape, dtype=compute)
        for x in (A_log, dt_bias)
    ]
    d_state = q.new_empty(0, dtype=compute)
    if need_state_grad:
        d_state = _new_state(q, v, _num_sequences(q, cu_seqlens), v_first, compute)
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), *gate_grads, d_state)


@torch.library.register_fake(add_op_namespace_prefix("kda_recurrent_fwd"))
def _kda_recurrent_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    l2norm: bool,
    gate: int,
    lower_bound: float,
    beta_mode: int,
    v_first: bool,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(q)
    final_state = q.new_empty(0, dtype=compute)
    if output_final_state:
        final_state = _new_state(q, v, _num_sequences(q, cu_seqlens), v_first, compute)
    return q.new_empty(v.shape), final_state


@torch.library.register_fake(add_op_namespace_prefix("kda_step_"))
def _kda_step_inplace_fake(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    state_indices: Optional[Tensor],
    scale: float,
    l2norm: bool,
    gate: int,
    lower_bound: float,
    beta_mode: int,
    v_first: bool,
) -> Tensor:
    return q.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], chunk_states: Optional[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.num_inputs = len(inputs)
    ctx.options = inputs[9:15]
    ctx.save_for_backward(*inputs[:9], chunk_states)


def _kda_chunk_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    chunk_size, output_final_state, output_chunk_states = inputs[15:]
    _, final_state, chunk_states = output
    ctx.mark_non_differentiable(chunk_states, *(() if output_final_state else (final_state,)))
    ctx.chunk_size = chunk_size
    _save(ctx, inputs, chunk_states if output_chunk_states else None)


def _kda_recurrent_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    if not inputs[15]:
        ctx.mark_non_differentiable(output[1])
    ctx.chunk_size = DEFAULT_CHUNK
    _save(ctx, inputs, None)


def _kda_backward(
    ctx: Any, d_out: Optional[Tensor], d_final_state: Optional[Tensor], *_: Optional[Tensor]
) -> tuple[Optional[Tensor], ...]:
    if d_out is None and d_final_state is None:
        return (None,) * ctx.num_inputs
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, chunk_states = ctx.saved_tensors
    if d_out is None:
        d_out = q.new_zeros(v.shape)
    needed = ctx.needs_input_grad
    # Hooks on saved tensors may hand back other strides than they were given.
    *grads, d_initial_state = ops.kda_chunk_bwd(
        dense_rows(d_out),
        None if d_final_state is None else dense_rows(d_final_state),
        *(dense_rows(x) for x in (q, k, v, g)),
        beta,
        *(None if x is None else x.contiguous() for x in (A_log, dt_bias)),
        None if initial_state is None else dense_rows(initial_state),
        cu_seqlens,
        None if chunk_states is None else chunk_states.contiguous(),
        *ctx.options,
        ctx.chunk_size,
        needed[5] or needed[6],
        needed[7],
    )
    if needed[7]:
        d_initial_state = d_initial_state.to(initial_state.dtype)
    grads.append(d_initial_state)
    wanted = [grad if need else None for grad, need in zip(grads, needed)]
    return (*wanted, *(None,) * (ctx.num_inputs - len(wanted)))


def _kda_chunk_bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _kda_chunk_bwd_backward(ctx: Any, *_: Optional[Tensor]) -> None:
    raise NotImplementedError(
        "chunk_kda, fused_recurrent_kda: the gradient of a gradient is not implemented; "
        "reference.kda has one"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("kda_chunk_fwd"), _kda_backward, setup_context=_kda_chunk_setup
)
torch.library.register_autograd(
    add_op_namespace_prefix("kda_recurrent_fwd"), _kda_backward, setup_context=_kda_recurrent_setup
)
torch.library.register_autograd(
    add_op_namespace_prefix("kda_chunk_bwd"),
    _kda_chunk_bwd_backward,
    setup_context=_kda_chunk_bwd_setup,
)
