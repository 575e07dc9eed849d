# SPDX-License-Identifier: Apache-2.0
"""A client that is not ours: transformers' Kimi Linear, its own torch path against our functions.

Optional: ``pip install -r requirements-transformers.txt``; without it these tests are skipped.
"""

import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -r requirements-transformers.txt")
pytest.importorskip(
    "transformers.models.kimi_linear", reason="this transformers has no Kimi Linear"
)

PINNED = re.search(
    r"^transformers==(.+)$",
    (Path(__file__).parents[1] / "requirements-transformers.txt").read_text(),
    re.MULTILINE,
).group(1)
if importlib.metadata.version("transformers") != PINNED:
    pytest.skip(f"written for transformers {PINNED}", allow_module_level=True)

from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping  # noqa: E402
from transformers import KimiLinearConfig, KimiLinearForCausalLM  # noqa: E402

from .helpers.compare import relative_error  # noqa: E402

LAYERS = ("chunk_kda", "fused_recurrent_kda")


def small_model(device, experts=True):
    """Return a random model: three KDA layers with a convolution each, one attention, experts."""
    torch.manual_seed(0)
    config = KimiLinearConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse" if experts else "dense"] * 2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        linear_head_dim=32,
        linear_num_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = KimiLinearForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 1)
            elif name.endswith("dt_bias"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.3 * parameter.shape[-1] ** -0.25)
    return model.to(device)


def under_our_functions(sdm, model, device, mode):
    """Put our layers under the model's two functions, by the names of transformers' own mapping."""
    path = Path(sdm.__file__).parents[2]
    mapping = {name: {device.type: LocalLayerRepository(path, layer_name=name)} for name in LAYERS}
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=device)
    return model


@pytest.fixture
def calls(sdm, monkeypatch):
    """Count the calls that reach our functions."""
    seen = dict.fromkeys(LAYERS, 0)
    module = sdm.layers.kda
    for name in LAYERS:
        own = getattr(module, name)

        def counted(*args, name=name, own=own, **keywords):
            seen[name] += 1
            return own(*args, **keywords)

        monkeypatch.setattr(module, name, counted)
    return seen


@pytest.fixture
def kimi(device):
    """Return a small model; its functions are its own again after the test."""
    model = small_model(device)
    yield model
    with use_kernel_mapping({}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=device)


def draw_tokens(device, *shape):
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(1)).to(device)


def train(model, tokens):
    """Return logits, loss and every gradient of a training step."""
    model.train()
    model.zero_grad(set_to_none=True)
    out = model(tokens, labels=tokens)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def test_training(sdm, device, kimi, calls):
    tokens = draw_tokens(device, 2, 150)
    expected = train(kimi, tokens)
    assert sum(calls.values()) == 0
    got = train(under_our_functions(sdm, kimi, device, Mode.TRAINING), tokens)
    assert calls == {"chunk_kda": 3, "fused_recurrent_kda": 0}
    assert got.keys() == expected.keys()
    assert sum("A_log" in name or "dt_bias" in name for name in got) == 6
    for name in got:
        assert relative_error(got[name], expected[name]) < 1e-4, name


def test_training_in_bfloat16(sdm, device, kimi, calls):
    """In bfloat16 the model is as close to its float32 self as with its own functions.

    Without experts: a rounding that sends a token to another one is no error of ours.
    """
    tokens = draw_tokens(device, 2, 100)
    model = small_model(device, experts=False).bfloat16()
    theirs = train(model, tokens)
    got = train(under_our_functions(sdm, model, device, Mode.TRAINING), tokens)
    exact = train(model.float(), tokens)
    assert calls["chunk_kda"] == 6
    for name in got:
        assert got[name].dtype == theirs[name].dtype
        error = relative_error(got[name], exact[name])
        assert error < 1.3 * relative_error(theirs[name], exact[name]) + 0.01, name


def decode(model, tokens, prompt):
    """Return the logits of a prompt, then of one token at a time through the cache."""
    model.eval()
    with torch.no_grad():
        out = model(tokens[:, :prompt], use_cache=True)
        logits = [out.logits]
        for t in range(prompt, tokens.shape[1]):
            cache = out.past_key_values
            out = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("prompt", [1, 63, 70])
def test_prefill_and_decode(sdm, device, kimi, calls, prompt):
    tokens = draw_tokens(device, 2, prompt + 5)
    expected = decode(kimi, tokens, prompt)
    under_our_functions(sdm, kimi, device, Mode.INFERENCE)
    got = decode(kimi, tokens, prompt)
    assert calls == {"chunk_kda": 3, "fused_recurrent_kda": 15}
    assert relative_error(got, expected) < 1e-5
    with torch.no_grad():
        whole = kimi(tokens, use_cache=False).logits
    assert relative_error(got, whole) < 1e-5


def test_prefill_in_two_parts(sdm, device, kimi, calls):
    tokens = draw_tokens(device, 1, 90)
    under_our_functions(sdm, kimi, device, Mode.INFERENCE)
    kimi.eval()
    with torch.no_grad():
        whole = kimi(tokens, use_cache=False).logits
        first = kimi(tokens[:, :50], use_cache=True)
        second = kimi(tokens[:, 50:], past_key_values=first.past_key_values, use_cache=True)
    assert calls["chunk_kda"] == 9
    assert relative_error(torch.cat([first.logits, second.logits], 1), whole) < 1e-5


def test_generate(sdm, device, kimi, calls):
    tokens = draw_tokens(device, 2, 20)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = kimi.eval().generate(tokens, **options)
    under_our_functions(sdm, kimi, device, Mode.INFERENCE)
    assert torch.equal(kimi.generate(tokens, **options), expected)
    assert calls["fused_recurrent_kda"] >= 3 * 10


def test_names_of_the_community_kernel(sdm):
    """The layers that transformers asks a package of these functions for."""
    assert sdm.layers.chunk_kimi_delta_attention is sdm.layers.chunk_kda
    assert sdm.layers.recurrent_kimi_delta_attention is sdm.layers.fused_recurrent_kda
