# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck on every KDA op, fakes against the real results, and gradcheck."""

import pytest
import torch

from .helpers import kda_cases
from .helpers.kda_cases import KdaCase
from .helpers.poison import poisoned, transposed
from .test_opcheck import compare_with_fake
from .test_opcheck import make as draw

BASE = KdaCase("op", B=2, T=21, K=16, V=16)
CASES = [
    BASE,
    BASE.but(dtype=torch.bfloat16, form="softplus", v_first=True, state_dtype=torch.bfloat16),
    BASE.but(dtype=torch.float16, form="activated", strength="activated", initial=False),
    BASE.but(lengths=(4, 0, 17), V=32),
    BASE.but(lengths=(4, 0, 17), integer=torch.int32, dtype=torch.float64, parameters=False),
]
EMPTY = [BASE.but(T=0), BASE.but(B=0), BASE.but(T=1), BASE.but(lengths=(0, 0))]
GATES = {"activated": 0, "softplus": 1, "bounded": 2}
STRENGTHS = {"activated": 0, "sigmoid": 1, "two": 2}


def make(case, device="cpu"):
    return draw(case, device, kda_cases.make)


def options(case):
    bound = case.lower_bound if case.form == "bounded" else 0.0
    strength = STRENGTHS[case.strength]
    return (0.25, case.l2norm, GATES[case.form], bound, strength, case.v_first)


def forward_args(case, x, *, chunk=16, final=True, states=True):
    extras = (x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens)
    return (*x.tokens(), *extras, *options(case), chunk, final, states)


def backward_args(ops, case, x, *, chunk=16, states=True, d_state=True, need=True):
    x = x.map(torch.detach)
    out, final, saved = ops.kda_chunk_fwd(*forward_args(case, x, chunk=chunk))
    return (
        torch.randn_like(out), torch.randn_like(final) if d_state else None, *x.tokens(), x.A_log,
        x.dt_bias, x.initial_state, x.cu_seqlens, saved if states else None, *options(case), chunk,
        need, need,
    )  # fmt: skip


def recurrent_args(case, x, *, final=True):
    extras = (x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens)
    return (*x.tokens(), *extras, *options(case), final)


def step_args(case, x, state, rows=None):
    return (state, *x.tokens(), x.A_log, x.dt_bias, x.cu_seqlens, rows, *options(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("final", [False, True])
def test_opcheck_forward(ops, device, case, final):
    inputs = make(case, device).map(lambda x: x.requires_grad_())
    # Rows of states that no chunk has are never written, so they are not compared here.
    args = forward_args(case, inputs, final=final, states=False)
    torch.library.opcheck(ops.kda_chunk_fwd.default, args)
    torch.library.opcheck(ops.kda_recurrent_fwd.default, recurrent_args(case, inputs, final=final))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_opcheck_backward(ops, device, case, states):
    args = backward_args(ops, case, make(case, device), states=states, d_state=not states)
    torch.library.opcheck(ops.kda_chunk_bwd.default, args)


@pytest.mark.parametrize("rows", [None, (2, -1)])
def test_opcheck_step(ops, device, rows):
    case = BASE.but(T=2)
    inputs = make(case, device)
    state = inputs.initial_state if rows is None else torch.randn(4, 2, 16, 16, device=device)
    rows = None if rows is None else torch.tensor(rows, device=device)
    torch.library.opcheck(ops.kda_step_.default, step_args(case, inputs, state.clone(), rows))


@pytest.mark.parametrize("layout", [None, poisoned, transposed])
@pytest.mark.parametrize("case", CASES + EMPTY, ids=lambda case: case.id)
def test_fake_equals_real(ops, device, case, layout):
    inputs = make(case, device)
    if layout is not None:
        inputs = inputs.map(layout, ("q", "k", "v", "g"))
    for flag in (False, True):
        for chunk in (16, 64):
            args = forward_args(case, inputs, chunk=chunk, final=flag, states=not flag)
            compare_with_fake(ops.kda_chunk_fwd, args, f"forward {flag} {chunk}")
            args = backward_args(
                ops, case, inputs, chunk=chunk, states=flag, d_state=not flag, need=flag
            )
            compare_with_fake(ops.kda_chunk_bwd, args, f"backward {flag} {chunk}")
        args = recurrent_args(case, inputs, final=flag)
        compare_with_fake(ops.kda_recurrent_fwd, args, f"recurrent {flag}")
    state = torch.randn(case.num, 2, case.K, case.V, dtype=torch.float32).to(device)
    if case.dtype == torch.float64:
        state = state.double()
    state = state.transpose(2, 3).contiguous() if case.v_first else state
    compare_with_fake(ops.kda_step_, step_args(case, inputs, state), "step")


def test_meta_tensors(sdm):
    inputs = make(BASE.but(V=32)).map(lambda x: x.to("meta"))
    out, state = sdm.chunk_kda(
        *inputs.tokens(), initial_state=inputs.initial_state, output_final_state=True,
        **inputs.keywords(),
    )  # fmt: skip
    assert out.shape == (2, 21, 2, 32)
    assert state.shape == (2, 2, 16, 32)
    assert out.device.type == state.device.type == "meta"


@pytest.mark.parametrize("form", ["activated", "softplus", "bounded"])
@pytest.mark.parametrize("fn", ["chunk_kda", "fused_recurrent_kda"])
def test_gradcheck(sdm, device, fn, form):
    case = KdaCase("grad", B=1, T=5, H=1, HV=2, form=form, dtype=torch.float64, K=16, V=16)
    for lengths in (None, (3, 0, 2)):
        inputs = make(case.but(lengths=lengths), device).map(lambda x: x.requires_grad_())
        keywords = inputs.keywords()
        names = inputs.names()

        def call(*leaves, names=names, keywords=keywords):
            values = dict(zip(names, leaves))
            tokens = [values.pop(name) for name in ("q", "k", "v", "g", "beta")]
            return getattr(sdm, fn)(*tokens, output_final_state=True, **{**keywords, **values})

        assert torch.autograd.gradcheck(call, inputs.args(), fast_mode=True, atol=1e-6, rtol=1e-6)


def test_ops_check_again(ops, device):
    """A direct call with wrong arguments raises and reads nothing."""
    inputs = make(BASE, device)
    good = forward_args(BASE, inputs)
    wrong = {
        1: inputs.k[:, :-1],
        2: inputs.v[:, :, :, ::2],
        3: inputs.g[..., :-1],
        4: inputs.beta[..., :1],
        5: inputs.A_log[:1],
        6: inputs.dt_bias.flatten(),
        7: inputs.initial_state.half(),
        8: torch.tensor([0, 42]),
        11: 3,
        13: -1,
        15: 0,
    }
    for position, value in wrong.items():
        args = list(good)
        args[position] = value
        with pytest.raises(RuntimeError, match="kda_chunk_fwd: "):
            ops.kda_chunk_fwd(*args)
    with pytest.raises(RuntimeError, match="head size of q must be a multiple of 16"):
        odd = [inputs.q[..., :15], inputs.k[..., :15], inputs.v, inputs.g[..., :15]]
        ops.kda_chunk_fwd(*odd, *good[4:6], inputs.dt_bias[:, :15].contiguous(), *good[7:])
