# SPDX-License-Identifier: Apache-2.0
"""Sparse delta memory and Kimi delta attention: kernels, layers and their definitions in plain PyTorch."""

from . import layers, reference
from .config import SparseDeltaMemoryConfig
from .kda import chunk_kda, fused_recurrent_kda, recurrent_kda_
from .module import SparseDeltaMemory
from .sdm import check_indices, chunk_sdm, chunk_sdm_, recurrent_sdm_
from .state import SparseDeltaMemoryState
from .topk import product_key_topk

__all__ = [
    "SparseDeltaMemory",
    "SparseDeltaMemoryConfig",
    "SparseDeltaMemoryState",
    "check_indices",
    "chunk_kda",
    "chunk_sdm",
    "chunk_sdm_",
    "fused_recurrent_kda",
    "layers",
    "product_key_topk",
    "recurrent_kda_",
    "recurrent_sdm_",
    "reference",
]
