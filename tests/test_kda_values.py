# SPDX-License-Identifier: Apache-2.0
"""Outputs, states and every gradient against the float64 token recurrence, for every option."""

import pytest
import torch

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import KdaCase, ids, make
from .helpers.kda_grads import check_case, results

BASE = KdaCase()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda")

OPTIONS = [
    BASE,
    BASE.but(form="softplus", strength="sigmoid"),
    BASE.but(form="activated", strength="activated"),
    BASE.but(form="activated", strength="activated", l2norm=False),
    BASE.but(parameters=False),
    BASE.but(form="softplus", parameters=False),
    BASE.but(initial=False),
    BASE.but(v_first=True),
    BASE.but(scale=0.3),
    BASE.but(H=2, HV=2),
    BASE.but(H=2, HV=6),
    BASE.but(H=1, HV=8),
    BASE.but(H=3, HV=3, B=1),
    BASE.but(lengths=(5, 0, 33, 1), v_first=True),
    BASE.but(lengths=(64, 1, 16, 15), integer=torch.int32, form="softplus"),
    BASE.but(T=130),
    BASE.but(T=130, chunk=16, form="softplus"),
    BASE.but(T=130, chunk=32, form="activated", strength="sigmoid"),
    BASE.but(T=1),
    BASE.but(T=70, K=32, V=16),
    BASE.but(T=70, K=48, V=80),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS, ids=ids(OPTIONS))
def test_chunk(sdm, device, case, dtype):
    check_case(sdm, case.but(dtype=dtype), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS[:15], ids=ids(OPTIONS[:15]))
def test_recurrent(sdm, device, case, dtype):
    check_case(sdm, case.but(dtype=dtype), device, fn=sdm.fused_recurrent_kda)


@pytest.mark.parametrize("size", [16, 64, 112, 128, 144, 256])
def test_head_sizes(sdm, device, size):
    for K, V in ((size, 32), (32, size), (size, size)):
        case = BASE.but(K=K, V=V, T=67, B=1, HV=1)
        check_case(sdm, case, device)
        check_case(sdm, case.but(dtype=torch.bfloat16, form="softplus"), device)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129])
def test_lengths(sdm, device, length):
    """Initial state in, final state out, both in the loss, at lengths around the blocks' edges."""
    for dtype in (torch.float32, torch.bfloat16):
        case = BASE.but(T=length, H=2, HV=2, K=32, dtype=dtype)
        check_case(sdm, case, device)
        check_case(sdm, case.but(form="softplus"), device)
        check_case(sdm, case, device, through=("out",))
        check_case(sdm, case, device, through=("final_state",))


MIXTURES = [
    {"dtype": torch.bfloat16, "gate_dtype": torch.float32, "beta_dtype": torch.float32},
    {"dtype": torch.bfloat16, "gate_dtype": torch.float16, "beta_dtype": torch.float32},
    {"dtype": torch.float16, "gate_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16},
    {"dtype": torch.float32, "gate_dtype": torch.bfloat16, "beta_dtype": torch.float16},
    {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    {"dtype": torch.float32, "state_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("changes", MIXTURES, ids=str)
@pytest.mark.parametrize("form", ["bounded", "softplus", "activated"])
def test_mixed_dtypes(sdm, device, changes, form):
    case = BASE.but(form=form, T=70, **changes)
    check_case(sdm, case, device)
    check_case(sdm, case, device, fn=sdm.fused_recurrent_kda)


def test_tokens_of_different_dtypes(sdm, device):
    """q, k and v in several dtypes are converted to the widest; results follow their own tensors."""
    inputs = make(BASE.but(dtype=torch.bfloat16), device)
    for fn in FUNCTIONS:
        mixed = inputs.map(lambda x: x.float(), ("v",))
        wide = inputs.map(lambda x: x.float(), ("q", "k", "v"))
        got, expected = (results(getattr(sdm, fn), x) for x in (mixed, wide))
        assert got["out"].dtype == torch.bfloat16
        assert_same_bits(got["out"], expected["out"].bfloat16())
        assert_same_bits(got["final_state"], expected["final_state"])
        assert got["d_q"].dtype == torch.bfloat16
        assert got["d_v"].dtype == torch.float32


def test_gate_parameters_in_other_forms(sdm, device):
    """``[1, 1, HV, 1]`` and ``[HV * K]``, in bfloat16: what models have."""
    case = BASE.but(form="softplus", dtype=torch.bfloat16)
    inputs = make(case, device).map(lambda x: x.bfloat16(), ("A_log", "dt_bias"))
    expected = results(sdm.chunk_kda, inputs)
    other = inputs.map(lambda x: x.view(1, 1, 2, 1), ("A_log",))
    other = other.map(torch.flatten, ("dt_bias",))
    got = results(sdm.chunk_kda, other)
    for name, x in got.items():
        if name in ("d_A_log", "d_dt_bias"):
            assert x.shape == getattr(other, name[2:]).shape
        assert_same_bits(x.flatten(), expected[name].flatten(), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keeping_the_states_changes_little(sdm, device, dtype):
    """With and without ``disable_recompute``, the gradients are within the limits."""
    for case in (BASE.but(T=150), BASE.but(lengths=(70, 0, 3, 77), v_first=True)):
        case = case.but(dtype=dtype)
        _, kept, _ = check_case(sdm, case, device, disable_recompute=True)
        plain = results(sdm.chunk_kda, make(case, device))
        assert_same_bits(kept["out"], plain["out"])
        assert_same_bits(kept["final_state"], plain["final_state"])


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_only_some_gradients(sdm, device, fn, name):
    """One input that requires grad: it gets the bits that it gets among all."""
    inputs = make(BASE.but(T=70), device)
    expected = results(getattr(sdm, fn), inputs)
    got = results(getattr(sdm, fn), inputs, only=(name,))
    assert_same_bits(got, {key: expected[key] for key in got})


def test_frozen_inputs_get_no_gradient(sdm, device):
    inputs = make(BASE, device)
    leaves = inputs.map(lambda x: x.requires_grad_(), ("v", "A_log"))
    out, _ = sdm.chunk_kda(
        *leaves.tokens(), initial_state=leaves.initial_state, **leaves.keywords()
    )
    out.sum().backward()
    for name in inputs.names():
        assert (getattr(leaves, name).grad is not None) == (name in ("v", "A_log")), name


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_missing_and_expanded_upstream_gradients(sdm, device, fn):
    inputs = make(BASE.but(T=70), device)
    leaves = inputs.map(lambda x: x.requires_grad_())

    def call(final):
        return getattr(sdm, fn)(
            *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=final,
            **leaves.keywords(),
        )  # fmt: skip

    def grads(*upstream):
        return torch.autograd.grad((out, state), leaves.args(), upstream, retain_graph=True)

    out, state = call(True)
    expected = grads(torch.ones_like(out), torch.zeros_like(state))
    assert_same_bits(torch.autograd.grad(out.sum(), leaves.args(), retain_graph=True), expected)
    alone, none = call(False)
    assert none is None
    assert_same_bits(torch.autograd.grad(alone.sum(), leaves.args()), expected)
    expected = grads(torch.zeros_like(out), torch.ones_like(state))
    got = torch.autograd.grad(state.sum(), leaves.args(), allow_unused=True)
    for x, y in zip(got, expected):
        assert_same_bits(torch.zeros_like(y) if x is None else x, y)
