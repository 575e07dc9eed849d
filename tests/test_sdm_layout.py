# SPDX-License-Identifier: Apache-2.0
"""Strided, expanded, shifted and poisoned arguments give the bits of contiguous copies."""

import pytest
import torch

from .helpers.cases import ORDER, Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import results
from .helpers.poison import LAYOUTS, fused, poisoned, transposed

CASE = Case("layout", T=21, D=8, W=4, R=4, gate_per_write=True, bank_per_sequence=True)


def applicable(layout, x):
    return not (layout is fused and x.dim() < 4) and not (layout is transposed and x.dim() < 3)


def run(sdm, inputs, **options):
    """Return results with leaves that keep the layout of the inputs."""
    return results(sdm.chunk_sdm, inputs, chunk_size=8, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("name", ORDER)
def test_one_argument(sdm, device, layout, name):
    inputs = make(CASE, device)
    if not applicable(layout, getattr(inputs, name)):
        pytest.skip("needs more dimensions")
    expected = run(sdm, inputs)
    laid_out = inputs.map(layout, (name,))
    assert torch.equal(getattr(laid_out, name), getattr(inputs, name))
    assert_same_bits(run(sdm, laid_out), expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save": "rows"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64},
        {"gate_per_write": False, "bank_per_sequence": False},
        {"lengths": (5, 0, 16), "write_int": torch.int32},
    ],
    ids=str,
)
def test_all_arguments(sdm, device, layout, changes):
    case = CASE.but(**changes)
    inputs = make(case, device)
    laid_out = inputs.map(lambda x: layout(x) if applicable(layout, x) else poisoned(x))
    expected = run(sdm, inputs, save=case.save)
    assert_same_bits(run(sdm, laid_out, save=case.save), expected)


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_unaligned_storage(sdm, device, offset):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = make(CASE.but(dtype=dtype, D=16), device)

        def shift(x):
            big = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
            return big[offset:].view(x.shape).copy_(x)

        assert_same_bits(run(sdm, inputs.map(shift)), run(sdm, inputs))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded(sdm, device, dim):
    """A stride of 0 in batch, time or head."""
    inputs = make(CASE, device)
    names = ORDER[:-1]

    def expand(x):
        return x.narrow(dim, 0, 1).expand(x.shape)

    expanded = inputs.map(expand, names)
    contiguous = expanded.map(torch.Tensor.contiguous, names)
    for save in ("replay", "rows"):
        assert_same_bits(run(sdm, expanded, save=save), run(sdm, contiguous, save=save))


def test_expanded_bank(sdm, device):
    inputs = make(CASE.but(bank_per_sequence=False), device)
    own = inputs.map(lambda x: x.expand(2, *x.shape), ("initial_state",))
    copy = own.map(torch.Tensor.contiguous, ("initial_state",))
    assert_same_bits(run(sdm, own), run(sdm, copy))


@pytest.mark.parametrize("fn", ["recurrent_sdm_", "chunk_sdm_"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
def test_in_place_functions(sdm, device, fn, layout):
    inputs = make(CASE, device)
    laid_out = inputs.map(layout, [name for name in ORDER[:-1] if name != "beta"])
    state, other = inputs.initial_state.clone(), poisoned(inputs.initial_state)
    expected = getattr(sdm, fn)(state, *inputs.tokens())
    assert_same_bits(getattr(sdm, fn)(other, *laid_out.tokens()), expected)
    assert_same_bits(other, state)


def test_nothing_past_the_end_is_read(sdm, device):
    """Views of the valid part of buffers whose rest is NaN, at lengths around chunk ends."""
    for length in (1, 63, 64, 65, 127):
        for lengths in (None, (length // 2, 0, length - length // 2)):
            case = Case("tail", B=1, T=length, lengths=lengths, S=32, D=16, W=4, R=4)
            inputs = make(case, device)
            got = results(sdm.chunk_sdm, inputs.map(poisoned), chunk_size=64)
            assert all(x.isfinite().all() for x in got.values())
            assert_same_bits(got, results(sdm.chunk_sdm, inputs, chunk_size=64))
