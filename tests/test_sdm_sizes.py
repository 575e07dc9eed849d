# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2^31 elements, many streams, and ids that change behind autograd's back."""

import sys

import pytest
import torch

from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import results
from .helpers.memory import run_python

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs lazy allocation")


@linux
@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
def test_bank_past_two_to_the_31(sdm, fn):
    """Rows at both ends of a bank of 2^31 elements and more, of which only they are touched."""
    S, D = 2**22 + 5, 512
    small = make(
        Case("small", B=1, T=9, H=1, S=12, D=D, bank_per_sequence=True, dtype=torch.bfloat16)
    )
    spread = torch.cat([torch.arange(4), torch.arange(4) + 2**21, S - 1 - torch.arange(4)])
    state = torch.empty(1, 1, S, D, dtype=torch.bfloat16)  # pages appear when touched
    state[0, 0, spread] = small.initial_state[0, 0]
    tokens = small.tokens()
    tokens[0], tokens[5] = spread[small.write_idx], spread[small.read_idx].int()
    expected_state = small.initial_state.clone()
    # ascending slots are summed in ascending order, so the map keeps the order of ids
    order = spread.argsort()
    expected_state = expected_state[:, :, order].contiguous()
    rank = order.argsort()
    small.write_idx, small.read_idx = rank[small.write_idx], rank[small.read_idx]
    expected = getattr(sdm, fn)(expected_state, *small.tokens())
    assert_same_bits(getattr(sdm, fn)(state, *tokens), expected)
    assert_same_bits(state[0, 0, spread[order]], expected_state[0, 0])


@linux
def test_strides_past_two_to_the_31(sdm):
    """Tokens and streams that lie 2^28 elements apart."""
    inputs = make(Case("far", B=2, T=6, H=1, S=12, D=8, W=3, R=3, dtype=torch.bfloat16))
    expected = results(sdm.chunk_sdm, inputs, chunk_size=4)
    step = 2**28
    strides = (6 * step, step, 64, 1)
    far = torch.empty(12 * step, dtype=torch.bfloat16).as_strided(inputs.v.shape, strides)
    far.copy_(inputs.v)
    inputs.v = far
    assert far.storage_offset() + 11 * step > 2**31
    got = sdm.chunk_sdm(*inputs.args(), chunk_size=4, output_final_state=True)
    assert_same_bits(got, (expected["out"], expected["final_state"]))


def test_many_rows(sdm, device):
    """More rows than a 16-bit grid has: equal to two halves."""
    case = Case("rows", B=70_000, T=1, H=1, S=4, D=4, W=1, R=1, ids="any", bank_per_sequence=True)
    inputs = make(case, device)
    state = inputs.initial_state.clone()
    out = sdm.recurrent_sdm_(state, *inputs.tokens())
    for half in (slice(0, 35_000), slice(35_000, None)):
        part = inputs.rows(half)
        expected = part.initial_state.clone()
        assert_same_bits(out[half], sdm.recurrent_sdm_(expected, *part.tokens()))
        assert_same_bits(state[half], expected)


def test_many_documents(sdm, device):
    """65,600 packed documents of three tokens."""
    num = 65_600
    case = Case("docs", lengths=(3,) * num, H=1, S=4, D=4, W=1, R=1, ids="any")
    inputs = make(case, device)
    whole = results(sdm.chunk_sdm, inputs)
    half = inputs.part(0, 3 * num // 2)
    half.cu_seqlens = inputs.cu_seqlens[: num // 2 + 1]
    got = results(sdm.chunk_sdm, half, grad=False)
    assert_same_bits(got["out"], whole["out"][:, : 3 * num // 2])
    assert_same_bits(got["final_state"], whole["final_state"][: num // 2])
    assert whole["d_initial_state"].isfinite().all()


def test_many_chunks(sdm, device):
    """65,537 chunks in one sequence: equal to two chained calls."""
    T, cut = 65_537 * 4, 32_768 * 4
    case = Case("long", B=1, T=T, H=1, S=4, D=2, W=1, R=1, ids="any", bank_per_sequence=True)
    inputs = make(case, device)
    out, state = sdm.chunk_sdm(*inputs.args(), chunk_size=4, output_final_state=True)
    half = inputs.initial_state.clone()
    first = sdm.chunk_sdm_(half, *inputs.part(0, cut).tokens(), chunk_size=4)
    second = sdm.chunk_sdm_(half, *inputs.part(cut, T).tokens(), chunk_size=4)
    assert_same_bits(torch.cat([first, second], 1), out)
    assert_same_bits(half, state)


def test_ids_changed_behind_autograd(sdm):
    """Ids edited through an alias without a version: any result, but no access out of bounds."""
    code = """
    gen = torch.Generator().manual_seed(0)
    T, S, W, D = 300, 64, 4, 8
    ids = lambda: torch.randint(S, (2, T, 2, W), generator=gen)
    wild = torch.tensor([-1, S, 2**31, -(2**40), 2**62, 0])
    wild_ids = lambda: wild[torch.randint(6, (2, T, 2, W), generator=gen)]
    for save, change in ((s, c) for s in ("replay", "rows", "int4") for c in (ids, wild_ids)):
        write, read = torch.zeros_like(ids()), ids()
        val = torch.rand(2, T, 2, W, requires_grad=True)
        v = torch.randn(2, T, 2, D, requires_grad=True)
        bank = torch.randn(2, S, D, requires_grad=True)
        beta, g = torch.rand(2, T, 2), -torch.rand(2, T, 2)
        out, _ = sdm.chunk_sdm(write, val, v, beta, g, read, val, bank, save=save)
        write.numpy()[:] = change().numpy()
        read.numpy()[:] = change().numpy()
        out.sum().backward()
    print(json.dumps("survived"))
    """
    assert run_python(code, env={"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}) == "survived"
