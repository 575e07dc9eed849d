# SPDX-License-Identifier: Apache-2.0
"""Bytes of the bank that the chunked algorithm has to move, counted from the real slots.

In one chunk of one stream let U be the distinct slots touched and U_w the distinct slots written.
Rows moved, each of D elements:

    forward            gather: U read; update: U_w read, U_w written              U + 2 U_w
      keeping rows     old rows written                                               +   U_w
    replay             update once more, from row to kept row                         + 2 U_w
      in place         old rows written besides                                       +   U_w
    backward           gradient rows of written slots read (their sum goes back
                       to the values), then of all touched ones read and written    2 U +   U_w
                       rows before the chunk read (bank or kept ones)                 U
      in place         bank put back                                                  +   U_w

"In place" is a backward that works in one bank, as the CUDA kernels do; those of the CPU read every
row where it was kept.

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


def sdm_bytes(touched, written, dim, dtype, in_place):
    """Return {pass: bytes} for the passes that `measure.py` times; `in_place` as above."""
    row = dim * dtype.itemsize
    gradient_row = dim * max(4, dtype.itemsize)
    forward = (touched + 2 * written) * row
    moved = written if in_place else 0
    backward = (2 * touched + written) * gradient_row + (touched + moved) * row
    return {
        "forward": forward,
        "rows": forward + written * row + backward,
        "replay": forward + (2 * written + moved) * row + backward,
    }


def step_bytes(write_idx, read_idx, num_slots, dim, dtype):
    """Bytes of one decode step, averaged over the tokens given: chunks of one token."""
    touched, written = count_rows(write_idx, read_idx, num_slots, 1)
    return (touched + 2 * written) * dim * dtype.itemsize / write_idx.shape[1]
