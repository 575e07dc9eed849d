# SPDX-License-Identifier: Apache-2.0
"""What PyTorch expects of an op: versions, retained graphs, hooks, checkpoints, autocast."""

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import results

CASE = Case("contract", T=40, S=16, D=8, W=4, R=4, chunk=16)
SAVES = ("replay", "rows", "fp8")


def leaves_of(inputs):
    return inputs.map(lambda x: x.clone().requires_grad_(), FLOATS)


def grads_of(leaves):
    return {name: getattr(leaves, name).grad for name in FLOATS}


@pytest.mark.parametrize("save", SAVES)
def test_backward_twice(sdm, device, save):
    leaves = leaves_of(make(CASE, device))
    out, state = sdm.chunk_sdm(*leaves.args(), output_final_state=True, save=save)
    wanted = [getattr(leaves, name) for name in FLOATS]
    loss = out.square().sum() + state.square().sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, wanted), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, wanted)


def test_one_graph_used_twice(sdm, device):
    """Two calls share their leaves; gradients add up."""
    leaves = leaves_of(make(CASE, device))
    one, _ = sdm.chunk_sdm(*leaves.args())
    one.sum().backward()
    single = grads_of(leaves)
    leaves = leaves_of(make(CASE, device))
    (sdm.chunk_sdm(*leaves.args())[0] + sdm.chunk_sdm(*leaves.args())[0]).sum().backward()
    for name, grad in grads_of(leaves).items():
        assert_same_bits(grad, 2 * single[name], name)


def test_second_derivative_raises(sdm, device):
    leaves = leaves_of(make(CASE, device))
    out, _ = sdm.chunk_sdm(*leaves.args())
    (grad,) = torch.autograd.grad(out.square().sum(), leaves.v, create_graph=True)
    with pytest.raises(
        NotImplementedError, match="^chunk_sdm: the gradient of a gradient is not impl"
    ):
        grad.sum().backward()


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", ["write_idx", "write_val", "beta", "g", "read_idx", "read_val"])
def test_argument_changed_before_backward(sdm, device, name, save):
    leaves = make(CASE, device).map(lambda x: x.requires_grad_(), ("v",))
    out, _ = sdm.chunk_sdm(*leaves.args(), save=save)
    getattr(leaves, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_bank_changed_before_backward(sdm, device):
    leaves = make(CASE, device).map(lambda x: x.requires_grad_(), ("v",))
    out, _ = sdm.chunk_sdm(*leaves.args(), save="replay")
    leaves.initial_state.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    leaves = make(CASE, device).map(lambda x: x.requires_grad_(), ("v",))
    out, state = sdm.chunk_sdm(*leaves.args(), save="rows", output_final_state=True)
    # What the rows go with: the bank that they lead back to, on CUDA the one that they follow.
    kept = leaves.initial_state if torch.device(device).type == "cuda" else state
    kept.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("func", ["recurrent_sdm_", "chunk_sdm_"])
def test_in_place_change_is_noticed(sdm, device, func):
    """A state that autograd keeps for a backward must not change unnoticed."""
    inputs = make(CASE.but(bank_per_sequence=True), device)
    state = inputs.initial_state.clone()
    weight = torch.ones_like(state, requires_grad=True)
    version = state._version
    loss = (weight * state).sum()
    getattr(sdm, func)(state, *inputs.tokens())
    assert state._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    cache = torch.zeros(4, *state.shape, device=device)
    version = cache._version
    getattr(sdm, func)(cache[2], *inputs.tokens())
    assert cache._version > version


@pytest.mark.parametrize("func", ["recurrent_sdm_", "chunk_sdm_"])
@pytest.mark.parametrize("name", FLOATS)
def test_in_place_functions_have_no_backward(sdm, device, func, name):
    inputs = make(CASE.but(bank_per_sequence=True), device)
    inputs = inputs.map(lambda x: x.requires_grad_(), (name,))
    message = f"^{func}: changes state in place and has no backward"
    before = inputs.initial_state.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        getattr(sdm, func)(inputs.initial_state, *inputs.tokens())
    assert_same_bits(inputs.initial_state.detach(), before)
    with torch.no_grad():
        out = getattr(sdm, func)(inputs.initial_state, *inputs.tokens())
    assert not out.requires_grad


def test_requires_grad_of_results(sdm, device):
    inputs = make(CASE, device)
    for name in FLOATS:
        leaves = inputs.map(lambda x: x.clone().requires_grad_(), (name,))
        out, state = sdm.chunk_sdm(*leaves.args(), output_final_state=True)
        assert out.requires_grad
        assert state.requires_grad
        with torch.no_grad():
            assert not sdm.chunk_sdm(*leaves.args())[0].requires_grad
        with torch.inference_mode():
            assert not sdm.chunk_sdm(*leaves.args())[0].requires_grad
    assert not sdm.chunk_sdm(*inputs.args())[0].requires_grad


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(sdm, device, save, reentrant):
    inputs = make(CASE, device)

    def two_layers(*args):
        *tokens, bank = args
        out, state = sdm.chunk_sdm(*tokens, bank, output_final_state=True, save=save)
        tokens[2] = out.tanh()
        return sdm.chunk_sdm(*tokens, state, output_final_state=True, save=save)

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
        ours = op == ops.sdm_chunk_fwd.default
        return CheckpointPolicy[policy] if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(*args):
        out, _ = sdm.chunk_sdm(*args)
        return out.tanh()

    def run(**options):
        leaves = leaves_of(inputs)
        checkpoint(layer, *leaves.args(), use_reentrant=False, **options).sum().backward()
        return grads_of(leaves)

    expected = run()
    got = run(context_fn=lambda: create_selective_checkpoint_contexts(choose))
    assert_same_bits(got, expected)
    assert ops.sdm_chunk_fwd.default in seen


@pytest.mark.parametrize("save", SAVES)
def test_saved_tensor_hooks(sdm, device, save):
    """Hooks may hand back copies, in other strides."""
    inputs = make(CASE.but(gate_per_write=True), device)
    expected = results(sdm.chunk_sdm, inputs, save=save)

    def unpack(x):
        if x.dim() < 2:
            return x.clone()
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        assert_same_bits(results(sdm.chunk_sdm, inputs, save=save), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(results(sdm.chunk_sdm, inputs, save=save), expected)


def test_autocast_changes_nothing(sdm, device):
    mixes = [
        CASE,
        CASE.but(dtype=torch.bfloat16, bank_dtype=torch.float32),
        CASE.but(dtype=torch.float32, gate_dtype=torch.bfloat16),
    ]
    for case in mixes:
        inputs = make(case, device)
        expected = results(sdm.chunk_sdm, inputs)
        with torch.autocast(device.type, torch.bfloat16):
            got = results(sdm.chunk_sdm, inputs)
        assert_same_bits(got, expected)
        assert got["out"].dtype == case.dtype


def test_functional_call(sdm, device):
    inputs = make(CASE, device)

    class Memory(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bank = torch.nn.Parameter(torch.zeros_like(inputs.initial_state))

        def forward(self, *tokens):
            return sdm.chunk_sdm(*tokens, self.bank)[0]

    bank = inputs.initial_state.clone().requires_grad_()
    out = torch.func.functional_call(Memory().to(device), {"bank": bank}, tuple(inputs.tokens()))
    expected, _ = sdm.chunk_sdm(*inputs.args())
    assert_same_bits(out.detach(), expected)
    out.sum().backward()
    assert bank.grad.shape == bank.shape


def test_anomaly_mode_and_threads(sdm, device):
    """A backward in another thread, under anomaly detection."""
    import threading

    inputs = make(CASE, device)
    expected = results(sdm.chunk_sdm, inputs)
    got = {}

    def work():
        with torch.autograd.detect_anomaly(check_nan=True):
            got.update(results(sdm.chunk_sdm, inputs))

    thread = threading.Thread(target=work)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        thread.start()
        thread.join()
    assert_same_bits(got, expected)


def test_parallel_calls(sdm, device):
    """Calls from several threads at once do not disturb each other."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [make(CASE, device, seed) for seed in range(8)]
    expected = [results(sdm.chunk_sdm, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = list(pool.map(lambda x: results(sdm.chunk_sdm, x), inputs))
            assert_same_bits(got, expected)
