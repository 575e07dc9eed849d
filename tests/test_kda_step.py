# SPDX-License-Identifier: Apache-2.0
"""The decode step in place: pools, skipped rows, layouts, equality with the out-of-place form."""

import pytest
import torch

from .helpers.compare import assert_close, assert_same_bits, relative_error
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import reference_results, results
from .helpers.poison import LAYOUTS, fused, poisoned, transposed

BASE = KdaCase("step", B=3, T=2, K=32, V=16)
STATES = (torch.float32, torch.bfloat16)


def step(sdm, state, inputs, **options):
    return sdm.recurrent_kda_(state, *inputs.tokens(), **inputs.keywords(), **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("form", ["activated", "softplus", "bounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("v_first", [False, True])
def test_equals_the_form_out_of_place(sdm, device, form, dtype, v_first):
    for length in (1, 2, 5):
        case = BASE.but(form=form, dtype=dtype, v_first=v_first, T=length)
        inputs = make(case, device)
        expected = results(sdm.fused_recurrent_kda, inputs, grad=False)
        state = inputs.initial_state.clone()
        assert_same_bits(step(sdm, state, inputs), expected["out"])
        assert_same_bits(state, expected["final_state"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_by_token(sdm, device, dtype):
    """T calls with one token and one call with T tokens: the same bits for a float32 state."""
    inputs = make(BASE.but(T=9, dtype=dtype), device)
    whole, single = inputs.initial_state.clone(), inputs.initial_state.clone()
    expected = step(sdm, whole, inputs)
    outs = [step(sdm, single, inputs.part(t, t + 1)) for t in range(9)]
    assert_same_bits(torch.cat(outs, 1), expected)
    assert_same_bits(single, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_reference(sdm, device, dtype):
    for T in (1, 3, 20):
        inputs = make(BASE.but(T=T, dtype=dtype, H=1, HV=3, K=64, V=48), device)
        state = inputs.initial_state.clone()
        got = {"out": step(sdm, state, inputs), "final_state": state}
        kind = "kda-f32" if dtype == torch.float32 else "kda-low"
        assert_close(got, reference_results(sdm, inputs, grad=False), kind)


def test_float64(sdm, device):
    inputs = make(BASE.but(dtype=torch.float64), device)
    state = inputs.initial_state.clone()
    got = {"out": step(sdm, state, inputs), "final_state": state}
    assert_close(got, reference_results(sdm, inputs, grad=False), "f64")


def test_bfloat16_pool(sdm, device):
    """A bfloat16 state is read exactly and rounded once a call."""
    inputs = make(BASE.but(dtype=torch.bfloat16, state_dtype=torch.bfloat16), device)
    state = inputs.initial_state.clone()
    out = step(sdm, state, inputs)
    expected = results(sdm.fused_recurrent_kda, inputs, grad=False)
    assert_same_bits(out, expected["out"])
    assert_same_bits(state, expected["final_state"].bfloat16())


@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
def test_rows_of_a_pool(sdm, device, state_dtype, integer):
    """Padded rows (-1), even full of NaN, touch nothing and get output 0."""
    inputs = make(BASE.but(B=4), device)
    inputs.initial_state = None
    pool = torch.randn(6, 2, 32, 16, device=device).to(state_dtype)
    rows = torch.tensor([2, -1, 0, -1], dtype=integer, device=device)
    for name in TOKENS:
        getattr(inputs, name)[[1, 3]] = float("nan")
    before = pool.clone()
    out = step(sdm, pool, inputs, state_indices=rows)
    untouched = [1, 3, 4, 5]
    assert_same_bits(pool[untouched], before[untouched])
    assert (out[[1, 3]] == 0).all()
    live = inputs.rows(torch.tensor([0, 2], device=device))
    own = before[[2, 0]].clone()
    assert_same_bits(out[[0, 2]], step(sdm, own, live))
    assert_same_bits(pool[[2, 0]], own)


def test_packed_rows_of_a_pool(sdm, device):
    inputs = make(BASE.but(lengths=(2, 0, 3, 1)), device)
    inputs.initial_state = None
    pool = torch.randn(7, 2, 32, 16, device=device)
    before = pool.clone()
    rows = torch.tensor([6, 1, -1, 0], device=device)
    out = step(sdm, pool, inputs, state_indices=rows)
    assert (out[:, 2:5] == 0).all()
    assert_same_bits(pool[1:6], before[1:6])
    for row, (first, last) in ((6, (0, 2)), (0, (5, 6))):
        part, own = inputs.part(first, last), before[row : row + 1].clone()
        assert_same_bits(out[:, first:last], step(sdm, own, part))
        assert_same_bits(pool[row : row + 1], own)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
def test_layouts(sdm, device, layout, v_first):
    inputs = make(BASE.but(v_first=v_first), device)
    fits = [n for n in TOKENS if not (layout in (fused, transposed) and n == "beta")]
    laid_out = inputs.map(layout, fits)
    state, other = inputs.initial_state.clone(), poisoned(inputs.initial_state)
    whole = other._base
    edges = whole.clone()
    assert_same_bits(step(sdm, other, laid_out), step(sdm, state, inputs))
    assert_same_bits(other, state)
    edges[1:-1, 1:-1, 1:-1, 1:-1] = other
    assert_same_bits(whole, edges)


def test_many_rows(sdm, device):
    """More rows than one axis of a CUDA grid has blocks."""
    count = 70000 if device.type == "cuda" else 700
    case = KdaCase("many", B=count, T=1, H=1, HV=1, K=16, V=16)
    inputs = make(case, device)
    state = inputs.initial_state.clone()
    out = step(sdm, state, inputs)
    last = inputs.rows(slice(count - 3, count))
    own = last.initial_state.clone()
    assert_same_bits(out[count - 3 :], step(sdm, own, last))
    assert_same_bits(state[count - 3 :], own)
    assert relative_error(out, reference_results(sdm, inputs, grad=False)["out"]) < 1e-5


def test_in_place_change_is_noticed(sdm, device):
    """A state that autograd keeps for a backward must not change unnoticed."""
    inputs = make(BASE, device)
    state = inputs.initial_state.clone()
    weight = torch.ones_like(state, requires_grad=True)
    loss = (weight * state).sum()
    step(sdm, state, inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    pool = torch.zeros(4, *state.shape, device=device)
    version = pool._version
    step(sdm, pool[2], inputs)
    assert pool._version > version


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_there_is_no_backward(sdm, device, name):
    inputs = make(BASE, device).map(lambda x: x.requires_grad_(), (name,))
    before = inputs.initial_state.detach().clone()
    message = "^recurrent_kda_: changes state in place and has no backward.*fused_recurrent_kda"
    with pytest.raises(RuntimeError, match=message):
        step(sdm, inputs.initial_state, inputs)
    assert_same_bits(inputs.initial_state.detach(), before)
    with torch.no_grad():
        assert not step(sdm, inputs.initial_state, inputs).requires_grad
