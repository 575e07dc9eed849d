# SPDX-License-Identifier: Apache-2.0
"""Peak memory of KDA on the CPU, measured in fresh processes."""

import sys
import textwrap

import pytest

from .helpers.memory import run_python

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)

MIB = 2**20

SETUP = """
def inputs(T, H=4, D=64, requires_grad=False):
    gen = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, T, H, D, generator=gen) for _ in range(4)]
    tokens[3] = -tokens[3].abs()
    tokens.append(torch.rand(1, T, H, generator=gen))
    return [x.requires_grad_(requires_grad) for x in tokens]

def extra(fn):
    # Forget the peak so far, then see how far the call goes above what is there.
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = current()
    result = fn()
    return peak() - before
"""


def test_inference_does_not_grow_with_the_length(sdm):
    """Beyond its result, a call without gradients needs the same memory for any T."""
    code = """
    flags = {"use_qk_l2norm_in_kernel": True}
    sdm.chunk_kda(*inputs(64), **flags)
    used = {}
    for T in (1024, 8192):
        args = inputs(T)
        for name in ("chunk_kda", "fused_recurrent_kda"):
            call = lambda: getattr(sdm, name)(*args, **flags)
            used[f"{name} {T}"] = extra(call) - T * 4 * 64 * 4
    print(json.dumps(used))
    """
    used = run_python(SETUP + textwrap.dedent(code))
    for name in ("chunk_kda", "fused_recurrent_kda"):
        assert used[f"{name} 8192"] < used[f"{name} 1024"] + 4 * MIB, used


@pytest.mark.parametrize("keep", [False, True])
def test_training_grows_linearly(sdm, keep):
    """Twice the length, at most 2.2 times the memory, and nowhere near a state per token."""
    code = f"""
    def train(args):
        out, state = sdm.chunk_kda(
            *args, use_qk_l2norm_in_kernel=True, output_final_state=True, disable_recompute={keep}
        )
        (out.sum() + state.sum()).backward()

    train(inputs(64, requires_grad=True))
    used = dict()
    for T in (4096, 8192):
        args = inputs(T, requires_grad=True)
        used[T] = extra(lambda: train(args))
    print(json.dumps([used[4096], used[8192], sum(x.nbytes for x in args)]))
    """
    half, full, size = run_python(SETUP + textwrap.dedent(code))
    assert full < 2.2 * half + MIB
    assert full < 20 * size
    assert full < 4 * size, (full / MIB, size / MIB)
