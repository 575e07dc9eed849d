# SPDX-License-Identifier: Apache-2.0
"""Shapes of real layers on CUDA, against the CPU kernels in float64.

Those agree with the token loop at small sizes (the other tests), and take seconds where the loop
would take minutes.
"""

import pytest
import torch

from .helpers.cases import Case, make
from .helpers.compare import assert_close, assert_same_bits, precision
from .helpers.grads import results

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYER = Case("layer", B=2, T=600, H=2, S=4096, D=256, W=64, R=64, chunk=None, dtype=BF16, ids="any")
CASES = [
    LAYER,
    LAYER.but(bank_per_sequence=True, chunk=128),
    LAYER.but(lengths=(257, 0, 1, 300, 64), bank_per_sequence=True),
    LAYER.but(gate_per_write=True, chunk=64),
    LAYER.but(dtype=F32, T=300),
    LAYER.but(dtype=F16),
    LAYER.but(bank_dtype=F32, chunk=100),
    LAYER.but(B=1, H=1, T=777, D=1024, S=6000),
    LAYER.but(B=1, H=1, T=520, D=1024, W=128, R=128),
    LAYER.but(B=1, H=2, T=300, D=200, W=5, R=130),
    LAYER.but(B=1, H=2, T=300, D=100, W=129, R=1, dtype=F32),
    LAYER.but(B=1, H=1, T=520, D=1024, W=32, R=32, chunk=64, bank_dtype=F32),
    LAYER.but(B=1, H=8, D=128, W=32, R=32, S=8192),
    LAYER.but(B=1, H=2, D=192, W=48, R=16, S=1000),
    LAYER.but(B=3, T=1, H=3),
    LAYER.but(B=1, T=2100, H=1, D=64, S=300, W=16, R=8),  # several windows and segments
]


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


def draw(case):
    """The inputs of a case with ids as a top-k makes them: ascending, without repeats."""
    inputs = make(case)
    gen = torch.Generator().manual_seed(7)
    for name in ("write_idx", "read_idx"):
        ids = getattr(inputs, name)
        lanes = ids.shape[-1]
        ends = torch.arange(lanes + 1) * case.S // lanes
        offset = torch.randint(1 << 30, ids.shape, generator=gen) % ends.diff()
        setattr(inputs, name, (ends[:-1] + offset).to(ids.dtype))
    return inputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_cpu(sdm, device, case):
    inputs = draw(case)
    there = inputs.map(lambda x: x.to(device))
    if inputs.cu_seqlens is not None:
        there.cu_seqlens = inputs.cu_seqlens.to(device)
    torch.set_num_threads(4)  # the test before has left one; the fixture puts it back
    expected = results(sdm.chunk_sdm, inputs.to(torch.float64), save="rows")
    rows = results(sdm.chunk_sdm, there, chunk_size=case.chunk, save="rows")

    def low():
        return results(sdm.chunk_sdm, inputs, chunk_size=case.chunk or 256, save="rows")

    assert_close(rows, expected, precision(inputs), low=low)
    replay = results(sdm.chunk_sdm, there, chunk_size=case.chunk, save="replay")
    assert_same_bits(replay, rows)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.id)
def test_prefill_then_decode(sdm, device, case):
    """A cache that is filled by a chunked call and read on by steps."""
    case = case.but(bank_per_sequence=True)
    if case.lengths is not None:
        case = case.but(lengths=None, B=2, T=65)
    inputs = draw(case)
    exact = inputs.to(torch.float64)
    there = inputs.map(lambda x: x.to(device))
    cut = case.T - 8
    outs = []
    for x in (there, exact):
        state = x.initial_state.clone()
        prefill = sdm.chunk_sdm_(state, *x.part(0, cut).tokens())
        steps = [sdm.recurrent_sdm_(state, *x.part(t, t + 1).tokens()) for t in range(cut, case.T)]
        outs.append({"out": torch.cat([prefill, *steps], 1), "final_state": state})
    assert_close(*outs, precision(inputs), scale=2.0)  # a row is rounded at every step
