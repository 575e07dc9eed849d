# SPDX-License-Identifier: Apache-2.0
"""The functions of Kimi delta attention as ``Call``s of ``calls.py``, from raw inputs."""

import torch

FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


class Kda:
    """One of the three functions, on all of its tensors; grouped values, states with gradients."""

    def __init__(
        self, name, function, *, size=(32, 48), T=150, lengths=None, dtype=torch.bfloat16,
        lower_bound=-5.0, grad=True,
    ):  # fmt: skip
        self.name, self.function = name, function
        self.size, self.T, self.lengths = size, T, lengths
        self.dtype, self.lower_bound, self.grad = dtype, lower_bound, grad

    def draw(self, device, seed=0):
        gen = torch.Generator().manual_seed(seed)
        (K, V), H, HV = self.size, 2, 4
        B, T = (2, self.T) if self.lengths is None else (1, sum(self.lengths))
        num = B if self.lengths is None else len(self.lengths)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(shape, generator=gen).to(dtype)

        pool = num + 1 if self.function == "recurrent_kda_" else num
        arguments = [
            normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV, K),
            normal(B, T, HV), 0.5 * normal(HV, dtype=torch.float32),
            normal(HV * K, dtype=torch.float32), normal(pool, HV, K, V, dtype=torch.float32),
        ]  # fmt: skip
        if self.lengths is not None:
            arguments.append(torch.tensor((0, *self.lengths)).cumsum(0))
        if self.function == "recurrent_kda_":
            arguments.append(torch.roll(torch.arange(pool), 1 + seed)[:num])
        return [x.to(device) for x in arguments]

    def run(self, sdm, arguments):
        function = getattr(sdm, self.function)
        options = {**FLAGS, "lower_bound": self.lower_bound}
        if self.function == "recurrent_kda_":
            q, k, v, g, beta, A_log, dt_bias, pool, index = arguments
            pool = pool.clone()
            with torch.no_grad():
                out = function(
                    pool, q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, state_indices=index,
                    **options,
                )  # fmt: skip
            return out, pool
        if self.lengths is not None:
            options["cu_seqlens"] = arguments[8]
        if self.function == "chunk_kda":
            options["safe_gate"] = self.lower_bound is not None
        leaves = [x.detach().requires_grad_(self.grad) for x in arguments[:8]]
        named = dict(zip(LEAVES, leaves))
        with torch.set_grad_enabled(self.grad):
            out, state = function(**named, output_final_state=True, **options)
        if not self.grad:
            return out, state
        d_out, d_state = out.detach() * 0.5 + 1, state.detach() * 0.25 - 1
        grads = torch.autograd.grad((out, state), leaves, (d_out, d_state))
        return [out.detach(), state.detach(), *grads]


PACKED = (70, 0, 33, 47)
# Sizes of the tensor-core path and of the plain one.
KDA_CALLS = [
    Kda("chunk_kda", "chunk_kda", size=(128, 128), grad=False),
    Kda("chunk_kda_backward", "chunk_kda", size=(128, 128)),
    Kda("chunk_kda_packed", "chunk_kda", size=(128, 128), lengths=PACKED),
    Kda("chunk_kda_plain", "chunk_kda", dtype=torch.float32, lower_bound=None),
    Kda("chunk_kda_plain_packed", "chunk_kda", lengths=PACKED),
    Kda("fused_recurrent_kda", "fused_recurrent_kda", T=5),
    Kda("recurrent_kda_", "recurrent_kda_", T=2, size=(128, 128)),
]
