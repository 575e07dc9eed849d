# SPDX-License-Identifier: Apache-2.0
"""Generation with the mixer: prefill, decode, reset; training in segments."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .helpers.plain_mixer import OPTIONS, config_of, plain_forward, randomize


def close(a, b, tol=2e-5):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def build(sdm, device, **changes):
    """Return a mixer in eval mode (batch statistics would look ahead)."""
    return randomize(sdm.SparseDeltaMemory(config_of(sdm, **changes))).to(device).eval()


def feed(mixer, state, x, lengths):
    """Give x to the mixer in pieces of the given lengths; returns the outputs in one tensor."""
    with torch.no_grad():
        return torch.cat([mixer(part, state)[0] for part in x.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("option", OPTIONS)
def test_prefill_and_decode_equal_one_call(sdm, device, option):
    mixer = build(sdm, device, **OPTIONS[option])
    x = torch.randn(2, 90, 24, device=device)
    expected, bank = plain_forward(sdm, mixer, x)
    state = mixer.init_state(2)
    y = feed(mixer, state, x, [65, 1, 1, 3, 16, 4])
    close(y, expected)
    close(state.bank, bank)
    assert state.count.tolist() == [90, 90]


@pytest.mark.parametrize("prefill", [1, 63, 64, 65])
def test_every_prefill_length(sdm, device, prefill):
    mixer = build(sdm, device)
    x = torch.randn(1, prefill + 3, 24, device=device)
    state = mixer.init_state(1)
    close(feed(mixer, state, x, [prefill, 1, 1, 1]), mixer(x)[0], 1e-5)


def test_single_steps_and_several_steps_give_the_same_bits(sdm, device):
    # Of the recurrence; the projections may round otherwise for other numbers of rows.
    mixer = build(sdm, device)
    x = torch.randn(1, 8, 24, device=device)
    one, many = mixer.init_state(1), mixer.init_state(1)
    close(feed(mixer, one, x, [1] * 8), feed(mixer, many, x, [8]), 1e-6)
    close(one.bank, many.bank, 1e-6)


def test_state_is_advanced_in_place(sdm, device):
    mixer = build(sdm, device)
    state = mixer.init_state(2, count=7)
    bank, count = state.bank, state.count
    memory = mixer.memory.detach().clone()
    with torch.no_grad():
        for length in (1, 40):
            _, same = mixer(torch.randn(2, length, 24, device=device), state)
            assert same is state and state.bank is bank and state.count is count
    assert state.count.tolist() == [48, 48]
    assert torch.equal(mixer.memory, memory), "the learned bank must not change"
    assert not torch.equal(bank[0], bank[1])


def test_two_dimensional_steps(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(3, 1, 24, device=device)
    a, b = mixer.init_state(3), mixer.init_state(3)
    with torch.no_grad():
        y, _ = mixer(x, a)
        flat, _ = mixer(x[:, 0], b, seq_len=1)
    assert flat.shape == (3, 24)
    assert torch.equal(flat, y[:, 0]) and torch.equal(a.bank, b.bank)


def test_packed_prefill(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(1, 30, 24, device=device)
    offsets = torch.tensor([0, 11, 11, 30], device=device)
    state = mixer.init_state(3)
    with torch.no_grad():
        y, _ = mixer(x, state, offsets)
    assert state.count.tolist() == [11, 0, 19]
    assert torch.equal(state.bank[1], mixer.initial_bank())
    for n, (first, last) in enumerate([(0, 11), (11, 30)]):
        expected, bank = plain_forward(sdm, mixer, x[:, first:last])
        close(y[:, first:last], expected)
        close(state.bank[2 * n], bank[0])


@pytest.mark.parametrize("learned", [True, False])
def test_reset_goes_back_to_the_initial_bank(sdm, device, learned):
    mixer = build(sdm, device, backprop_on_memory=learned)
    x = torch.randn(2, 20, 24, device=device)
    state = mixer.init_state(2)
    first = feed(mixer, state, x, [18, 1, 1])
    assert state.reset() is state
    assert torch.equal(state.bank, mixer.initial_bank().expand_as(state.bank))
    assert state.count.tolist() == [0, 0]
    assert torch.equal(feed(mixer, state, x, [18, 1, 1]), first)
    if learned:  # it is the bank as learned by now
        with torch.no_grad():
            mixer.memory += 1
        assert torch.equal(state.reset().bank[1], mixer.initial_bank())


@pytest.mark.kernels_ci
@pytest.mark.parametrize("rows", [[1], [False, True, False]])
def test_reset_of_some_sequences(sdm, device, rows):
    mixer = build(sdm, device)
    state = mixer.init_state(3)
    feed(mixer, state, torch.randn(3, 20, 24, device=device), [20])
    before = state.bank.clone()
    state.reset(torch.tensor(rows, device=device))
    assert state.count.tolist() == [20, 0, 20]
    assert torch.equal(state.bank[1], mixer.initial_bank())
    assert torch.equal(state.bank[::2], before[::2])


def test_initial_bank_of_the_caller(sdm, device):
    mixer = build(sdm, device)
    bank = torch.randn(2, *mixer.initial_bank().shape, device=device)
    state = mixer.init_state(2, initial_bank=bank)
    assert torch.equal(state.bank, bank) and state.bank is not bank
    x = torch.randn(2, 20, 24, device=device)
    close(feed(mixer, state, x, [20]), plain_forward(sdm, mixer, x, bank)[0])
    state.reset(torch.tensor([1]))
    assert torch.equal(state.bank[1], bank[1]) and not torch.equal(state.bank[0], bank[0])


def test_dtypes_of_the_bank(sdm, device):
    mixer = build(sdm, device)
    assert mixer.init_state(1).bank.dtype == torch.float32
    low = mixer.init_state(1, dtype=torch.bfloat16)
    assert low.bank.dtype == torch.bfloat16
    x = torch.randn(1, 20, 24, device=device)
    y = feed(mixer, low, x, [18, 2])
    assert y.dtype == torch.float32
    close(y, mixer(x)[0], 0.1)


def test_conveniences(sdm, device):
    mixer = build(sdm, device)
    state = mixer.init_state(2)
    assert len(state) == 1 and state[0] is state.bank and list(state) == [state.bank]
    assert state.batch_size == 2 and "bank=(2, 2, 36, 12)" in repr(state)
    with pytest.raises(IndexError):
        state[1]
    other = state.clone()
    bank = torch.randn_like(state.bank).requires_grad_()
    held = state.bank
    assert state.update(bank, 3) is state
    assert state.bank is held and torch.equal(held, bank) and not held.requires_grad
    assert state.count.tolist() == [3, 3]
    assert torch.equal(other.bank[0], mixer.initial_bank()) and other.count.tolist() == [0, 0]
    feed(mixer, other, torch.randn(2, 1, 24, device=device), [1])
    assert torch.equal(copy.deepcopy(other).bank, other.bank)
    alone = sdm.SparseDeltaMemoryState(2, 2, 36, 12, device=device)
    assert not alone.bank.any()


def test_any_object_with_bank_and_count_is_a_state(sdm, device):
    class Cache:
        pass

    mixer = build(sdm, device)
    x = torch.randn(1, 3, 24, device=device)
    cache, state = Cache(), mixer.init_state(1)
    cache.bank, cache.count = state.bank.clone(), 0
    with torch.no_grad():
        assert torch.equal(mixer(x, cache)[0], mixer(x, state)[0])
    assert cache.count == 3 and torch.equal(cache.bank, state.bank)


def test_state_errors(sdm, device):
    state_class = sdm.SparseDeltaMemoryState
    with pytest.raises(ValueError, match="batch_size must be a positive integer"):
        state_class(0, 2, 36, 12)
    with pytest.raises(ValueError, match="initial_bank must have a shape"):
        state_class(1, 2, 36, 12, initial_bank=torch.zeros(2, 36, 11))
    with pytest.raises(ValueError, match="bank must have shape"):
        state_class(1, 2, 36, 12).update(torch.zeros(2, 2, 36, 12))


@pytest.mark.parametrize("length", [1, 40])
def test_state_in_training_is_refused(sdm, device, length):
    mixer = build(sdm, device)
    x = torch.randn(1, length, 24, device=device)
    state = mixer.init_state(1)
    with pytest.raises(RuntimeError, match="no_grad"):
        mixer(x, state)
    assert torch.equal(state.bank[0], mixer.initial_bank()) and state.count.tolist() == [0]
    # A recomputed region meets the same error instead of an advanced state.
    y = checkpoint(lambda x: mixer(x, state)[0], x.requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="no_grad"):
        y.sum().backward()
    # Nothing to differentiate, nothing to refuse.
    mixer.requires_grad_(False)
    mixer(x.detach(), state.reset())


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_training_in_segments_equals_one_call(sdm, device, reentrant):
    mixer = build(sdm, device, output_gate=True)
    x = torch.randn(2, 50, 24, device=device)
    y, _ = mixer(x)
    expected = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))

    bank, outputs = mixer.initial_bank(), []
    for part in x.split([20, 30], dim=1):
        if reentrant is None:
            y, bank = mixer(part, bank)
        else:
            y, bank = checkpoint(mixer, part, bank, use_reentrant=reentrant)
        outputs.append(y)
    assert bank.shape == (2, 2, 36, 12)
    torch.cat(outputs, dim=1).square().sum().backward()  # the reentrant kind allows no grad()
    grads = [parameter.grad for parameter in mixer.parameters()]
    for a, b in zip(grads, expected):
        close(a / b.abs().max(), b / b.abs().max(), 1e-4)


def test_decode_compiles(sdm, device):
    torch._dynamo.reset()
    mixer = build(sdm, device)
    step = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 24, 24, device=device)
    state = mixer.init_state(1)
    with torch.no_grad():
        parts = [step(part, state)[0] for part in x.split([20, 1, 1, 1, 1], dim=1)]
    close(torch.cat(parts, dim=1), mixer(x)[0])
    assert state.count.tolist() == [24]


def test_whole_generation_compiles(sdm, device):
    """A state that is made, copied and reset inside of the compiled function."""
    torch._dynamo.reset()
    mixer = build(sdm, device)

    def generate(x):
        state = mixer.init_state(1)
        y, state = mixer(x[:, :20], state)
        z, _ = mixer(x[:, 20:], state.clone())
        return torch.cat([y, z], dim=1), state.reset().bank

    x = torch.randn(1, 24, 24, device=device)
    with torch.no_grad():
        y, bank = torch.compile(generate, fullgraph=True, backend="aot_eager")(x)
    close(y, mixer(x)[0])
    close(bank[0], mixer.initial_bank())


def test_decode_in_inference_mode(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(1, 24, 24, device=device)
    expected = mixer(x)[0]
    with torch.inference_mode():
        state = mixer.init_state(1)
        parts = [mixer(part, state)[0] for part in x.split([20, 1, 3], dim=1)]
        state.reset()
    close(torch.cat(parts, dim=1), expected)


def test_state_made_in_inference_mode_is_an_ordinary_one(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(1, 24, 24, device=device)
    expected = mixer(x)[0]
    with torch.inference_mode():
        state = mixer.init_state(1)
        parts = [mixer(x[:, :20], state)[0]]
        branch = state.clone()
    with torch.no_grad():
        parts.append(mixer(x[:, 20:], state)[0])
        again, _ = mixer(x[:, 20:], branch)
    close(torch.cat(parts, dim=1), expected)
    assert torch.equal(again, parts[1])
    assert state.reset().count.tolist() == [0]
