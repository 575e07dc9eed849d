# SPDX-License-Identifier: Apache-2.0
"""What PyTorch expects of the KDA ops: versions, retained graphs, hooks, checkpoints, autocast."""

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import results

CASE = KdaCase("contract", T=70)
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda")
KEEP = ({}, {"disable_recompute": True})


def leaves_of(inputs):
    return inputs.map(lambda x: x.clone().requires_grad_())


def grads_of(leaves):
    return {name: getattr(leaves, name).grad for name in leaves.names()}


def call(fn, leaves, **options):
    return fn(
        *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
        **leaves.keywords(), **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", KEEP, ids=str)
def test_backward_twice(sdm, device, options):
    leaves = leaves_of(make(CASE, device))
    out, state = call(sdm.chunk_kda, leaves, **options)
    loss = out.square().sum() + state.square().sum()
    first = torch.autograd.grad(loss, leaves.args(), retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, leaves.args()), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves.args())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_used_twice(sdm, device, name):
    """Two calls share their leaves; gradients add up."""
    fn = getattr(sdm, name)
    leaves = leaves_of(make(CASE, device))
    call(fn, leaves)[0].sum().backward()
    single = grads_of(leaves)
    leaves = leaves_of(make(CASE, device))
    (call(fn, leaves)[0] + call(fn, leaves)[0]).sum().backward()
    for name, grad in grads_of(leaves).items():
        assert_same_bits(grad, 2 * single[name], name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivative_raises(sdm, device, name):
    leaves = leaves_of(make(CASE, device))
    out, _ = call(getattr(sdm, name), leaves)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves.v, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{name}.*: the gradient of a gradient is not"):
        grad.sum().backward()


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("name", ["q", "k", "g", "beta", "initial_state", "A_log", "dt_bias"])
def test_argument_changed_before_backward(sdm, device, fn, name):
    leaves = make(CASE, device).map(lambda x: x.requires_grad_(), ("v",))
    out, _ = call(getattr(sdm, fn), leaves)
    getattr(leaves, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_requires_grad_of_results(sdm, device):
    inputs = make(CASE, device)
    for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
        for name in inputs.names():
            leaves = inputs.map(lambda x: x.clone().requires_grad_(), (name,))
            assert all(x.requires_grad for x in call(fn, leaves))
            with torch.no_grad():
                assert not call(fn, leaves)[0].requires_grad
            with torch.inference_mode():
                assert not call(fn, leaves)[0].requires_grad
        assert not call(fn, inputs)[0].requires_grad


@pytest.mark.parametrize("options", KEEP, ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(sdm, device, options, reentrant):
    inputs = make(CASE.but(V=16), device)
    keywords = inputs.keywords()

    def two_layers(q, k, v, g, beta, state, A_log, dt_bias):
        extras = {**keywords, **options, "A_log": A_log, "dt_bias": dt_bias}
        for _ in range(2):
            v, state = sdm.chunk_kda(
                q, k, v.tanh(), g, beta, initial_state=state, output_final_state=True, **extras
            )
        return v, state

    def run(wrap):
        leaves = leaves_of(inputs)
        out, state = wrap(leaves.args())
        (out.square().sum() + state.square().sum()).backward()
        return grads_of(leaves)

    expected = run(lambda args: two_layers(*args))
    got = run(lambda args: checkpoint(two_layers, *args, use_reentrant=reentrant))
    assert_same_bits(got, expected)


@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_RECOMPUTE"])
def test_selective_checkpoint(sdm, ops, device, policy):
    inputs = make(CASE, device)
    seen = []

    def choose(ctx, op, *args, **kwargs):
        seen.append(op)
        ours = op == ops.kda_chunk_fwd.default
        return CheckpointPolicy[policy] if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*tokens):
        return sdm.chunk_kda(*tokens, **inputs.keywords())[0].tanh()

    def run(**options):
        leaves = leaves_of(inputs)
        checkpoint(layer, *leaves.tokens(), use_reentrant=False, **options).sum().backward()
        return [x.grad for x in leaves.tokens()]

    expected = run()
    got = run(context_fn=lambda: create_selective_checkpoint_contexts(choose))
    assert_same_bits(got, expected)
    assert ops.kda_chunk_fwd.default in seen


@pytest.mark.parametrize("options", KEEP, ids=str)
def test_saved_tensor_hooks(sdm, device, options):
    """Hooks may hand back copies, in other strides."""
    inputs = make(CASE, device)
    expected = results(sdm.chunk_kda, inputs, **options)

    def unpack(x):
        if x.dim() < 2:
            return x.clone()
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        assert_same_bits(results(sdm.chunk_kda, inputs, **options), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(results(sdm.chunk_kda, inputs, **options), expected)


def test_what_is_kept(sdm, device):
    """Without gradients nothing; else the arguments; the states only if they are asked for."""
    inputs = make(CASE.but(T=640, dtype=torch.bfloat16), device)
    kept = []

    def pack(x):
        kept.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.no_grad():
            call(sdm.chunk_kda, leaves_of(inputs), disable_recompute=True)
        assert sum(kept) == 0
        call(sdm.chunk_kda, leaves_of(inputs))
        arguments = sum(kept)
        kept.clear()
        call(sdm.chunk_kda, leaves_of(inputs), disable_recompute=True)
    assert arguments <= sum(x.nbytes for x in inputs.args())
    rows = 2 * 640 // 64 + 2
    assert sum(kept) == arguments + rows * 2 * 16 * 32 * 2


def test_autocast_changes_nothing(sdm, device):
    mixes = [
        CASE,
        CASE.but(dtype=torch.bfloat16, gate_dtype=torch.float32, beta_dtype=torch.float32),
        CASE.but(dtype=torch.float32, gate_dtype=torch.bfloat16),
    ]
    for case in mixes:
        for name in FUNCTIONS:
            inputs = make(case, device)
            expected = results(getattr(sdm, name), inputs)
            with torch.autocast(device.type, torch.bfloat16):
                got = results(getattr(sdm, name), inputs)
            assert_same_bits(got, expected)
            assert got["out"].dtype == case.dtype


def test_functional_call(sdm, device):
    inputs = make(CASE.but(form="softplus"), device)

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.A_log = torch.nn.Parameter(torch.zeros(2))

        def forward(self, *tokens):
            return sdm.chunk_kda(*tokens, **{**inputs.keywords(), "A_log": self.A_log})[0]

    value = inputs.A_log.clone().requires_grad_()
    out = torch.func.functional_call(Gate().to(device), {"A_log": value}, tuple(inputs.tokens()))
    expected, _ = sdm.chunk_kda(*inputs.tokens(), **inputs.keywords())
    assert_same_bits(out.detach(), expected)
    out.sum().backward()
    assert value.grad.shape == value.shape


def test_parallel_calls(sdm, device):
    """Calls from several threads at once do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [make(CASE, device, seed) for seed in range(8)]
    expected = [results(sdm.chunk_kda, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda x: results(sdm.chunk_kda, x), inputs))
            assert_same_bits(got, expected)
