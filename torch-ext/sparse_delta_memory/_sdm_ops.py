# SPDX-License-Identifier: Apache-2.0
"""Fake implementations and autograd formulas of the SDM ops."""

from typing import Any, Optional

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

# What a training call keeps for its backward; the numbers are part of the op schemas.
SAVE_NONE, SAVE_REPLAY, SAVE_ROWS, SAVE_BF16, SAVE_FP8, SAVE_INT4 = range(6)


def _logs_rows(initial_state: Tensor, save_mode: int) -> bool:
    """Whether the kept rows are a log of new ones, after the initial bank, rather than old ones."""
    return save_mode == SAVE_ROWS and initial_state.device.type == "cuda"


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x``, copied if its last dimension is not contiguous: what the kernels demand."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def note_mutation(state: Tensor) -> None:
    """Tell autograd that ``state`` has changed: ops from C++ libraries do not do it themselves."""
    if not torch.compiler.is_compiling() and not state.is_inference():
        torch.autograd.graph.increment_version(state)


@torch.library.register_fake(add_op_namespace_prefix("sdm_chunk_fwd"))
def _sdm_chunk_fwd_fake(
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    initial_state: Tensor,
    cu_seqlens: Optional[Tensor],
    chunk_size: int,
    output_final_state: bool,
    save_mode: int,
    segment_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, heads, dim = v.shape
    lanes = write_idx.shape[-1]
    num_slots = initial_state.shape[-2]
    num = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    compute = torch.float64 if v.dtype == torch.float64 else torch.float32

    out = v.new_empty((batch, length, heads, dim))
    final_state = initial_state.new_empty(0)
    log = _logs_rows(initial_state, save_mode)
    if output_final_state or (save_mode >= SAVE_ROWS and not log):
        final_state = initial_state.new_empty((num, heads, num_slots, dim))
    errors = v.new_empty((batch, length, heads, dim) if save_mode else 0, dtype=compute)
    saved_rows = initial_state.new_empty(0)
    row_scales = v.new_empty(0, dtype=torch.float32)
    row_links = v.new_empty(0, dtype=torch.int32)

    if save_mode == SAVE_REPLAY:
        # The bank at each segment boundary inside a sequence; packed: room for the worst split.
        segment = segment_chunks * chunk_size
        if cu_seqlens is None:
            num_banks = batch * torch.sym_max(0, -(-length // segment) - 1)
        else:
            num_banks = length // segment
        saved_rows = initial_state.new_empty((num_banks, heads, num_slots, dim))
    elif save_mode >= SAVE_ROWS:
        # One row for each distinct slot that a chunk writes, room for as many as there can be.
        rows_per_chunk = torch.sym_min(chunk_size * lanes, num_slots)
        if cu_seqlens is None:
            num_rows = batch * torch.sym_min(
                length * lanes, -(-length // chunk_size) * rows_per_chunk
            )
        else:
            num_rows = torch.sym_min(length * lanes, (length // chunk_size + num) * rows_per_chunk)
        dtype = {SAVE_ROWS: initial_state.dtype, SAVE_BF16: torch.bfloat16}.get(
            save_mode, torch.uint8
        )
        row_size = (dim + 1) // 2 if save_mode == SAVE_INT4 else dim
        saved_rows = initial_state.new_empty((heads, num_rows, row_size), dtype=dtype)
        if save_mode >= SAVE_FP8:
            row_scales = v.new_empty((heads, num_rows), dtype=torch.float32)
        if log:
            row_links = v.new_empty(heads * (num_rows + num * num_slots), dtype=torch.int32)
    return out, final_state, errors, saved_rows, row_scales, row_links


@torch.library.register_fake(add_op_namespace_prefix("sdm_chunk_bwd"))
def _sdm_chunk_bwd_fake(
    d_out: Tensor,
    d_final_state: Optional[Tensor],
    write_idx: Tensor,
    write_val: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    bank: Tensor,
    cu_seqlens: Optional[Tensor],
    errors: Tensor,
    saved_rows: Tensor,
    row_scales: Tensor,
    row_links: Tensor,
    chunk_size: int,
    save_mode: int,
    segment_chunks: int,
    shared_bank: bool,
    need_state_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_state = bank.new_empty(0)
    if need_state_grad:
        d_state = bank.new_empty(bank.shape[-3:] if shared_bank else bank.shape)
    grads = [x.new_empty(x.shape) for x in (write_val, d_out, beta, g, read_val)]
    return (*grads, d_state)


@torch.library.register_fake(add_op_namespace_prefix("sdm_chunk_"))
def _sdm_chunk_inplace_fake(
    state: Tensor,
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    cu_seqlens: Optional[Tensor],
    state_indices: Optional[Tensor],
    chunk_size: int,
) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.register_fake(add_op_namespace_prefix("sdm_step_"))
def _sdm_step_inplace_fake(
    state: Tensor,
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    state_indices: Optional[Tensor],
) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.register_fake(add_op_namespace_prefix("sdm_check_indices"))
def _sdm_check_indices_fake(idx: Tensor, num_slots: int) -> Tensor:
    return idx.new_empty((), dtype=torch.int64)


def _sdm_chunk_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    write_idx, write_val, v, beta, g, read_idx, read_val, initial_state, cu_seqlens = inputs[:9]
    chunk_size, output_final_state, save_mode, segment_chunks = inputs[9:]
    _, final_state, errors, saved_rows, row_scales, row_links = output
    ctx.set_materialize_grads(False)
    unused = () if output_final_state else (final_state,)
    ctx.mark_non_differentiable(errors, saved_rows, row_scales, row_links, *unused)
    ctx.out_dtype = v.dtype
    ctx.shared_bank = initial_state.dim() == 3
    ctx.options = (chunk_size, save_mode, segment_chunks)
    if save_mode == SAVE_NONE:
        return
    # Replay and a log start from the initial bank; old rows turn the final bank back into it.
    from_start = save_mode == SAVE_REPLAY or _logs_rows(initial_state, save_mode)
    bank = initial_state if from_start else final_state
    ctx.save_for_backward(
        write_idx, write_val, beta, g, read_idx, read_val, bank, cu_seqlens,
        errors, saved_rows, row_scales, row_links,
    )  # fmt: skip


def _sdm_chunk_backward(
    ctx: Any, d_out: Optional[Tensor], d_final_state: Optional[Tensor], *_: Optional[Tensor]
) -> tuple[Optional[Tensor], ...]:
    if d_out is None and d_final_state is None:
        return (None,) * 13
    if ctx.options[1] == SAVE_NONE:
        raise RuntimeError("sdm_chunk_fwd: save_mode 0 keeps nothing for a backward")
    # Hooks on saved tensors may hand back other strides than they were given.
    write_idx, write_val, beta, g, read_idx, read_val, bank, cu_seqlens, *saved = ctx.saved_tensors
    errors, saved_rows, row_scales, row_links = (x.contiguous() for x in saved)
    if d_out is None:
        d_out = errors.new_zeros(errors.shape, dtype=ctx.out_dtype)
    needed = ctx.needs_input_grad
    *grads, d_initial_state = ops.sdm_chunk_bwd(
        dense_rows(d_out),
        None if d_final_state is None else dense_rows(d_final_state),
        dense_rows(write_idx),
        dense_rows(write_val),
        beta,
        dense_rows(g) if g.dim() == 4 else g,
        dense_rows(read_idx),
        dense_rows(read_val),
        dense_rows(bank),
        cu_seqlens,
        errors,
        saved_rows,
        row_scales,
        row_links,
        *ctx.options,
        ctx.shared_bank,
        needed[7],
    )
    positions = (1, 2, 3, 4, 6)
    by_position = {i: grad for i, grad in zip(positions, grads) if needed[i]}
    if needed[7]:
        by_position[7] = d_initial_state
    return tuple(by_position.get(i) for i in range(13))


def _sdm_chunk_bwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _sdm_chunk_bwd_backward(ctx: Any, *_: Optional[Tensor]) -> None:
    raise NotImplementedError(
        "chunk_sdm: the gradient of a gradient is not implemented; reference.sdm has one"
    )


torch.library.register_autograd(
    add_op_namespace_prefix("sdm_chunk_fwd"), _sdm_chunk_backward, setup_context=_sdm_chunk_setup
)
torch.library.register_autograd(
    add_op_namespace_prefix("sdm_chunk_bwd"),
    _sdm_chunk_bwd_backward,
    setup_context=_sdm_chunk_bwd_setup,
)
