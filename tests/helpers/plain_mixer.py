# SPDX-License-Identifier: Apache-2.0
"""The mixer written out in plain PyTorch: the oracle of the module, and a module to kernelize."""

import torch
import torch.nn.functional as F

SIZES = {"dim": 24, "num_heads": 2, "slots_per_head": 36, "num_writes": 3, "num_reads": 4}

# Every option of the configuration that changes what is computed.
OPTIONS = {
    "plain": {},
    "output_gate": {"output_gate": True},
    "normalize_readings": {"normalize_readings": True, "norm_eps": 1e-5},
    "no_learned_bank": {"backprop_on_memory": False},
    "query_batchnorm": {"query_batchnorm": True},
    "key_weighted_decay": {"key_weighted_decay": True},
    "softmax_scales": {"read_act_scale": 2.0, "write_act_scale": 0.5},
    "l2_normalize": {"read_act": "l2_normalize", "write_act": "l2_normalize"},
    "nn_activations": {"read_act": "SiLU", "write_act": "Softsign"},
    "three_factors": {"product_key_factor_dims": [2, 3, 6]},
    "one_factor": {"product_key_factor_dims": (36,)},
    "chunk_size": {"chunk_size": 16},
    "A_init_range": {"A_init_range": (0.01, 0.1)},
    "rows": {"save": "rows"},
    "everything": {
        "output_gate": True,
        "normalize_readings": True,
        "query_batchnorm": True,
        "key_weighted_decay": True,
        "product_key_factor_dims": [4, 9],
        "chunk_size": 5,
    },
}


def config_of(sdm, **changes):
    """Return a small configuration."""
    return sdm.SparseDeltaMemoryConfig(**{**SIZES, **changes})


def randomize(mixer):
    """Give every parameter and buffer a value that matters, as training would, and return it."""
    with torch.no_grad():
        for name, tensor in mixer.state_dict().items():
            if "running_var" in name:
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point() and name not in ("A_log", "dt_bias"):
                tensor.add_(0.3 * torch.randn_like(tensor))
    return mixer


def _act(name, scale, x):
    if name == "Softmax":
        return torch.softmax(scale * x, dim=-1)
    if name == "l2_normalize":
        return x / (x.norm(dim=-1, keepdim=True) + 1e-12)
    return getattr(torch.nn, name)()(x)


def plain_forward(sdm, mixer, x, bank=None, cu_seqlens=None):
    """Return y and the final bank of x ``[B, T, dim]``, token by token."""
    c = mixer.config
    B, T, _ = x.shape
    heads, columns = c.num_heads, c.dim // c.num_heads
    if bank is None:
        shape = (heads, c.slots_per_head, columns)
        bank = mixer.memory.view(shape) if c.backprop_on_memory else x.new_zeros(shape)

    def pick(projection, norm, count, act, scale):
        scores = projection(x)
        if c.query_batchnorm:
            scores = norm(scores.view(B * T, -1)).view(B, T, -1)
        scores = scores.view(B, T, heads, -1)
        side = int(c.slots_per_head**0.5)
        dims = c.product_key_factor_dims or [side, side]
        values, slots = sdm.reference.product_key_topk(scores, list(dims), count)
        return slots, _act(act, scale, values)

    bn = (mixer.key_bn, mixer.query_bn) if c.query_batchnorm else (None, None)
    write_idx, write_val = pick(mixer.Wk_write, bn[0], c.num_writes, c.write_act, c.write_act_scale)
    read_idx, read_val = pick(mixer.Wq_read, bn[1], c.num_reads, c.read_act, c.read_act_scale)
    g = -mixer.A_log.exp() * F.softplus(mixer.a_proj(x) + mixer.dt_bias)
    if c.key_weighted_decay:
        g = g[..., None] * write_val
    beta = torch.sigmoid(mixer.b_proj(x))
    v = mixer.Wv_write(x).view(B, T, heads, columns)
    y, final = sdm.reference.sdm(
        write_idx, write_val, v, beta, g, read_idx, read_val, bank,
        cu_seqlens=cu_seqlens, output_final_state=True,
    )  # fmt: skip
    if c.normalize_readings:
        y = mixer.readings_norm(y)
    y = y.reshape(B, T, c.dim)
    if c.output_gate:
        y = torch.sigmoid(mixer.Wog(x)) * y
    return mixer.Wo(y), final
