# SPDX-License-Identifier: Apache-2.0
"""The computation of the mixer, shared by `SparseDeltaMemory` and the layer for `kernelize`.

A `mixer` here is any module with the attributes that `layers.SparseDeltaMemory` lists. Shapes:
x [B, T, dim]; H heads, S slots and D columns of a bank, W writes and R reads of a token.
"""

from typing import Optional, Union

import torch
import torch.nn.functional as F

from ._activations import activate
from .sdm import chunk_sdm, chunk_sdm_, recurrent_sdm_
from .state import SparseDeltaMemoryState
from .topk import product_key_topk

State = Union[SparseDeltaMemoryState, torch.Tensor]

# A call with a state and at most this many tokens a sequence goes step by step.
MAX_STEPS = 16


def mix(
    mixer: torch.nn.Module,
    x: torch.Tensor,
    state: Optional[State],
    cu_seqlens: Optional[torch.Tensor],
    seq_len: Optional[int],
) -> tuple[torch.Tensor, Optional[State]]:
    """`SparseDeltaMemory.forward`; see there."""
    batch, length = _batch_and_length(mixer, x, state, cu_seqlens, seq_len)
    shape = x.shape
    x = x.reshape(batch, length, shape[-1])

    g, beta = _gates(mixer, x)
    v = mixer.Wv_write(x).unflatten(-1, (mixer.config.num_heads, -1))
    write_idx, write_val = _select(mixer, mixer.Wk_write(x), "write")
    read_idx, read_val = _select(mixer, mixer.Wq_read(x), "read")
    if mixer.config.key_weighted_decay:
        g = g.unsqueeze(-1) * write_val.to(g.dtype)

    inputs = (write_idx, write_val, v, beta, g, read_idx, read_val)
    readings, state = _run(mixer, inputs, state, cu_seqlens)
    return _output(mixer, readings, x).reshape(shape), state


def initial_bank(mixer: torch.nn.Module) -> torch.Tensor:
    """The bank `[H, S, D]` that every sequence starts from: a view of `memory`, or zeros."""
    config = mixer.config
    shape = (config.num_heads, config.slots_per_head, config.head_dim)
    if config.backprop_on_memory:
        return mixer.memory.view(shape)
    # One row of zeros, expanded: the ops take strides, so no bank of zeros is allocated.
    return mixer.Wv_write.weight.new_zeros(config.head_dim).expand(shape)


def _gates(mixer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay g and write strength beta, [B, T, H]: at least float32 after the projections."""
    a, b = mixer.a_proj(x), mixer.b_proj(x)
    dtype = torch.promote_types(a.dtype, torch.float32)
    step = F.softplus(a.to(dtype) + mixer.dt_bias.to(dtype))
    return -torch.exp(mixer.A_log.to(dtype)) * step, torch.sigmoid(b.to(dtype))


def _select(
    mixer: torch.nn.Module, scores: torch.Tensor, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and weights of one side, [B, T, H, W or R], from its scores [B, T, H * factors]."""
    config = mixer.config
    writes = side == "write"
    if config.query_batchnorm:
        norm = mixer.key_bn if writes else mixer.query_bn
        scores = norm(scores.flatten(0, 1)).view(scores.shape)
    scores = scores.unflatten(-1, (config.num_heads, -1))
    count = config.num_writes if writes else config.num_reads
    picked, slots = product_key_topk(scores, list(config.factor_dims), count)
    act = config.write_act if writes else config.read_act
    scale = config.write_act_scale if writes else config.read_act_scale
    return slots, activate(picked, act, scale)


def _run(
    mixer: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    state: Optional[State],
    cu_seqlens: Optional[torch.Tensor],
) -> tuple[torch.Tensor, Optional[State]]:
    """Readings [B, T, H, D] and the state after the call."""
    chunk_size = mixer.config.chunk_size
    if state is None or isinstance(state, torch.Tensor):
        bank = initial_bank(mixer) if state is None else state
        if mixer.config.grad_bank_fp32 and bank.is_cuda and bank.dtype != torch.float32:
            raise NotImplementedError(
                "SparseDeltaMemory: grad_bank_fp32 on CUDA needs a float32 bank, "
                f"got {str(bank.dtype).split('.')[-1]}"
            )
        readings, final_bank = chunk_sdm(
            *inputs,
            bank,
            chunk_size=chunk_size,
            cu_seqlens=cu_seqlens,
            output_final_state=state is not None,
            save=mixer.config.save_mode,
        )
        return readings, final_bank

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        # Also what a checkpointed region runs into when it is recomputed: an error, rather than
        # a state that is advanced twice.
        raise RuntimeError(
            "SparseDeltaMemory: a SparseDeltaMemoryState is advanced in place and has no "
            "backward; call under torch.no_grad(), or pass a bank tensor as state to train"
        )
    length = inputs[0].shape[1]
    if cu_seqlens is None and length <= MAX_STEPS:
        readings = recurrent_sdm_(state.bank, *inputs)
    else:
        readings = chunk_sdm_(state.bank, *inputs, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    state.count += length if cu_seqlens is None else cu_seqlens.diff().to(state.count.dtype)
    return readings, state


def _output(mixer: torch.nn.Module, readings: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    config = mixer.config
    y = mixer.readings_norm(readings) if config.normalize_readings else readings
    y = y.flatten(-2)
    if config.output_gate:
        y = torch.sigmoid(mixer.Wog(x)) * y
    return mixer.Wo(y)


def _batch_and_length(
    mixer: torch.nn.Module,
    x: torch.Tensor,
    state: Optional[State],
    cu_seqlens: Optional[torch.Tensor],
    seq_len: Optional[int],
) -> tuple[int, int]:
    """B and T of the call after checking how its arguments fit together."""
    config = mixer.config
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"SparseDeltaMemory: x must be a tensor, got {type(x).__name__}")
    if x.dim() not in (2, 3) or x.shape[-1] != config.dim:
        raise ValueError(
            f"SparseDeltaMemory: x must have shape [B, T, {config.dim}] or [B*T, {config.dim}], "
            f"got {tuple(x.shape)}"
        )
    if x.dim() == 3:
        batch, length = x.shape[:2]
        if seq_len is not None and seq_len != length:
            raise ValueError(
                f"SparseDeltaMemory: seq_len must be {length} for this x, got {seq_len}"
            )
    elif cu_seqlens is not None or seq_len is None:
        batch, length = 1, x.shape[0]
        if seq_len is not None and seq_len != length:
            raise ValueError(
                f"SparseDeltaMemory: seq_len must be None with cu_seqlens and 2-D x, got {seq_len}"
            )
    else:
        if seq_len < 1 or x.shape[0] % seq_len != 0:
            raise ValueError(
                f"SparseDeltaMemory: seq_len must divide the {x.shape[0]} rows of x, got {seq_len}"
            )
        batch, length = x.shape[0] // seq_len, seq_len
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"SparseDeltaMemory: x must have batch 1 with cu_seqlens, got {batch}")
    _check_state(mixer, state, batch if cu_seqlens is None else cu_seqlens.numel() - 1)
    return batch, length


def _check_state(mixer: torch.nn.Module, state: Optional[State], num_sequences: int) -> None:
    if state is None:
        return
    # Not by class: a program may hold two builds of this package, or a cache of its own.
    if not isinstance(state, torch.Tensor) and not (
        hasattr(state, "bank") and hasattr(state, "count")
    ):
        raise TypeError(
            "SparseDeltaMemory: state must be a SparseDeltaMemoryState, a tensor or None, "
            f"got {type(state).__name__}"
        )
    config = mixer.config
    shared = (config.num_heads, config.slots_per_head, config.head_dim)
    bank = state if isinstance(state, torch.Tensor) else state.bank
    shape = tuple(bank.shape)
    allowed = [(num_sequences, *shared)] + ([shared] if bank is state else [])
    if shape not in allowed:
        raise ValueError(
            f"SparseDeltaMemory: state must hold a bank of shape {' or '.join(map(str, allowed))}, "
            f"got {shape}"
        )
