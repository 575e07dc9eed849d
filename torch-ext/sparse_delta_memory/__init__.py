# SPDX-License-Identifier: Apache-2.0
"""Sparse delta memory: kernels, layers and their definitions in plain PyTorch."""

from . import reference
from .sdm import check_indices, chunk_sdm, chunk_sdm_, recurrent_sdm_

__all__ = [
    "check_indices",
    "chunk_sdm",
    "chunk_sdm_",
    "recurrent_sdm_",
    "reference",
]
