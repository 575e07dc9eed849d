# SPDX-License-Identifier: Apache-2.0
"""Bytes of the bank that the chunked algorithm has to move, counted from the real slots.

In one chunk of one stream let U be the distinct slots touched and U_w the distinct slots written.
Rows moved, each of D elements:

    forward            gather: U read; update: U_w read, U_w written              U + 2 U_w
      keeping rows     old rows written                                               +   U_w
    replay             update once more, old rows written                             + 3 U_w
    backward           gradient rows of written slots read (their sum goes back
                       to the values), then of all touched ones read and written    2 U +   U_w
                       rows before the chunk read (bank or kept ones),
                       bank put back                                                  U +   U_w

Gradient rows are float32 (float64 for a float64 bank), all others have the bank's dtype. Passes over
whole banks (the copy of the initial bank, the zeroed gradient, checkpoints), the token rows and the
weights are not counted: the share of the ceiling that follows from these bytes is a lower bound.
"""

import torch


def count_rows(write_idx, read_idx, num_slots, chunk_size):
    """Return (U, U_w) summed over all chunks and streams."""
    batch, length, heads = write_idx.shape[:3]
    device = write_idx.device
    chunk = torch.arange(length, device=device).view(1, -1, 1, 1) // chunk_size
    stream = torch.arange(batch * heads, device=device).view(batch, 1, heads, 1)
    first = (chunk * batch * heads + stream) * num_slots

    def distinct(*indices):
        rows = [(first + idx)[(idx >= 0) & (idx < num_slots)].flatten() for idx in indices]
        return torch.cat(rows).unique().numel()

    return distinct(write_idx, read_idx), distinct(write_idx)


def sdm_bytes(touched, written, dim, dtype):
    """Return {pass: bytes} for the passes that `measure.py` times."""
    row = dim * dtype.itemsize
    gradient_row = dim * max(4, dtype.itemsize)
    forward = (touched + 2 * written) * row
    backward = (2 * touched + written) * gradient_row + (touched + written) * row
    return {
        "forward": forward,
        "rows": forward + written * row + backward,
        "replay": forward + 3 * written * row + backward,
    }


def step_bytes(write_idx, read_idx, num_slots, dim, dtype):
    """Bytes of one decode step, averaged over the tokens given: chunks of one token."""
    touched, written = count_rows(write_idx, read_idx, num_slots, 1)
    return (touched + 2 * written) * dim * dtype.itemsize / write_idx.shape[1]
