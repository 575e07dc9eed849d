# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definitions of the ops: what the tests compare with and the documentation cites."""

from .kda import kda
from .sdm import sdm
from .topk import product_key_topk

__all__ = ["kda", "product_key_topk", "sdm"]
