# SPDX-License-Identifier: Apache-2.0
"""All gradients of chunk_sdm against autograd through the float64 reference."""

import pytest
import torch

from .helpers.cases import FLOATS, Case, ids, make
from .helpers.compare import assert_close, assert_same_bits
from .helpers.grads import check_case, reference_results, results, weights_like
from .test_sdm_forward import BASE, F64, OPTIONS, SIZES


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", OPTIONS + SIZES, ids=ids(OPTIONS + SIZES))
def test_backward(sdm, device, case):
    check_case(sdm, case, device)


@pytest.mark.parametrize("case", OPTIONS, ids=ids(OPTIONS))
def test_backward_from_saved_rows(sdm, device, case):
    check_case(sdm, case.but(save="rows"), device)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 31, 33, 63, 64, 65])
@pytest.mark.parametrize("chunk", [16, 64])
def test_short_lengths(sdm, device, length, chunk):
    case = Case("short", T=length, chunk=chunk, S=24, D=8, W=4, R=3, bank_per_sequence=True)
    check_case(sdm, case, device)


@pytest.mark.parametrize("chunk", [1, 2, 7, 32, 63, 100, 129, 512])
def test_chunk_sizes(sdm, device, chunk):
    check_case(sdm, Case("chunks", B=1, T=129, chunk=chunk, S=24, D=8, W=4, R=3), device)


@pytest.mark.parametrize("through", [("out",), ("final_state",)])
@pytest.mark.parametrize("lengths", [None, (6, 0, 13)])
@pytest.mark.parametrize("save", ["replay", "rows"])
def test_loss_on_one_output(sdm, device, through, lengths, save):
    check_case(sdm, BASE.but(lengths=lengths, save=save), device, through=through)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("save", ["replay", "rows"])
def test_one_gradient_at_a_time(sdm, device, name, save):
    inputs = make(BASE, device)
    everything = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
    only = results(sdm.chunk_sdm, inputs, only=(name,), chunk_size=8, save=save)
    assert_same_bits(only, {key: everything[key] for key in only})

    leaves = inputs.map(lambda x: x.clone().requires_grad_(), (name,))
    out, _ = sdm.chunk_sdm(*leaves.args())
    out.sum().backward()
    for other in FLOATS:
        assert (getattr(leaves, other).grad is None) == (other != name)


@pytest.mark.parametrize(
    "case",
    [
        Case("g", dtype=F64, chunk=2),
        Case("w", dtype=F64, chunk=3, ids="repeated", W=4, gate_per_write=True),
        Case("packed", dtype=F64, chunk=2, ids="unused", lengths=(2, 0, 3), bank_per_sequence=True),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("save", ["replay", "rows"])
def test_gradcheck(sdm, device, case, save):
    inputs = make(case.but(B=1, T=5, H=1, S=5, D=2), device)
    leaves = [getattr(inputs, name).requires_grad_() for name in FLOATS]

    def fn(write_val, v, beta, g, read_val, bank):
        return sdm.chunk_sdm(
            inputs.write_idx, write_val, v, beta, g, inputs.read_idx, read_val, bank,
            cu_seqlens=inputs.cu_seqlens, output_final_state=True, chunk_size=case.chunk, save=save,
        )  # fmt: skip

    assert torch.autograd.gradcheck(fn, leaves)


def test_chained_calls(sdm, device):
    """Two calls, the second starting from the first one's final state, are one call."""
    inputs = make(Case("chain", T=192, H=2, S=64, D=32, W=4, R=4, bank_per_sequence=True), device)

    def chained(*args, cu_seqlens=None, output_final_state=True):
        *tokens, state = args
        first = [x[:, :130] for x in tokens]
        second = [x[:, 130:] for x in tokens]
        out1, state = sdm.chunk_sdm(*first, state, output_final_state=True)
        out2, state = sdm.chunk_sdm(*second, state, output_final_state=True)
        return torch.cat([out1, out2], 1), state

    for through in (("out",), ("final_state",), ("out", "final_state")):
        one = results(sdm.chunk_sdm, inputs, through=through)
        assert_close(results(chained, inputs, through=through), one, "f32")
        assert_close(one, reference_results(sdm, inputs, through=through), "f32")


def test_unused_lane_weights_get_zero(sdm, device):
    inputs = make(BASE.but(ids="unused", gate_per_write=True), device)
    got = results(sdm.chunk_sdm, inputs, chunk_size=8)
    outside = (inputs.write_idx < 0) | (inputs.write_idx >= BASE.S)
    assert (got["d_write_val"][outside] == 0).all()
    assert (got["d_g"][outside] == 0).all()
    outside = (inputs.read_idx < 0) | (inputs.read_idx >= BASE.S)
    assert (got["d_read_val"][outside] == 0).all()


def test_repeated_lanes_get_no_gate_gradient(sdm, device):
    """The gate of a repeated slot is that of its lowest lane; the others have no influence."""
    inputs = make(Case("repeats", W=4, S=9, gate_per_write=True), device)
    inputs.write_idx[..., 2] = inputs.write_idx[..., 0]
    got = results(sdm.chunk_sdm, inputs, chunk_size=8)
    assert (got["d_g"][..., 2] == 0).all()
    assert (got["d_g"][..., 0] != 0).all()
    assert_close(got, reference_results(sdm, inputs), "f32")


def test_empty_sequence_passes_its_gradient_through(sdm, device):
    inputs = make(Case("empty", lengths=(0, 0, 64, 0, 66), bank_per_sequence=True), device)
    got = results(sdm.chunk_sdm, inputs)
    incoming = weights_like(inputs.initial_state, 12)
    for n in (0, 1, 3):
        assert_same_bits(got["d_initial_state"][n], incoming[n])


def test_shared_bank_gradient_adds_up(sdm, device):
    """The gradient of a shared bank is the sum over sequences, also of those that touch nothing."""
    shared = make(Case("shared", B=3, S=40, D=4, T=5), device)
    own = shared.map(lambda x: x.expand(3, *x.shape), ("initial_state",))
    got = results(sdm.chunk_sdm, shared)
    each = results(sdm.chunk_sdm, own)
    torch.testing.assert_close(got["d_initial_state"], each["d_initial_state"].sum(0))
    assert_same_bits(got["d_v"], each["d_v"])


@pytest.mark.parametrize("save", ["replay", "rows", "bf16", "fp8", "int4"])
def test_expanded_and_sliced_incoming_gradients(sdm, device, save):
    inputs = make(BASE.but(bank_per_sequence=True), device)
    leaves = inputs.map(lambda x: x.requires_grad_(), FLOATS)
    out, state = sdm.chunk_sdm(*leaves.args(), output_final_state=True, save=save)
    wanted = [getattr(leaves, name) for name in FLOATS]

    def grads(d_out, d_state):
        return torch.autograd.grad((out, state), wanted, (d_out, d_state), retain_graph=True)

    one = torch.ones((), device=device)
    dense = grads(torch.ones_like(out), torch.ones_like(state))
    assert_same_bits(grads(one.expand(out.shape), one.expand(state.shape)), dense)
    d_out, d_state = weights_like(out, 1), weights_like(state, 2)
    dense = grads(d_out, d_state)
    views = [torch.stack([x, x * float("nan")], -1)[..., 0] for x in (d_out, d_state)]
    assert_same_bits(grads(*views), dense)
