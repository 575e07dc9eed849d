# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: equal to separate calls, and nothing passes from one to the other."""

import pytest
import torch

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import check_case, results, weights_like

LENGTHS = [
    (1,),
    (37, 51, 40),
    (0, 0, 64, 0, 66, 0),
    (1, 2, 3, 1, 1),
    (16, 16),
    (8, 15, 17, 9),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("own_bank", [False, True])
@pytest.mark.parametrize("save", ["replay", "rows", "fp8"])
def test_packed_equals_separate(sdm, device, lengths, own_bank, save):
    case = Case("packed", lengths=lengths, S=32, D=8, W=4, R=4, bank_per_sequence=own_bank)
    inputs = make(case, device)
    got = results(sdm.chunk_sdm, inputs, chunk_size=16, save=save)
    cuts = inputs.cu_seqlens.tolist()
    bank_grads = []
    for n, (first, last) in enumerate(zip(cuts, cuts[1:])):
        alone = inputs.part(first, last)
        if own_bank:
            alone.initial_state = inputs.initial_state[n : n + 1]
        leaves = alone.map(lambda x: x.clone().requires_grad_(), FLOATS)
        out, state = sdm.chunk_sdm(
            *leaves.args(), output_final_state=True, chunk_size=16, save=save
        )
        assert_same_bits(got["out"][:, first:last], out)
        assert_same_bits(got["final_state"][n : n + 1], state)
        d_out = weights_like(got["out"], 11)[:, first:last]
        d_state = weights_like(got["final_state"], 12)[n : n + 1]
        torch.autograd.backward((out, state), (d_out, d_state))
        for name in FLOATS[:-1]:
            grad = getattr(leaves, name).grad
            assert_same_bits(got[f"d_{name}"][:, first:last], grad, f"d_{name}")
        bank_grads.append(leaves.initial_state.grad)
    if own_bank:
        assert_same_bits(got["d_initial_state"], torch.cat(bank_grads))
    else:
        torch.testing.assert_close(got["d_initial_state"], torch.stack(bank_grads).sum(0))


def test_against_reference(sdm, device):
    for lengths in LENGTHS:
        check_case(sdm, Case("packed", lengths=lengths, S=32, D=8, chunk=16), device)


def test_documents_do_not_leak(sdm, device):
    """Slow decay, one document disturbed: the others keep every bit, and their gradients."""
    case = Case("leak", lengths=(37, 51, 40), S=32, D=8, W=4, R=4, gate=-0.005)
    inputs = make(case, device)
    other = make(case, device, seed=1)
    disturbed = inputs.map(torch.clone)
    for name in ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val"):
        getattr(disturbed, name)[:, 37:88] = getattr(other, name)[:, 37:88]
    disturbed.v[:, 37:88] *= 1e3
    for save in ("replay", "rows"):
        before = results(sdm.chunk_sdm, inputs, chunk_size=16, save=save)
        after = results(sdm.chunk_sdm, disturbed, chunk_size=16, save=save)
        for name in ("out", *(f"d_{name}" for name in FLOATS[:-1])):
            for document in (slice(0, 37), slice(88, 128)):
                assert_same_bits(after[name][:, document], before[name][:, document], name)
        assert_same_bits(after["final_state"][[0, 2]], before["final_state"][[0, 2]])
        assert not torch.equal(after["out"][:, 37:88], before["out"][:, 37:88])


def test_gradient_stays_in_its_document(sdm, device):
    inputs = make(Case("leak", lengths=(37, 51, 40), S=32, D=8, W=4, R=4, gate=-0.005), device)
    leaves = inputs.map(lambda x: x.requires_grad_(), FLOATS)
    out, _ = sdm.chunk_sdm(*leaves.args(), cu_seqlens=inputs.cu_seqlens)
    out[:, 88:].square().sum().backward()
    for name in FLOATS[:-1]:
        grad = getattr(leaves, name).grad
        assert (grad[:, :88] == 0).all(), name
        assert (grad[:, 88:] != 0).any(), name


def test_many_short_documents(sdm, device):
    """Hundreds of documents, several of them in the time of one chunk."""
    lengths = (3,) * 150
    inputs = make(Case("many", lengths=lengths, S=16, D=4, H=1, bank_per_sequence=True), device)
    whole = results(sdm.chunk_sdm, inputs)
    batched = inputs.map(
        lambda x: x.view(150, 3, *x.shape[2:]),
        ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val"),
    )
    batched.cu_seqlens = None
    got = sdm.chunk_sdm(*batched.args(), output_final_state=True)
    assert_same_bits(got[0].view_as(whole["out"]), whole["out"])
    assert_same_bits(got[1], whole["final_state"])
