# SPDX-License-Identifier: Apache-2.0
"""Layers for `kernels.kernelize`: a forward each, without constructor and state."""

from typing import Any, Optional

import torch
from torch import nn

from . import kda
from ._mixer import State, mix
from .config import SparseDeltaMemoryConfig


class SparseDeltaMemory(nn.Module):
    """Forward of a Sparse Delta Memory mixer for a module that has its parameters.

    The adopting module brings the attributes annotated below, those marked "as configured" only
    where its `config` asks for them; `config` may be any object with the fields and properties
    of `SparseDeltaMemoryConfig`. Its forward must take the same four arguments, and it is called
    as `SparseDeltaMemory.forward` of this package describes.
    """

    has_backward = True
    can_torch_compile = True

    config: SparseDeltaMemoryConfig
    Wq_read: nn.Linear
    Wk_write: nn.Linear
    Wv_write: nn.Linear
    a_proj: nn.Linear
    b_proj: nn.Linear
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    Wo: nn.Linear
    Wog: nn.Linear  # as configured: output_gate
    memory: nn.Parameter  # as configured: backprop_on_memory
    readings_norm: nn.LayerNorm  # as configured: normalize_readings
    query_bn: nn.BatchNorm1d  # as configured: query_batchnorm
    key_bn: nn.BatchNorm1d  # as configured: query_batchnorm

    def forward(
        self,
        x: torch.Tensor,
        state: Optional[State] = None,
        cu_seqlens: Optional[torch.Tensor] = None,
        seq_len: Optional[int] = None,
    ) -> tuple[torch.Tensor, Optional[State]]:
        """Mix `x` as `SparseDeltaMemory.forward` does."""
        return mix(self, x, state, cu_seqlens, seq_len)


class chunk_kda(nn.Module):  # noqa: N801  the name that mappings ask for
    """``chunk_kda`` with the signature of a model's own function for whole sequences.

    That is the one of transformers' ``chunk_kimi_delta_attention``, which it calls "chunk_kda" in
    its kernel mapping: log decays and strengths arrive activated. Offsets of packed sequences may
    come as ``cu_seqlens`` or ``cu_seq_lens_q``; other keywords of a model's forward are ignored.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: Optional[torch.Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return the output ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` or None."""
        cu_seqlens = kwargs.get("cu_seqlens")
        return kda.chunk_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens,
            chunk_size=chunk_size,
        )


class fused_recurrent_kda(nn.Module):  # noqa: N801
    """``fused_recurrent_kda`` with the signature of a model's own function for single tokens.

    That is the one of transformers' ``recurrent_kimi_delta_attention``, "fused_recurrent_kda" in
    its kernel mapping.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: Optional[torch.Tensor],
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return the output ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` or None."""
        cu_seqlens = kwargs.get("cu_seqlens")
        return kda.fused_recurrent_kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens,
        )


# The names under which other packages offer these two layers.
chunk_kimi_delta_attention = chunk_kda
recurrent_kimi_delta_attention = fused_recurrent_kda
