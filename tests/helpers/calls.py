# SPDX-License-Identifier: Apache-2.0
"""Every op as a function of a flat list of tensors: what a test of streams, graphs or devices needs.

``Call(name).draw(device, seed)`` makes the arguments, ``.run(sdm, arguments)`` returns the results,
gradients included. Arguments are never changed: in-place ops work on a copy made inside.
"""

from dataclasses import replace

import torch

from .calls_kda import KDA_CALLS
from .cases import FLOATS, ORDER, Case, Inputs, make

# Several chunks of two sizes, columns beyond one slice, every stage of the kernels.
BASE = Case("base", B=2, T=150, H=2, S=64, D=96, W=5, R=3, chunk=64, dtype=torch.bfloat16)
PACKED = replace(BASE, id="packed", lengths=(70, 0, 33, 47), bank_per_sequence=True)
# Long enough for a bank at a segment boundary.
SEGMENTS = replace(BASE, id="segments", T=600, S=256, D=40, W=64, B=1)
SINGLE = replace(BASE, id="single", T=3, bank_per_sequence=True)


def private(x):
    """Return a copy of ``x`` in a storage of the same size, with its strides and its offset."""
    if x.is_contiguous() and x.storage_offset() == 0:
        return x.clone()
    size = x.untyped_storage().nbytes() // x.element_size()
    storage = torch.empty(size, dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


class _SdmCall:
    def __init__(self, name, case):
        self.name, self.case = name, case

    def draw(self, device, seed=0):
        inputs = make(self.case, device, seed)
        extra = [] if inputs.cu_seqlens is None else [inputs.cu_seqlens]
        return [*inputs.args(), *extra]

    def inputs(self, arguments):
        packed = self.case.lengths is not None
        return Inputs(
            *arguments[: len(ORDER)], cu_seqlens=arguments[len(ORDER)] if packed else None
        )


class Forward(_SdmCall):
    def run(self, sdm, arguments):
        x = self.inputs(arguments)
        with torch.no_grad():
            return sdm.chunk_sdm(
                *x.args(),
                chunk_size=self.case.chunk,
                cu_seqlens=x.cu_seqlens,
                output_final_state=True,
            )


class Train(_SdmCall):
    def run(self, sdm, arguments):
        x = self.inputs(arguments).map(lambda x: x.detach().requires_grad_(), FLOATS)
        out, state = sdm.chunk_sdm(
            *x.args(),
            chunk_size=self.case.chunk,
            cu_seqlens=x.cu_seqlens,
            output_final_state=True,
            save=self.case.save,
        )
        # The gradients that come in are functions of the inputs, so that they change with them.
        d_out, d_state = out.detach() * 0.5 + 1, state.detach() * 0.25 - 1
        grads = torch.autograd.grad((out, state), [getattr(x, n) for n in FLOATS], (d_out, d_state))
        return [out.detach(), state.detach(), *grads]


class InPlace(_SdmCall):
    """With a pool of one row more than there are sequences, in another order."""

    def draw(self, device, seed=0):
        arguments = super().draw(device, seed)
        num = self.case.num
        pool = torch.cat([arguments[7], arguments[7][:1]])
        index = torch.roll(torch.arange(num + 1), 1 + seed)[:num].to(device)
        return [*arguments[:7], pool, *arguments[8:], index]

    def run(self, sdm, arguments):
        x, pool = self.inputs(arguments), private(arguments[7])
        with torch.no_grad():
            out = sdm.chunk_sdm_(
                pool,
                *x.tokens(),
                chunk_size=self.case.chunk,
                cu_seqlens=x.cu_seqlens,
                state_indices=arguments[-1],
            )
        return out, pool


class Step(InPlace):
    def run(self, sdm, arguments):
        x, pool = self.inputs(arguments), private(arguments[7])
        with torch.no_grad():
            out = sdm.recurrent_sdm_(pool, *x.tokens(), state_indices=arguments[-1])
        return out, pool


class Topk:
    def __init__(self, name, dims, k):
        self.name, self.dims, self.k = name, dims, k

    def draw(self, device, seed=0):
        gen = torch.Generator().manual_seed(seed)
        return [torch.randn(200, sum(self.dims), generator=gen).to(device, torch.bfloat16)]

    def run(self, sdm, arguments):
        scores = arguments[0].detach().requires_grad_()
        values, ids = sdm.product_key_topk(scores, self.dims, self.k)
        (grad,) = torch.autograd.grad(values, scores, values.detach() * 0.5 + 1)
        return values.detach(), ids, grad


CALLS = [
    Forward("chunk_sdm", BASE),
    Forward("chunk_sdm_packed", PACKED),
    Train("backward_replay", replace(BASE, gate_per_write=True)),
    Train("backward_rows", replace(BASE, save="rows", dtype=torch.float32)),
    Train("backward_packed", PACKED),
    Train("backward_segments", SEGMENTS),
    Train("backward_fp8", replace(BASE, save="fp8")),
    InPlace("chunk_sdm_", replace(BASE, bank_per_sequence=True)),
    InPlace("chunk_sdm_packed_", PACKED),
    Step("recurrent_sdm_", SINGLE),
    Topk("product_key_topk", (64, 48), 24),
    Topk("product_key_topk_3", (12, 10, 8), 24),
    *KDA_CALLS,
]
BY_NAME = {call.name: call for call in CALLS}
