# SPDX-License-Identifier: Apache-2.0
"""The generation state of a `SparseDeltaMemory` mixer: the banks of a batch of sequences."""

from typing import Optional

import torch


class SparseDeltaMemoryState:
    """Banks of `N` sequences and the number of tokens each has seen.

    Made by `SparseDeltaMemory.init_state`, or directly for a layer adopted with `kernelize`. A
    forward that gets a state advances it in place, so the tensors keep their addresses (as CUDA
    graphs need) and no copy is made. Because of that a state takes no part in autograd; to
    carry a bank from one training segment to the next, pass a tensor instead.

    `len(state)` is 1 and `state[0]` is the bank, as for a cache with one tensor.

    Attributes:
        bank: `[N, H, S, D]`.
        count: `[N]` int64 on the bank's device: tokens of each sequence so far.
        initial_bank: What `reset` goes back to: the tensor given to the constructor, not a copy,
            so a learned bank that has been trained further is seen; None means zeros.

    Example:
        >>> layer = SparseDeltaMemory(SparseDeltaMemoryConfig(dim=64, slots_per_head=256))
        >>> state = layer.init_state(batch_size=2)
        >>> with torch.no_grad():
        ...     y, state = layer(torch.randn(2, 100, 64), state)  # prefill
        ...     y, state = layer(torch.randn(2, 1, 64), state)  # decode
        >>> state.count
        tensor([101, 101])
        >>> state.reset().count
        tensor([0, 0])

    """

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        num_slots: int,
        head_dim: int,
        *,
        initial_bank: Optional[torch.Tensor] = None,
        count: int = 0,
        dtype: Optional[torch.dtype] = None,
        device: Optional[torch.device] = None,
    ):
        """Allocate the banks and fill them.

        Args:
            batch_size: Sequences (N).
            num_heads: Heads (H).
            num_slots: Bank rows per head (S).
            head_dim: Columns of a bank row (D).
            initial_bank: `[H*S, D]`, `[H, S, D]` or `[N, H, S, D]` to start from; None means zeros.
            count: Tokens that the initial bank already stands for.
            dtype: Of the bank; None takes the initial bank's, else the default dtype.
            device: Of the bank; None takes the initial bank's, else the default device.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"SparseDeltaMemoryState: batch_size must be a positive integer, got {batch_size!r}"
            )
        self.initial_bank = initial_bank
        shape = (batch_size, num_heads, num_slots, head_dim)
        if initial_bank is not None:
            allowed = (shape, shape[1:], (num_heads * num_slots, head_dim))
            if tuple(initial_bank.shape) not in allowed:
                raise ValueError(
                    "SparseDeltaMemoryState: initial_bank must have a shape of "
                    f"{', '.join(map(str, allowed))}, got {tuple(initial_bank.shape)}"
                )
            dtype = dtype or initial_bank.dtype
            device = device or initial_bank.device
        # Ordinary tensors also if made in inference mode: calls outside of it may advance them.
        with torch.inference_mode(False):
            self.bank = torch.empty(shape, dtype=dtype, device=device)
            self.count = torch.full(
                (batch_size,), count, dtype=torch.int64, device=self.bank.device
            )
        with torch.no_grad():  # not as a decorator, which torch.compile cannot follow here
            self._fill(slice(None))

    @property
    def batch_size(self) -> int:
        """Number of sequences (N)."""
        return self.bank.shape[0]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in (0, -1):
            raise IndexError(f"SparseDeltaMemoryState: index must be 0, got {index}")
        return self.bank

    def __repr__(self) -> str:
        return f"SparseDeltaMemoryState(bank={tuple(self.bank.shape)}, dtype={self.bank.dtype})"

    def reset(self, sequences: Optional[torch.Tensor] = None) -> "SparseDeltaMemoryState":
        """Go back to the initial bank and to count 0, in place.

        Args:
            sequences: Integer indices or a boolean mask `[N]` of the sequences to reset; None
                resets all.
        """
        rows = slice(None) if sequences is None else sequences
        with torch.no_grad():
            self._fill(rows)
            self.count[rows] = 0
        return self

    @torch.no_grad()
    def update(self, bank: torch.Tensor, num_tokens: int = 1) -> "SparseDeltaMemoryState":
        """Replace the contents of the bank by `bank [N, H, S, D]` and count `num_tokens` more.

        The values are copied into the state's own tensor and cut off from autograd.
        """
        if bank.shape != self.bank.shape:
            raise ValueError(
                f"SparseDeltaMemoryState: bank must have shape {tuple(self.bank.shape)}, "
                f"got {tuple(bank.shape)}"
            )
        if bank is not self.bank:
            self.bank.copy_(bank)
        self.count += num_tokens
        return self

    def clone(self) -> "SparseDeltaMemoryState":
        """A copy with its own bank and count, for instance to branch a generation."""
        other = object.__new__(SparseDeltaMemoryState)
        other.initial_bank = self.initial_bank
        with torch.inference_mode(False):
            other.bank, other.count = self.bank.clone(), self.count.clone()
        return other

    def _fill(self, rows) -> None:
        if self.initial_bank is None:
            self.bank[rows] = 0
            return
        initial = self.initial_bank
        if hasattr(initial, "full_tensor"):  # a sharded parameter
            initial = initial.full_tensor()
        if initial.dim() == 4:
            initial = initial[rows]
        else:
            initial = initial.reshape(self.bank.shape[1:])
        self.bank[rows] = initial.to(self.bank.device, self.bank.dtype)
