# SPDX-License-Identifier: Apache-2.0
"""The layer for `kernelize`, through the mapping API of the kernels package."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels import (
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from kernels.layer.layer import _validate_layer
from torch import nn

from .helpers.plain_mixer import OPTIONS, config_of, plain_forward, randomize

NAME = "SparseDeltaMemory"
MODES = {
    "inference": Mode.INFERENCE,
    "training": Mode.TRAINING,
    "inference_compile": Mode.INFERENCE | Mode.TORCH_COMPILE,
    "training_compile": Mode.TRAINING | Mode.TORCH_COMPILE,
}


def adopting_class(sdm):
    """Return a user's own mixer in plain PyTorch that counts its calls."""

    @use_kernel_forward_from_hub(NAME)
    class PlainMixer(nn.Module):
        calls = 0

        def __init__(self, **changes):
            super().__init__()
            source = randomize(sdm.SparseDeltaMemory(config_of(sdm, **changes)))
            self.config = source.config
            for name, child in source.named_children():
                self.add_module(name, child)
            for name, parameter in source.named_parameters(recurse=False):
                self.register_parameter(name, parameter)

        def forward(self, x, state=None, cu_seqlens=None, seq_len=None):
            type(self).calls += 1
            return plain_forward(sdm, self, x, state, cu_seqlens)[0], None

    return PlainMixer


def mapping_of(sdm, device, mode=None):
    """Map the layer to the build that the fixture loaded."""
    repository = LocalLayerRepository(Path(sdm.__file__).parents[2], layer_name=NAME)
    return {NAME: {device.type: repository if mode is None else {mode: repository}}}


@pytest.mark.kernels_ci
def test_layer_is_pure(sdm):
    layer = getattr(sdm.layers, NAME)
    _validate_layer(check_cls=adopting_class(sdm), cls=layer, repo="the layer")
    own = {name for name in vars(layer) if not name.startswith("__")}
    assert own == {"forward", "has_backward", "can_torch_compile"}
    assert layer.has_backward is True and layer.can_torch_compile is True


def test_layer_and_module_have_one_signature(sdm):
    layer, module = getattr(sdm.layers, NAME), sdm.SparseDeltaMemory
    assert inspect.signature(layer.forward) == inspect.signature(module.forward)
    noted = set(inspect.get_annotations(layer)) - {"config"}
    mixer = module(config_of(sdm, **OPTIONS["everything"]))
    assert noted == {name.split(".")[0] for name, _ in mixer.named_parameters()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_kernelize(sdm, device, mode, option):
    torch._dynamo.reset()
    cls = adopting_class(sdm)
    model = nn.Sequential(cls(**OPTIONS[option])).to(device)
    training = Mode.TRAINING in MODES[mode]
    model.train(training)
    x = torch.randn(2, 21, 24, device=device, requires_grad=training)
    parameters = list(model.parameters())

    def run(model):
        y, _ = model(x)
        if not training:
            return [y]
        grads = torch.autograd.grad(y.square().sum(), [x, *parameters])
        return [y, *(grad / grad.abs().max().clamp(min=1.0) for grad in grads)]

    with torch.set_grad_enabled(training):
        expected = run(model)
        calls = cls.calls
        with use_kernel_mapping(mapping_of(sdm, device), inherit_mapping=False):
            kernelize(model, mode=MODES[mode], device=device, use_fallback=False)
        if Mode.TORCH_COMPILE in MODES[mode]:
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = run(model)
    assert cls.calls == calls, "the plain forward was used"
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_generation_after_kernelize(sdm, device):
    model = adopting_class(sdm)(output_gate=True).to(device)
    x = torch.randn(2, 30, 24, device=device)
    expected, _ = model(x)
    with use_kernel_mapping(mapping_of(sdm, device), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=False)
    state = sdm.SparseDeltaMemoryState(2, 2, 36, 12, initial_bank=model.memory)
    with torch.no_grad():
        parts = [model(part, state)[0] for part in x.split([27, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.kernels_ci
def test_mapping_for_one_mode_falls_back_in_others(sdm, device):
    cls = adopting_class(sdm)
    model = cls().to(device)
    x = torch.randn(1, 5, 24, device=device)
    mapping = mapping_of(sdm, device, Mode.INFERENCE)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device=device)
        model(x)
        assert cls.calls == 1
        kernelize(model, mode=Mode.INFERENCE, device=device)
        model(x)
        assert cls.calls == 1
        with pytest.raises(ValueError, match="mode"):
            kernelize(model, mode=Mode.TRAINING, device=device, use_fallback=False)


def test_mapping_for_both_devices(sdm, device):
    cls = adopting_class(sdm)
    model = cls().to(device)
    repository = LocalLayerRepository(Path(sdm.__file__).parents[2], layer_name=NAME)
    mapping = {NAME: {"cpu": repository, "cuda": repository}}
    x = torch.randn(1, 5, 24)
    expected = model(x.to(device))[0]
    # The device of the parameters decides; a CUDA variant serves both.
    devices = ["cpu"] if device.type == "cpu" else ["cpu", "cuda"]
    for name in devices:
        model = model.to(name)
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE, use_fallback=False)
        got = model(x.to(name))[0]
        torch.testing.assert_close(got.to(device), expected, rtol=1e-4, atol=1e-4)
    assert cls.calls == 1


def test_device_without_a_mapping_falls_back(sdm, device):
    cls = adopting_class(sdm)
    model = cls().to(device)
    repository = LocalLayerRepository(Path(sdm.__file__).parents[2], layer_name=NAME)
    other = "xpu"
    with use_kernel_mapping({NAME: {other: repository}}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device)
        model(torch.randn(1, 5, 24, device=device))
        assert cls.calls == 1
        with pytest.raises(ValueError, match="device type"):
            kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=False)


def test_kernel_that_is_not_there_falls_back_on_demand(sdm, device, tmp_path):
    cls = adopting_class(sdm)
    model = cls().to(device)
    mapping = {NAME: {device.type: LocalLayerRepository(tmp_path, layer_name=NAME)}}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        with pytest.raises(FileNotFoundError, match="Cannot find a build variant"):
            kernelize(model, mode=Mode.INFERENCE, device=device)
        kernelize(model, mode=Mode.INFERENCE, device=device, use_fallback=KernelizeFallback.ALL)
    model(torch.randn(1, 5, 24, device=device))
    assert cls.calls == 1


def test_kernelize_twice_and_another_mode(sdm, device):
    cls = adopting_class(sdm)
    model = cls().to(device)
    x = torch.randn(1, 5, 24, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), x)
    with use_kernel_mapping(mapping_of(sdm, device), inherit_mapping=False):
        for mode in (Mode.INFERENCE, Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE):
            kernelize(model, mode=mode, device=device, use_fallback=False)
            (got,) = torch.autograd.grad(model(x)[0].sum(), x)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert cls.calls == 1


def test_without_a_mapping_the_own_forward_stays(sdm, device):
    cls = adopting_class(sdm)
    model = cls().to(device)
    with use_kernel_mapping({}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device)
    model(torch.randn(1, 5, 24, device=device))
    assert cls.calls == 1


def test_other_signature_is_refused(sdm, device):
    @use_kernel_forward_from_hub(NAME)
    class Other(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(TypeError, match="different number of arguments"):
        _validate_layer(check_cls=Other, cls=getattr(sdm.layers, NAME), repo="the layer")


def test_switch_of_kernels_keeps_the_own_forward(sdm):
    code = (
        "import torch, kernels\n"
        "from kernels import kernelize, Mode, use_kernel_forward_from_hub\n"
        f"@use_kernel_forward_from_hub({NAME!r})\n"
        "class Plain(torch.nn.Module):\n"
        "    def forward(self, x, state=None, cu_seqlens=None, seq_len=None): return 'own'\n"
        "m = kernelize(Plain(), mode=Mode.INFERENCE, device='cpu')\n"
        "assert m(None) == 'own'\n"
    )
    environment = {**os.environ, "DISABLE_KERNEL_MAPPING": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
