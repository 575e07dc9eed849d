# SPDX-License-Identifier: Apache-2.0
"""Named shapes and random inputs drawn the way the layer makes them."""

import json
import math
from pathlib import Path

import torch

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


def draw_picks(kernel, shape, lanes, device):
    """Slots and weights of one side: product keys on random scores, softmax over the picks."""
    sizes = (shape["B"], shape["T"], shape["H"])
    scores = torch.randn(*sizes, sum(shape["factor_dims"]))
    # On the CPU whatever the device: the same draw everywhere, and one kernel fewer to depend on.
    values, indices = kernel.product_key_topk(scores, shape["factor_dims"], lanes)
    weights = values.softmax(-1).to(getattr(torch, shape["dtype"]))
    return indices.to(device), weights.to(device)


def draw_sdm(kernel, shape, device, seed=0):
    """Return the arguments of `chunk_sdm`, one bank a sequence, decays as the layer makes them."""
    torch.manual_seed(seed)
    dtype = getattr(torch, shape["dtype"])
    sizes = (shape["B"], shape["T"], shape["H"])
    write_idx, write_val = draw_picks(kernel, shape, shape["W"], device)
    read_idx, read_val = draw_picks(kernel, shape, shape["R"], device)
    v = torch.randn(*sizes, shape["D"]).to(dtype).to(device)
    beta = torch.randn(*sizes).sigmoid().to(device)
    g = -torch.nn.functional.softplus(torch.randn(*sizes)).to(device)
    banks = torch.randn(shape["B"], shape["H"], num_slots(shape), shape["D"], device=device)
    return write_idx, write_val, v, beta, g, read_idx, read_val, banks.to(dtype)


def with_grad(arguments):
    """Copies of the floating arguments as leaves that require a gradient."""
    return [x.clone().requires_grad_() if x.is_floating_point() else x for x in arguments]
