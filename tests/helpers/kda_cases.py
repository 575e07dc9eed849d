# SPDX-License-Identifier: Apache-2.0
"""Cases of Kimi delta attention: a table entry says what is special, ``make`` draws the tensors."""

from dataclasses import dataclass, field, replace
from typing import Optional

import torch

TOKENS = ("q", "k", "v", "g", "beta")
EXTRAS = ("initial_state", "A_log", "dt_bias")
ALL = TOKENS + EXTRAS
LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KdaCase:
    """Shape and options of one call; the defaults are small, odd and use every option."""

    id: str = "base"
    B: int = 2
    T: int = 37
    H: int = 1
    HV: int = 2
    K: int = 16
    V: int = 32
    dtype: torch.dtype = torch.float32  # of q, k, v
    gate_dtype: Optional[torch.dtype] = None  # of g; None: dtype
    beta_dtype: Optional[torch.dtype] = None  # None: dtype
    state_dtype: Optional[torch.dtype] = None  # None: float32, float64 for float64
    form: str = "bounded"  # of the gate: activated, softplus or bounded
    lower_bound: float = -5.0
    strength: str = "two"  # of beta: activated, sigmoid or two (two sigmoids)
    l2norm: bool = True
    initial: bool = True
    parameters: bool = True  # dt_bias, and A_log where the gate can do without
    v_first: bool = False
    scale: Optional[float] = None
    lengths: Optional[tuple] = None  # of packed sequences; sets B = 1 and T
    integer: torch.dtype = torch.int64
    chunk: int = 64
    decay: object = "usual"  # or one number: the log decay (raw for a form) of all tokens
    similar: float = 0.0  # share of a direction that all keys have in common

    def but(self, **changes):
        """Return the case with other fields, and an id made of them."""
        name = ",".join(f"{k}={_short(v)}" for k, v in changes.items())
        return replace(self, **{"id": f"{self.id}:{name}", **changes})

    @property
    def num(self):
        """Return the number of sequences."""
        return self.B if self.lengths is None else len(self.lengths)


@dataclass
class KdaInputs:
    """Tensors of a call (None: absent) and its other keywords."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: Optional[torch.Tensor] = None
    A_log: Optional[torch.Tensor] = None
    dt_bias: Optional[torch.Tensor] = None
    cu_seqlens: Optional[torch.Tensor] = None
    options: dict = field(default_factory=dict)

    def names(self):
        """Return the names of the floating tensors that are there."""
        return tuple(name for name in ALL if getattr(self, name) is not None)

    def args(self):
        """Return the floating tensors that are there."""
        return [getattr(self, name) for name in self.names()]

    def tokens(self):
        """Return q, k, v, g and beta."""
        return [getattr(self, name) for name in TOKENS]

    def keywords(self):
        """Return the keywords after the tokens, without the initial state."""
        found = {name: getattr(self, name) for name in ("A_log", "dt_bias", "cu_seqlens")}
        return {**self.options, **{k: v for k, v in found.items() if v is not None}}

    def map(self, fn, names=ALL):
        """Return a copy with ``fn`` applied to the named tensors."""
        found = {name: getattr(self, name) for name in names}
        return replace(self, **{name: fn(x) for name, x in found.items() if x is not None})

    def to(self, dtype):
        """Return a copy with all floating tensors in ``dtype``."""
        return self.map(lambda x: x.detach().to(dtype))

    def part(self, first, last):
        """Return the tokens ``first`` to ``last``, without offsets."""
        return replace(self.map(lambda x: x[:, first:last], TOKENS), cu_seqlens=None)

    def rows(self, index):
        """Return some batch rows with their states."""
        return self.map(lambda x: x[index], (*TOKENS, "initial_state"))


def make(case, device="cpu", seed=0):
    """Draw the inputs of a case."""
    gen = torch.Generator().manual_seed(seed)
    B, T = (case.B, case.T) if case.lengths is None else (1, sum(case.lengths))
    H, HV, K, V = case.H, case.HV, case.K, case.V
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32

    def normal(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(shape, generator=gen, dtype=torch.float64)

    k = normal(B, T, H, K)
    if case.similar:
        common = normal(1, 1, H, K)
        k = case.similar * common + (1 - case.similar) * k
    if not case.l2norm:
        k = k / k.norm(dim=-1, keepdim=True)
    raw = case.form != "activated"
    g = 2 * normal(B, T, HV, K) if raw else -1.6 + 1.59 * uniform(B, T, HV, K)
    if case.decay != "usual":
        g = torch.full_like(g, case.decay)
    beta = uniform(B, T, HV) if case.strength == "activated" else normal(B, T, HV)
    states = (V, K) if case.v_first else (K, V)
    inputs = KdaInputs(
        q=normal(B, T, H, K).to(case.dtype),
        k=k.to(case.dtype),
        v=normal(B, T, HV, V).to(case.dtype),
        g=g.to(case.gate_dtype or case.dtype),
        beta=beta.to(case.beta_dtype or case.dtype),
        options={
            "scale": case.scale,
            "use_qk_l2norm_in_kernel": case.l2norm,
            "use_gate_in_kernel": raw,
            "lower_bound": case.lower_bound if case.form == "bounded" else None,
            "use_beta_sigmoid_in_kernel": case.strength != "activated",
            "allow_neg_eigval": case.strength == "two",
            "state_v_first": case.v_first,
        },
    )
    A_log, dt_bias = 0.5 * normal(HV), normal(HV, K)
    if case.form == "softplus" or (raw and case.parameters):
        inputs.A_log = A_log.to(wide)
    if raw and case.parameters:
        inputs.dt_bias = dt_bias.to(wide)
    if case.initial:
        inputs.initial_state = normal(case.num, HV, *states).to(case.state_dtype or wide)
    if case.lengths is not None:
        offsets = torch.tensor((0, *case.lengths)).cumsum(0)
        inputs.cu_seqlens = offsets.to(device, case.integer)
    return inputs.map(lambda x: x.to(device))


def ids(cases):
    """Return the test ids of a table."""
    return [case.id for case in cases]


def _short(value):
    return str(value).replace("torch.", "").replace(" ", "")
