# SPDX-License-Identifier: Apache-2.0
"""Decays, strengths and keys at the ends of their ranges: finite, and as exact as elsewhere."""

import math

import pytest
import torch

from .helpers.compare import relative_error
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import check_case, compare, reference_results, results

DTYPES = (torch.float32, torch.bfloat16)
PLAIN = KdaCase("plain", B=1, T=150, H=2, HV=2, K=32, V=32, form="activated", strength="activated")


def check(sdm, inputs, **options):
    """Compare a call on these inputs with the reference; all results are finite."""
    got = results(sdm.chunk_kda, inputs, **options)
    for name, x in got.items():
        assert x is None or x.isfinite().all(), name
    expected = reference_results(sdm, inputs, **options)
    compare(sdm, inputs, got, expected, **options)
    return got


def gates(case, pattern, device):
    """Return inputs whose log decays follow a pattern."""
    inputs = make(case, device)
    g = inputs.g
    gen = torch.Generator().manual_seed(3)
    channel = torch.arange(g.shape[-1], device=g.device)
    token = torch.arange(g.shape[1], device=g.device).view(-1, 1, 1)
    patterns = {
        "tiny": lambda: torch.full_like(g, math.log(1e-12)),
        "half of the channels": lambda: g.new_zeros(g.shape).masked_fill(
            channel % 2 == 0, math.log(1e-12)
        ),
        "all or nothing": lambda: -20.0 * torch.randint(2, g.shape, generator=gen).to(g),
        "keep everything": lambda: torch.zeros_like(g),
        "half of the tokens": lambda: g * (token % 2),
        "floor": lambda: torch.full_like(g, -5.0),
        "floor in one channel": lambda: torch.where(channel == 3, -5.0, g).to(g.dtype),
        "floor in blocks": lambda: (-5.0 * ((token // 16) % 2)).to(g.dtype).expand(g.shape),
        "one channel at -60, one at -1e-6": lambda: torch.where(
            channel == 0, -60.0, torch.where(channel == 1, -1e-6, g)
        ).to(g.dtype),
        "beyond every exponent": lambda: torch.full_like(g, -1e4),
        "slow": lambda: torch.full_like(g, -0.03),
        "very slow": lambda: torch.full_like(g, -0.001),
    }
    inputs.g = patterns[pattern]()
    return inputs


PATTERNS = (
    "tiny", "half of the channels", "all or nothing", "keep everything", "half of the tokens",
    "floor", "floor in one channel", "floor in blocks", "one channel at -60, one at -1e-6",
    "beyond every exponent", "slow", "very slow",
)  # fmt: skip


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_decays(sdm, device, pattern, dtype):
    case = PLAIN.but(dtype=dtype, gate_dtype=torch.float32)
    got = check(sdm, gates(case, pattern, device))
    if pattern == "tiny":
        assert got["out"].abs().max() < 10
    step = results(sdm.fused_recurrent_kda, gates(case, pattern, device))
    assert all(x.isfinite().all() for x in step.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "form, changes, raw",
    [
        ("bounded", {"lower_bound": -20.0}, "usual"),
        ("bounded", {"lower_bound": -50.0}, "usual"),
        ("bounded", {"lower_bound": -50.0}, 30.0),
        ("bounded", {"lower_bound": -5.0}, -60.0),
        ("softplus", {}, 30.0),
        ("softplus", {}, -30.0),
        ("softplus", {}, 20.0),
    ],
)
def test_raw_gates(sdm, device, form, changes, raw, dtype):
    case = PLAIN.but(dtype=dtype, form=form, decay=raw, gate_dtype=torch.float32, **changes)
    inputs = make(case, device)
    if raw != "usual":
        inputs.g = inputs.g + torch.randn(inputs.g.shape, device=device)
    check(sdm, inputs)


def test_saturated_gate(sdm, device):
    """A sigmoid that rounds to 1: its slope, lost in s * (1 - s), is small and not 0."""
    inputs = make(PLAIN.but(form="bounded", parameters=False, decay=60.0), device)
    check(sdm, inputs, grad=False)
    got = results(sdm.chunk_kda, inputs)
    assert all(x.isfinite().all() for x in got.values())
    assert 0 < got["d_g"].abs().max() < 1e-20


def test_growing_state(sdm, device):
    """A log decay above 0 makes the state grow; it is followed as far as float32 goes."""
    inputs = gates(PLAIN.but(T=64, initial=False), "keep everything", device)
    inputs.g = inputs.g + 0.5
    got = results(sdm.chunk_kda, inputs, grad=False)
    expected = reference_results(sdm, inputs, grad=False)
    for name in got:
        assert relative_error(got[name], expected[name]) < 1e-4, name


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_error_does_not_grow_with_the_tokens(sdm, device, chunk):
    """Without decay, the last tokens are as exact as the first."""
    inputs = gates(PLAIN.but(T=1000, H=1, HV=1, chunk=chunk), "keep everything", device)
    out = results(sdm.chunk_kda, inputs, grad=False, chunk_size=chunk)["out"]
    expected = reference_results(sdm, inputs, grad=False)["out"]
    errors = [relative_error(out[:, a:b], expected[:, a:b]) for a, b in ((0, 100), (900, 1000))]
    assert errors[1] < max(3 * errors[0], 1e-5), errors


SIMILAR = [
    # share of the common direction, strength, log decay
    (0.7, 0.5, -0.03),
    (0.7, 0.99, -0.001),
    (0.7, 1.99, -0.001),
    (1.0, 0.99, -0.001),
    (1.0, 1.99, -0.001),
    (1.0, 2.0, 0.0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share, strength, decay", SIMILAR)
def test_similar_keys(sdm, device, share, strength, decay, dtype):
    """Keys that share a direction, up to identical ones: what repeated tokens give."""
    case = PLAIN.but(dtype=dtype, similar=share, decay=decay, T=192, gate_dtype=torch.float32)
    case = case.but(beta_dtype=torch.float32)
    inputs = make(case, device)
    inputs.beta = torch.full_like(inputs.beta, strength)
    got = results(sdm.chunk_kda, inputs)
    expected = reference_results(sdm, inputs)
    low = reference_results(sdm, inputs, torch.float32)
    hard = strength > 1
    limit = {torch.float32: 1e-4, torch.bfloat16: 2e-2 if hard else 5e-3}[dtype]
    for name in got:
        assert got[name].isfinite().all(), name
        if name == "d_g" and share == 1.0:
            continue  # close to 0, and only the rest of large terms: no relative error
        error = relative_error(got[name], expected[name])
        # The recurrence itself may be no better in float32.
        recurrence = relative_error(low[name].to(got[name].dtype), expected[name])
        assert error < max(limit, 3 * recurrence), (name, error, recurrence)


@pytest.mark.parametrize("count", [16, 64])
def test_runs_of_one_key(sdm, device, count):
    """The same key many times in a row, with the strength at which writes overshoot most."""
    inputs = make(PLAIN.but(T=128, decay=0.0, l2norm=False), device)
    inputs.k[:, 20 : 20 + count] = inputs.k[:, 20:21].clone()
    inputs.beta = torch.full_like(inputs.beta, 2.0)
    check(sdm, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strengths(sdm, device, dtype):
    """Logits from -90 to 90: the gradient of a closed write is small, never lost to a division."""
    case = PLAIN.but(dtype=dtype, strength="sigmoid", beta_dtype=torch.float32, T=91)
    inputs = make(case, device)
    inputs.beta = torch.linspace(-90, 90, 91, device=device).view(1, -1, 1).expand(1, 91, 2)
    got = check(sdm, inputs)
    assert (got["d_beta"][:, 40] != 0).all()
    case = PLAIN.but(dtype=dtype, beta_dtype=torch.float32)
    for value in (0.0, 1e-12, 1e-8, 1.0, 2.0):
        inputs = make(case, device)
        inputs.beta = torch.full_like(inputs.beta, value)
        got = check(sdm, inputs)
        assert (got["d_beta"] != 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zeros(sdm, device, name, dtype):
    """All-zero queries, keys or values, some or all, with and without normalisation."""
    for l2norm in (True, False):
        inputs = make(PLAIN.but(dtype=dtype, l2norm=l2norm), device)
        x = getattr(inputs, name)
        x[:, 10:30] = 0
        check(sdm, inputs)
        x[:] = 0
        got = results(sdm.chunk_kda, inputs)
        assert all(x.isfinite().all() for x in got.values())


def test_neutral_tokens(sdm, device):
    """A token with q = k = v = 0, g = 0 and beta = 0 changes nothing."""
    inputs = make(PLAIN.but(l2norm=False), device)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(inputs, name)[:, 80:] = 0
    got = results(sdm.chunk_kda, inputs, grad=False)
    short = results(sdm.chunk_kda, inputs.part(0, 80), grad=False)
    assert relative_error(got["final_state"], short["final_state"]) < 1e-6
    assert (got["out"][:, 80:] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_memory(sdm, device, dtype):
    """A weak write and almost no decay over thousands of tokens: the state must not be rounded."""
    length = 8192 if device.type == "cuda" else 1500
    case = PLAIN.but(
        T=length, H=1, HV=1, K=64, V=64, dtype=dtype, strength="sigmoid", decay=-0.001,
        gate_dtype=torch.float32, beta_dtype=torch.float32,
    )  # fmt: skip
    inputs = make(case, device)
    inputs.beta = inputs.beta - 7
    got = results(sdm.chunk_kda, inputs, grad=device.type != "cuda")
    expected = reference_results(sdm, inputs, grad=device.type != "cuda")
    compare(sdm, inputs, got, expected)


@pytest.mark.parametrize("steps", [512])
def test_many_single_steps_in_float32(sdm, device, steps):
    """Step errors do not compound: no reduced-precision product behind a float32 contract."""
    inputs = make(PLAIN.but(B=2, T=steps, decay=-0.01), device)
    state = inputs.initial_state.clone()
    outs = []
    for t in range(steps):
        token = inputs.part(t, t + 1)
        outs.append(sdm.recurrent_kda_(state, *token.tokens(), **token.keywords()))
    expected = reference_results(sdm, inputs, grad=False)
    out = torch.cat(outs, 1)
    assert relative_error(out[:, :1], expected["out"][:, :1]) < 1e-5
    assert relative_error(out[:, -1:], expected["out"][:, -1:]) < 1e-4
    assert relative_error(state, expected["final_state"]) < 1e-4


def test_slow_gates_in_bfloat16_calls(sdm, device):
    """float32 gates beside bfloat16 tokens are not rounded on the way in."""
    case = PLAIN.but(dtype=torch.bfloat16, gate_dtype=torch.float32, T=600, H=1, HV=1)
    inputs = make(case, device)
    inputs.g = -1e-3 * torch.rand(inputs.g.shape, device=device)
    check(sdm, inputs, grad=False)
    rounded = inputs.map(lambda x: x.bfloat16().float(), ("g",))
    assert not torch.equal(
        results(sdm.chunk_kda, inputs, grad=False)["final_state"],
        results(sdm.chunk_kda, rounded, grad=False)["final_state"],
    )


def test_case_table_of_the_specification(sdm, device):
    """Both gate forms and both ranges of beta, at the widths that models have."""
    for form in ("bounded", "softplus"):
        for strength in ("sigmoid", "two"):
            case = KdaCase(
                "spec", B=1, T=130, H=1, HV=1, K=128, V=128, form=form, strength=strength,
                dtype=torch.bfloat16,
            )  # fmt: skip
            check_case(sdm, case, device)


@pytest.mark.parametrize("decay", [-2.44, -4.0])
def test_values_that_end(sdm, device, decay):
    """Without values the state fades, below what float16 holds, and stays what it is."""
    case = KdaCase("ends", B=1, T=400, K=64, V=64, dtype=torch.bfloat16, decay=decay)
    inputs = make(case.but(parameters=False), device)
    inputs.v[:, 64:] = 0
    check(sdm, inputs)
