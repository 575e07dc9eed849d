# SPDX-License-Identifier: Apache-2.0
"""Token-by-token definition of the sparse delta memory in plain PyTorch."""

from typing import Optional

import torch
from torch import Tensor


def sdm(
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
    """Sparse delta memory, one token after the other: the definition of ``chunk_sdm``.

    For every token, on the bank ``M`` (``[S, D]``) of its sequence and head:

    1. each distinct slot ``s`` that the token writes decays once, ``M[s] *= exp(g)``; with one
       gate a write the gate is that of the lowest lane that names the slot;
    2. ``r = sum_a write_val[a] * M[write_idx[a]]``;
    3. ``M[write_idx[a]] += write_val[a] * beta * (v - r)`` for every lane, repeats add up;
    4. ``out = sum_b read_val[b] * M[read_idx[b]]``.

    A lane whose id lies outside ``[0, S)`` is unused: it writes nothing, decays nothing and reads
    nothing. The arithmetic is float64 for float64 inputs and float32 otherwise; the bank is rounded
    to its dtype once, when it is returned. Ordinary autograd differentiates it, also twice.

    Args:
        write_idx: ``[B, T, H, W]`` int32 or int64, slots to write.
        write_val: ``[B, T, H, W]`` floating, write weights.
        v: ``[B, T, H, D]`` floating, values.
        beta: ``[B, T, H]`` floating, write strengths.
        g: ``[B, T, H]`` or ``[B, T, H, W]`` floating, log decays.
        read_idx: ``[B, T, H, R]`` int32 or int64, slots to read.
        read_val: ``[B, T, H, R]`` floating, read weights.
        initial_state: ``[H, S, D]`` shared by all sequences, or ``[N, H, S, D]``.
        chunk_size: accepted for the sake of one signature, without influence.
        cu_seqlens: ``[N + 1]`` offsets of N sequences packed into ``B == 1``, or None (N = B).
        output_final_state: whether the bank after the last token is returned.
        save: accepted for the sake of one signature, without influence.

    Returns:
        ``out [B, T, H, D]`` in ``v``'s dtype, and ``final_state [N, H, S, D]`` in the dtype of
        ``initial_state`` or None. Both are differentiable.

    """
    del chunk_size, save
    tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
    if cu_seqlens is None:
        batches = [tokens]
        states = [initial_state]
    else:
        offsets = cu_seqlens.tolist()
        spans = list(zip(offsets[:-1], offsets[1:]))
        batches = [tuple(x[:, first:last] for x in tokens) for first, last in spans]
        shared = initial_state.dim() == 3
        if shared:
            initial_state = initial_state.unsqueeze(0)
        states = [
            initial_state[:1] if shared else initial_state[n : n + 1] for n in range(len(spans))
        ]
    results = [_sequences(*batch, state) for batch, state in zip(batches, states)]
    out = torch.cat([out for out, _ in results] or [v], dim=1)
    if not output_final_state:
        return out, None
    return out, torch.cat([state for _, state in results] or [initial_state[:0]], dim=0)


def _sequences(
    write_idx: Tensor,
    write_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    read_idx: Tensor,
    read_val: Tensor,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run B sequences of equal length: ``out [B, T, H, D]`` and the last bank ``[B, H, S, D]``."""
    batch, length, heads, dim = v.shape
    num_slots = initial_state.shape[-2]
    compute = torch.float64 if v.dtype == torch.float64 else torch.float32
    write_val, values, beta, g, read_val = (
        x.to(compute) for x in (write_val, v, beta, g, read_val)
    )
    write_idx, read_idx = write_idx.long(), read_idx.long()
    log_decay = g if g.dim() == 4 else g.unsqueeze(-1).expand(write_idx.shape)

    # Row S of the bank stays zero: unused lanes and repeats of a slot point at it.
    bank = initial_state.to(compute).expand(batch, heads, num_slots, dim)
    bank = torch.cat([bank, bank.new_zeros(batch, heads, 1, dim)], dim=2)

    in_bank = (write_idx >= 0) & (write_idx < num_slots)
    write_idx = write_idx.masked_fill(~in_bank, num_slots)
    write_val = write_val.masked_fill(~in_bank, 0)
    same_slot = write_idx.unsqueeze(-1) == write_idx.unsqueeze(-2)  # [B, T, H, W, W]
    first_lane = same_slot.int().argmax(-1)
    owner = in_bank & (first_lane == torch.arange(write_idx.shape[-1], device=v.device))
    log_decay = log_decay.gather(-1, first_lane).masked_fill(~in_bank, 0)
    decay = log_decay.exp().unsqueeze(-1)
    slot_weight = write_val.unsqueeze(-2).masked_fill(~same_slot, 0).sum(-1).unsqueeze(-1)

    used = (read_idx >= 0) & (read_idx < num_slots)
    read_idx = read_idx.masked_fill(~used, num_slots)
    read_val = read_val.masked_fill(~used, 0)

    b = torch.arange(batch, device=v.device).view(-1, 1, 1)
    h = torch.arange(heads, device=v.device).view(1, -1, 1)
    outputs: list[Tensor] = []
    for t in range(length):
        rows = decay[:, t] * bank[b, h, write_idx[:, t]]
        retrieved = (write_val[:, t].unsqueeze(-1) * rows).sum(-2)
        delta = beta[:, t].unsqueeze(-1) * (values[:, t] - retrieved)
        rows = rows + slot_weight[:, t] * delta.unsqueeze(-2)
        target = write_idx[:, t].masked_fill(~owner[:, t], num_slots)
        rows = rows.masked_fill(~owner[:, t].unsqueeze(-1), 0)
        bank[b, h, target] = rows
        read_rows = bank[b, h, read_idx[:, t]]
        outputs.append((read_val[:, t].unsqueeze(-1) * read_rows).sum(-2))
    out = torch.stack(outputs, dim=1) if outputs else values
    return out.to(v.dtype), bank[:, :, :num_slots].to(initial_state.dtype)
