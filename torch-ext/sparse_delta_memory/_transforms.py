# SPDX-License-Identifier: Apache-2.0
"""Which derivatives a call is asked for, and those that the ops have no formulas for."""

from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Private names of torch: one that lacks them costs a clear message, nothing else.
transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_functorch = getattr(torch._C, "_functorch", None)

_MESSAGE = (
    "forward mode and the transforms of torch.func that differentiate are not implemented; "
    "torch.autograd.grad and backward() are, and `reference` has all"
)


def check_transforms(func: str, *tensors: Optional[Tensor]) -> None:
    """Raise NotImplementedError where torch.func or forward mode asks for a derivative.

    The ops have formulas for the backward only. Forward mode would give a tangent of zero without a
    word, and the transforms of torch.func fail with a message about something else.
    """
    in_forward_mode = getattr(forward_ad, "_current_level", -1) >= 0
    if torch.compiler.is_compiling():
        if (
            in_forward_mode
        ):  # torch.func.jvp inside; a trace does not tell which tensors have tangents
            raise NotImplementedError(f"{func}: {_MESSAGE}")
        return
    transformed = transforms_active()
    if not transformed and not in_forward_mode:
        return
    for x in tensors:
        if x is not None and (_has_tangent(x) or (transformed and _is_differentiated(x))):
            raise NotImplementedError(f"{func}: {_MESSAGE}")


def needs_gradient(*tensors: Optional[Tensor]) -> bool:
    """Return whether autograd will ask for the gradient of any of them."""
    if not torch.is_grad_enabled():
        return False
    if any(x is not None and x.requires_grad for x in tensors):
        return True
    if torch.compiler.is_compiling() or not transforms_active():
        return False
    # Inside vmap the tensor that requires a gradient is the one behind.
    return any(x is not None and _innermost(x).requires_grad for x in tensors)


def _innermost(x: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def _is_differentiated(x: Tensor) -> bool:
    """Return whether torch.func.grad, vjp or the like follows ``x``, also through vmap."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
