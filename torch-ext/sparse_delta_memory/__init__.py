# SPDX-License-Identifier: Apache-2.0
"""Sparse delta memory: kernels, layers and their definitions in plain PyTorch."""

from . import layers, reference
from .config import SparseDeltaMemoryConfig
from .module import SparseDeltaMemory
from .sdm import check_indices, chunk_sdm, chunk_sdm_, recurrent_sdm_
from .state import SparseDeltaMemoryState
from .topk import product_key_topk

__all__ = [
    "SparseDeltaMemory",
    "SparseDeltaMemoryConfig",
    "SparseDeltaMemoryState",
    "check_indices",
    "chunk_sdm",
    "chunk_sdm_",
    "layers",
    "product_key_topk",
    "recurrent_sdm_",
    "reference",
]
