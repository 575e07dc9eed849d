# SPDX-License-Identifier: Apache-2.0
"""The mixer: what it computes for every option, its gradients, precision and shapes."""

import copy
import doctest

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .helpers.plain_mixer import OPTIONS, config_of, plain_forward, randomize

T = 21


def close(a, b, tol=2e-5):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def build(sdm, device, dtype=torch.float32, **changes):
    """Return a mixer with parameters as after some training."""
    return randomize(sdm.SparseDeltaMemory(config_of(sdm, **changes))).to(device, dtype)


def gradients(mixer, y, x):
    """Gradients of a loss that weighs every element of y otherwise, by parameter name."""
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    (y * weights).sum().backward()
    grads = {name: p.grad for name, p in mixer.named_parameters()}
    grads["x"] = x.grad
    return grads


@pytest.mark.parametrize("option", OPTIONS)
def test_equals_plain_pytorch(sdm, device, option):
    mixer = build(sdm, device, **OPTIONS[option])
    plain = copy.deepcopy(mixer)
    x = torch.randn(2, T, 24, device=device, requires_grad=True)
    y, state = mixer(x)
    assert state is None
    grads = gradients(mixer, y, x)
    assert all(grad is not None for grad in grads.values()), "a parameter got no gradient"

    z = x.detach().clone().requires_grad_()
    expected, _ = plain_forward(sdm, plain, z)
    close(y, expected)
    for name, grad in gradients(plain, expected, z).items():
        scale = grad.abs().max().clamp(min=1.0)
        close(grads[name] / scale, grad / scale, 1e-4)


def test_every_parameter_gets_a_gradient_that_is_not_zero(sdm, device):
    mixer = build(sdm, device, **OPTIONS["everything"])
    x = torch.randn(2, T, 24, device=device, requires_grad=True)
    for name, grad in gradients(mixer, mixer(x)[0], x).items():
        # A constant added to all scores changes neither the choice nor the softmax.
        if name not in ("Wq_read.bias", "Wk_write.bias"):
            assert grad.abs().max() > 0, name


def test_gradients_in_float64(sdm):
    torch.manual_seed(3)
    mixer = build(sdm, "cpu", torch.float64, output_gate=True, key_weighted_decay=True)
    x = torch.randn(1, 4, 24, dtype=torch.float64, requires_grad=True)
    assert mixer(x)[0].dtype == torch.float64
    bank = mixer.initial_bank().detach().requires_grad_()
    call = lambda x, bank: mixer(x, bank)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, bank), fast_mode=True)


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_snapshot_modes_train(sdm, device, mode):
    x = torch.randn(2, T, 24, device=device, requires_grad=True)
    results = []
    for snapshot_quant in ("none", mode):
        torch.manual_seed(1)
        mixer = build(sdm, device, snapshot_quant=snapshot_quant)
        results.append((mixer(x)[0], mixer))
    close(results[0][0], results[1][0], 0)  # the forward is exact in every mode
    exact, approximate = (gradients(mixer, y, x) for y, mixer in results)
    for name in ("Wv_write.weight", "memory"):
        close(approximate[name], exact[name], 1e-4)
    for name, grad in approximate.items():
        error = (grad - exact[name]).norm() / exact[name].norm().clamp(min=1e-3)
        assert error < 0.5, f"{name}: {error}"


def test_single_factor_is_the_dense_gated_delta_rule(sdm, device):
    d, dim, heads = 8, 16, 2
    config = sdm.SparseDeltaMemoryConfig(
        dim=dim, num_heads=heads, slots_per_head=d, product_key_factor_dims=[d],
        num_writes=d, num_reads=d, read_act="l2_normalize", write_act="l2_normalize",
        backprop_on_memory=False,
    )  # fmt: skip
    mixer = randomize(sdm.SparseDeltaMemory(config)).to(device)
    x = torch.randn(1, 30, dim, device=device)
    y, _ = mixer(x)

    normal = torch.nn.functional.normalize
    k = normal(mixer.Wk_write(x).view(30, heads, d), dim=-1)
    q = normal(mixer.Wq_read(x).view(30, heads, d), dim=-1)
    v = mixer.Wv_write(x).view(30, heads, dim // heads)
    step = torch.nn.functional.softplus(mixer.a_proj(x) + mixer.dt_bias)[0]
    decay, beta = torch.exp(-mixer.A_log.exp() * step), torch.sigmoid(mixer.b_proj(x))[0]
    outputs, bank = [], torch.zeros(heads, d, dim // heads, device=device)
    for t in range(30):
        bank = bank * decay[t, :, None, None]
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], bank)
        bank = bank + beta[t, :, None, None] * k[t, :, :, None] * error[:, None, :]
        outputs.append(torch.einsum("hk,hkv->hv", q[t], bank))
    close(y[0], mixer.Wo(torch.stack(outputs).view(30, dim)))


@pytest.mark.kernels_ci
def test_two_dimensional_input(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(3, 7, 24, device=device)
    y, _ = mixer(x)
    flat, _ = mixer(x.view(21, 24), seq_len=7)
    assert flat.shape == (21, 24)
    assert torch.equal(flat.view_as(y), y)
    one, _ = mixer(x[0])
    close(one, y[0], 1e-6)  # the projections round otherwise at other sizes
    packed, _ = mixer(x.view(21, 24), cu_seqlens=torch.tensor([0, 7, 14, 21], device=device))
    close(packed.view_as(y), y, 1e-6)


@pytest.mark.kernels_ci
def test_packed_sequences_equal_separate_ones(sdm, device):
    mixer = build(sdm, device, key_weighted_decay=True)
    lengths = [5, 0, 17, 1]
    x = torch.randn(1, sum(lengths), 24, device=device)
    offsets = torch.tensor([0, 5, 5, 22, 23], dtype=torch.int32, device=device)
    y, _ = mixer(x, cu_seqlens=offsets)
    parts = [mixer(part)[0] for part in x.split(lengths, dim=1) if part.shape[1]]
    close(y, torch.cat(parts, dim=1), 1e-6)

    # Nothing crosses a border: neither values nor gradients.
    changed = x.clone()
    changed[:, 5:22] *= -3
    z, _ = mixer(changed, cu_seqlens=offsets)
    assert torch.equal(z[:, :5], y[:, :5]) and torch.equal(z[:, 22:], y[:, 22:])
    leaf = x.clone().requires_grad_()
    mixer(leaf, cu_seqlens=offsets)[0][:, 22:].sum().backward()
    assert not leaf.grad[:, :22].any() and leaf.grad[:, 22:].any()


@pytest.mark.parametrize("t", [0, 1, 62, 63, 64])
def test_causal(sdm, device, t):
    mixer = build(sdm, device, **OPTIONS["everything"]).eval()
    x = torch.randn(1, 80, 24, device=device)
    changed = x.clone()
    changed[:, t + 1 :] = 1e3 * torch.randn_like(changed[:, t + 1 :])
    y, z = mixer(x)[0], mixer(changed)[0]
    assert torch.equal(y[:, : t + 1], z[:, : t + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_module(sdm, device, dtype):
    mixer = build(sdm, device, **OPTIONS["everything"])
    low = copy.deepcopy(mixer).to(dtype)
    x = torch.randn(2, T, 24, device=device).to(dtype).requires_grad_()
    y, _ = low(x)
    assert y.dtype == dtype
    for name, grad in gradients(low, y.float(), x).items():
        assert grad.dtype == dtype and grad.isfinite().all(), name
    assert low.init_state(1).bank.dtype == dtype
    # Other slots may be chosen where scores tie after rounding, so the bound is a loose one.
    reference, _ = copy.deepcopy(low).float()(x.float())
    cosine = torch.cosine_similarity(y.float().flatten(), reference.flatten(), dim=0)
    assert cosine > 0.98


def test_gates_are_computed_in_float32(sdm, device, monkeypatch):
    mixer = build(sdm, device, torch.bfloat16)
    mixer_code = __import__(sdm.SparseDeltaMemory.__module__, fromlist=["_mixer"])
    namespace = mixer_code.mix.__globals__
    seen = {}
    original = namespace["chunk_sdm"]

    def spy(*args, **kwargs):
        seen["dtypes"] = [x.dtype for x in args]
        return original(*args, **kwargs)

    monkeypatch.setitem(namespace, "chunk_sdm", spy)
    x = torch.randn(1, T, 24, device=device, dtype=torch.bfloat16)
    mixer(x)
    _, write_val, v, beta, g, _, read_val, bank = seen["dtypes"]
    assert beta == g == torch.float32
    assert write_val == v == read_val == bank == torch.bfloat16
    with torch.autocast(device.type, torch.bfloat16):
        build(sdm, device)(x.float())
    _, write_val, v, beta, g, _, read_val, bank = seen["dtypes"]
    assert beta == g == bank == torch.float32
    assert write_val == v == read_val == torch.bfloat16


def test_autocast(sdm, device):
    mixer = build(sdm, device, **OPTIONS["everything"])
    x = torch.randn(2, T, 24, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y, _ = mixer(x)
    assert y.dtype == torch.bfloat16
    for name, grad in gradients(mixer, y.float(), x).items():
        assert grad.dtype == torch.float32 and grad.isfinite().all(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(sdm, device, reentrant):
    first, second = (build(sdm, device, **OPTIONS["everything"]).eval() for _ in range(2))
    x = torch.randn(2, T, 24, device=device, requires_grad=True)
    results = []
    for wrapped in (False, True):
        for mixer in (first, second):
            mixer.zero_grad()
        z = x.detach().clone().requires_grad_()
        h = z
        for mixer in (first, second):
            call = lambda t, mixer=mixer: mixer(t)[0]  # noqa: E731
            h = checkpoint(call, h, use_reentrant=reentrant) if wrapped else call(h)
        h.square().sum().backward()
        parameters = [p.grad for m in (first, second) for p in m.parameters()]
        results.append([h.detach(), z.grad, *(grad.clone() for grad in parameters)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(sdm, device, dynamic):
    torch._dynamo.reset()
    mixer = build(sdm, device, **OPTIONS["everything"]).eval()
    compiled = torch.compile(mixer, fullgraph=True, dynamic=dynamic or None, backend="aot_eager")
    for length in (T, 34) if dynamic else (T,):
        x = torch.randn(2, length, 24, device=device, requires_grad=True)
        y, _ = mixer(x)
        expected = torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])
        z, _ = compiled(x)
        got = torch.autograd.grad(z.square().sum(), [x, *mixer.parameters()])
        close(z, y)
        for a, b in zip(got, expected):
            close(a, b, 1e-4)


def test_export(sdm, device):
    """One program for every batch and length, also after the decompositions of a deployment."""
    mixer = build(sdm, device, **OPTIONS["everything"]).eval()
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("T", min=2, max=4096)}
    x = torch.randn(2, T, 24, device=device)
    program = torch.export.export(mixer, (x,), dynamic_shapes=(sizes,))
    for module in (program.module(), program.run_decompositions().module()):
        for shape in ((2, T), (3, 70)):
            x = torch.randn(*shape, 24, device=device)
            close(module(x)[0], mixer(x)[0])


@pytest.mark.slow
def test_compiles_with_inductor(sdm, device):
    torch._dynamo.reset()
    mixer = build(sdm, device, output_gate=True)
    compiled = torch.compile(mixer, fullgraph=True)
    x = torch.randn(2, T, 24, device=device)
    close(compiled(x)[0], mixer(x)[0])


def test_same_bits_every_time(sdm, device):
    mixer = build(sdm, device)
    x = torch.randn(3, T, 24, device=device)
    y, _ = mixer(x)
    assert torch.equal(mixer(x)[0], y)
    with torch.no_grad():
        assert torch.equal(mixer(x)[0], y)


@pytest.mark.parametrize("name", ["SparseDeltaMemory", "SparseDeltaMemoryState"])
def test_example_of_the_docstring(sdm, name):
    globs = {"torch": torch, **{other: getattr(sdm, other) for other in sdm.__all__}}
    tests = doctest.DocTestFinder(recurse=False).find(getattr(sdm, name), name, globs=globs)
    assert any(test.examples for test in tests)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0
