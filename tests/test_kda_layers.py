# SPDX-License-Identifier: Apache-2.0
"""The KDA layers for `kernelize`, under functions with the signatures of transformers' own."""

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

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import results

LAYERS = ("chunk_kda", "fused_recurrent_kda")
CASE = KdaCase("layer", T=70, form="activated", strength="activated")


def plain_functions():
    """Return a model's own two functions, as transformers declares them, that refuse to run."""

    @use_kernel_forward_from_hub("chunk_kda")
    def chunk_kimi_delta_attention(
        query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        raise AssertionError("the model's own function ran")

    @use_kernel_forward_from_hub("fused_recurrent_kda")
    def recurrent_kimi_delta_attention(
        query, key, value, g, beta, initial_state, output_final_state,
        use_qk_l2norm_in_kernel=False, **kwargs,
    ):  # fmt: skip
        raise AssertionError("the model's own function ran")

    return chunk_kimi_delta_attention, recurrent_kimi_delta_attention


def attention_class():
    chunk, recurrent = plain_functions()

    @use_kernelized_func(chunk, recurrent)
    class Attention(nn.Module):
        def forward(self, q, k, v, g, beta, initial_state=None, decode=False, **kwargs):
            if decode:
                return recurrent(
                    q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
                    use_qk_l2norm_in_kernel=True, **kwargs,
                )  # fmt: skip
            return chunk(
                q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, **kwargs,
            )  # fmt: skip

    return Attention


@pytest.fixture(params=["training", "inference", "training_compile"])
def model(request, sdm, device):
    """Return a module whose functions are replaced by our layers, in one of the modes."""
    torch._dynamo.reset()
    path = Path(sdm.__file__).parents[2]
    mapping = {name: {device.type: LocalLayerRepository(path, layer_name=name)} for name in LAYERS}
    modes = {
        "training": Mode.TRAINING,
        "inference": Mode.INFERENCE,
        "training_compile": Mode.TRAINING | Mode.TORCH_COMPILE,
    }
    attention = attention_class()().train(request.param != "inference")
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(attention, mode=modes[request.param], device=device, use_fallback=False)
    if request.param == "training_compile":
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    yield attention
    torch._dynamo.reset()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_pure(sdm, name):
    layer = getattr(sdm.layers, name)
    own = dict(zip(LAYERS, plain_functions()))[name]
    _validate_layer(check_cls=type(own), cls=layer, repo="the layer")
    members = {key for key in vars(layer) if not key.startswith("__")}
    assert members == {"forward", "has_backward", "can_torch_compile"}
    assert layer.has_backward is True
    assert layer.can_torch_compile is True


@pytest.mark.parametrize("decode", [False, True])
def test_under_a_model(sdm, device, model, decode):
    inputs = make(CASE.but(T=3 if decode else 70), device)
    name = LAYERS[decode]
    expected = results(getattr(sdm, name), inputs)

    def call(*tokens, initial_state, output_final_state, **options):
        return model(*tokens, initial_state=initial_state, decode=decode)

    assert_same_bits(results(call, inputs), expected)


@pytest.mark.parametrize("key", ["cu_seqlens", "cu_seq_lens_q"])
@pytest.mark.parametrize("decode", [False, True])
def test_packed_under_a_model(sdm, device, model, decode, key):
    """Offsets come through by either name; other keywords of a model's forward are ignored."""
    inputs = make(CASE.but(lengths=(20, 0, 50)), device)
    expected = results(getattr(sdm, LAYERS[decode]), inputs)

    def call(*tokens, initial_state, output_final_state, cu_seqlens, **options):
        extras = {key: cu_seqlens, "position_ids": None, "max_length_q": 50}
        return model(*tokens, initial_state=initial_state, decode=decode, **extras)

    assert_same_bits(results(call, inputs), expected)
