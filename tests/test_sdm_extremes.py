# SPDX-License-Identifier: Apache-2.0
"""Gates, weights, slots and lengths at the edges of their range."""

import math

import pytest
import torch

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_close, assert_same_bits, relative_error
from .helpers.grads import check_case, reference_results, results

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MEDIUM = Case("medium", B=1, T=96, S=48, D=16, W=8, R=8, chunk=32)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("per_write", [False, True])
@pytest.mark.parametrize("gate", ["zero", "half_zero", -1e4, -20.0, math.log(1e-12), 0.5, -1e-3])
def test_gates(sdm, device, gate, per_write, dtype):
    case = MEDIUM.but(gate=gate, gate_per_write=per_write, dtype=dtype, bank_dtype=F32)
    if dtype == F64:
        case = case.but(bank_dtype=F64)
    _, got, _ = check_case(sdm, case, device)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("gate", [(0.0, -20.0), (0.0, math.log(1e-12)), (0.4, -1e4)])
def test_gates_that_alternate(sdm, device, gate):
    for per_write in (False, True):
        inputs = make(MEDIUM.but(gate_per_write=per_write), device)
        choice = torch.rand(inputs.g.shape, device=device) < 0.5
        inputs.g = torch.where(choice, *(torch.full_like(inputs.g, x) for x in gate))
        got = results(sdm.chunk_sdm, inputs, chunk_size=32)
        assert_close(got, reference_results(sdm, inputs), "f32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_tiny_decay_at_scale(sdm, device, dtype):
    """Decays of 1e-12: finite everywhere, never an inverse of a vanished product."""
    case = Case("tiny", B=1, T=256, S=96, D=64, W=8, R=8, chunk=64, dtype=dtype, bank_dtype=F32)
    for per_write in (False, True):
        inputs = make(case.but(gate=math.log(1e-12), gate_per_write=per_write), device)
        if per_write:
            inputs.g[..., ::2] = 0
        got = results(sdm.chunk_sdm, inputs, chunk_size=64)
        kind = "f32" if dtype == F32 else "low"
        assert_close(got, reference_results(sdm, inputs), kind)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["zero", "half_zero"])
def test_keep_everything_does_not_drift(sdm, device, gate):
    case = Case("keep", B=1, H=1, T=1000, S=256, D=32, W=16, R=16, gate=gate)
    inputs = make(case, device)
    expected = reference_results(sdm, inputs)
    for chunk in (32, 64, 128):
        got = results(sdm.chunk_sdm, inputs, chunk_size=chunk)
        assert_close(got, expected, "f32")
        first, last = (
            relative_error(got["out"][:, span], expected["out"][:, span])
            for span in (slice(100), slice(-100, None))
        )
        assert last < 3 * first + 1e-6


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_strengths(sdm, device, beta):
    for dtype in (F32, F64):
        check_case(sdm, MEDIUM.but(beta=beta, dtype=dtype), device)


def test_zero_strength_only_decays(sdm, device):
    inputs = make(MEDIUM.but(beta=0.0, gate="zero"), device)
    got = results(sdm.chunk_sdm, inputs, grad=False)
    assert_same_bits(got["final_state"][0], inputs.initial_state)


@pytest.mark.parametrize("name", ["write_val", "read_val", "v", "initial_state"])
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-42, 1e18])
def test_scaled_arguments(sdm, device, name, scale):
    """Zero, small, denormal and large values; each stays within float32's own accuracy."""
    if name == "write_val" and scale > 1:
        scale = 4.0  # the recurrence itself diverges with larger weights
    inputs = make(MEDIUM.but(T=40), device)
    inputs = inputs.map(lambda x: x * scale, (name,))
    got = results(sdm.chunk_sdm, inputs, chunk_size=16)
    expected = reference_results(sdm, inputs)
    low = results(sdm.reference.sdm, inputs)
    assert_close(got, expected, "f32", low=lambda: low)


def test_signs(sdm, device):
    """Weights of any sign and strengths of any sign."""
    inputs = make(MEDIUM, device)
    inputs = inputs.map(lambda x: torch.randn_like(x) * 0.3, ("write_val", "beta", "read_val"))
    got = results(sdm.chunk_sdm, inputs, chunk_size=32)
    assert_close(got, reference_results(sdm, inputs), "f32")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_values_stay_where_they_are_used(sdm, device, bad):
    """A bad row of the bank is seen by the tokens that touch it and by no others."""
    case = Case("bad", B=1, H=2, T=40, S=24, D=8, W=2, R=2, chunk=16)
    inputs = make(case, device)
    inputs.write_idx = torch.where(inputs.write_idx == 7, 8, inputs.write_idx)
    inputs.read_idx = torch.where(inputs.read_idx == 7, 8, inputs.read_idx)
    clean = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=16)
    inputs.initial_state[:, 7] = bad
    got = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=16)
    assert_same_bits(got["out"], clean["out"])
    kept = [s for s in range(24) if s != 7]
    assert_same_bits(got["final_state"][:, :, kept], clean["final_state"][:, :, kept])
    assert_same_bits(got["final_state"][0, :, 7], inputs.initial_state[:, 7])


def test_bad_value_does_not_cross_heads_or_sequences(sdm, device):
    inputs = make(Case("bad", B=2, H=2, T=20, bank_per_sequence=True), device)
    clean = results(sdm.chunk_sdm, inputs)
    inputs.v[0, 3, 1, 2] = float("nan")
    got = results(sdm.chunk_sdm, inputs)
    assert_same_bits(got["out"][1], clean["out"][1])
    assert_same_bits(got["out"][:, :, 0].contiguous(), clean["out"][:, :, 0].contiguous())
    assert_same_bits(got["out"][0, :3], clean["out"][0, :3])
    for name in FLOATS:
        assert_same_bits(got[f"d_{name}"][1], clean[f"d_{name}"][1], name)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bad_value_within_a_chunk(sdm, device, dtype, bad):
    """A bad value spares the tokens before it (in the backward those after it) and other columns."""
    case = Case("bad", B=1, T=70, H=2, S=40, D=64, W=3, R=4, chunk=64, dtype=dtype)
    inputs = make(case, device)
    clean = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=64)
    spoilt = inputs.map(lambda x: x.clone())
    spoilt.v[0, 37, 1, 5] = bad
    got = results(sdm.chunk_sdm, spoilt, grad=False, chunk_size=64)["out"]
    assert not got[0, 37:, 1, 5].isfinite().all()
    assert_same_bits(got[:, :37], clean["out"][:, :37])
    for columns in (slice(0, 5), slice(6, None)):
        assert_same_bits(got[..., columns], clean["out"][..., columns])

    v = inputs.v.detach().requires_grad_()
    args = [v if x is inputs.v else x for x in inputs.args()]
    out, _ = sdm.chunk_sdm(*args, chunk_size=64)
    weights = torch.ones_like(out)
    (clean_dv,) = torch.autograd.grad(out, v, weights, retain_graph=True)
    weights[0, 30, 0, 3] = bad
    (dv,) = torch.autograd.grad(out, v, weights)
    assert not dv[0, :31, 0, 3].isfinite().all()
    assert_same_bits(dv[:, 31:], clean_dv[:, 31:])
    for columns in (slice(0, 3), slice(4, None)):
        assert_same_bits(dv[..., columns], clean_dv[..., columns])


def test_last_slot_of_a_full_id_space(sdm, device):
    """S = 65536: the last id has all bits of a 16-bit key set."""
    case = Case("full", B=1, H=1, T=9, S=65536, D=2, W=4, R=4, chunk=4, ids="any")
    inputs = make(case, device)
    inputs.write_idx[:, ::2, :, 1] = 65535
    inputs.read_idx[..., 2] = 65535
    inputs.write_idx[:, 3, :, 0] = -1
    for per_write in (False, True):
        if per_write:
            inputs.g = inputs.g.unsqueeze(-1).repeat(1, 1, 1, 4) * torch.rand(4, device=device)
        got = results(sdm.chunk_sdm, inputs, chunk_size=4)
        assert_close(got, reference_results(sdm, inputs), "f32")


@pytest.mark.parametrize("per_write", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_hot_slot(sdm, device, per_write, chunk):
    """All lanes of all tokens on one slot."""
    case = MEDIUM.but(ids="hot", gate_per_write=per_write, chunk=chunk, W=3, R=2)
    check_case(sdm, case, device)
    check_case(sdm, case.but(W=1, R=1, gate=-1.0), device)


def test_dense_limit(sdm, device):
    """Every token touches the whole bank: the gated delta rule with a dense state."""
    S = D = 16
    case = Case("dense", B=2, T=70, H=2, S=S, D=D, W=S, R=S, chunk=32, dtype=F64)
    inputs = make(case, device)
    ids = torch.arange(S, device=device).expand(2, 70, 2, S)
    k = torch.nn.functional.normalize(torch.randn(2, 70, 2, S, dtype=F64), dim=-1).to(device)
    inputs.write_idx, inputs.read_idx, inputs.write_val = ids, ids, k
    got = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=32)
    state = inputs.initial_state.expand(2, 2, S, D)
    outs = []
    for t in range(70):
        key, query = k[:, t], inputs.read_val[:, t]
        state = state * inputs.g[:, t].exp()[..., None, None]
        error = inputs.v[:, t] - torch.einsum("bhs,bhsd->bhd", key, state)
        delta = inputs.beta[:, t].unsqueeze(-1) * error
        state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append(torch.einsum("bhs,bhsd->bhd", query, state))
    assert_close(got, {"out": torch.stack(outs, 1), "final_state": state}, "f64")


@pytest.mark.slow
def test_sums_of_gates_do_not_grow_with_the_length(sdm, device):
    """The last tokens of a long run are as accurate as the first ones."""
    case = Case("far", B=1, H=1, T=65536, S=65536, D=16, W=16, R=16, chunk=256, ids="any")
    inputs = make(case, device)
    tail = 65536 - 256
    out, state = sdm.chunk_sdm(
        *inputs.part(0, tail).args(), chunk_size=256, output_final_state=True
    )
    last = inputs.part(tail, 65536)
    last.initial_state = state
    whole, final = sdm.chunk_sdm(*inputs.args(), chunk_size=256, output_final_state=True)
    assert_same_bits(whole[:, :tail], out)
    errors = []
    for part, got in ((inputs.part(0, 256), whole[:, :256]), (last, whole[:, tail:])):
        expected, _ = sdm.reference.sdm(*part.to(F64).args())
        errors.append(relative_error(got, expected))
    assert errors[0] < 1e-5
    assert errors[1] < max(2 * errors[0], 2e-7)
    assert final.isfinite().all()
