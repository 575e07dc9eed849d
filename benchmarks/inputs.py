# SPDX-License-Identifier: Apache-2.0
"""Named shapes and random inputs drawn the way the layer makes them."""

import json
import math
from pathlib import Path

import torch
from eager_sdm import eager_product_key_topk

SHAPES = Path(__file__).with_name("shapes.json")


def load_shapes(device_type, names=()):
    """Return {kind: {name: shape}}: the named shapes, or all that are meant for a device."""
    shapes = json.loads(SHAPES.read_text())
    known = {name for group in shapes.values() for name in group}
    unknown = sorted(set(names) - known)
    if unknown:
        raise SystemExit(f"no shape {', '.join(unknown)}; there are: {', '.join(sorted(known))}")

    def wanted(name, shape):
        if names:
            return name in names
        return device_type in shape["devices"] and not shape.get("optional", False)

    return {
        kind: {name: shape for name, shape in group.items() if wanted(name, shape)}
        for kind, group in shapes.items()
    }


def num_slots(shape):
    return math.prod(shape["factor_dims"])


def draw_picks(kernel, shape, lanes, device, generator):
    """Slots and weights of one side: product keys on random scores, softmax over the picks.

    On the CPU by the kernel, on a GPU by the eager top-k, so that nothing that is measured there
    has made its own inputs.
    """
    sizes = (shape["B"], shape["T"], shape["H"])
    dims = shape["factor_dims"]
    scores = torch.randn(*sizes, sum(dims), device=device, generator=generator)
    if device.type == "cuda":
        rows = scores.flatten(0, 2).split(8192)  # the pair sums of all rows would be gigabytes
        picked = [eager_product_key_topk(x, dims, lanes) for x in rows]
        values, indices = (torch.cat(x).view(*sizes, lanes) for x in zip(*picked))
        indices = indices.int()
    else:
        values, indices = kernel.product_key_topk(scores, dims, lanes)
    return indices, values.softmax(-1).to(getattr(torch, shape["dtype"]))


def draw_sdm(kernel, shape, device, seed=0, shared_bank=False):
    """Return the arguments of `chunk_sdm`, one bank a sequence or a head, decays as the layer's."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, shape["dtype"])
    sizes = (shape["B"], shape["T"], shape["H"])

    def normal(*size, dtype=torch.float32):
        return torch.randn(*size, device=device, generator=generator, dtype=dtype)

    write_idx, write_val = draw_picks(kernel, shape, shape["W"], device, generator)
    read_idx, read_val = draw_picks(kernel, shape, shape["R"], device, generator)
    v = normal(*sizes, shape["D"], dtype=dtype)
    beta = normal(*sizes).sigmoid()
    g = -torch.nn.functional.softplus(normal(*sizes))
    own = () if shared_bank else (shape["B"],)
    bank = normal(*own, shape["H"], num_slots(shape), shape["D"], dtype=dtype)
    return write_idx, write_val, v, beta, g, read_idx, read_val, bank


def draw_kda(shape, device, seed=0):
    """Return raw q, k, v, g and beta and the parameters of the gate, as a layer's projections are."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, shape["dtype"])
    B, T, H, K, V = (shape[letter] for letter in "BTHKV")

    def normal(*size, dtype=dtype):
        return torch.randn(*size, device=device, generator=generator, dtype=dtype)

    q, k, v, g = (normal(B, T, H, size) for size in (K, K, V, K))
    beta = normal(B, T, H)
    A_log = (1 + 15 * torch.rand(H, device=device, generator=generator)).log()
    dt_bias = 0.5 * normal(H * K, dtype=torch.float32)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}


def with_grad(arguments):
    """Copies of the floating arguments as leaves that require a gradient."""
    return [x.clone().requires_grad_() if x.is_floating_point() else x for x in arguments]
