# SPDX-License-Identifier: Apache-2.0
"""Same inputs, same bits: over runs, threads, processes, instruction sets and neighbours."""

import pytest
import torch

from .helpers.cases import FLOATS, ORDER, Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import results, weights_like
from .helpers.memory import run_python

# Large enough that threads are woken, columns for each way to walk a row.
CASE = Case("bits", B=3, T=70, H=4, S=40, D=200, W=5, R=3, chunk=16, bank_per_sequence=True)
CASES = [
    CASE,
    CASE.but(dtype=torch.bfloat16, gate_per_write=True),
    CASE.but(dtype=torch.float64, D=64),
    CASE.but(ids="hot", D=64),
    CASE.but(lengths=(30, 0, 17, 50), write_int=torch.int32, ids="unused"),
    CASE.but(bank_per_sequence=False, save="rows"),
    CASE.but(save="fp8", ids="repeated"),
    CASE.but(save="int4", dtype=torch.float16),
]


def run(sdm, inputs, case, **options):
    return results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save=case.save, **options)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runs(sdm, device, case):
    inputs = make(case, device)
    first = run(sdm, inputs, case)
    for _ in range(10):
        assert_same_bits(run(sdm, inputs, case), first)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_thread_counts(sdm, case):
    inputs = make(case)
    expected = run(sdm, inputs, case)
    state = inputs.initial_state.clone()
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert_same_bits(run(sdm, inputs, case), expected)
    if case.bank_per_sequence and case.lengths is None:
        step = sdm.recurrent_sdm_(state, *inputs.tokens())
        torch.set_num_threads(1)
        again = inputs.initial_state.clone()
        assert_same_bits(sdm.recurrent_sdm_(again, *inputs.tokens()), step)
        assert_same_bits(again, state)


def test_permuted_batch(sdm, device):
    for case in (CASE, CASE.but(save="rows", gate_per_write=True)):
        inputs = make(case, device)
        expected = run(sdm, inputs, case)
        order = torch.tensor([2, 0, 1], device=device)
        leaves = inputs.rows(order).map(lambda x: x.requires_grad_(), FLOATS)
        out, state = sdm.chunk_sdm(
            *leaves.args(), output_final_state=True, chunk_size=case.chunk, save=case.save
        )
        assert_same_bits(out, expected["out"][order])
        assert_same_bits(state, expected["final_state"][order])
        d_out = weights_like(out, 11)[order]
        d_state = weights_like(state, 12)[order]
        torch.autograd.backward((out, state), (d_out, d_state))
        for name in FLOATS:
            grad = getattr(leaves, name).grad
            assert_same_bits(grad, expected[f"d_{name}"][order], name)


def test_permuted_heads(sdm, device):
    for case in (CASE, CASE.but(bank_per_sequence=False, gate_per_write=True)):
        inputs = make(case, device)
        expected = run(sdm, inputs, case, grad=False)
        order = torch.tensor([3, 1, 0, 2], device=device)
        permuted = inputs.map(lambda x, order=order: x[:, :, order], ORDER[:-1])
        head_dim = inputs.initial_state.dim() - 3
        permuted.initial_state = inputs.initial_state.index_select(head_dim, order)
        got = run(sdm, permuted, case, grad=False)
        assert_same_bits(got["out"], expected["out"][:, :, order])
        assert_same_bits(got["final_state"], expected["final_state"][:, order])


def test_neighbours_in_the_batch(sdm, device):
    """A row has the same bits alone and among others."""
    inputs = make(CASE, device)
    whole = run(sdm, inputs, CASE, grad=False)
    for b in range(3):
        alone = run(sdm, inputs.rows(slice(b, b + 1)), CASE, grad=False)
        assert_same_bits(alone["out"][0], whole["out"][b])
        assert_same_bits(alone["final_state"][0], whole["final_state"][b])


@pytest.mark.parametrize("cut", [1, 62, 63, 64, 65, 100])
def test_causality(sdm, device, cut):
    """Later tokens, however wild, leave earlier outputs alone."""
    case = Case("causal", T=130, S=40, D=8, W=4, R=4)
    inputs, other = make(case, device), make(case, device, seed=1)
    changed = inputs.map(torch.clone)
    for name in ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val"):
        getattr(changed, name)[:, cut:] = getattr(other, name)[:, cut:]
    changed.v[:, cut:] *= 1e3
    for chunk in (16, 64, 200):
        before = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=chunk)
        after = results(sdm.chunk_sdm, changed, grad=False, chunk_size=chunk)
        assert_same_bits(after["out"][:, :cut], before["out"][:, :cut])
        assert not torch.equal(after["out"][:, cut:], before["out"][:, cut:])


DIGEST = """
import hashlib
sys.path.insert(0, ".")
from tests.helpers.cases import make
from tests.helpers.compare import bits
from tests.helpers.grads import results
from tests.test_determinism import CASES
torch.set_num_threads({threads})
digests = []
for case in CASES:
    inputs = make(case)
    got = results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save=case.save)
    if case.lengths is None and case.bank_per_sequence:
        state = inputs.initial_state.clone()
        got["step"] = sdm.recurrent_sdm_(state, *inputs.tokens())
        got["state"] = state
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
