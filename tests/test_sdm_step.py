# SPDX-License-Identifier: Apache-2.0
"""The in-place functions: decode step and prefill into a cache, pools of states."""

import pytest
import torch

from .helpers.cases import Case, ids, make
from .helpers.compare import assert_close, assert_same_bits, precision
from .helpers.grads import low_results, reference_results, results
from .test_sdm_forward import BASE, OPTIONS

STEP = [case for case in OPTIONS if case.lengths is None]


def own_bank(case):
    return case.but(bank_per_sequence=True)


def in_place(fn, inputs, **options):
    """Return out and the new state; the inputs' state stays as it is."""
    state = inputs.initial_state.clone()
    out = fn(state, *inputs.tokens(), **options)
    return {"out": out, "final_state": state}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", STEP, ids=ids(STEP))
def test_step_equals_reference(sdm, device, case):
    inputs = make(own_bank(case), device)
    got = in_place(sdm.recurrent_sdm_, inputs)
    assert got["out"].dtype == inputs.v.dtype
    expected = reference_results(sdm, inputs, grad=False)
    low = lambda: low_results(sdm, inputs, 1, grad=False)  # noqa: E731
    assert_close(got, expected, precision(inputs), low=low)


@pytest.mark.parametrize("case", OPTIONS, ids=ids(OPTIONS))
def test_prefill_equals_functional_form(sdm, device, case):
    inputs = make(own_bank(case), device)
    got = in_place(sdm.chunk_sdm_, inputs, cu_seqlens=inputs.cu_seqlens, chunk_size=case.chunk)
    expected = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=case.chunk)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("case", STEP, ids=ids(STEP))
def test_step_is_prefill_with_chunks_of_one(sdm, device, case):
    inputs = make(own_bank(case), device)
    step = in_place(sdm.recurrent_sdm_, inputs)
    chunks = in_place(sdm.chunk_sdm_, inputs, chunk_size=1)
    if device.type == "cpu":
        assert_same_bits(chunks, step)
    else:  # two kernels, two orders of sums
        assert_close(chunks, step, precision(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pieces", [(1,) * 12, (4, 8), (5, 1, 6)])
def test_several_tokens_are_several_calls(sdm, device, dtype, pieces):
    inputs = make(Case(T=12, dtype=dtype, bank_per_sequence=True), device)
    whole = in_place(sdm.recurrent_sdm_, inputs)
    state = inputs.initial_state.clone()
    outs, first = [], 0
    for length in pieces:
        part = inputs.part(first, first + length)
        outs.append(sdm.recurrent_sdm_(state, *part.tokens()))
        first += length
    assert_same_bits(torch.cat(outs, 1), whole["out"])
    assert_same_bits(state, whole["final_state"])


@pytest.mark.parametrize("prefill", [1, 63, 64, 65])
def test_prefill_then_decode(sdm, device, prefill):
    case = Case("serve", T=prefill + 20, S=64, D=16, W=8, R=8, bank_per_sequence=True)
    inputs = make(case, device)
    state = inputs.initial_state.clone()
    outs = [sdm.chunk_sdm_(state, *inputs.part(0, prefill).tokens())]
    outs += [
        sdm.recurrent_sdm_(state, *inputs.part(t, t + 1).tokens())
        for t in range(prefill, prefill + 20)
    ]
    got = {"out": torch.cat(outs, 1), "final_state": state}
    assert_close(got, results(sdm.chunk_sdm, inputs, grad=False), "f32")
    assert_close(got, reference_results(sdm, inputs, grad=False), "f32")


def test_error_does_not_grow_over_many_steps(sdm, device):
    case = Case("long", T=512, S=256, D=32, W=8, R=8, H=1, B=1, bank_per_sequence=True)
    inputs = make(case, device)
    got = in_place(sdm.recurrent_sdm_, inputs)
    expected = reference_results(sdm, inputs, grad=False)
    assert_close(got, expected, "f32")
    last = {"out": got["out"][:, -16:]}
    assert_close(last, {"out": expected["out"][:, -16:]}, "f32")


@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_with_skipped_rows(sdm, device, fn, integer, dtype):
    """Padding rows (-1) hold NaN and touch nothing; live rows are as in a call of their own."""
    inputs = make(BASE.but(B=4, T=5, bank_per_sequence=True, dtype=dtype), device)
    floats = ("write_val", "v", "beta", "g", "read_val")
    for name in floats:
        getattr(inputs, name)[[1, 3]] = float("nan")
    pool = torch.randn(6, 2, 13, 5, device=device).to(dtype)
    pool[1] = float("nan")
    before = pool.clone()
    rows = torch.tensor([2, -1, 0, -1], dtype=integer, device=device)
    out = getattr(sdm, fn)(pool, *inputs.tokens(), state_indices=rows)

    live = inputs.rows([0, 2])
    state = before[[2, 0]]
    expected = getattr(sdm, fn)(state, *live.tokens())
    assert_same_bits(out[[0, 2]], expected)
    assert_same_bits(pool[[2, 0]], state)
    assert_same_bits(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
    assert (out[[1, 3]] == 0).all()


def test_packed_prefill_into_a_pool(sdm, device):
    inputs = make(Case("packed", lengths=(7, 0, 20, 3), bank_per_sequence=True), device)
    inputs.v[:, 27:] = float("nan")
    pool = torch.randn(5, 2, 13, 5, device=device)
    before = pool.clone()
    rows = torch.tensor([4, 1, 0, -1], device=device)
    out = sdm.chunk_sdm_(
        pool, *inputs.tokens(), cu_seqlens=inputs.cu_seqlens, state_indices=rows, chunk_size=8
    )
    for first, last, row in ((0, 7, 4), (7, 27, 0)):
        state = before[row : row + 1].clone()
        alone = sdm.chunk_sdm_(state, *inputs.part(first, last).tokens(), chunk_size=8)
        assert_same_bits(out[:, first:last], alone)
        assert_same_bits(pool[row : row + 1], state)
    assert (out[:, 27:] == 0).all()
    assert_same_bits(pool[1:4], before[1:4])


@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
def test_state_with_strides(sdm, device, fn):
    """A slice of a larger cache advances in place; what surrounds it keeps its bits."""
    inputs = make(BASE.but(T=6, bank_per_sequence=True), device)
    expected = in_place(getattr(sdm, fn), inputs)
    cache = torch.full((3, 4, 2, 15, 9), float("nan"), device=device)
    layouts = {
        "slice": cache[1, 1:3, :, 1:14, 2:7],
        "heads_first": torch.full((2, 2, 13, 5), float("nan"), device=device).transpose(0, 1),
        "slots_first": torch.full((13, 2, 2, 5), 0.0, device=device).permute(1, 2, 0, 3),
    }
    for name, state in layouts.items():
        state.copy_(inputs.initial_state)
        out = getattr(sdm, fn)(state, *inputs.tokens())
        assert_same_bits({"out": out, "final_state": state}, expected, name)
    assert cache.isnan().sum() == cache.numel() - 2 * 2 * 13 * 5


@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
@pytest.mark.parametrize("changes", [{"B": 0}, {"T": 0}])
def test_nothing_to_do(sdm, device, fn, changes):
    inputs = make(BASE.but(bank_per_sequence=True, **changes), device)
    got = in_place(getattr(sdm, fn), inputs)
    assert got["out"].shape == inputs.v.shape
    assert_same_bits(got["final_state"], inputs.initial_state)


@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
def test_in_inference_mode(sdm, device, fn):
    inputs = make(BASE.but(bank_per_sequence=True), device)
    expected = in_place(getattr(sdm, fn), inputs)
    with torch.inference_mode():
        assert_same_bits(in_place(getattr(sdm, fn), inputs), expected)
        got = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=8)
    assert_close(got, expected, "f32")
