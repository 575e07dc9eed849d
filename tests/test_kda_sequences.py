# SPDX-License-Identifier: Apache-2.0
"""Packed sequences, causality and hand-over of states: bit by bit where that is promised."""

import pytest
import torch

from .helpers.compare import assert_close, assert_same_bits
from .helpers.grads import weights_like
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import check_case, limits_of, reference_results, results

BASE = KdaCase("packed", H=1, HV=2, K=32, V=16)
LENGTHS = [
    (1,),
    (37, 51, 40),
    (0, 0, 64, 0, 66, 0),
    (1, 2, 3, 1, 1),
    (16, 16),
    (0, 1, 15, 16, 17, 63, 64, 65),
]
DTYPES = (torch.float32, torch.bfloat16)
PER_TOKEN = tuple(f"d_{name}" for name in TOKENS)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("options", [{}, {"disable_recompute": True}, {"chunk_size": 16}], ids=str)
def test_packed_equals_separate(sdm, device, lengths, dtype, options):
    inputs = make(BASE.but(lengths=lengths, dtype=dtype), device)
    got = results(sdm.chunk_kda, inputs, **options)
    cuts = inputs.cu_seqlens.tolist()
    for n, (first, last) in enumerate(zip(cuts, cuts[1:])):
        alone = inputs.part(first, last)
        alone.initial_state = inputs.initial_state[n : n + 1]
        leaves = alone.map(lambda x: x.detach().clone().requires_grad_())
        out, state = sdm.chunk_kda(
            *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
            **leaves.keywords(), **options,
        )  # fmt: skip
        assert_same_bits(got["out"][:, first:last], out)
        assert_same_bits(got["final_state"][n : n + 1], state)
        d_out = weights_like(got["out"], 11)[:, first:last]
        d_state = weights_like(got["final_state"], 12)[n : n + 1]
        torch.autograd.backward((out, state), (d_out, d_state))
        for name in TOKENS:
            grad = getattr(leaves, name).grad
            assert_same_bits(got[f"d_{name}"][:, first:last], grad, f"d_{name}")
        assert_same_bits(got["d_initial_state"][n : n + 1], leaves.initial_state.grad)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_against_reference(sdm, device, lengths):
    check_case(sdm, BASE.but(lengths=lengths), device)
    check_case(sdm, BASE.but(lengths=lengths, form="softplus", dtype=torch.bfloat16), device)
    check_case(sdm, BASE.but(lengths=lengths, initial=False), device, fn=sdm.fused_recurrent_kda)


def test_long_sequence_among_short_ones(sdm, device):
    lengths = (0, 1, 4097, 16, 65) if device.type == "cuda" else (0, 1, 1025, 16, 65)
    for dtype in DTYPES:
        inputs = make(BASE.but(lengths=lengths, K=64, V=64, dtype=dtype), device)
        whole = results(sdm.chunk_kda, inputs)
        start, stop = 1, 1 + lengths[2]
        alone = inputs.part(start, stop)
        alone.initial_state = inputs.initial_state[2:3]
        got = results(sdm.chunk_kda, alone, grad=False)
        assert_same_bits(whole["out"][:, start:stop], got["out"])
        assert_same_bits(whole["final_state"][2:3], got["final_state"])
        assert all(x.isfinite().all() for x in whole.values())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [(0, 0, 64, 0, 66, 0), (0, 0), ()], ids=str)
def test_empty_sequences(sdm, device, lengths, state_dtype):
    """The state passes through, bit for bit; so does its gradient; without one it is zero."""
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        inputs = make(BASE.but(lengths=lengths, state_dtype=state_dtype), device)
        leaves = inputs.map(lambda x: x.requires_grad_())
        out, state = fn(
            *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
            **leaves.keywords(),
        )  # fmt: skip
        d_state = torch.randn_like(state)
        torch.autograd.backward((out, state), (torch.ones_like(out), d_state))
        for n, length in enumerate(lengths):
            if length == 0:
                assert_same_bits(state[n], inputs.initial_state[n].float())
                grad = leaves.initial_state.grad[n]
                assert_same_bits(grad, d_state[n].to(state_dtype))
        assert out.shape == (1, sum(lengths), 2, 16)
        assert all(getattr(leaves, name).grad.isfinite().all() for name in inputs.names())
        empty = make(BASE.but(lengths=lengths, initial=False), device)
        _, state = fn(*empty.tokens(), output_final_state=True, **empty.keywords())
        assert all((state[n] == 0).all() for n, length in enumerate(lengths) if length == 0)


@pytest.mark.parametrize("shape", [{"T": 0}, {"B": 0}, {"B": 0, "T": 0}], ids=str)
def test_no_tokens_at_all(sdm, device, shape):
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        got = results(fn, make(BASE.but(**shape), device))
        assert got["out"].numel() == 0
        assert (got["d_A_log"] == 0).all() and (got["d_dt_bias"] == 0).all()
        for name, x in got.items():
            assert x.isfinite().all(), name


def test_documents_do_not_leak(sdm, device):
    """Slow decay, one document disturbed: the others keep every bit, and their gradients."""
    case = BASE.but(lengths=(37, 51, 40), form="activated", decay=-0.005)
    inputs, other = make(case, device), make(case, device, seed=1)
    disturbed = inputs.map(torch.clone)
    for name in TOKENS:
        getattr(disturbed, name)[:, 37:88] = getattr(other, name)[:, 37:88]
    disturbed.v[:, 37:88] *= 1e3
    before, after = results(sdm.chunk_kda, inputs), results(sdm.chunk_kda, disturbed)
    for name in ("out", *PER_TOKEN):
        for document in (slice(0, 37), slice(88, 128)):
            assert_same_bits(after[name][:, document], before[name][:, document], name)
    assert_same_bits(after["final_state"][[0, 2]], before["final_state"][[0, 2]])
    assert not torch.equal(after["out"][:, 37:88], before["out"][:, 37:88])


def test_gradient_stays_in_its_document(sdm, device):
    inputs = make(BASE.but(lengths=(37, 51, 40)), device)
    leaves = inputs.map(lambda x: x.requires_grad_())
    out, _ = sdm.chunk_kda(*leaves.tokens(), **leaves.keywords())
    out[:, 88:].square().sum().backward()
    for name in TOKENS:
        grad = getattr(leaves, name).grad
        assert (grad[:, :88] == 0).all(), name
        assert (grad[:, 88:] != 0).any(), name


def test_many_short_documents(sdm, device):
    """Hundreds of documents, several of them in the time of one chunk."""
    count, heads = (2050, 32) if device.type == "cuda" else (150, 1)
    case = BASE.but(lengths=(3,) * count, K=16, H=heads, HV=heads)
    inputs = make(case, device)
    whole = results(sdm.chunk_kda, inputs)
    batched = inputs.map(lambda x: x.view(count, 3, *x.shape[2:]), TOKENS)
    batched.cu_seqlens = None
    got = results(sdm.chunk_kda, batched, grad=False)
    assert_same_bits(got["out"].view_as(whole["out"]), whole["out"])
    assert_same_bits(got["final_state"], whole["final_state"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [1, 8, 15, 16, 62, 63, 64, 65, 100])
@pytest.mark.parametrize("form", ["activated", "softplus", "bounded"])
def test_causality(sdm, device, cut, form, dtype):
    """Later tokens, their gates included and however wild, leave earlier outputs every bit."""
    case = KdaCase("causal", B=1, T=130, K=16, V=32, form=form, dtype=dtype)
    inputs, other = make(case, device), make(case, device, seed=1)
    changed = inputs.map(torch.clone)
    for name in TOKENS:
        getattr(changed, name)[:, cut:] = getattr(other, name)[:, cut:]
    changed.v[:, cut:] *= 1e3
    if form == "activated":
        changed.g[:, cut:] *= 30
    for fn, chunks in ((sdm.chunk_kda, (16, 32, 64)), (sdm.fused_recurrent_kda, (None,))):
        for chunk in chunks:
            options = {} if chunk is None else {"chunk_size": chunk}
            before = results(fn, inputs, grad=False, **options)
            after = results(fn, changed, grad=False, **options)
            assert_same_bits(after["out"][:, :cut], before["out"][:, :cut])
            assert not torch.equal(after["out"][:, cut:], before["out"][:, cut:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", TOKENS)
def test_bad_value_does_not_reach_earlier_tokens(sdm, device, name, bad):
    if torch.device(device).type == "cuda":
        pytest.skip("on CUDA it spoils its chunk: docs/kda.md")
    inputs = make(KdaCase("bad", B=1, T=130, K=16, V=32), device)
    changed = inputs.map(torch.clone)
    getattr(changed, name)[:, 70] = bad
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        before = results(fn, inputs, grad=False)
        after = results(fn, changed, grad=False)
        assert_same_bits(after["out"][:, :70], before["out"][:, :70])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 128, 140])
def test_prefix(sdm, device, length, dtype):
    """A longer call gives its first tokens the bits of a shorter one."""
    inputs = make(KdaCase("prefix", T=150, K=32, V=32, dtype=dtype), device)
    whole = results(sdm.chunk_kda, inputs, grad=False)
    part = results(sdm.chunk_kda, inputs.part(0, length), grad=False)
    assert_same_bits(part["out"], whole["out"][:, :length])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [1, 62, 64, 128, 130])
def test_hand_over(sdm, device, cut, dtype):
    """Two chained calls, the state's gradient through both, equal one call within the limits."""
    inputs = make(KdaCase("chain", T=192, H=1, HV=3, K=64, V=32, dtype=dtype), device)

    def chained(*tokens, initial_state, output_final_state, **options):
        outs, state = [], initial_state
        for part in (slice(0, cut), slice(cut, None)):
            out, state = sdm.chunk_kda(
                *(x[:, part] for x in tokens), initial_state=state, output_final_state=True,
                **options,
            )  # fmt: skip
            outs.append(out)
        return torch.cat(outs, 1), state

    expected = reference_results(sdm, inputs)
    assert_close(results(chained, inputs), expected, limits_of(inputs))
    if dtype == torch.float32:
        one = results(sdm.chunk_kda, inputs)
        assert_close(results(chained, inputs), one, "kda-f32")


@pytest.mark.parametrize("prompt", [1, 63, 64, 65])
def test_prefill_then_decode(sdm, device, prompt):
    inputs = make(KdaCase("decode", T=prompt + 5, K=32, V=32), device)
    expected = results(sdm.chunk_kda, inputs, grad=False)
    first = inputs.part(0, prompt)
    out, state = sdm.chunk_kda(
        *first.tokens(), initial_state=first.initial_state, output_final_state=True,
        **first.keywords(),
    )  # fmt: skip
    outs = [out]
    for t in range(prompt, prompt + 5):
        token = inputs.part(t, t + 1)
        outs.append(sdm.recurrent_kda_(state, *token.tokens(), **token.keywords()))
    got = {"out": torch.cat(outs, 1), "final_state": state}
    assert_close(got, expected, "kda-f32")
