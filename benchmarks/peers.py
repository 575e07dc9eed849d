# SPDX-License-Identifier: Apache-2.0
"""Public packages beside the kernels, through their public functions, where they are installed.

They compile or tune themselves at the first call, which takes minutes; measure.py asks for them with
--peers only. Without them targets.json has their figures.
"""

import torch


def sdm_peer(inputs, d_out, chunk):
    """Return {(op, who): function} of the package sparse-delta-memory, {} where it is missing."""
    try:
        from sparse_delta_memory.memory_ops import sdm_write_read  # noqa: TID251  the public one
    except ImportError:
        return {}
    write_idx, write_val, v, beta, g, read_idx, read_val, bank = inputs
    streams, slots = v.shape[0] * v.shape[2], bank.shape[-2]

    def by_stream(x):
        return x.transpose(1, 2).flatten(0, 1).contiguous()

    offset = (torch.arange(streams, device=v.device) * slots).view(-1, 1, 1)
    write, read = by_stream(write_idx).long() + offset, by_stream(read_idx).long() + offset
    floats = [bank.reshape(-1, bank.shape[-1]), by_stream(write_val), by_stream(v)]
    floats += [by_stream(beta.unsqueeze(-1)), by_stream(g.unsqueeze(-1)), by_stream(read_val)]
    leaves = [x.detach().clone().requires_grad_() for x in floats]
    gradient = by_stream(d_out)
    options = {"chunk_size": chunk, "num_memory_slots": slots, "num_parallel": streams}

    def call(memory, k, values, strength, gate, q):
        return sdm_write_read(memory, write, k, values, strength, gate, read, q, **options)

    def train():
        out = call(*leaves)
        return torch.autograd.grad(out, leaves, gradient.view_as(out))

    who = f"sparse-delta-memory, chunk {chunk}"
    return {("forward", who): lambda: call(*floats), ("forward + backward", who): train}


def kda_peer(arguments, d_out, flags):
    """Return {(op, who): function} of the packages that are there."""
    return {**_fla_kda(arguments, d_out, flags), **_transformers_kda(arguments, d_out, flags)}


def _pair(who, call, arguments, d_out):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}

    def train():
        return torch.autograd.grad(call(**leaves), list(leaves.values()), d_out)

    return {("forward", who): lambda: call(**arguments), ("forward + backward", who): train}


def _fla_kda(arguments, d_out, flags):
    """Kimi delta attention of flash-linear-attention."""
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return {}
    return _pair("fla", lambda **inputs: chunk_kda(**inputs, **flags)[0], arguments, d_out)


def _transformers_kda(arguments, d_out, flags):
    """The torch path of transformers' Kimi Linear, with the activations that its layer makes."""
    try:
        from transformers.models.kimi_linear import modeling_kimi_linear as model
    except ImportError:
        return {}

    def call(q, k, v, g, beta, A_log, dt_bias):
        gate = A_log.exp().view(-1, 1) * (g.float() + dt_bias.view(*g.shape[2:]))
        gate = flags["lower_bound"] * gate.sigmoid()
        attention = model.chunk_kimi_delta_attention
        return attention(q, k, v, g=gate, beta=beta.sigmoid(), use_qk_l2norm_in_kernel=True)[0]

    return _pair("transformers", call, arguments, d_out)
