# SPDX-License-Identifier: Apache-2.0
"""Fresh memory full of NaN: nothing is read before it is written, and every result is written."""

import pytest
import torch

from .helpers.calls import CALLS
from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits


@pytest.fixture
def filled(device):
    """Make torch hand out memory full of NaN, or of ones in the bits of integers."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True

    def switch(on):
        torch.use_deterministic_algorithms(on)
        assert not on or torch.empty(3, device=device).isnan().all()

    yield switch
    switch(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_same_bits(sdm, device, filled, call):
    arguments = call.draw(device)
    expected = [x.clone() for x in call.run(sdm, arguments)]
    filled(True)
    got = call.run(sdm, arguments)
    filled(False)
    assert_same_bits(list(got), expected)


@pytest.mark.parametrize(
    "changes", [{"T": 0}, {"B": 0}, {"lengths": (0, 0)}, {"lengths": (3, 0, 2)}]
)
def test_empty_calls_write_their_results(sdm, device, filled, changes):
    inputs = make(Case(**changes), device)
    leaves = inputs.map(lambda x: x.requires_grad_(), ("v", "initial_state"))
    filled(True)
    out, state = sdm.chunk_sdm(
        *leaves.args(), cu_seqlens=inputs.cu_seqlens, output_final_state=True
    )
    grads = torch.autograd.grad((out.sum(), state.sum()), (leaves.v, leaves.initial_state))
    filled(False)
    for x in (out, state, *grads):
        assert x.isfinite().all()
