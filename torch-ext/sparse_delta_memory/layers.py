# SPDX-License-Identifier: Apache-2.0
"""Layers for `kernels.kernelize`: a forward each, without constructor and state."""

from typing import Optional

import torch
from torch import nn

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
