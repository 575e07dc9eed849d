# SPDX-License-Identifier: Apache-2.0
"""Cases of sparse delta memory: a table entry says what is special, ``make`` draws the tensors."""

from dataclasses import dataclass, fields, replace
from typing import Optional

import torch

FLOATS = ("write_val", "v", "beta", "g", "read_val", "initial_state")
ORDER = ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val", "initial_state")


@dataclass(frozen=True)
class Case:
    """Shape and options of one call; the defaults are small, odd and hit every lane twice."""

    id: str = "base"
    B: int = 2
    T: int = 19
    H: int = 2
    S: int = 13
    D: int = 5
    W: int = 3
    R: int = 2
    chunk: Optional[int] = 8
    dtype: torch.dtype = torch.float32  # of write_val, v, read_val
    gate_dtype: Optional[torch.dtype] = None  # of beta and g; None: dtype, float32 for 16 bits
    bank_dtype: Optional[torch.dtype] = None  # None: dtype
    write_int: torch.dtype = torch.int64
    read_int: torch.dtype = torch.int64
    gate_per_write: bool = False
    bank_per_sequence: bool = False
    lengths: Optional[tuple] = None  # of packed sequences; sets B = 1 and T
    ids: str = "distinct"  # distinct, any, repeated, unused, hot
    gate: object = "usual"  # usual, zero, half_zero, or one number for all
    beta: Optional[float] = None
    save: str = "replay"

    def but(self, **changes):
        """Return the case with other fields, and an id made of them."""
        name = ",".join(f"{k}={_short(v)}" for k, v in changes.items())
        return replace(self, **{"id": f"{self.id}:{name}", **changes})

    @property
    def num(self):
        """Return the number of sequences."""
        return self.B if self.lengths is None else len(self.lengths)


@dataclass
class Inputs:
    """Arguments of ``chunk_sdm`` in their order, and the offsets."""

    write_idx: torch.Tensor
    write_val: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    g: torch.Tensor
    read_idx: torch.Tensor
    read_val: torch.Tensor
    initial_state: torch.Tensor
    cu_seqlens: Optional[torch.Tensor] = None

    def args(self):
        """Return the positional arguments of ``chunk_sdm``."""
        return [getattr(self, name) for name in ORDER]

    def tokens(self):
        """Return the arguments that come after ``state`` in the in-place functions."""
        return self.args()[:-1]

    def map(self, fn, names=ORDER):
        """Return a copy with ``fn`` applied to the named tensors."""
        return replace(self, **{name: fn(getattr(self, name)) for name in names})

    def to(self, dtype):
        """Return a copy with all floating tensors in ``dtype``."""
        return self.map(lambda x: x.detach().to(dtype), FLOATS)

    def part(self, first, last):
        """Return the tokens ``first`` to ``last``, without offsets."""
        names = [f.name for f in fields(self) if f.name not in ("initial_state", "cu_seqlens")]
        return replace(self.map(lambda x: x[:, first:last], names), cu_seqlens=None)

    def rows(self, index):
        """Return some batch rows; a bank per sequence goes with them."""
        names = ORDER[:-1] + (("initial_state",) if self.initial_state.dim() == 4 else ())
        return self.map(lambda x: x[index], names)


def make(case, device="cpu", seed=0):
    """Draw the inputs of a case."""
    gen = torch.Generator().manual_seed(seed)
    B, T = (case.B, case.T) if case.lengths is None else (1, sum(case.lengths))
    H, S, D, W, R = case.H, case.S, case.D, case.W, case.R
    low = case.dtype in (torch.bfloat16, torch.float16)
    gate_dtype = case.gate_dtype or (torch.float32 if low else case.dtype)

    def normal(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(shape, generator=gen, dtype=torch.float64)

    def slots(lanes, integer):
        if case.ids == "hot":
            return torch.full((B, T, H, lanes), S - 1)
        if case.ids in ("distinct", "unused") and lanes <= S:
            ids = uniform(B, T, H, S).argsort(-1)[..., :lanes]
        else:
            ids = torch.randint(S, (B, T, H, lanes), generator=gen)
        if case.ids == "repeated":  # lane 0 is named again by every other lane
            ids[..., ::2] = ids[..., :1].clone()
        if case.ids == "unused":
            outside = [-1, S, -(2**31), 2**31 - 1]
            if integer == torch.int64:  # slots 0 and 1 if the upper half is dropped
                outside += [2**32, -(2**32) + 1]
            pick = torch.randint(len(outside), ids.shape, generator=gen)
            outside = torch.tensor(outside)[pick]
            ids = torch.where(uniform(*ids.shape) < 0.4, outside, ids)
        return ids.to(integer).contiguous()

    gate_shape = (B, T, H, W) if case.gate_per_write else (B, T, H)
    g = -1.6 + 1.59 * uniform(*gate_shape)
    if case.gate == "zero":
        g = torch.zeros_like(g)
    elif case.gate == "half_zero":
        g = torch.where(uniform(*gate_shape) < 0.5, torch.zeros_like(g), g)
    elif case.gate != "usual":
        g = torch.full_like(g, case.gate)
    beta = uniform(B, T, H)
    if case.beta is not None:
        beta = torch.full_like(beta, case.beta)
    bank_shape = (case.num, H, S, D) if case.bank_per_sequence else (H, S, D)
    inputs = Inputs(
        write_idx=slots(W, case.write_int),
        write_val=normal(B, T, H, W).softmax(-1).to(case.dtype),
        v=normal(B, T, H, D).to(case.dtype),
        beta=beta.to(gate_dtype),
        g=g.to(gate_dtype),
        read_idx=slots(R, case.read_int),
        read_val=normal(B, T, H, R).softmax(-1).to(case.dtype),
        initial_state=normal(*bank_shape).to(case.bank_dtype or case.dtype),
    )
    if case.lengths is not None:
        inputs.cu_seqlens = torch.tensor((0, *case.lengths)).cumsum(0)
        inputs.cu_seqlens = inputs.cu_seqlens.to(case.write_int)
    names = [f.name for f in fields(inputs) if getattr(inputs, f.name) is not None]
    return inputs.map(lambda x: x.to(device), names)


def ids(cases):
    """Return the test ids of a table."""
    return [case.id for case in cases]


def _short(value):
    return str(value).replace("torch.", "").replace(" ", "")
