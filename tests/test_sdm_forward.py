# SPDX-License-Identifier: Apache-2.0
"""chunk_sdm without gradients against the float64 reference: every option, odd sizes first."""

import pytest
import torch

from .helpers.cases import Case, ids, make
from .helpers.compare import assert_same_bits
from .helpers.grads import check_case, results

BASE = Case()
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

OPTIONS = [
    BASE,
    BASE.but(dtype=F64),
    BASE.but(dtype=BF16),
    BASE.but(dtype=BF16, bank_dtype=F32),
    BASE.but(dtype=F16),
    BASE.but(dtype=F16, bank_dtype=BF16),
    BASE.but(dtype=F32, bank_dtype=BF16),
    BASE.but(dtype=BF16, gate_dtype=BF16),
    BASE.but(dtype=F32, gate_dtype=F16),
    BASE.but(write_int=torch.int32),
    BASE.but(read_int=torch.int32),
    BASE.but(write_int=torch.int32, read_int=torch.int32, gate_per_write=True),
    BASE.but(gate_per_write=True),
    BASE.but(bank_per_sequence=True),
    BASE.but(bank_per_sequence=True, gate_per_write=True, dtype=F64),
    BASE.but(ids="any", W=7, S=4, R=9),
    BASE.but(ids="repeated", W=5, R=5),
    BASE.but(ids="repeated", W=5, R=5, gate_per_write=True, dtype=F64),
    BASE.but(ids="unused"),
    BASE.but(ids="unused", gate_per_write=True, read_int=torch.int32, write_int=torch.int32),
    BASE.but(ids="hot", T=40),
    BASE.but(lengths=(5, 0, 9, 1, 0, 17)),
    BASE.but(lengths=(5, 0, 9, 1, 0, 17), bank_per_sequence=True, dtype=BF16),
    BASE.but(lengths=(7,), write_int=torch.int32),
    BASE.but(chunk=None),
]
SIZES = [
    Case("one", B=1, T=1, H=1, S=1, D=1, W=1, R=1),
    Case("wide", B=1, T=9, H=1, S=300, D=33, W=256, R=256, chunk=4),
    Case("tall", B=1, T=6, H=3, S=17, D=130, W=3, R=5),
    Case("w1", W=1, R=17, S=40, D=16),
    Case("r1", W=17, R=1, S=40, D=31),
    Case("d17", D=17, T=33, chunk=32),
    Case("d64", D=64, T=33, chunk=16, W=8, R=8, S=64),
    Case("many_heads", B=3, H=5, T=7),
    Case("no_batch", B=0),
    Case("no_batch_own_bank", B=0, bank_per_sequence=True),
    Case("no_tokens", T=0),
    Case("no_tokens_own_bank", T=0, bank_per_sequence=True),
    Case("all_empty", lengths=(0, 0), bank_per_sequence=True),
    Case("all_empty_shared", lengths=(0, 0)),
    Case("no_sequences", lengths=()),
]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("case", OPTIONS + SIZES, ids=ids(OPTIONS + SIZES))
def test_forward(sdm, device, case):
    check_case(sdm, case, device, grad=False)


@pytest.mark.parametrize("chunk", [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 512])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_lengths_against_chunk_sizes(sdm, device, length, chunk):
    case = Case("lengths", B=1, T=length, chunk=chunk, S=24, D=8, W=4, R=3)
    check_case(sdm, case, device, grad=False)


@pytest.mark.parametrize("streams", [2, 3, 8])
@pytest.mark.parametrize("length", [65, 100, 200])
@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_chunks_end_with_their_row(sdm, device, streams, length, chunk):
    """A chunk never reaches into the next batch row, whatever the remainder."""
    case = Case("rows", B=streams, H=1, T=length, S=32, D=8, W=4, R=4, bank_per_sequence=True)
    inputs = make(case, device)
    got = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=chunk)
    for b in range(streams):
        alone = results(sdm.chunk_sdm, inputs.rows(slice(b, b + 1)), grad=False, chunk_size=chunk)
        assert_same_bits(got["out"][b : b + 1], alone["out"])
        assert_same_bits(got["final_state"][b : b + 1], alone["final_state"])


def test_final_state_only_on_request(sdm, device):
    inputs = make(BASE, device)
    out, state = sdm.chunk_sdm(*inputs.args())
    assert state is None
    again, state = sdm.chunk_sdm(*inputs.args(), output_final_state=True)
    assert_same_bits(again, out)
    assert state.shape == (2, 2, 13, 5)


@pytest.mark.parametrize("save", ["replay", "rows", "bf16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_training_forward_equals_inference(sdm, device, save, dtype):
    inputs = make(BASE.but(dtype=dtype, T=50), device)
    expected = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=8)
    got = results(sdm.chunk_sdm, inputs, chunk_size=8, save=save)
    assert_same_bits({name: got[name] for name in expected}, expected)


def test_empty_sequences_keep_their_bits(sdm, device):
    case = Case("empty", lengths=(0, 0, 64, 0, 66, 0), bank_per_sequence=True, chunk=16)
    for dtype in (F32, BF16, F16, F64):
        inputs = make(case.but(dtype=dtype), device)
        inputs.initial_state[0, 0, 0, 0] = float("nan")
        inputs.initial_state[1, 0, 0, 0] = -0.0
        got = results(sdm.chunk_sdm, inputs, grad=False, chunk_size=16)
        for n in (0, 1, 3, 5):
            assert_same_bits(got["final_state"][n], inputs.initial_state[n])


def test_arguments_do_not_change(sdm, device):
    for case in (BASE, BASE.but(bank_per_sequence=True), BASE.but(lengths=(9, 0, 30))):
        inputs = make(case, device)
        before = [x.clone() for x in inputs.args()]
        got = results(sdm.chunk_sdm, inputs, chunk_size=8)
        assert_same_bits(inputs.args(), before)
        pointers = {x.untyped_storage().data_ptr() for x in inputs.args()}
        assert not pointers & {x.untyped_storage().data_ptr() for x in got.values()}
