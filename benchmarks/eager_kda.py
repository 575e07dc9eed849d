# SPDX-License-Identifier: Apache-2.0
"""The yardstick: chunked Kimi delta attention in eager PyTorch, with autograd for the backward.

The mathematics of docs/semantics.md as one would write it without a kernel: what does not depend on
the state is computed for all chunks and heads at once, and a loop over chunks carries the state. Decays
between two tokens are products of two factors of at most 1, anchored at the first row of a strip of 16
rows; inside a strip they are taken one by one. So no gate overflows.
"""

import torch
import torch.nn.functional as F

STRIP = 16


def eager_chunk_kda(q, k, v, g, beta, A_log, dt_bias, *, lower_bound=-5.0, chunk_size=64):
    """Return `(out, final_state)` like `chunk_kda` on raw inputs: norm, gate and sigmoid inside."""
    batch, length, heads, dim = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    chunks = -(-length // chunk_size)

    def chunked(x):
        """[B, T, H, ...] -> [chunks, B * H, C, ...], tails filled with zeros."""
        x = x.to(compute).reshape(batch, length, heads, -1)
        x = F.pad(x, (0, 0, 0, 0, 0, chunks * chunk_size - length))
        x = x.view(batch, chunks, chunk_size, heads, -1)
        return x.permute(1, 0, 3, 2, 4).flatten(1, 2)

    def normed(x):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    gate = A_log.exp().view(-1, 1) * (g.to(compute) + dt_bias.view(heads, dim))
    gate = chunked(lower_bound * torch.sigmoid(gate))  # a filled token keeps everything
    strength = chunked(torch.sigmoid(beta.to(compute)))
    q, k, v = normed(chunked(q)) * dim**-0.5, normed(chunked(k)), chunked(v)
    total = gate.cumsum(2)
    pairs, reads = _decayed_scores(k, q, total)
    lower = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    eye = torch.eye(chunk_size, dtype=compute, device=q.device)
    system = eye + (strength * pairs).masked_fill(~lower.tril(-1), 0.0)
    reads = reads.masked_fill(~lower, 0.0)
    decay = total.exp()
    right = torch.cat([strength * v, strength * decay * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, weights = solved.split([v.shape[-1], dim], -1)
    queries = q * decay
    remaining = k * (total[:, :, -1:] - total).exp()
    last = decay[:, :, -1].unsqueeze(-1)

    state = q.new_zeros(batch * heads, dim, v.shape[-1])
    outputs = []
    for n in range(chunks):
        written = values[n] - weights[n] @ state
        outputs.append(torch.baddbmm(queries[n] @ state, reads[n], written))
        state = torch.baddbmm(last[n] * state, remaining[n].transpose(1, 2), written)
    out = torch.stack(outputs).unflatten(1, (batch, heads)).permute(1, 0, 3, 2, 4)
    out = out.reshape(batch, chunks * chunk_size, heads, -1)[:, :length]
    return out.to(g.dtype), state.unflatten(0, (batch, heads))


def _decayed_scores(k, q, total):
    """Return the sums over channels of k_i k_j and of q_i k_j, times exp(total_i - total_j), j <= i."""
    size = k.shape[2]
    both = torch.stack([k, q])  # the rows; columns are those of k
    strips = []
    for first in range(0, size, STRIP):
        rows = slice(first, min(first + STRIP, size))
        here = total[:, :, rows]
        inside = (here.unsqueeze(3) - here.unsqueeze(2)).clamp_max(0.0).exp()
        inside = inside * k[:, :, rows].unsqueeze(2)
        strip = torch.einsum("xnpik,npijk->xnpij", both[..., rows, :], inside)
        if first:
            anchor = total[:, :, first : first + 1]
            near = both[..., rows, :] * (here - anchor).exp()
            far = k[:, :, :first] * (anchor - total[:, :, :first]).exp()
            strip = torch.cat([near @ far.transpose(-1, -2), strip], -1)
        strips.append(F.pad(strip, (0, size - strip.shape[-1])))
    return torch.cat(strips, -2).unbind(0)
