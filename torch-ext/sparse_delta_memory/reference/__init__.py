# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch definitions of the ops: what the tests compare with and the documentation cites."""

from .sdm import sdm

__all__ = ["sdm"]
