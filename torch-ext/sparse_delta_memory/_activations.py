# SPDX-License-Identifier: Apache-2.0
"""Activations that turn the picked scores of a token into read or write weights."""

from collections.abc import Callable

import torch
import torch.nn.functional as F


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def _l2_normalize(x: torch.Tensor) -> torch.Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-12)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


# Beside the first two: the activation classes of torch.nn without parameters or random numbers,
# with the defaults of their constructors; those with a `dim` work over the picks of a token.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Softmax": _softmax,
    "l2_normalize": _l2_normalize,
    "CELU": F.celu,
    "ELU": F.elu,
    "GELU": F.gelu,
    "Hardshrink": F.hardshrink,
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Hardtanh": F.hardtanh,
    "Identity": _identity,
    "LeakyReLU": F.leaky_relu,
    "LogSigmoid": F.logsigmoid,
    "Mish": F.mish,
    "ReLU": F.relu,
    "ReLU6": F.relu6,
    "SELU": F.selu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
    "Softplus": F.softplus,
    "Softshrink": F.softshrink,
    "Softsign": F.softsign,
    "Tanh": torch.tanh,
    "Tanhshrink": F.tanhshrink,
}


def activate(scores: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """Weights of the picked `scores [..., k]`, computed in at least float32, in their dtype."""
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scale != 1.0:
        x = x * scale
    return ACTIVATIONS[name](x).to(scores.dtype)
