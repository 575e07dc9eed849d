# SPDX-License-Identifier: Apache-2.0
"""Strided, expanded, shifted and poisoned arguments give the bits of contiguous copies."""

import pytest
import torch

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import ALL, TOKENS, KdaCase, make
from .helpers.kda_grads import results
from .helpers.poison import LAYOUTS, fused, poisoned, transposed

CASE = KdaCase("layout", T=41, H=2, HV=2, K=16, V=32)


def applicable(layout, x):
    least = {fused: 4, transposed: 3}.get(layout, 1)
    return x.dim() >= least


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("name", ALL)
def test_one_argument(sdm, device, layout, name):
    inputs = make(CASE, device)
    if not applicable(layout, getattr(inputs, name)):
        pytest.skip("needs more dimensions")
    expected = results(sdm.chunk_kda, inputs)
    laid_out = inputs.map(layout, (name,))
    assert torch.equal(getattr(laid_out, name), getattr(inputs, name))
    assert_same_bits(results(sdm.chunk_kda, laid_out), expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.bfloat16, "gate_dtype": torch.float32},
        {"dtype": torch.float16, "K": 128, "V": 128, "form": "softplus"},
        {"dtype": torch.float64},
        {"lengths": (5, 0, 36), "integer": torch.int32, "v_first": True},
        {"state_dtype": torch.bfloat16, "v_first": True},
    ],
    ids=str,
)
def test_all_arguments(sdm, device, layout, changes):
    inputs = make(CASE.but(**changes), device)
    laid_out = inputs.map(lambda x: layout(x) if applicable(layout, x) else poisoned(x))
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        assert_same_bits(results(fn, laid_out), results(fn, inputs))


@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_unaligned_storage(sdm, device, offset):
    def shift(x):
        big = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
        return big[offset:].view(x.shape).copy_(x)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = make(CASE.but(dtype=dtype, K=64, V=64, T=70), device)
        assert_same_bits(results(sdm.chunk_kda, inputs.map(shift)), results(sdm.chunk_kda, inputs))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded(sdm, device, dim):
    """A stride of 0 in batch, time or head."""
    inputs = make(CASE, device)
    names = (*TOKENS, *(("initial_state",) if dim == 0 else ()))
    expanded = inputs.map(lambda x: x.narrow(dim, 0, 1).expand(x.shape), names)
    contiguous = expanded.map(torch.Tensor.contiguous, names)
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        assert_same_bits(results(fn, expanded), results(fn, contiguous))


def test_heads_first(sdm, device):
    """``[B, H, T, D]`` storage, and q, k, v as slices of one projection."""
    inputs = make(CASE, device)
    expected = results(sdm.chunk_kda, inputs)
    qkv = torch.cat([inputs.q, inputs.k, inputs.v[..., :16]], dim=-1)
    sliced = inputs.map(lambda x: x)
    sliced.q, sliced.k = qkv[..., :16], qkv[..., 16:32]
    assert_same_bits(results(sdm.chunk_kda, sliced.map(transposed, TOKENS)), expected)
    assert_same_bits(results(sdm.chunk_kda, sliced), expected)


def test_strided_inputs_are_not_copied(sdm, device, monkeypatch):
    """Slices whose last dimension is dense go to the op as they are."""
    inputs = make(CASE, device)
    laid_out = inputs.map(poisoned, (*TOKENS, "initial_state"))
    seen = []
    module = sdm.kda
    own = module.ops.kda_chunk_fwd

    class Spy:
        def __getattr__(self, name):
            return getattr(module_ops, name)

        def kda_chunk_fwd(self, *args):
            seen.extend(x.data_ptr() for x in args[:5])
            seen.append(args[7].data_ptr())
            return own(*args)

    module_ops = module.ops
    monkeypatch.setattr(module, "ops", Spy())
    results(sdm.chunk_kda, laid_out, grad=False)
    names = (*TOKENS, "initial_state")
    assert seen == [getattr(laid_out, name).data_ptr() for name in names]


def test_nothing_past_the_end_is_read(sdm, device):
    """Views of the valid part of buffers whose rest is NaN, at lengths around chunk ends."""
    for length in (1, 15, 63, 64, 65, 127):
        for lengths in (None, (length // 2, 0, length - length // 2)):
            for dtype in (torch.float32, torch.bfloat16):
                case = KdaCase("tail", B=1, T=length, lengths=lengths, dtype=dtype)
                inputs = make(case, device)
                got = results(sdm.chunk_kda, inputs.map(poisoned))
                assert all(x.isfinite().all() for x in got.values())
                assert_same_bits(got, results(sdm.chunk_kda, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [None, (30, 0, 40, 1)])
def test_nothing_past_the_end_is_written(sdm, device, lengths, dtype):
    """Results land in memory that was freed between guards; the guards stay as they were."""
    inputs = make(CASE.but(T=71, lengths=lengths, dtype=dtype), device)
    expected = results(sdm.chunk_kda, inputs, disable_recompute=True)
    sizes = [x.nbytes for x in expected.values()]
    guards, gaps = [], []
    for size in sizes * 8:
        gaps.append(torch.empty(size, dtype=torch.uint8, device=device))
        guards.append(torch.full((4096,), 77, dtype=torch.uint8, device=device))
    gaps.clear()
    got = results(sdm.chunk_kda, inputs, disable_recompute=True)
    assert_same_bits(got, expected)
    assert all((guard == 77).all() for guard in guards)
