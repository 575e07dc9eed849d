# SPDX-License-Identifier: Apache-2.0
"""Gradients of any size: all are linear in the incoming one, so powers of two pass through exactly."""

import pytest
import torch

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import weights_like

CASES = [
    Case("bf16", dtype=torch.bfloat16, T=45, S=40, D=72, W=4, R=3, chunk=16),
    Case("bf16 wide", dtype=torch.bfloat16, T=37, S=23, D=264, W=3, R=5, chunk=32),
    Case("f32", T=45, S=40, D=72, W=4, R=3, chunk=16),
    Case("f32 bank", dtype=torch.bfloat16, bank_dtype=torch.float32, T=33, D=40, chunk=16),
]


@pytest.fixture(params=CASES, ids=lambda case: case.id)
def case(request):
    return request.param


def gradients(sdm, case, device, save, factors):
    """Gradients of <out, W factors>, factors [T] or a number."""
    leaves = make(case, device).map(lambda x: x.detach().requires_grad_(), FLOATS)
    out, _ = sdm.chunk_sdm(*leaves.args(), chunk_size=case.chunk, save=save)
    weights = weights_like(out, 11)
    factors = torch.as_tensor(factors, device=device, dtype=out.dtype).reshape(-1, 1, 1)
    return dict(
        zip(
            FLOATS,
            torch.autograd.grad(out, [getattr(leaves, n) for n in FLOATS], weights * factors),
        )
    )


@pytest.mark.parametrize("save", ["replay", "rows"])
@pytest.mark.parametrize("power", [-60, 40])
def test_scaled_incoming_gradient(sdm, device, case, save, power):
    plain = gradients(sdm, case, device, save, 1.0)
    scaled = gradients(sdm, case, device, save, 2.0**power)
    assert_same_bits(scaled, {name: x * 2.0**power for name, x in plain.items()})
    assert all(x.abs().max() > 0 for x in scaled.values())


@pytest.mark.parametrize("save", ["replay", "rows"])
def test_tokens_of_different_size(sdm, device, case, save):
    """The gradient of a token's read weights depends on no other token's incoming gradient."""
    powers = 2.0 ** (torch.arange(case.T) * 37 % 81 - 40)
    plain = gradients(sdm, case, device, save, 1.0)["read_val"]
    scaled = gradients(sdm, case, device, save, powers)["read_val"]
    expected = plain * powers.to(plain.device, plain.dtype).reshape(-1, 1, 1)
    assert_same_bits([scaled], [expected])
    assert scaled.abs().amax(dim=(0, 2, 3)).min() > 0
