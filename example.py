# SPDX-License-Identifier: Apache-2.0
"""One call of each op on small tensors, compared with the plain PyTorch reference. Runs in seconds.

`python example.py` takes the package from the hub; with
`LOCAL_KERNELS="org/sparse-delta-memory=$PWD"` before it, the build of this checkout.
"""

import kernels
import torch

REPO_ID = "org/sparse-delta-memory"
k = kernels.get_kernel(REPO_ID, version=1, trust_remote_code=[REPO_ID])

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, D = 2, 256, 2, 64  # batch, tokens, heads, columns of a bank row
W, R = 8, 8  # slots that a token writes and reads
factors = (32, 32)  # product keys: 32 * 32 = 1024 slots from 64 scores
S = 32 * 32


def randn(*shape):
    """Normal numbers on the device."""
    return torch.randn(shape, device=device)


def show(name, got, expected):
    """Print the largest difference."""
    error = (got - expected).abs().max().item()
    print(f"{name:<32} largest difference to the reference {error:.1e}")


# Which slots to write and to read: the best sums of one score from each factor.
write_scores, read_scores = randn(B, T, H, sum(factors)), randn(B, T, H, sum(factors))
write_val, write_idx = k.product_key_topk(write_scores, factors, W)
read_val, read_idx = k.product_key_topk(read_scores, factors, R)
expected_val, expected_idx = k.reference.product_key_topk(write_scores, factors, W)
assert torch.equal(write_idx, expected_idx)
show("product_key_topk", write_val, expected_val)

# The memory: every token decays, corrects and reads a few rows of its bank.
v, bank = randn(B, T, H, D), randn(H, S, D)
beta, g = torch.sigmoid(randn(B, T, H)), -0.1 * torch.rand(B, T, H, device=device)
inputs = (write_idx, write_val.softmax(-1), v, beta, g, read_idx, read_val.softmax(-1))
out, final_bank = k.chunk_sdm(*inputs, bank, output_final_state=True)
expected_out, expected_bank = k.reference.sdm(*inputs, bank, output_final_state=True)
show("chunk_sdm, output", out, expected_out)
show("chunk_sdm, final bank", final_bank, expected_bank)

# Generation: the same tokens, a prompt at once and then one by one, in place.
state = bank.expand(B, H, S, D).clone()
prompt = k.chunk_sdm_(state, *(x[:, :250] for x in inputs))
steps = [k.recurrent_sdm_(state, *(x[:, t : t + 1] for x in inputs)) for t in range(250, T)]
show("chunk_sdm_ and recurrent_sdm_", torch.cat([prompt, *steps], dim=1), expected_out)

# The whole mixer, with a gradient.
config = k.SparseDeltaMemoryConfig(
    dim=H * D, num_heads=H, slots_per_head=S, num_writes=W, num_reads=R
)
layer = k.SparseDeltaMemory(config).to(device)
y, _ = layer(randn(B, T, H * D))
y.square().mean().backward()
print(f"{'SparseDeltaMemory':<32} {tuple(y.shape)}, bank gradient {layer.memory.grad.norm():.1e}")

# Kimi delta attention: a dense state a head, trained on whole sequences, advanced token by token.
K = 32
q, key = randn(B, T, H, K), randn(B, T, H, K)
decay = -0.1 * torch.rand(B, T, H, K, device=device)
inputs = (q, key, v, decay, beta)
options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
out, final_state = k.chunk_kda(*inputs, **options)
expected_out, expected_state = k.reference.kda(*inputs, **options)
show("chunk_kda, output", out, expected_out)
show("chunk_kda, final state", final_state, expected_state)
_, state = k.chunk_kda(*(x[:, :250] for x in inputs), **options)
rest = [x[:, 250:] for x in inputs]
out, _ = k.fused_recurrent_kda(*rest, initial_state=state, **options)
show("fused_recurrent_kda", out, expected_out[:, 250:])
show("recurrent_kda_", k.recurrent_kda_(state, *rest, use_qk_l2norm_in_kernel=True), out)
