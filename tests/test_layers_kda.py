# SPDX-License-Identifier: Apache-2.0
"""The layers of Kimi delta attention for `kernelize`: in place of a model's own functions."""

import inspect
from pathlib import Path

import pytest
import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)
from kernels.layer.layer import _validate_layer
from torch import nn

from .test_layers import MODES

NAMES = ["chunk_kda", "fused_recurrent_kda"]


def own_module(sdm, name):
    """A model's own function as a module, with the plain recurrence in it; counts its calls."""

    class Own(nn.Module):
        calls = 0

    def run(query, key, value, g, beta, initial_state, output_final_state, normalise, kwargs):
        Own.calls += 1
        return sdm.reference.kda(
            query,
            key,
            value,
            g,
            beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=normalise,
            cu_seqlens=kwargs.get("cu_seqlens"),
        )

    if name == "chunk_kda":

        def forward(
            self,
            query,
            key,
            value,
            g,
            beta,
            chunk_size=64,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=False,
            **kwargs,
        ):
            rest = (initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs)
            return run(query, key, value, g, beta, *rest)
    else:

        def forward(
            self,
            query,
            key,
            value,
            g,
            beta,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel=False,
            **kwargs,
        ):
            rest = (initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs)
            return run(query, key, value, g, beta, *rest)

    Own.forward = forward
    return use_kernel_forward_from_hub(name)(Own)


def mapping_of(sdm, name, devices, mode=None):
    repository = LocalLayerRepository(Path(sdm.__file__).parents[2], layer_name=name)
    return {name: {d: repository if mode is None else {mode: repository} for d in devices}}


def draw(device, T=21, B=2, H=2, HV=4, K=16, V=32):
    """Inputs with the gates activated, as the layers take them."""
    q, k = (torch.randn(B, T, H, K) for _ in range(2))
    v = torch.randn(B, T, HV, V)
    g = -0.2 * torch.rand(B, T, HV, K)
    beta = torch.rand(B, T, HV)
    state = torch.randn(B, HV, K, V)
    return [x.to(device) for x in (q, k, v, g, beta, state)]


def call(module, inputs, **others):
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **others}
    return module(*inputs[:5], initial_state=inputs[5], **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", NAMES)
def test_layer_is_pure(sdm, name):
    layer = getattr(sdm.layers, name)
    _validate_layer(check_cls=own_module(sdm, name), cls=layer, repo="the layer")
    own = {key for key in vars(layer) if not key.startswith("__")}
    assert own == {"forward", "has_backward", "can_torch_compile"}
    assert layer.has_backward is True and layer.can_torch_compile is True
    assert inspect.signature(layer.forward).parameters.keys() >= {"query", "key", "value", "g"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_kernelize(sdm, device, name, mode):
    torch._dynamo.reset()
    own = own_module(sdm, name)
    model = nn.Sequential(own())
    training = Mode.TRAINING in MODES[mode]
    inputs = [x.requires_grad_(training) for x in draw(device)]

    def run(module):
        out, state = call(module, inputs)
        if not training:
            return [out, state]
        return [out, state, *torch.autograd.grad(out.square().sum() + state.sum(), inputs)]

    with torch.set_grad_enabled(training):
        expected = run(model[0])
        with use_kernel_mapping(mapping_of(sdm, name, ["cpu", "cuda"]), inherit_mapping=False):
            kernelize(model, mode=MODES[mode], device=device, use_fallback=False)
        module = model[0]
        if Mode.TORCH_COMPILE in MODES[mode]:
            module = torch.compile(module, fullgraph=True, backend="aot_eager")
        got = run(module)
    assert own.calls == 1, "the model's own function was used"
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_under_either_name(sdm, device, name):
    own = own_module(sdm, name)
    model = nn.Sequential(own())
    q, k, v, g, beta, state = draw(device, B=1)
    state = torch.cat([state, state * 0.5])
    offsets = torch.tensor([0, 5, 21], device=device)
    inputs = (q, k, v, g, beta, state)
    expected = call(model[0], inputs, cu_seqlens=offsets)
    with use_kernel_mapping(mapping_of(sdm, name, [device.type]), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=False)
    for keyword in ("cu_seqlens", "cu_seq_lens_q"):
        got = call(model[0], inputs, **{keyword: offsets}, position_ids=None)
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
    assert own.calls == 1


@pytest.mark.parametrize("name", NAMES)
def test_other_mode_and_other_device_fall_back(sdm, device, name):
    own = own_module(sdm, name)
    model = nn.Sequential(own())
    inputs = draw(device, T=3)
    only_inference = mapping_of(sdm, name, [device.type], Mode.INFERENCE)
    with use_kernel_mapping(only_inference, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device=device)
        call(model[0], inputs)
        assert own.calls == 1
        kernelize(model, mode=Mode.INFERENCE, device=device)
        call(model[0], inputs)
        assert own.calls == 1
        with pytest.raises(ValueError, match="mode"):
            kernelize(model, mode=Mode.TRAINING, device=device, use_fallback=False)
    with use_kernel_mapping(mapping_of(sdm, name, ["xpu"]), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device)
        call(model[0], inputs)
        assert own.calls == 2
        with pytest.raises(ValueError, match="device type"):
            kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=False)


def test_function_that_a_model_calls(sdm, device):
    @use_kernel_forward_from_hub("chunk_kda")
    def attend(
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        raise AssertionError("the model's own function")

    @use_kernelized_func(attend)
    class Model(nn.Module):
        def forward(self, *inputs):
            return call(attend, inputs)

    inputs = draw(device)
    with use_kernel_mapping(mapping_of(sdm, "chunk_kda", [device.type]), inherit_mapping=False):
        model = kernelize(Model(), mode=Mode.TRAINING, device=device, use_fallback=False)
    expected = sdm.reference.kda(
        *inputs[:5],
        initial_state=inputs[5],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    for a, b in zip(model(*inputs), expected):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
