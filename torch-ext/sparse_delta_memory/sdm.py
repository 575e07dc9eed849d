# SPDX-License-Identifier: Apache-2.0
"""Sparse delta memory: the chunked op, its in-place form and the decode step."""

from typing import Optional

import torch
from torch import Tensor

from ._checks import (
    INDICES,
    check_bool,
    check_choice,
    check_chunk_size,
    check_cu_seqlens,
    check_dtype,
    check_no_grad,
    check_sdm_tensors,
    check_shape,
    check_state_indices,
    check_tensor,
    check_writable_state,
    type_name,
)
from ._ops import ops
from ._sdm_ops import (
    SAVE_BF16,
    SAVE_FP8,
    SAVE_INT4,
    SAVE_NONE,
    SAVE_REPLAY,
    SAVE_ROWS,
    dense_rows,
    note_mutation,
)
from ._transforms import check_transforms, needs_gradient

_SAVE_MODES = {
    "replay": SAVE_REPLAY,
    "rows": SAVE_ROWS,
    "bf16": SAVE_BF16,
    "fp8": SAVE_FP8,
    "int4": SAVE_INT4,
}


def chunk_sdm(
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    initial_state: Tensor,
    *,
    chunk_size: Optional[int] = None,
    cu_seqlens: Optional[Tensor] = None,
    output_final_state: bool = False,
    save: str = "replay",
) -> tuple[Tensor, Optional[Tensor]]:
    r"""Write T tokens into a bank by the gated delta rule and read it, a few slots a token.

    For every token of every sequence and head, on its bank ``M [S, D]``::

        M[s]  = exp(g) * M[s]                      once for each distinct slot s in write_idx
        r     = sum_a write_val[a] * M[write_idx[a]]
        M[write_idx[a]] += write_val[a] * beta * (v - r)          for every lane a
        out   = sum_b read_val[b] * M[read_idx[b]]

    Slots that the token does not write keep their value. A slot named by several lanes decays once,
    by the gate of the lowest such lane, and the weights add up. A lane whose id lies outside
    ``[0, S)`` (``-1`` by convention) is unused: it does nothing and its weight gets gradient 0.

    Args:
        write_idx: ``[B, T, H, W]`` int32 or int64, slots of the head's own bank, W >= 1.
        write_val: ``[B, T, H, W]`` floating, weights of the writes, of any sign and size.
        v: ``[B, T, H, D]`` floating, the values to store.
        beta: ``[B, T, H]`` floating, write strengths, usually 0 to 1.
        g: ``[B, T, H]`` floating, log decays, usually <= 0 and at least finite; or ``[B, T, H, W]``
            for one gate a write.
        read_idx: ``[B, T, H, R]`` int32 or int64, R >= 1; may differ in dtype from ``write_idx``.
        read_val: ``[B, T, H, R]`` floating, weights of the reads.
        initial_state: ``[H, S, D]``, one bank a head from which every sequence starts (a learned
            bank), or ``[N, H, S, D]``, one for each sequence. Its dtype is the bank's.
        chunk_size: tokens worked on at a time, 1 to 512. None takes a tuned value. It changes
            speed, memory and rounding, never the meaning.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets from 0 to T of N sequences packed one after
            the other into ``B == 1``; empty sequences are legal. None means N = B sequences of T.
        output_final_state: whether the banks after the last token are returned.
        save: what a call that needs gradients keeps for the backward. ``"replay"``: banks at
            segment boundaries, exact, the backward repeats the writes. ``"rows"``: each row before
            it is overwritten, or on CUDA after it is written, exact. ``"bf16"``, ``"fp8"``,
            ``"int4"``: the rows before, rounded.

    The floating dtypes are float32, bfloat16 and float16 in any mixture, or float64 for all. Strides
    are free as long as nothing overlaps that is written; an argument whose last dimension is not
    contiguous (``beta`` and a 3-D ``g`` excepted) is copied once.

    Returns:
        ``(out, final_state)``: ``out [B, T, H, D]`` in ``v``'s dtype, ``final_state [N, H, S, D]`` in
        the bank's dtype, or None. Both are contiguous and differentiable. The final state of an
        empty sequence is its initial state.

    Effects: none. The arguments are not changed and the results share no memory with them.

    Gradients: ``write_val``, ``v``, ``beta``, ``g``, ``read_val`` and ``initial_state``, each in its
    argument's dtype, computed only if asked for. The prediction errors ``v - r`` are kept
    (``B*T*H*D`` float32), and besides them, with C tokens a chunk and E bytes a bank element:
    ``"replay"`` keeps ``B*H*S*D*E`` bytes for each ``max(4*S, 32768)/W`` tokens of a sequence;
    ``"rows"`` at most ``min(C*W, S)*D*E`` bytes for each chunk and head, ``"bf16"``, ``"fp8"`` and
    ``"int4"`` the same with 2, 1 and 1/2 bytes an element (and 4 a row for the last two), and all
    four keep the final state; ``"rows"`` on CUDA instead 4 bytes a row and a slot. With a rounded
    form ``v``, ``beta`` and ``initial_state`` still get the exact gradient; ``write_val``, ``g`` and
    ``read_val`` an approximate one. A call that needs no gradient keeps nothing, and its working
    memory does not grow with T. The gradient of a gradient is not implemented; ``reference.sdm``
    has one. The backward may run twice (``retain_graph=True``).

    Precision: float32 (float64 for float64), with float64 decays; a bank row is rounded to the
    bank's dtype once for each chunk that writes it, ``out`` once. Tolerances: docs/numerics.md,
    class "chunk".

    Determinism: bitwise the same from run to run, for any number of threads, and whatever else is
    in the batch. ``"replay"`` and ``"rows"`` give the same bits. Different chunk sizes round
    differently.

    Support: CPU, and CUDA from compute capability 8.0 without float64; anything else raises
    NotImplementedError. S up to 2**31 - 1. On CUDA a chunk has at most 256 tokens, less where a
    block has less shared memory (a longer ``chunk_size`` is cut); the gradient of a bank is kept in
    the bank's dtype and rounded once for each chunk that touches a row.

    Works under ``torch.compile(fullgraph=True)`` with dynamic B and T, ``torch.export`` and both
    kinds of activation checkpointing. Autocast changes nothing: dtypes are taken as given.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination. Slot ids are not looked at, see
            ``check_indices``; offsets are looked at on the CPU and outside of traces.

    Example:
        >>> B, T, H, S, D, W = 1, 32, 2, 256, 16, 4
        >>> idx = torch.randint(S, (B, T, H, W))
        >>> val = torch.softmax(torch.randn(B, T, H, W), dim=-1)
        >>> v, beta, g = torch.randn(B, T, H, D), torch.rand(B, T, H), -torch.rand(B, T, H)
        >>> bank = torch.zeros(H, S, D, requires_grad=True)
        >>> out, last = chunk_sdm(idx, val, v, beta, g, idx, val, bank, output_final_state=True)
        >>> (out.square().sum() + last.sum()).backward()

    """
    func = "chunk_sdm"
    tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
    check_sdm_tensors(func, *tokens, initial_state, "initial_state")
    num = _num_sequences(func, v, cu_seqlens)
    num_slots = initial_state.shape[-2]
    heads, dim = v.shape[2:]
    if initial_state.dim() == 3:
        check_shape(func, "initial_state", initial_state, "[H, S, D]", heads, num_slots, dim)
    else:
        check_shape(
            func, "initial_state", initial_state, "[N, H, S, D]", num, heads, num_slots, dim
        )
    check_chunk_size(func, chunk_size)
    check_bool(func, "output_final_state", output_final_state)
    check_choice(func, "save", save, tuple(_SAVE_MODES))

    floats = (write_val, v, beta, g, read_val, initial_state)
    check_transforms(func, *floats)
    needs_grad = needs_gradient(*floats)
    chunk = effective_chunk_size(v.device, chunk_size, initial_state.dtype)
    out, final_state, *_ = ops.sdm_chunk_fwd(
        *_dense_tokens(*tokens),
        dense_rows(initial_state),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chunk,
        output_final_state,
        _SAVE_MODES[save] if needs_grad else SAVE_NONE,
        segment_chunks(num_slots, write_idx.shape[-1], chunk),
    )
    return out, final_state if output_final_state else None


def chunk_sdm_(
    state: Tensor,
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    *,
    chunk_size: Optional[int] = None,
    cu_seqlens: Optional[Tensor] = None,
    state_indices: Optional[Tensor] = None,
) -> Tensor:
    """Run ``chunk_sdm`` on banks that advance in place: the prefill of a cache.

    The recurrence, the arguments not named below and the precision are those of ``chunk_sdm``.

    Args:
        state: ``[N, H, S, D]``, the bank of each sequence; with ``state_indices``
            ``[pool, H, S, D]``. Any strides with a contiguous last dimension and without overlap, a
            slice of a larger cache for instance. **Advanced in place.**
        write_idx: ``[B, T, H, W]`` int32 or int64.
        write_val: ``[B, T, H, W]`` floating.
        v: ``[B, T, H, D]`` floating.
        beta: ``[B, T, H]`` floating.
        g: ``[B, T, H]`` or ``[B, T, H, W]`` floating.
        read_idx: ``[B, T, H, R]`` int32 or int64.
        read_val: ``[B, T, H, R]`` floating.
        chunk_size: tokens worked on at a time, 1 to 512, or None for a tuned value.
        cu_seqlens: ``[N + 1]`` offsets of N sequences packed into ``B == 1``, or None (N = B).
        state_indices: ``[N]`` int32 or int64, the row of ``state`` that each sequence uses, or None
            for row n. ``-1`` skips the sequence: its output is 0, nothing is read or written. Other
            values must differ from each other and lie in ``[0, pool)``; on the CPU and outside of
            traces that is checked.

    Returns:
        ``out [B, T, H, D]`` in ``v``'s dtype, contiguous, not differentiable.

    Effects: ``state`` changes, and autograd notices if it was saved for a backward. Nothing else
    changes; ``out`` shares no memory with the arguments.

    Gradients: none. RuntimeError if grad mode is on and an argument requires grad.

    Determinism: the bits of ``chunk_sdm`` without gradients, whatever the row of the pool.

    Support: as ``chunk_sdm``. Works under ``torch.compile`` (the schema declares the mutation); autocast changes nothing; working memory does not grow with T.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination.
        RuntimeError: a gradient is asked for.

    Example:
        >>> cache = torch.zeros(8, 2, 256, 16)
        >>> idx, val = torch.randint(256, (1, 32, 2, 4)), torch.rand(1, 32, 2, 4)
        >>> v, beta, g = torch.randn(1, 32, 2, 16), torch.rand(1, 32, 2), -torch.rand(1, 32, 2)
        >>> row = torch.tensor([3])
        >>> out = chunk_sdm_(cache, idx, val, v, beta, g, idx, val, state_indices=row)

    """
    func = "chunk_sdm_"
    tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
    check_sdm_tensors(func, *tokens, state, "state")
    num = _num_sequences(func, v, cu_seqlens)
    _check_state(func, state, v, num, state_indices)
    check_chunk_size(func, chunk_size)
    check_no_grad(func, state, write_val, v, beta, g, read_val)
    out = ops.sdm_chunk_(
        state,
        *_dense_tokens(*tokens),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if state_indices is None else state_indices.contiguous(),
        effective_chunk_size(v.device, chunk_size, state.dtype),
    )
    note_mutation(state)
    return out


def recurrent_sdm_(
    state: Tensor,
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    *,
    state_indices: Optional[Tensor] = None,
) -> Tensor:
    """Advance banks in place token by token: the decode step.

    The recurrence is that of ``chunk_sdm``, executed literally: each token reads and stores its rows
    before the next one starts, so T calls with one token and one call with T tokens give the same
    bits. T >= 1; up to 16 tokens (verification of several drafted tokens) are tuned for. Slots that
    a token names repeatedly mean the same as in training.

    Args:
        state: ``[B, H, S, D]``, the bank of each sequence; with ``state_indices``
            ``[pool, H, S, D]``. Any strides with a contiguous last dimension and without overlap.
            **Advanced in place.**
        write_idx: ``[B, T, H, W]`` int32 or int64.
        write_val: ``[B, T, H, W]`` floating.
        v: ``[B, T, H, D]`` floating.
        beta: ``[B, T, H]`` floating.
        g: ``[B, T, H]`` or ``[B, T, H, W]`` floating.
        read_idx: ``[B, T, H, R]`` int32 or int64.
        read_val: ``[B, T, H, R]`` floating.
        state_indices: ``[B]`` int32 or int64, the row of ``state`` that each sequence uses, or None
            for row b. ``-1`` skips the sequence: its output is 0, nothing is read or written. Other
            values must differ from each other and lie in ``[0, pool)``; on the CPU and outside of
            traces that is checked.

    Returns:
        ``out [B, T, H, D]`` in ``v``'s dtype, contiguous, not differentiable.

    Effects: ``state`` changes, and autograd notices if it was saved for a backward. Nothing else
    changes; ``out`` shares no memory with the arguments.

    Gradients: none. RuntimeError if grad mode is on and an argument requires grad.

    Precision: float32 (float64 for float64) inside a token; a row is rounded to the bank's dtype once
    for each token that writes it. Tolerances: docs/numerics.md, class "step".

    Determinism: bitwise the same from run to run, for any number of threads and any batch around;
    on the CPU ``chunk_sdm_`` with ``chunk_size=1`` gives the same bits.

    Support: as ``chunk_sdm``. Works under ``torch.compile`` (the schema declares the mutation); autocast changes nothing.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, range or combination.
        RuntimeError: a gradient is asked for.

    Example:
        >>> cache = torch.zeros(3, 2, 256, 16)
        >>> idx, val = torch.randint(256, (3, 1, 2, 4)), torch.rand(3, 1, 2, 4)
        >>> v, beta, g = torch.randn(3, 1, 2, 16), torch.rand(3, 1, 2), -torch.rand(3, 1, 2)
        >>> out = recurrent_sdm_(cache, idx, val, v, beta, g, idx, val)

    """
    func = "recurrent_sdm_"
    tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
    check_sdm_tensors(func, *tokens, state, "state")
    _check_state(func, state, v, v.shape[0], state_indices)
    check_no_grad(func, state, write_val, v, beta, g, read_val)
    out = ops.sdm_step_(
        state,
        *_dense_tokens(*tokens),
        None if state_indices is None else state_indices.contiguous(),
    )
    note_mutation(state)
    return out


def check_indices(idx: Tensor, num_slots: int) -> None:
    """Raise IndexError if a slot id lies outside ``[0, num_slots)``, naming the first position.

    The ops take such an id for an unused lane and say nothing, because looking at values would make
    every call wait for the device. This function does wait; call it where ids are made. ``-1``, the
    padding value, is outside as well.

    Args:
        idx: int32 or int64 ids, any shape and strides.
        num_slots: S, the number of slots of a bank, at least 0.

    Returns:
        None.

    Effects: none. Nothing is differentiable. Under ``torch.compile`` it is a graph break.

    Support: CPU and CUDA; it waits for the device.

    Raises:
        IndexError: an id is outside.
        TypeError: ``idx`` is not an int32 or int64 tensor, ``num_slots`` not an int.
        ValueError: ``num_slots`` is negative.

    Example:
        >>> check_indices(torch.tensor([[0, 7], [8, 1]]), 8)
        Traceback (most recent call last):
        IndexError: check_indices: idx[1, 0] must be from 0 to 7, got 8

    """
    func = "check_indices"
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    check_tensor(func, "idx", idx)
    check_dtype(func, "idx", idx, INDICES)
    if isinstance(num_slots, bool) or not isinstance(num_slots, int):
        raise TypeError(f"{func}: num_slots must be an int, got {type_name(num_slots)}")
    if num_slots < 0:
        raise ValueError(f"{func}: num_slots must be at least 0, got {num_slots}")
    linear = int(ops.sdm_check_indices(idx.contiguous(), num_slots))
    if linear < 0:
        return
    position = []
    for size in reversed(idx.shape):
        position.insert(0, linear % size)
        linear //= size
    raise IndexError(
        f"{func}: idx[{', '.join(map(str, position))}] must be from 0 to {num_slots - 1}, "
        f"got {idx[tuple(position)].item()}"
    )


_CUDA_MAX_CHUNK = 256


def cuda_chunk_limit(shared_memory: int, element_size: int) -> int:
    """Return the most tokens of a chunk that a CUDA block holds, a multiple of 16 up to 256.

    A slice of a row is 128 bytes. The backward walk asks for most: two slices a token, each with a
    scale for a 16-bit bank, and 86 KiB for rows in flight and what belongs to them (``slots_smem``
    in sdm_slots.cuh).
    """
    slice_bytes = 128 + (4 if element_size == 2 else 0)
    tokens = (shared_memory - 86 * 1024) // (2 * slice_bytes)
    return max(16, min(tokens // 16 * 16, _CUDA_MAX_CHUNK))


def _device_chunk_limit(device: torch.device, element_size: int) -> int:
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return cuda_chunk_limit(shared_memory, element_size)


# All that torch.compiler.assume_constant_result does; to call it would import torch._dynamo, a second.
_device_chunk_limit._dynamo_marked_constant = True


def effective_chunk_size(
    device: torch.device, chunk_size: Optional[int], bank_dtype: torch.dtype
) -> int:
    """Return the chunk size that a call on ``device`` works with; None asks for a tuned one."""
    if device.type != "cuda":
        return 64 if chunk_size is None else chunk_size
    limit = _device_chunk_limit(device, bank_dtype.itemsize)
    return limit if chunk_size is None else min(chunk_size, limit)


def segment_chunks(num_slots: int, lanes: int, chunk_size: int) -> int:
    """Return the number of chunks between two banks that ``save="replay"`` keeps.

    A segment writes about four times as many rows as a bank has, so the kept banks cost a quarter of
    what the rows would; small banks get longer segments, because each segment has a fixed cost. The
    number does not depend on T, so that a dynamic T compiles once.
    """
    rows = max(4 * num_slots, 32768)
    return max(1, -(-rows // (lanes * chunk_size)))


def _num_sequences(func: str, v: Tensor, cu_seqlens: Optional[Tensor]) -> int:
    if cu_seqlens is None:
        return v.shape[0]
    check_cu_seqlens(func, cu_seqlens, v, "v")
    return cu_seqlens.shape[0] - 1


def _check_state(
    func: str, state: Tensor, v: Tensor, num: int, state_indices: Optional[Tensor]
) -> None:
    letters = "[N, H, S, D]" if state_indices is None else "[pool, H, S, D]"
    if state.dim() != 4:
        raise ValueError(f"{func}: state must be {letters}, got {list(state.shape)}")
    rows, _, num_slots, _ = state.shape
    if state_indices is None:
        rows = num
    check_shape(func, "state", state, letters, rows, v.shape[2], num_slots, v.shape[3])
    if state_indices is not None:
        check_state_indices(func, state_indices, num, state)
    check_writable_state(func, state)


def _dense_tokens(
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
) -> tuple[Tensor, ...]:
    """Copy what the kernels can't stride over: a last dimension that is not contiguous."""
    return (
        dense_rows(write_idx),
        dense_rows(write_val),
        dense_rows(v),
        beta,
        dense_rows(g) if g.dim() == 4 else g,
        dense_rows(read_idx),
        dense_rows(read_val),
    )
