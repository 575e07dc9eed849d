# SPDX-License-Identifier: Apache-2.0
"""`kernelize` with layers from the hub, as a model's author and its user write it."""

from pathlib import Path

import pytest

from .helpers.hub_client import REPO_ID, Client
from .helpers.hub_server import Hub, files_of

# A mixer whose own forward raises: with the kernel in place nobody calls it.
MODEL = f"""
import torch
from kernels import (
    FuncRepository, LayerRepository, Mode, get_kernel, kernelize, use_kernel_forward_from_hub,
    use_kernel_mapping, use_kernelized_func,
)

repo = {REPO_ID!r}
package = get_kernel(repo, version=1, trust_remote_code=True)
config = package.SparseDeltaMemoryConfig(
    dim=16, num_heads=2, slots_per_head=16, num_writes=4, num_reads=4
)


@use_kernel_forward_from_hub("SparseDeltaMemory")
class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        source = package.SparseDeltaMemory(config)
        self.config = config
        for name, child in source.named_children():
            self.add_module(name, child)
        for name, parameter in source.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def forward(self, x, state=None, cu_seqlens=None, seq_len=None):
        raise AssertionError("the model's own forward")


def layer(name, **changes):
    return LayerRepository(repo, layer_name=name, version=1, trust_remote_code=True, **changes)


x = torch.randn(2, 7, 16)
"""

MODES = """
mapping = {"SparseDeltaMemory": {device: layer("SparseDeltaMemory") for device in ("cpu", "cuda")}}
for mode in (Mode.INFERENCE, Mode.TRAINING):
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Mixer())
        with use_kernel_mapping(mapping, inherit_mapping=False):
            wanted = mode | Mode.TORCH_COMPILE if compiled else mode
            model = kernelize(model, mode=wanted, use_fallback=False)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        y, _ = run(x)
        if mode == Mode.TRAINING:
            y.square().sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        print(float(y.detach().double().sum()))
"""

KDA = """
@use_kernel_forward_from_hub("chunk_kda")
def attend(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, **kwargs,
):
    raise AssertionError("the model's own function")


@use_kernelized_func(attend)
class Attention(torch.nn.Module):
    def forward(self, *inputs):
        return attend(*inputs, use_qk_l2norm_in_kernel=True)[0]


q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
inputs = (q, k, v, -torch.rand(1, 9, 2, 16), torch.rand(1, 9, 2))
mapping = {"chunk_kda": {device: layer("chunk_kda") for device in ("cpu", "cuda")}}
with use_kernel_mapping(mapping, inherit_mapping=False):
    model = kernelize(Attention(), mode=Mode.TRAINING, device="cpu", use_fallback=False)
got = torch.autograd.grad(model(*inputs).sum(), (q, k, v))
expected = package.reference.kda(*inputs, use_qk_l2norm_in_kernel=True)[0]
for a, b in zip(got, torch.autograd.grad(expected.sum(), (q, k, v))):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""

FUNCTION = """
@use_kernel_forward_from_hub("product_key_topk")
def pick(scores, factor_dims, k):
    raise AssertionError("the model's own function")


@use_kernelized_func(pick)
class Chooser(torch.nn.Module):
    def forward(self, scores):
        return pick(scores, (4, 4), 3)


mapping = {
    "product_key_topk": {
        device: FuncRepository(repo, func_name="product_key_topk", version=1, trust_remote_code=True)
        for device in ("cpu", "cuda")
    }
}
with use_kernel_mapping(mapping, inherit_mapping=False):
    model = kernelize(Chooser(), mode=Mode.INFERENCE, device="cpu", use_fallback=False)
scores = torch.randn(3, 8)
values, indices = model(scores)
expected = package.reference.product_key_topk(scores, (4, 4), 3)
assert torch.equal(values, expected[0]) and torch.equal(indices, expected[1])
"""


@pytest.fixture
def client(sdm, tmp_path):
    variant = Path(sdm.__file__).parent
    hub = Hub()
    files = {f"build/{variant.name}/{path}": data for path, data in files_of(variant).items()}
    hub.push(REPO_ID, files, "main", "v1")
    with hub.running():
        yield Client(tmp_path, hub)


@pytest.mark.slow
def test_kernelize_from_the_hub_in_every_mode(client):
    sums = set(client.run(MODEL + MODES).stdout.split())
    assert len(sums) == 1  # the same bits in each mode


@pytest.mark.slow
def test_function_from_the_hub_in_place_of_a_models_own(client):
    client.run(MODEL + FUNCTION)
    client.run(MODEL + KDA)


@pytest.mark.slow
def test_layer_of_an_unknown_name_is_named(client):
    code = """
try:
    layer("NoSuchLayer").load()
except ValueError as error:
    print(error)
"""
    printed = client.run(MODEL + code).stdout
    assert "Layer `NoSuchLayer` not found" in printed and REPO_ID in printed
