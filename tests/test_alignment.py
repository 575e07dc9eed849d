# SPDX-License-Identifier: Apache-2.0
"""Arguments that start anywhere in their storage: the bits of aligned ones."""

import pytest
import torch

from .helpers.calls import CALLS
from .helpers.compare import assert_same_bits


def moved(x, offset):
    """The same values, ``offset`` elements into a storage, between NaN or ids that are wrong."""
    filler = float("nan") if x.is_floating_point() else 0
    storage = torch.full((x.numel() + offset + 8,), filler, dtype=x.dtype, device=x.device)
    return storage[offset : offset + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.parametrize("offset", [1, 2, 4, 7])
def test_all_arguments(sdm, device, call, offset):
    arguments = call.draw(device)
    expected = list(call.run(sdm, arguments))
    got = call.run(sdm, [moved(x, offset) for x in arguments])
    assert_same_bits(list(got), expected)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_argument(sdm, device, call):
    arguments = call.draw(device)
    expected = list(call.run(sdm, arguments))
    for i, x in enumerate(arguments):
        got = call.run(sdm, [*arguments[:i], moved(x, 1), *arguments[i + 1 :]])
        assert_same_bits(list(got), expected, f"argument {i}")
