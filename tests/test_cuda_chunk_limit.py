# SPDX-License-Identifier: Apache-2.0
"""How many tokens a chunk has on a card is a matter of its shared memory alone."""

import importlib

import pytest
import torch

KIB = 1024


@pytest.fixture
def module(sdm):
    return importlib.import_module(sdm.chunk_sdm.__module__)


@pytest.mark.parametrize(
    "shared_memory, element_size, limit",
    [
        (227 * KIB, 2, 256),  # 9.0, 10.0
        (227 * KIB, 4, 256),
        (163 * KIB, 2, 256),  # 8.0
        (163 * KIB, 4, 256),
        (99 * KIB, 2, 48),  # 8.6, 8.9, 12.0
        (99 * KIB, 4, 48),
    ],
)
def test_limit_of_known_cards(module, shared_memory, element_size, limit):
    assert module.cuda_chunk_limit(shared_memory, element_size) == limit
    # what the kernels ask for: two slices of halves and a scale a token, or one of floats; the rows in
    # flight; for each slot in flight a note and a place
    walk = 2 * limit * (128 + (4 if element_size == 2 else 0)) + 64 * KIB + 4 * 64 * (64 + 24)
    update = limit * 128 // element_size * 4 + 32 * KIB + 4 * 64 * (48 + 24)
    assert max(walk, update) <= shared_memory


def test_cpu_takes_any_chunk(module):
    device = torch.device("cpu")
    assert module.effective_chunk_size(device, None, torch.float32) == 64
    assert module.effective_chunk_size(device, 512, torch.float32) == 512
