# SPDX-License-Identifier: Apache-2.0
"""Peak memory, measured in fresh processes."""

import sys
import textwrap

import pytest

from .helpers.memory import run_python

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)

MIB = 2**20

SETUP = """
def inputs(T, H=2, S=4096, D=32, W=16, requires_grad=False):
    gen = torch.Generator().manual_seed(0)
    idx = torch.randint(S, (1, T, H, W), generator=gen, dtype=torch.int32)
    val = torch.full((1, T, H, W), 1.0 / W)
    v = torch.randn(1, T, H, D, generator=gen)
    beta = torch.full((1, T, H), 0.5)
    g = torch.full((1, T, H), -0.1)
    bank = torch.zeros(H, S, D)
    args = [idx, val, v, beta, g, idx, val, bank]
    return [x.requires_grad_(requires_grad) if x.is_floating_point() else x for x in args]

def extra(fn):
    # Forget the peak so far, then see how far the call goes above what is there.
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = current()
    result = fn()
    return peak() - before, result
"""


def test_inference_does_not_grow_with_the_length(sdm):
    """Beyond its result, a call without gradients needs the same memory for any T."""
    code = """
    sdm.chunk_sdm(*inputs(64))
    used = {}
    for T in (1024, 16384):
        args = inputs(T)
        used[f"chunk {T}"] = extra(lambda: sdm.chunk_sdm(*args))[0] - T * 2 * 32 * 4
        state = args[-1].unsqueeze(0).clone()
        call = lambda: sdm.chunk_sdm_(state, *args[:-1])
        used[f"chunk_ {T}"] = extra(call)[0] - T * 2 * 32 * 4
        call = lambda: sdm.recurrent_sdm_(state, *args[:-1])
        used[f"step_ {T}"] = extra(call)[0] - T * 2 * 32 * 4
    print(json.dumps(used))
    """
    used = run_python(SETUP + textwrap.dedent(code))
    for name in ("chunk", "chunk_", "step_"):
        assert used[f"{name} 16384"] < used[f"{name} 1024"] + 2 * MIB, used


def test_training_grows_linearly(sdm):
    """Twice the length, at most 2.2 times the memory, and nowhere near a bank per token."""
    code = """
    def train(args):
        out, state = sdm.chunk_sdm(*args, output_final_state=True)
        (out.sum() + state.sum()).backward()

    train(inputs(64, requires_grad=True))
    used = {}
    for T in (4096, 8192):
        args = inputs(T, S=512, requires_grad=True)
        used[T] = extra(lambda: train(args))[0]
    size = sum(x.nbytes for x in args)
    print(json.dumps([used[4096], used[8192], size]))
    """
    half, full, size = run_python(SETUP + textwrap.dedent(code))
    assert full < 2.2 * half + MIB
    assert full < 20 * size
