# SPDX-License-Identifier: Apache-2.0
"""A small byte-level language model whose only long-range path is Sparse Delta Memory.

Each block is local (a causal convolution over a few bytes, then an MLP). Blocks named in
`memory_blocks` have a Sparse Delta Memory layer in between. Without those layers a byte sees only
the few bytes before it.

The memory works as a lookup of what came next: a byte is stored under the context before it, and
read when the same context returns. For that a memory layer sees each position together with the
one before, and starts with write keys that see the one before as the read keys see this one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass
class ByteLMConfig:
    """Sizes of the model."""

    dim: int = 128
    num_blocks: int = 4
    conv_width: int = 4
    mlp_factor: int = 2
    memory_blocks: tuple[int, ...] = (1, 2)  # () is the same model without memory
    num_heads: int = 2
    slots_per_head: int = 4096
    num_writes: int = 8
    num_reads: int = 8


class LocalMixer(nn.Module):
    """Gated causal convolution, one filter per channel."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.width = width
        self.up = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, width, groups=dim)
        self.down = nn.Linear(dim, dim)

    def forward(
        self, x: torch.Tensor, tail: Optional[torch.Tensor] = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, dim] and the inputs before it; returns y and the inputs to keep for later."""
        u, gate = self.up(x).chunk(2, dim=-1)
        if tail is None:
            tail = u.new_zeros(u.shape[0], self.width - 1, u.shape[2])
        u = torch.cat([tail, u], dim=1)
        y = self.conv(u.transpose(1, 2)).transpose(1, 2)
        return self.down(F.silu(y) * torch.sigmoid(gate)), u[:, u.shape[1] - self.width + 1 :]


class LookupMemory(nn.Module):
    """Sparse Delta Memory that stores what follows a context, ready to be read by that context."""

    def __init__(self, dim: int, memory: nn.Module):
        super().__init__()
        half = dim // 2
        self.narrow = nn.Linear(dim, half)
        self.memory = memory
        # The input is [this position, the one before]. At the start reads look at the first half
        # and writes, by the same keys, at the second; training is free to change that.
        with torch.no_grad():
            read, write = memory.Wq_read.weight, memory.Wk_write.weight
            write[:, half:] = read[:, :half]
            write[:, :half] = 0
            read[:, half:] = 0

    def forward(self, x: torch.Tensor, cache: dict) -> torch.Tensor:
        """x [B, T, dim] -> [B, T, dim]; the cache is empty or what an earlier call left."""
        here = self.narrow(x)
        previous = cache.get("previous")
        if previous is None:
            previous = torch.zeros_like(here[:, :1])
        before = torch.cat([previous, here[:, :-1]], dim=1)
        cache["previous"] = here[:, -1:]
        y, _ = self.memory(torch.cat([here, before], dim=-1), cache.get("memory"))
        return y


class Block(nn.Module):
    """Local mixing, optionally memory, then an MLP; each adds to the residual stream."""

    def __init__(self, config: ByteLMConfig, memory: Optional[nn.Module]):
        super().__init__()
        dim, hidden = config.dim, config.mlp_factor * config.dim
        self.norm1 = nn.LayerNorm(dim)
        self.local = LocalMixer(dim, config.conv_width)
        self.memory = None
        if memory is not None:
            self.norm2 = nn.LayerNorm(dim)
            self.memory = LookupMemory(dim, memory)
        self.norm3 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: torch.Tensor, cache: Optional[dict] = None) -> torch.Tensor:
        """x [B, T, dim]. With a cache, x continues what the cache has seen."""
        cache = {} if cache is None else cache
        y, cache["tail"] = self.local(self.norm1(x), cache.get("tail"))
        x = x + y
        if self.memory is not None:
            x = x + self.memory(self.norm2(x), cache)
        return x + self.mlp(self.norm3(x))


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, kernel, config: ByteLMConfig):
        """`kernel` is the module that `kernels.get_kernel` returned."""
        super().__init__()
        self.config = config
        memory_config = kernel.SparseDeltaMemoryConfig(
            dim=config.dim,
            num_heads=config.num_heads,
            slots_per_head=config.slots_per_head,
            num_writes=config.num_writes,
            num_reads=config.num_reads,
            output_gate=True,
            normalize_readings=True,
        )
        self.embed = nn.Embedding(256, config.dim)
        self.blocks = nn.ModuleList(
            Block(
                config,
                kernel.SparseDeltaMemory(memory_config) if i in config.memory_blocks else None,
            )
            for i in range(config.num_blocks)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, 256)

    def forward(self, tokens: torch.Tensor, caches: Optional[list[dict]] = None) -> torch.Tensor:
        """tokens [B, T] -> logits [B, T, 256]. With caches, continues where they stopped."""
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def new_caches(self, batch_size: int) -> list[dict]:
        """Caches of `batch_size` sequences that have seen nothing."""
        return [
            {} if block.memory is None else {"memory": block.memory.memory.init_state(batch_size)}
            for block in self.blocks
        ]

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Continue prompt [B, T] greedily: one prefill, then one step of the recurrence a byte."""
        caches = self.new_caches(prompt.shape[0])
        logits = self(prompt, caches)
        out = [prompt]
        for _ in range(num_bytes):
            out.append(logits[:, -1:].argmax(dim=-1))
            logits = self(out[-1], caches)
        return torch.cat(out, dim=1)

    @torch.no_grad()
    def generate_slowly(self, prompt: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """The same text without caches: the whole sequence again for every byte."""
        tokens = prompt
        for _ in range(num_bytes):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(dim=-1)], dim=1)
        return tokens

    def save(self, folder: Path) -> None:
        """Write model.safetensors and config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, kernel, folder: Path) -> "ByteLM":
        """Read what `save` wrote."""
        values = json.loads((folder / "config.json").read_text())
        values["memory_blocks"] = tuple(values["memory_blocks"])
        model = cls(kernel, ByteLMConfig(**values))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model
