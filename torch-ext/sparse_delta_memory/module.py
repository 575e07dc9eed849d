# SPDX-License-Identifier: Apache-2.0
"""The full Sparse Delta Memory sequence mixer."""

import math
from typing import Any, Optional

import torch
from torch import nn

from ._mixer import State, initial_bank, mix
from .config import SparseDeltaMemoryConfig
from .state import SparseDeltaMemoryState

_SMALLEST_STEP = 1e-4  # floor of exp(A_log) and of the softplus step at initialisation


class SparseDeltaMemory(nn.Module):
    """Sequence mixer with a large sparse memory: projections, slot selection, delta rule, output.

    For every token and head (`docs/semantics.md` has the recurrence of the memory itself):

        g    = -exp(A_log) * softplus(a_proj x + dt_bias)        log-decay of the written slots
        beta = sigmoid(b_proj x)                                 write strength
        v    = Wv_write x                                        value
        write slots and weights = write_act(top-W slots of Wk_write x)
        read slots and weights  = read_act(top-R slots of Wq_read x)
        y    = Wo [sigmoid(Wog x) *] [readings_norm] reading

    Parameter names are the published ones: `Wq_read`, `Wk_write`, `Wv_write`, `a_proj`, `b_proj`,
    `Wo` (weight and bias each), `A_log`, `dt_bias`, and as configured `Wog`, `memory`,
    `readings_norm`, `query_bn`, `key_bn`.

    `A_log` and `dt_bias` carry `_no_weight_decay = True`, and `memory` carries
    `_is_memory_bank = True` so that a parameter count can leave it out. Copies and loaded state
    dicts keep these attributes; wrappers that make parameters of their own, like `fully_shard`,
    do not, so sort by name there.

    Precision: projections run in the module's dtype, or autocast's; gates, log-decay and
    activations are computed in float32, the memory as `chunk_sdm` says. The bank has the dtype
    of `memory`.

    Example:
        >>> config = SparseDeltaMemoryConfig(dim=256, num_heads=2, slots_per_head=4096)
        >>> layer = SparseDeltaMemory(config)
        >>> y, _ = layer(torch.randn(2, 512, 256))
        >>> y.square().mean().backward()

    """

    def __init__(
        self,
        config: SparseDeltaMemoryConfig,
        *,
        device: Optional[torch.device] = None,
        dtype: Optional[torch.dtype] = None,
    ):
        """Build and initialise the mixer.

        Args:
            config: Shape and options.
            device: Of the parameters; "meta" allocates nothing, see `reset_parameters`.
            dtype: Of the parameters.
        """
        super().__init__()
        if not isinstance(config, SparseDeltaMemoryConfig):
            raise TypeError(
                "SparseDeltaMemory: config must be a SparseDeltaMemoryConfig, "
                f"got {type(config).__name__}"
            )
        self.config = config
        kwargs = {"device": device, "dtype": dtype}
        dim, heads, head_dim = config.dim, config.num_heads, config.head_dim
        scores = heads * sum(config.factor_dims)

        self.Wq_read = nn.Linear(dim, scores, **kwargs)
        self.Wk_write = nn.Linear(dim, scores, **kwargs)
        self.Wv_write = nn.Linear(dim, dim, **kwargs)
        self.a_proj = nn.Linear(dim, heads, **kwargs)
        self.b_proj = nn.Linear(dim, heads, **kwargs)
        self.A_log = nn.Parameter(torch.empty(heads, **kwargs))
        self.dt_bias = nn.Parameter(torch.empty(heads, **kwargs))
        self.Wo = nn.Linear(dim, dim, **kwargs)
        if config.output_gate:
            self.Wog = nn.Linear(dim, dim, **kwargs)
        if config.backprop_on_memory:
            rows = heads * config.slots_per_head
            self.memory = nn.Parameter(torch.empty(rows, head_dim, **kwargs))
        if config.normalize_readings:
            self.readings_norm = nn.LayerNorm(head_dim, eps=config.norm_eps, **kwargs)
        if config.query_batchnorm:
            self.query_bn = nn.BatchNorm1d(scores, **kwargs)
            self.key_bn = nn.BatchNorm1d(scores, **kwargs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, init_std: Optional[float] = None, factor: float = 1.0) -> None:
        """Initialise every parameter and buffer anew, also after `to_empty` from the meta device.

        Args:
            init_std: Standard deviation of the projections and of `memory`, drawn from a normal
                distribution cut at three of them; None means `dim ** -0.5`.
            factor: Divides it, for instance by the depth of a network.
        """
        std = (self.config.dim**-0.5 if init_std is None else init_std) / factor

        def truncated_normal(tensor: torch.Tensor) -> None:
            nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std)

        for module in self.children():
            if isinstance(module, nn.Linear):
                truncated_normal(module.weight)
                nn.init.zeros_(module.bias)
            else:  # the norms
                module.reset_parameters()
        if self.config.backprop_on_memory:
            truncated_normal(self.memory)

        # Drawn in float32 whatever the parameters' dtype.
        uniform = torch.empty_like(self.A_log, dtype=torch.float32)
        low, high = self.config.A_init_range
        self.A_log.copy_(uniform.uniform_(low, high).clamp_(min=_SMALLEST_STEP).log_())
        step = uniform.uniform_(math.log(0.001), math.log(0.1)).exp_().clamp_(min=_SMALLEST_STEP)
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        self.A_log._no_weight_decay = True
        self.dt_bias._no_weight_decay = True
        if self.config.backprop_on_memory:
            self.memory._is_memory_bank = True

    # Both may have brought other parameter objects, without attributes of their own.
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_parameters()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._mark_parameters()

    def extra_repr(self) -> str:
        """The sizes that the submodules don't show."""
        config = self.config
        return (
            f"heads={config.num_heads}, slots_per_head={config.slots_per_head}, "
            f"writes={config.num_writes}, reads={config.num_reads}"
        )

    def initial_bank(self) -> torch.Tensor:
        """The bank `[H, S, D]` that every sequence starts from: a view of `memory`, or zeros."""
        return initial_bank(self)

    def init_state(
        self,
        batch_size: int,
        *,
        count: int = 0,
        initial_bank: Optional[torch.Tensor] = None,
        dtype: Optional[torch.dtype] = None,
        device: Optional[torch.device] = None,
    ) -> SparseDeltaMemoryState:
        """Make the state of a generation.

        Args:
            batch_size: Sequences (N).
            count: Tokens that the initial bank already stands for.
            initial_bank: `[H*S, D]`, `[H, S, D]` or `[N, H, S, D]`; None means the learned bank, or
                zeros where there is none.
            dtype: Of the bank; None means the initial bank's, else the parameters'.
            device: Of the bank; None means the parameters'.
        """
        config = self.config
        if initial_bank is None and config.backprop_on_memory:
            initial_bank = self.memory
        if dtype is None:
            dtype = (self.Wv_write.weight if initial_bank is None else initial_bank).dtype
        return SparseDeltaMemoryState(
            batch_size,
            config.num_heads,
            config.slots_per_head,
            config.head_dim,
            initial_bank=initial_bank,
            count=count,
            dtype=dtype,
            device=self.Wv_write.weight.device if device is None else device,
        )

    def forward(
        self,
        x: torch.Tensor,
        state: Optional[State] = None,
        cu_seqlens: Optional[torch.Tensor] = None,
        seq_len: Optional[int] = None,
    ) -> tuple[torch.Tensor, Optional[State]]:
        """Mix a batch of sequences.

        Args:
            x: `[B, T, dim]`, or `[tokens, dim]`: one sequence, or those of `cu_seqlens` or
                `seq_len`.
            state: Where the sequences start and what they end in.
                None: the learned initial bank; nothing is returned.
                A `SparseDeltaMemoryState` of N sequences: generation. It is advanced in place and
                returned; calls of up to 16 tokens go step by step, longer ones in chunks. No
                backward.
                A bank tensor `[N, H, S, D]` or `[H, S, D]`: training in segments. The final bank
                `[N, H, S, D]` is returned, with its gradient; `detach()` it to cut.
            cu_seqlens: `[N+1]` int32 or int64 borders of N sequences packed into one row (B = 1).
                Without it N = B.
            seq_len: T for x of shape `[B*T, dim]`.

        Returns:
            y of the shape of x, and the state after the call as said above (else None).
        """
        return mix(self, x, state, cu_seqlens, seq_len)
