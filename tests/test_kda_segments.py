# SPDX-License-Identifier: Apache-2.0
"""Sequences of more than 1024 tokens with few heads, which CUDA scans in segments of 1024.

Values across the borders of segments, gradients of states through them, and the promised bits.
"""

import pytest
import torch

from .helpers.compare import assert_close, assert_same_bits
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import check_case, compare, results

BASE = KdaCase("segments", B=1, H=1, HV=2, K=64, V=64, T=1100, dtype=torch.bfloat16)
CASES = [
    BASE.but(T=1025),
    BASE.but(T=2049, H=2, v_first=True),
    BASE.but(T=1200, V=128, dtype=torch.float16, gate_dtype=torch.float32),
    BASE.but(T=1200, K=128, form="softplus", initial=False),
    BASE.but(T=2100, H=2, form="activated", decay=-0.002, strength="activated"),
    BASE.but(T=1100, H=2, similar=0.8, strength="sigmoid", decay=-6.0, parameters=False),
    # What a chunk leaves of the state, 2^-37, is 0 in float16 and not in float32.
    BASE.but(T=2100, K=128, decay=-2.44, parameters=False),
    BASE.but(lengths=(1024, 0, 1100, 3)),
    BASE.but(lengths=(5, 2050, 70), integer=torch.int32, HV=1),
]
# With borders of segments, of chunks and of nothing.
CUTS = (1, 1000, 1023, 1024, 1025, 1088, 2048, 2060)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_reference(sdm, device, case):
    inputs, _, expected = check_case(sdm, case, device)
    kept = results(sdm.chunk_kda, inputs, chunk_size=case.chunk, disable_recompute=True)
    compare(sdm, inputs, kept, expected)


@pytest.mark.parametrize("K", [64, 128])
def test_a_prefix_has_the_same_bits(sdm, device, K):
    inputs = make(BASE.but(T=2100, HV=1, K=K), device)
    whole = results(sdm.chunk_kda, inputs, grad=False)["out"]
    for stop in CUTS:
        part = results(sdm.chunk_kda, inputs.part(0, stop), grad=False)["out"]
        assert_same_bits(part, whole[:, :stop], f"{stop} tokens")


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_packed_equals_separate(sdm, device, keep):
    case = BASE.but(lengths=(1030, 0, 1, 1024, 2049, 65))
    inputs = make(case, device)
    got = results(sdm.chunk_kda, inputs, disable_recompute=keep)
    cuts = inputs.cu_seqlens.tolist()
    for n, (first, last) in enumerate(zip(cuts, cuts[1:])):
        if first == last:
            assert_same_bits(got["final_state"][n], inputs.initial_state[n])
            continue
        part = inputs.part(first, last)
        part.initial_state = inputs.initial_state[n : n + 1]
        alone = results(sdm.chunk_kda, part, grad=False, disable_recompute=keep)
        assert_same_bits(got["out"][:, first:last], alone["out"])
        assert_same_bits(got["final_state"][n : n + 1], alone["final_state"])


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_rows_of_a_batch_equal_rows_alone(sdm, device, keep):
    """On CUDA these are more sequences than go through the card at a time."""
    rows, heads = (24, 8) if device.type == "cuda" else (2, 1)
    inputs = make(BASE.but(B=rows, T=1700, H=heads, HV=heads), device)
    got = results(sdm.chunk_kda, inputs, disable_recompute=keep)
    again = results(sdm.chunk_kda, inputs, disable_recompute=keep)
    assert_same_bits(again, got)
    for n in (0, rows // 2, rows - 1):
        row = torch.tensor([n], device=device)
        alone = results(sdm.chunk_kda, inputs.rows(row), grad=False, disable_recompute=keep)
        for name, x in alone.items():
            assert_same_bits(x, got[name][n : n + 1], name)


def test_gradients_do_not_depend_on_neighbours(sdm, device):
    """A row's gradients of tokens and state, with the same upstream, are those of the row twice."""
    inputs = make(BASE.but(T=1500), device)
    leaves = inputs.map(lambda x: x.detach().requires_grad_())
    twice = inputs.rows(torch.tensor([0, 0], device=device))
    twice = twice.map(lambda x: x.detach().requires_grad_())
    names = (*TOKENS, "initial_state")
    grads = []
    for x in (leaves, twice):
        out, state = sdm.chunk_kda(
            *x.tokens(), initial_state=x.initial_state, output_final_state=True, **x.keywords()
        )
        upstream = [y.detach() for y in (out, state)]
        grads.append(torch.autograd.grad((out, state), [getattr(x, n) for n in names], upstream))
    for name, one, two in zip(names, *grads):
        assert_same_bits(two[:1], one, name)
        assert_same_bits(two[1:], one, name)


@pytest.mark.parametrize("name", TOKENS)
def test_a_bad_token_does_not_reach_earlier_chunks(sdm, device, name):
    inputs = make(BASE.but(T=2100, HV=1), device)
    good = results(sdm.chunk_kda, inputs, grad=False)["out"]
    at = 1030
    getattr(inputs, name)[:, at] = float("nan")
    bad = results(sdm.chunk_kda, inputs, grad=False)["out"]
    assert_same_bits(bad[:, :1024], good[:, :1024])
    assert bad[:, at].isnan().any()
    if name != "q":
        assert bad[:, 2049:].isnan().any()


def test_states_at_borders(sdm, device):
    """The state in front of a chunk is the final state of the tokens before it."""
    inputs = make(BASE.but(T=2200, initial=False), device)
    with torch.no_grad():
        states = sdm.chunk_kda(
            *inputs.tokens(), output_final_state=True, return_intermediate_states=True,
            chunk_size=64, **inputs.keywords(),
        )[2]  # fmt: skip
    for chunk in (15, 16, 17, 32, 34):
        part = inputs.part(0, 64 * chunk)
        final = results(sdm.chunk_kda, part, grad=False)["final_state"]
        got = {"final_state": states[:, chunk].float()}
        assert_close(got, {"final_state": final.double()}, "kda-low")
