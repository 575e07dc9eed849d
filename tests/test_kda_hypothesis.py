# SPDX-License-Identifier: Apache-2.0
"""Random shapes and options of KDA: forward and all gradients against the float64 reference."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import check_case, results

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
STATES = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def cases(draw):
    size = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    H = size(1, 3)
    case = KdaCase(
        "drawn",
        B=size(0, 2),
        T=pick(size(0, 40), size(0, 140)),
        H=H,
        HV=H * size(1, 3),
        K=16 * size(1, 4),
        V=16 * size(1, 4),
        form=pick("activated", "softplus", "bounded"),
        lower_bound=pick(-0.5, -5.0, -30.0),
        strength=pick("activated", "sigmoid", "two"),
        l2norm=draw(st.booleans()),
        initial=draw(st.booleans()),
        parameters=draw(st.booleans()),
        v_first=draw(st.booleans()),
        scale=pick(None, 1.0, 0.05),
        chunk=pick(16, 32, 64),
        decay=pick("usual", "usual", -0.01, -3.0),
        similar=pick(0.0, 0.0, 0.5),
        integer=pick(torch.int32, torch.int64),
    )
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 50), max_size=4))
        case = case.but(lengths=tuple(lengths))
    if draw(st.booleans()):
        names = ("dtype", "gate_dtype", "beta_dtype")
        case = case.but(**{name: draw(DTYPES) for name in names})
        return case.but(state_dtype=draw(STATES))
    return case.but(dtype=torch.float64) if draw(st.booleans()) else case


SETTINGS = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@SETTINGS
@given(case=cases(), keep=st.booleans(), seed=st.integers(0, 2**16))
def test_chunk_against_reference(sdm, device, case, keep, seed):
    check_case(sdm, case, device, seed=seed, disable_recompute=keep)


@SETTINGS
@given(case=cases(), seed=st.integers(0, 2**16))
def test_recurrent_against_reference(sdm, device, case, seed):
    check_case(sdm, case, device, seed=seed, fn=sdm.fused_recurrent_kda)


@SETTINGS
@given(case=cases(), cut=st.integers(0, 140), seed=st.integers(0, 2**16))
def test_prefixes_and_steps(sdm, device, case, cut, seed):
    """The first tokens alone keep their bits, and steps in place are the recurrence."""
    case = case.but(lengths=None)
    inputs = make(case, device, seed)
    whole = results(sdm.chunk_kda, inputs, grad=False, chunk_size=case.chunk)
    part = results(sdm.chunk_kda, inputs.part(0, cut), grad=False, chunk_size=case.chunk)
    assert_same_bits(part["out"], whole["out"][:, :cut])
    recurrent = results(sdm.fused_recurrent_kda, inputs, grad=False)
    state = torch.zeros_like(recurrent["final_state"])
    if inputs.initial_state is not None:
        state.copy_(inputs.initial_state)
    for span in (slice(0, cut), slice(cut, None)):
        tokens = [getattr(inputs, name)[:, span] for name in TOKENS]
        out = sdm.recurrent_kda_(state, *tokens, **inputs.keywords())
        assert_same_bits(out, recurrent["out"][:, span])
    assert_same_bits(state, recurrent["final_state"])
