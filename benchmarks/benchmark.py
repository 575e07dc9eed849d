# SPDX-License-Identifier: Apache-2.0
"""Benchmarks for `kernels benchmark`: a smoke figure a size, launch cost included.

Small sizes are checked against the package's plain PyTorch reference, a loop over tokens whose time shows
up as the reference time; large ones would wait for it. measure.py compares with a fast eager version and
has the real numbers.
"""

import torch
from kernels.benchmark import Benchmark

# B, T, H, W = R, D, factor_dims
SIZES = {
    "small": (1, 64, 2, 8, 32, (16, 16)),
    "base": (1, 256, 2, 16, 64, (64, 64)),
    "large": (2, 1024, 2, 32, 256, (128, 128)),
}


class _Sdm:
    seed = 0

    def draw(self, size, length=None):
        b, t, h, lanes, d, dims = SIZES[size]
        t = length or t

        def picks():
            scores = torch.randn(b, t, h, sum(dims))
            values, indices = self.kernel.product_key_topk(scores, dims, lanes)
            return indices.to(self.device), values.softmax(-1).to(self.device)

        write_idx, write_val = picks()
        read_idx, read_val = picks()
        v = torch.randn(b, t, h, d, device=self.device)
        beta = torch.rand(b, t, h, device=self.device)
        g = -torch.rand(b, t, h, device=self.device)
        self.tokens = (write_idx, write_val, v, beta, g, read_idx, read_val)
        self.bank = torch.randn(b, h, dims[0] * dims[1], d, device=self.device)


class ChunkSdm(_Sdm, Benchmark):
    def setup_base(self):
        self.draw("base")

    def setup_large(self):
        self.draw("large")

    def forward(self):
        with torch.no_grad():
            self.out, _ = self.kernel.chunk_sdm(*self.tokens, self.bank)

    def reference(self):
        with torch.no_grad():
            return self.kernel.reference.sdm(*self.tokens, self.bank)[0]

    benchmark_base = benchmark_large = forward
    verify_base = reference


class ChunkSdmTraining(_Sdm, Benchmark):
    """Forward and backward; what is checked is the gradient of the values."""

    def setup_small(self):
        self.draw("small")
        self.require_grad()

    def setup_large(self):
        self.draw("large")
        self.require_grad()

    def require_grad(self):
        self.d_out = torch.randn_like(self.tokens[2])
        self.leaves = [
            x.requires_grad_() for x in (*self.tokens, self.bank) if x.is_floating_point()
        ]

    def gradients(self, function):
        out, _ = function(*self.tokens, self.bank)
        return torch.autograd.grad(out, self.leaves, self.d_out)[1]

    def train(self):
        self.out = self.gradients(self.kernel.chunk_sdm)

    def reference(self):
        return self.gradients(self.kernel.reference.sdm)

    benchmark_small = benchmark_large = train
    verify_small = reference


class RecurrentSdm(_Sdm, Benchmark):
    """One decode step; the state keeps advancing, so that the first output is the one checked."""

    def setup_base(self):
        self.draw("base", length=1)
        self.first = None
        self.state = self.bank.clone()

    def setup_large(self):
        self.draw("large", length=1)
        self.first = None
        self.state = self.bank.clone()

    def step(self):
        out = self.kernel.recurrent_sdm_(self.state, *self.tokens)
        if self.first is None:
            self.first = self.out = out

    def reference(self):
        return self.kernel.reference.sdm(*self.tokens, self.bank)[0]

    benchmark_base = benchmark_large = step
    verify_base = verify_large = reference


class ProductKeyTopk(Benchmark):
    seed = 0

    def setup_base(self):
        self.draw(512, (64, 64), 16)

    def setup_large(self):
        self.draw(4096, (128, 128), 32)

    def draw(self, rows, dims, k):
        self.dims, self.k = dims, k
        self.scores = torch.randn(rows, sum(dims), device=self.device)

    def select(self):
        self.out, _ = self.kernel.product_key_topk(self.scores, self.dims, self.k)

    def reference(self):
        return self.kernel.reference.product_key_topk(self.scores, self.dims, self.k)[0]

    benchmark_base = benchmark_large = select
    verify_base = verify_large = reference


# B, T, H (queries and keys) = HV (values), K = V
KDA_SIZES = {
    "base": (1, 128, 2, 64),
    "large": (2, 2048, 8, 128),
}


class _Kda:
    seed = 0

    def draw(self, size, length=None):
        b, t, h, d = KDA_SIZES[size]
        t = length or t
        q, k, v = (torch.randn(b, t, h, d, device=self.device) for _ in range(3))
        g = -0.2 * torch.rand(b, t, h, d, device=self.device)
        beta = torch.rand(b, t, h, device=self.device)
        self.inputs = (q, k, v, g, beta)
        self.state = torch.randn(b, h, d, d, device=self.device)

    def call(self, function):
        out, _ = function(*self.inputs, initial_state=self.state, use_qk_l2norm_in_kernel=True)
        return out


class ChunkKda(_Kda, Benchmark):
    def setup_base(self):
        self.draw("base")

    def setup_large(self):
        self.draw("large")

    def forward(self):
        with torch.no_grad():
            self.out = self.call(self.kernel.chunk_kda)

    def reference(self):
        with torch.no_grad():
            return self.call(self.kernel.reference.kda)

    benchmark_base = benchmark_large = forward
    verify_base = reference


class ChunkKdaTraining(_Kda, Benchmark):
    """Forward and backward; what is checked is the gradient of the keys."""

    def setup_base(self):
        self.draw("base")
        self.require_grad()

    def setup_large(self):
        self.draw("large")
        self.require_grad()

    def require_grad(self):
        self.d_out = torch.randn_like(self.inputs[2])
        self.leaves = [x.requires_grad_() for x in (*self.inputs, self.state)]

    def gradients(self, function):
        return torch.autograd.grad(self.call(function), self.leaves, self.d_out)[1]

    def train(self):
        self.out = self.gradients(self.kernel.chunk_kda)

    def reference(self):
        return self.gradients(self.kernel.reference.kda)

    benchmark_base = benchmark_large = train
    verify_base = reference


class FusedRecurrentKda(_Kda, Benchmark):
    """Sixteen tokens, one after the other."""

    def setup_base(self):
        self.draw("base", length=16)

    def setup_large(self):
        self.draw("large", length=16)

    def forward(self):
        with torch.no_grad():
            self.out = self.call(self.kernel.fused_recurrent_kda)

    def reference(self):
        with torch.no_grad():
            return self.call(self.kernel.reference.kda)

    benchmark_base = benchmark_large = forward
    verify_base = verify_large = reference


class RecurrentKda(_Kda, Benchmark):
    """One decode step; the state keeps advancing, so that the first output is the one checked."""

    def setup_base(self):
        self.draw("base", length=1)
        self.first, self.pool = None, self.state.clone()

    def setup_large(self):
        self.draw("large", length=1)
        self.first, self.pool = None, self.state.clone()

    def step(self):
        out = self.kernel.recurrent_kda_(self.pool, *self.inputs, use_qk_l2norm_in_kernel=True)
        if self.first is None:
            self.first = self.out = out

    def reference(self):
        return self.call(self.kernel.reference.kda)

    benchmark_base = benchmark_large = step
    verify_base = verify_large = reference
