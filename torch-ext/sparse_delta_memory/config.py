# SPDX-License-Identifier: Apache-2.0
"""Configuration of the `SparseDeltaMemory` mixer."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from ._activations import ACTIVATIONS

MAX_PICKS = 1024  # of product_key_topk
MAX_CHUNK_SIZE = 512  # of chunk_sdm
MAX_FACTORS = 512
MAX_SLOTS = 2**31 - 1  # slot ids are int32

# What `snapshot_quant` means for the op. "none" asks for exact gradients, which "replay" gives
# with the least memory; `save="rows"` gives the same gradients faster with more memory.
_SAVE_OF_SNAPSHOT_QUANT = {"none": "replay", "bf16": "bf16", "fp8": "fp8", "int4": "int4"}
_SAVE_MODES = ("replay", "rows", "bf16", "fp8", "int4")

_UNSUPPORTED_SWITCHES = {
    "cuda_graph": "capture the training step with torch.cuda.graph or "
    'torch.compile(mode="reduce-overhead"), which the ops support',
    "log_memory_access_stats": "the module keeps no statistics; use forward hooks",
    "log_memory_norms": "the module keeps no statistics; use forward hooks",
}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, field: str, wanted: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"SparseDeltaMemoryConfig: {field} must be {wanted}, got {got!r}")


@dataclass
class SparseDeltaMemoryConfig:
    """Shape and options of a `SparseDeltaMemory` mixer.

    Field names and defaults are the published ones, so existing configurations can be passed as
    they are (`SparseDeltaMemoryConfig.from_dict(d)`). A value that this package does not act on is
    refused instead of ignored.

    Attributes:
        dim: Width of the input and the output.
        num_heads: Heads; each has its own bank. Divides `dim`; a bank row has `dim / num_heads`
            columns.
        slots_per_head: Bank rows per head (S). A perfect square, or the product of
            `product_key_factor_dims`.
        product_key_factor_dims: Widths of the product-key factors; None means two factors of
            `sqrt(slots_per_head)`.
        num_writes: Slots written by a token and head (W), 1 to min(1024, S).
        num_reads: Slots read by a token and head (R), 1 to min(1024, S).
        chunk_size: Tokens of a chunk, 1 to 512; a matter of speed only. None picks a tuned value.
        read_act: Activation of the read scores: "Softmax", "l2_normalize", or the name of an
            activation class of `torch.nn` without parameters, such as "ReLU".
        write_act: The same for the write scores.
        read_act_scale: Factor on the scores inside "Softmax"; other activations want 1.0.
        write_act_scale: The same for `write_act`.
        normalize_readings: LayerNorm over the columns of each head's reading.
        norm_eps: Its epsilon.
        output_gate: Multiply the readings by `sigmoid(Wog x)` before the output projection.
        A_init_range: `exp(A_log)` starts uniform in this range.
        dt_bias_init: Has no effect in published code either; only 0.0 is accepted.
        backprop_on_memory: Learn the initial bank (parameter `memory`). False starts every
            sequence from zeros.
        query_batchnorm: BatchNorm on the read and write scores, over all tokens of the call. In
            training mode a token then depends on later tokens through the batch statistics; in
            eval mode it does not.
        key_weighted_decay: Scale the log-decay of each write by its weight (one gate per write).
        snapshot_quant: What training keeps for the backward: "none" (exact gradients), "bf16",
            "fp8" or "int4" (less memory, approximate gradients).
        grad_bank_fp32: Whether bank gradients must be accumulated in float32 and rounded once. On
            the CPU they always are. On CUDA they are with a float32 bank only; a 16-bit bank then
            raises NotImplementedError.
        cuda_graph: Must be False; graphs are captured outside the module.
        log_memory_access_stats: Must be False.
        log_memory_norms: Must be False.
        memory_block_size: Deprecated name of `chunk_size`.
        save: The `save` argument of `chunk_sdm`. None follows `snapshot_quant`, with "none"
            meaning "replay". Set it to "rows" for a faster exact backward that uses more memory.
    """

    dim: int = -1
    num_heads: int = 1
    slots_per_head: int = 10000
    product_key_factor_dims: Optional[Sequence[int]] = None
    num_writes: int = 64
    num_reads: int = 64
    chunk_size: Optional[int] = None
    read_act: str = "Softmax"
    write_act: str = "Softmax"
    read_act_scale: float = 1.0
    write_act_scale: float = 1.0
    normalize_readings: bool = False
    norm_eps: float = 1e-6
    output_gate: bool = False
    A_init_range: tuple[float, float] = (0, 16)
    dt_bias_init: float = 0.0
    backprop_on_memory: bool = True
    query_batchnorm: bool = False
    key_weighted_decay: bool = False
    snapshot_quant: str = "none"
    grad_bank_fp32: bool = False
    cuda_graph: bool = False
    log_memory_access_stats: bool = False
    log_memory_norms: bool = False
    memory_block_size: Optional[int] = None
    save: Optional[str] = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._resolve_factors()
        for field in ("num_writes", "num_reads"):
            most = min(MAX_PICKS, self.slots_per_head)
            value = getattr(self, field)
            _require(_is_int(value) and 1 <= value <= most, field, f"an integer 1..{most}", value)
        self._resolve_chunk_size()
        for side in ("read", "write"):
            self._check_activation(f"{side}_act")
        self._check_rest()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SparseDeltaMemoryConfig":
        """Build a configuration from a mapping; an unknown key raises TypeError."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise TypeError(f"SparseDeltaMemoryConfig: unknown fields {', '.join(unknown)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values that json can write."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @property
    def head_dim(self) -> int:
        """Columns of a bank row (D)."""
        return self.dim // self.num_heads

    @property
    def factor_dims(self) -> tuple[int, ...]:
        """Widths of the product-key factors."""
        if self.product_key_factor_dims is not None:
            return tuple(self.product_key_factor_dims)
        side = math.isqrt(self.slots_per_head)
        return (side, side)

    @property
    def save_mode(self) -> str:
        """The `save` argument that `chunk_sdm` gets."""
        return self.save if self.save is not None else _SAVE_OF_SNAPSHOT_QUANT[self.snapshot_quant]

    def _check_sizes(self) -> None:
        for field in ("dim", "num_heads", "slots_per_head"):
            value = getattr(self, field)
            _require(_is_int(value) and value > 0, field, "a positive integer", value)
        wanted = f"divisible by num_heads {self.num_heads}"
        _require(self.dim % self.num_heads == 0, "dim", wanted, self.dim)
        total = self.num_heads * self.slots_per_head
        _require(total <= MAX_SLOTS, "num_heads * slots_per_head", "below 2**31", total)

    def _resolve_factors(self) -> None:
        dims, slots = self.product_key_factor_dims, self.slots_per_head
        if dims is None:
            side = math.isqrt(slots)
            wanted = f"a perfect square ({side**2} or {(side + 1) ** 2} are the nearest)"
            _require(side * side == slots, "slots_per_head", wanted, slots)
            return
        wanted = f"a sequence of 1..{MAX_FACTORS} positive integers"
        proper = isinstance(dims, Sequence) and not isinstance(dims, (str, bytes))
        _require(proper, "product_key_factor_dims", wanted, dims)
        proper = 1 <= len(dims) <= MAX_FACTORS and all(_is_int(n) and n > 0 for n in dims)
        _require(proper, "product_key_factor_dims", wanted, dims)
        wanted = f"factors whose product is slots_per_head {slots}"
        _require(math.prod(dims) == slots, "product_key_factor_dims", wanted, dims)
        self.product_key_factor_dims = tuple(dims)

    def _resolve_chunk_size(self) -> None:
        if self.memory_block_size is not None:
            warnings.warn(
                "SparseDeltaMemoryConfig: memory_block_size is deprecated, use chunk_size",
                DeprecationWarning,
                stacklevel=4,
            )
            wanted = f"equal to chunk_size {self.chunk_size}"
            same = self.chunk_size in (None, self.memory_block_size)
            _require(same, "memory_block_size", wanted, self.memory_block_size)
            self.chunk_size = self.memory_block_size
        if self.chunk_size is not None:
            proper = _is_int(self.chunk_size) and 1 <= self.chunk_size <= MAX_CHUNK_SIZE
            wanted = f"None or an integer 1..{MAX_CHUNK_SIZE}"
            _require(proper, "chunk_size", wanted, self.chunk_size)

    def _check_activation(self, field: str) -> None:
        name, scale = getattr(self, field), getattr(self, f"{field}_scale")
        wanted = f"one of {', '.join(sorted(ACTIVATIONS))}"
        _require(isinstance(name, str) and name in ACTIVATIONS, field, wanted, name)
        proper = isinstance(scale, (int, float)) and math.isfinite(scale)
        _require(proper, f"{field}_scale", "a finite number", scale)
        wanted = f'1.0 with {field}="{name}" (only "Softmax" is scaled)'
        _require(name == "Softmax" or scale == 1.0, f"{field}_scale", wanted, scale)

    def _check_rest(self) -> None:
        low_high = self.A_init_range
        proper = isinstance(low_high, Sequence) and len(low_high) == 2
        proper = proper and 0 <= low_high[0] <= low_high[1] and low_high[1] > 0
        _require(proper, "A_init_range", "two numbers 0 <= low <= high, high > 0", low_high)
        self.A_init_range = tuple(low_high)
        _require(self.norm_eps > 0, "norm_eps", "positive", self.norm_eps)
        wanted = "0.0 (it has no effect)"
        _require(self.dt_bias_init == 0.0, "dt_bias_init", wanted, self.dt_bias_init)
        proper = self.snapshot_quant in _SAVE_OF_SNAPSHOT_QUANT
        wanted = f"one of {', '.join(_SAVE_OF_SNAPSHOT_QUANT)}"
        _require(proper, "snapshot_quant", wanted, self.snapshot_quant)
        if self.save is not None:
            wanted = f"None or one of {', '.join(_SAVE_MODES)}"
            _require(self.save in _SAVE_MODES, "save", wanted, self.save)
            same = self.snapshot_quant in ("none", self.save)
            _require(same, "save", f"that of snapshot_quant {self.snapshot_quant!r}", self.save)
        for field, instead in _UNSUPPORTED_SWITCHES.items():
            if getattr(self, field):
                raise NotImplementedError(
                    f"SparseDeltaMemoryConfig: {field} must be False, got True; {instead}"
                )
