# SPDX-License-Identifier: Apache-2.0
"""The reference against a literal token loop, and its derivatives against finite differences."""

import numpy as np
import pytest
import torch

from .helpers.cases import FLOATS, Case, ids, make

F64 = Case("f64", T=9, dtype=torch.float64)
CASES = (
    F64,
    F64.but(gate_per_write=True),
    F64.but(ids="repeated", W=4, R=4),
    F64.but(ids="repeated", W=4, gate_per_write=True, bank_per_sequence=True),
    F64.but(ids="unused", gate_per_write=True),
    F64.but(ids="any", W=7, S=4, R=6),
    F64.but(ids="hot", W=3, gate_per_write=True),
    F64.but(lengths=(3, 0, 1, 5), bank_per_sequence=True),
    F64.but(lengths=(0, 4, 0), write_int=torch.int32),
    F64.but(lengths=(0, 0), bank_per_sequence=True),
    F64.but(B=0),
    F64.but(T=0),
)


def token_loop(bank, write_idx, write_val, v, beta, g, read_idx, read_val):
    """Run one stream literally, in numpy."""
    bank, num_slots = bank.copy(), len(bank)
    out = np.zeros_like(v)
    for t in range(len(v)):
        lanes = [(a, s) for a, s in enumerate(write_idx[t]) if 0 <= s < num_slots]
        decayed = set()
        for a, s in lanes:
            if s not in decayed:
                decayed.add(s)
                bank[s] *= np.exp(g[t, a if g.shape[1] > 1 else 0])
        retrieved = sum((write_val[t, a] * bank[s] for a, s in lanes), np.zeros_like(v[t]))
        delta = beta[t] * (v[t] - retrieved)
        for a, s in lanes:
            bank[s] += write_val[t, a] * delta
        for b, s in enumerate(read_idx[t]):
            if 0 <= s < num_slots:
                out[t] += read_val[t, b] * bank[s]
    return out, bank


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_equals_token_loop(sdm, case):
    inputs = make(case)
    out, final_state = sdm.reference.sdm(
        *inputs.args(), cu_seqlens=inputs.cu_seqlens, output_final_state=True
    )
    assert out.shape == inputs.v.shape
    assert final_state.shape == (case.num, case.H, case.S, case.D)
    x = {name: getattr(inputs, name).numpy() for name in (*FLOATS, "write_idx", "read_idx")}
    if x["g"].ndim == 3:
        x["g"] = x["g"][..., None]
    cuts = [0, *np.cumsum(case.lengths)] if case.lengths else [0, inputs.v.shape[1]]
    for n in range(case.num):
        b, span = (0, slice(cuts[n], cuts[n + 1])) if case.lengths else (n, slice(None))
        for h in range(case.H):
            bank = x["initial_state"][(n, h) if case.bank_per_sequence else h]
            names = ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val")
            y, last = token_loop(bank, *(x[name][b, span, h] for name in names))
            np.testing.assert_allclose(out[b, span, h].numpy(), y, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(final_state[n, h].numpy(), last, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "case",
    [
        F64.but(T=3),
        F64.but(T=3, ids="repeated", W=4, gate_per_write=True),
        F64.but(ids="unused", lengths=(2, 0, 1), bank_per_sequence=True),
    ],
    ids=lambda case: case.id,
)
def test_gradcheck(sdm, case):
    inputs = make(case.but(H=1, S=5, D=2))
    leaves = [getattr(inputs, name).requires_grad_() for name in FLOATS]

    def fn(write_val, v, beta, g, read_val, bank):
        return sdm.reference.sdm(
            inputs.write_idx, write_val, v, beta, g, inputs.read_idx, read_val, bank,
            cu_seqlens=inputs.cu_seqlens, output_final_state=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(fn, leaves)
    assert torch.autograd.gradgradcheck(fn, leaves)


def test_unused_lanes_hide_poison(sdm):
    """Whatever stands in an unused lane, not even NaN gets out, forward or backward."""
    inputs = make(F64.but(ids="unused", gate_per_write=True))
    outside = (inputs.write_idx < 0) | (inputs.write_idx >= F64.S)
    read_outside = (inputs.read_idx < 0) | (inputs.read_idx >= F64.S)
    poison = make(F64.but(ids="unused", gate_per_write=True))
    poison.write_val[outside] = float("nan")
    poison.g[outside] = float("nan")
    poison.read_val[read_outside] = float("nan")
    leaves = poison.map(lambda x: x.requires_grad_(), FLOATS)
    out, state = sdm.reference.sdm(*leaves.args(), output_final_state=True)
    expected, expected_state = sdm.reference.sdm(*inputs.args(), output_final_state=True)
    assert torch.equal(out, expected)
    assert torch.equal(state, expected_state)
    (out.sum() + state.sum()).backward()
    assert all(getattr(leaves, name).grad.isfinite().all() for name in FLOATS)
    assert (leaves.write_val.grad[outside] == 0).all()


def test_tuning_arguments_have_no_influence(sdm):
    inputs = make(F64)
    out, state = sdm.reference.sdm(*inputs.args())
    again, _ = sdm.reference.sdm(*inputs.args(), chunk_size=3, save="fp8")
    assert torch.equal(out, again)
    assert state is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(sdm, dtype):
    inputs = make(Case(dtype=dtype, bank_dtype=torch.float32))
    out, state = sdm.reference.sdm(*inputs.args(), output_final_state=True)
    assert out.dtype == dtype
    assert state.dtype == torch.float32
