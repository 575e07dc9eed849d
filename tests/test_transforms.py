# SPDX-License-Identifier: Apache-2.0
"""Forward mode and torch.func: what has no formula says so, what works is right."""

import pytest
import torch
from torch.autograd import forward_ad

from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits
from .helpers.kda_cases import KdaCase
from .helpers.kda_cases import make as make_kda

FUNCTIONS = ("chunk_sdm", "chunk_kda", "fused_recurrent_kda", "product_key_topk")
IN_PLACE = ("chunk_sdm_", "recurrent_sdm_", "recurrent_kda_")
MESSAGE = "forward mode and the transforms of torch.func that differentiate are not implemented"


def function_of(sdm, name, device):
    """One of the functions as one of a single tensor, and a value for it."""
    if name == "product_key_topk":
        scores = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(device)
        return lambda x: sdm.product_key_topk(x, (8, 8), 4)[0], scores
    if "kda" in name:
        inputs = make_kda(
            KdaCase("transforms", T=20, form="activated", strength="activated"), device
        )
        tokens = [inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta]
    else:
        inputs = make(Case("transforms", T=20, S=16, D=8, bank_per_sequence=True), device)
        tokens = list(inputs.tokens())
    state = inputs.initial_state
    place = 2

    def call(x):
        arguments = [*tokens[:place], x, *tokens[place + 1 :]]
        if name in IN_PLACE:
            return getattr(sdm, name)(state.clone(), *arguments)
        if "kda" in name:
            return getattr(sdm, name)(*arguments, initial_state=state)[0]
        return sdm.chunk_sdm(*arguments, state)[0]

    return call, tokens[place]


@pytest.mark.parametrize("name", FUNCTIONS + IN_PLACE)
def test_forward_mode_is_refused(sdm, device, name):
    call, x = function_of(sdm, name, device)
    with pytest.raises(NotImplementedError, match=f"^{name}: {MESSAGE}"):
        torch.func.jvp(call, (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=f"^{name}: {MESSAGE}"):
            call(forward_ad.make_dual(x, x))
        call(x)  # without a tangent there is nothing to lose


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_forward_mode_is_refused(sdm, device, name):
    torch._dynamo.reset()
    call, x = function_of(sdm, name, device)
    compiled = torch.compile(lambda y: torch.func.jvp(call, (y,), (y,)), backend="eager")
    with pytest.raises(NotImplementedError, match=f"^{name}: {MESSAGE}"):
        compiled(x)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_differentiating_transforms_are_refused(sdm, device, name):
    call, x = function_of(sdm, name, device)
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match=f"^{name}: {MESSAGE}"):
            transform(lambda y: call(y).sum())(x)
    with pytest.raises(NotImplementedError, match=f"^{name}: {MESSAGE}"):
        torch.func.grad(lambda y: torch.vmap(call)(y).sum())(torch.stack([x, x]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap(sdm, device, name):
    """Values and gradients are those of one call after the other."""
    call, x = function_of(sdm, name, device)
    leaves = torch.stack([x, 2 * x]).requires_grad_()
    out = torch.vmap(call)(leaves)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves)
    for i in range(2):
        leaf = leaves[i].detach().requires_grad_()
        one = call(leaf)
        assert_same_bits(out[i].detach(), one.detach())
        one.square().sum().backward()
        assert_same_bits(grad[i], leaf.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_batched_gradients(sdm, device, name):
    """Several vectors through one backward, as torch.autograd.functional does with vectorize."""
    call, x = function_of(sdm, name, device)
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    vectors = torch.stack([torch.ones_like(out), out.detach()])
    (batched,) = torch.autograd.grad(out, leaf, vectors, is_grads_batched=True, retain_graph=True)
    for vector, grad in zip(vectors, batched):
        assert_same_bits(grad, torch.autograd.grad(out, leaf, vector, retain_graph=True)[0])
