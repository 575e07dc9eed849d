# SPDX-License-Identifier: Apache-2.0
"""Token-by-token definition of Kimi delta attention in plain PyTorch."""

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import softplus


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: Optional[int] = None,
    *,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    chunk_size: int = 64,
) -> tuple[Tensor, ...]:
    """Kimi delta attention, one token after the other: the definition of ``chunk_kda``.

    For every token, on the state ``S`` (``[K, V]``) of its sequence and value head, with the query
    and key of head ``hv // (HV / H)``:

    1. ``S = exp(g)[:, None] * S``: each key channel decays by its own gate;
    2. ``r = v - S^T k``: what the state does not yet predict for this key;
    3. ``S = S + k (beta * r)^T``;
    4. ``out = scale * S^T q``.

    Before it, as asked for: ``q`` and ``k`` times ``rsqrt(sum of squares + 1e-6)``; the gate from its
    raw value ``z = g + dt_bias``, ``-exp(A_log) * softplus(z)`` or, with a lower bound,
    ``lower_bound * sigmoid(exp(A_log) * z)``; ``beta`` through a sigmoid, times 2 with
    ``allow_neg_eigval``. The arithmetic is float64 for float64 inputs and float32 otherwise. Ordinary
    autograd differentiates it, also twice.

    The arguments and results are those of ``chunk_kda``; ``safe_gate``, ``disable_recompute``,
    ``cu_seqlens_cpu``, ``cp_context``, ``use_graph`` and ``max_num_seqs`` have no influence.
    ``chunk_size`` only says at which tokens the states of ``return_intermediate_states`` are taken.
    """
    del safe_gate, disable_recompute, cu_seqlens_cpu, cp_context, use_graph, max_num_seqs
    dtype = q.dtype
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    heads, dim = v.shape[2], q.shape[3]
    q, k, v, g, beta = (x.to(compute) for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if use_gate_in_kernel:
        rate = 1.0 if A_log is None else A_log.to(compute).reshape(heads, 1).exp()
        z = g if dt_bias is None else g + dt_bias.to(compute).reshape(heads, dim)
        g = -rate * softplus(z) if lower_bound is None else lower_bound * (rate * z).sigmoid()
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    q = q * (dim**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))

    if cu_seqlens is None:
        spans = [slice(None)]
        num = q.shape[0]
    else:
        cuts = cu_seqlens.tolist()
        spans = [slice(first, last) for first, last in zip(cuts, cuts[1:])]
        num = len(spans)
    if initial_state is None:
        states = q.new_zeros(num, heads, dim, v.shape[3])
    else:
        states = initial_state.to(compute)
        states = states.transpose(2, 3) if state_v_first else states
    results = [
        _sequences(
            *(x[:, span] for x in (q, k, v, g, beta)),
            states if cu_seqlens is None else states[n : n + 1],
            chunk_size,
        )
        for n, span in enumerate(spans)
    ]
    outs, finals, boundaries = zip(*results) if results else ((), (), ())
    final_state = torch.cat(finals) if finals else states[:0]
    found = torch.cat(boundaries, dim=1) if boundaries else states[:0].unsqueeze(0)
    if state_v_first:
        final_state, found = final_state.transpose(2, 3), found.transpose(3, 4)
    out = (torch.cat(outs, dim=1) if outs else v).to(dtype)
    final = final_state.contiguous() if output_final_state else None
    return (out, final, found.to(dtype)) if return_intermediate_states else (out, final)


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run B sequences of equal length: out, the last state, the states before each chunk."""
    outputs: list[Tensor] = []
    boundaries: list[Tensor] = []
    for t in range(q.shape[1]):
        if t % chunk_size == 0:
            boundaries.append(state)
        state = g[:, t].exp().unsqueeze(-1) * state
        residual = v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2)
        write = beta[:, t].unsqueeze(-1) * residual
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    out = torch.stack(outputs, dim=1) if outputs else v
    found = torch.stack(boundaries, dim=1) if boundaries else state.unsqueeze(1)[:, :0]
    return out, state, found
