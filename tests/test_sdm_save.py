# SPDX-License-Identifier: Apache-2.0
"""What a training call keeps: exact forms agree bit by bit, rounded forms within their bound."""

import sys

import pytest
import torch

from .helpers.cases import FLOATS, Case, ids, make
from .helpers.compare import assert_close, assert_same_bits, relative_error
from .helpers.grads import check_case, reference_results, results
from .test_sdm_forward import BF16, F32, OPTIONS

LOSSY = ("bf16", "fp8", "int4")
EXACT_IN_LOSSY = ("out", "final_state", "d_v", "d_beta", "d_initial_state")
# Relative error of the other gradients, docs/numerics.md: about the rounding error of a row.
BOUND = {"bf16": 1e-2, "fp8": 8e-2, "int4": 3e-1}
LONG = Case("long", T=100, S=40, D=12, W=4, R=4, chunk=8)


@pytest.fixture
def short_segments(sdm, monkeypatch):
    """Return a function that makes ``save="replay"`` keep a bank every ``chunks`` chunks."""
    module = sys.modules[sdm.chunk_sdm.__module__]

    def set_chunks(chunks):
        monkeypatch.setattr(module, "segment_chunks", lambda *_: chunks)

    return set_chunks


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", OPTIONS, ids=ids(OPTIONS))
def test_replay_equals_rows(sdm, device, case):
    inputs = make(case, device)
    rows = results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save="rows")
    replay = results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save="replay")
    assert_same_bits(replay, rows)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [None, (37, 0, 5, 8, 50), (8, 16, 24, 1), (0, 100)], ids=str)
@pytest.mark.parametrize("own_bank", [False, True])
def test_replay_over_several_segments(sdm, device, short_segments, chunks, lengths, own_bank):
    short_segments(chunks)
    for dtype in (F32, BF16):
        case = LONG.but(lengths=lengths, bank_per_sequence=own_bank, dtype=dtype)
        inputs = make(case, device)
        replay = results(sdm.chunk_sdm, inputs, chunk_size=8, save="replay")
        rows = results(sdm.chunk_sdm, inputs, chunk_size=8, save="rows")
        assert_same_bits(replay, rows)


@pytest.mark.parametrize("save", ["replay", "rows", *LOSSY])
@pytest.mark.parametrize("dim", [12, 64, 128, 200, 256, 300])
def test_few_tokens_in_a_large_bank(sdm, device, short_segments, save, dim):
    """Most rows are never touched, and a row is as wide as, or wider than, what is worked on."""
    short_segments(2)
    large = LONG.but(T=40, S=700, D=dim, W=3, R=3, ids="any", bank_per_sequence=True)
    for case in (large, large.but(lengths=(9, 0, 31)), large.but(bank_dtype=BF16)):
        inputs = make(case, device)
        got = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
        expected = results(sdm.chunk_sdm, inputs, chunk_size=8, save="rows")
        names = EXACT_IN_LOSSY if save in LOSSY else expected
        assert_same_bits({n: got[n] for n in names}, {n: expected[n] for n in names})
        bank = inputs.initial_state.clone()
        out = sdm.chunk_sdm_(bank, *inputs.tokens(), cu_seqlens=inputs.cu_seqlens, chunk_size=8)
        assert_same_bits(
            {"out": out, "final_state": bank}, {n: got[n] for n in ("out", "final_state")}
        )
    check_case(sdm, large.but(save=save) if save not in LOSSY else large, device)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 24, 25, 32, 33, 64])
def test_replay_around_segment_ends(sdm, device, short_segments, length):
    short_segments(2)
    check_case(sdm, LONG.but(T=length), device)


@pytest.mark.parametrize("case", [LONG, LONG.but(lengths=(37, 0, 63), bank_per_sequence=True)])
@pytest.mark.parametrize("save", LOSSY)
@pytest.mark.parametrize("bank", [F32, BF16, torch.float16], ids=str)
def test_rounded_rows(sdm, device, case, save, bank):
    inputs = make(case.but(bank_dtype=bank), device)
    exact = results(sdm.chunk_sdm, inputs, chunk_size=8, save="rows")
    got = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
    assert_same_bits(
        {name: got[name] for name in EXACT_IN_LOSSY},
        {name: exact[name] for name in EXACT_IN_LOSSY},
    )
    for name in set(exact) - set(EXACT_IN_LOSSY):
        assert relative_error(got[name], exact[name]) < BOUND[save], name
    if save == "bf16" and bank == BF16:
        assert_same_bits(got, exact)
    elif bank == F32:
        assert not torch.equal(got["d_write_val"], exact["d_write_val"])


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 33])
@pytest.mark.parametrize("save", LOSSY)
def test_rounded_rows_of_odd_width(sdm, device, dim, save):
    inputs = make(LONG.but(D=dim, ids="repeated", gate_per_write=True), device)
    exact = results(sdm.chunk_sdm, inputs, chunk_size=8, save="rows")
    got = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
    for name in set(exact) - set(EXACT_IN_LOSSY):
        assert relative_error(got[name], exact[name]) < BOUND[save], name


@pytest.mark.parametrize("save", LOSSY)
def test_rounded_rows_of_float64(sdm, device, save):
    inputs = make(LONG.but(dtype=torch.float64), device)
    got = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
    expected = reference_results(sdm, inputs)
    exact = {name: got[name] for name in EXACT_IN_LOSSY}
    assert_close(exact, {name: expected[name] for name in EXACT_IN_LOSSY}, "f64")


@pytest.mark.parametrize("save", LOSSY)
def test_rounded_rows_with_extreme_values(sdm, device, save):
    """Zero rows, tiny rows and rows near the largest float keep finite gradients."""
    inputs = make(LONG, device)
    for scale in (0.0, 1e-30, 1e30):
        scaled = inputs.map(lambda x, s=scale: x * s, ("v", "initial_state"))
        got = results(sdm.chunk_sdm, scaled, chunk_size=8, save=save)
        for name in FLOATS:
            assert got[f"d_{name}"].isfinite().all(), (name, scale)


def saved_bytes(fn):
    """Return the bytes that a call keeps for its backward, arguments included."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fn()
    return sum(kept.values())


def test_kept_memory(sdm, device):
    """The formulas of the docstring, as upper bounds."""
    B, T, H, S, D, W, C = 1, 512, 2, 64, 32, 4, 64
    inputs = make(Case("kept", B=B, T=T, H=H, S=S, D=D, W=W, R=W), device)
    leaves = inputs.map(lambda x: x.requires_grad_(), FLOATS)
    arguments = sum(x.nbytes for x in inputs.args()) - inputs.v.nbytes
    errors = B * T * H * D * 4
    rows = H * (T // C) * min(C * W, S)
    final = B * H * S * D * 4
    limits = {
        "replay": B * H * S * D * 4 * (T * W // max(4 * S, 32768)),
        "rows": rows * D * 4 + final,
        "bf16": rows * D * 2 + final,
        "fp8": rows * (D + 4) + final,
        "int4": rows * (D // 2 + 4) + final,
    }
    for save, limit in limits.items():
        kept = saved_bytes(lambda save=save: sdm.chunk_sdm(*leaves.args(), chunk_size=C, save=save))
        assert kept <= arguments + errors + limit + 64, save

    with torch.no_grad():
        assert saved_bytes(lambda: sdm.chunk_sdm(*leaves.args())) == 0
    assert saved_bytes(lambda: sdm.chunk_sdm(*inputs.map(torch.detach).args())) == 0
