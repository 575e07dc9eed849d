# SPDX-License-Identifier: Apache-2.0
"""Same inputs, same bits: over runs, threads, processes, instruction sets and neighbours."""

import pytest
import torch

from .helpers.compare import assert_same_bits
from .helpers.grads import weights_like
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import results
from .helpers.memory import run_python

# Large enough that threads are woken.
CASE = KdaCase("bits", B=3, T=150, H=2, HV=4, K=64, V=48)
CASES = [
    CASE,
    CASE.but(dtype=torch.bfloat16, gate_dtype=torch.float32),
    CASE.but(dtype=torch.float16, form="softplus", v_first=True),
    CASE.but(dtype=torch.float64, T=70),
    CASE.but(lengths=(80, 0, 17, 130), form="activated", integer=torch.int32),
    CASE.but(dtype=torch.bfloat16, B=1, HV=2, K=128, V=128, T=200),
]


def run(sdm, inputs, **options):
    got = results(sdm.chunk_kda, inputs, **options)
    got["step"] = results(sdm.fused_recurrent_kda, inputs, grad=False)["out"]
    return got


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runs(sdm, device, case):
    inputs = make(case, device)
    for keep in (False, True):
        first = run(sdm, inputs, disable_recompute=keep)
        for _ in range(50 if device.type == "cuda" else 4):
            assert_same_bits(run(sdm, inputs, disable_recompute=keep), first)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_thread_counts(sdm, case):
    inputs = make(case)
    expected = run(sdm, inputs)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert_same_bits(run(sdm, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_permuted_batch(sdm, device, dtype):
    """Rows in another order, or alone, keep their bits; sums over rows are those of the order."""
    inputs = make(CASE.but(dtype=dtype), device)
    expected = results(sdm.chunk_kda, inputs)
    order = torch.tensor([2, 0, 1], device=device)
    leaves = inputs.rows(order).map(lambda x: x.detach().requires_grad_())
    out, state = sdm.chunk_kda(
        *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
        **leaves.keywords(),
    )  # fmt: skip
    assert_same_bits(out, expected["out"][order])
    assert_same_bits(state, expected["final_state"][order])
    upstream = (weights_like(out, 11)[order], weights_like(state, 12)[order])
    torch.autograd.backward((out, state), upstream)
    for name in (*TOKENS, "initial_state"):
        assert_same_bits(getattr(leaves, name).grad, expected[f"d_{name}"][order], name)
    for b in range(3):
        alone = results(sdm.chunk_kda, inputs.rows(slice(b, b + 1)), grad=False)
        assert_same_bits(alone["out"][0], expected["out"][b])
        assert_same_bits(alone["final_state"][0], expected["final_state"][b])


def test_permuted_heads(sdm, device):
    inputs = make(CASE.but(H=4), device)
    expected = results(sdm.chunk_kda, inputs, grad=False)
    order = torch.tensor([3, 1, 0, 2], device=device)
    permuted = inputs.map(lambda x: x[:, :, order], TOKENS)
    permuted = permuted.map(lambda x: x[:, order], ("initial_state",))
    permuted = permuted.map(lambda x: x[order], ("A_log", "dt_bias"))
    got = results(sdm.chunk_kda, permuted, grad=False)
    assert_same_bits(got["out"], expected["out"][:, :, order])
    assert_same_bits(got["final_state"], expected["final_state"][:, order])


def test_training_and_inference_agree(sdm, device):
    inputs = make(CASE, device)
    trained = results(sdm.chunk_kda, inputs, disable_recompute=True)
    assert_same_bits(results(sdm.chunk_kda, inputs, grad=False), {
        name: trained[name] for name in ("out", "final_state")
    })  # fmt: skip


DIGEST = """
import hashlib
sys.path.insert(0, ".")
from tests.helpers.compare import bits
from tests.helpers.kda_cases import make
from tests.test_kda_determinism import CASES, run
torch.set_num_threads({threads})
digests = []
for case in CASES:
    got = run(sdm, make(case))
    text = b"".join(bits(got[name]).numpy().tobytes() for name in sorted(got))
    digests.append(hashlib.sha256(text).hexdigest())
print(json.dumps(digests))
"""


def test_instruction_sets(sdm):
    """SDM_FORCE_ISA picks the code; every choice has the same bits, and so has a new process."""
    code = DIGEST.format(threads=1)
    default = run_python(code)
    for isa in ("plain", "avx2", "avx512"):
        assert run_python(code, env={"SDM_FORCE_ISA": isa}) == default, isa
    assert run_python(DIGEST.format(threads=2)) == default
