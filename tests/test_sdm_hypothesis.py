# SPDX-License-Identifier: Apache-2.0
"""Random shapes and options: forward and all gradients against the float64 reference."""

import sys

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits
from .helpers.grads import check_case, results

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
INTEGERS = st.sampled_from([torch.int32, torch.int64])


@st.composite
def cases(draw):
    size = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    case = Case(
        "drawn",
        B=size(0, 3),
        T=size(0, 40),
        H=size(1, 3),
        S=size(1, 20),
        D=size(1, 20),
        W=size(1, 6),
        R=size(1, 6),
        chunk=draw(st.one_of(st.none(), st.integers(1, 48), st.integers(1, 512))),
        write_int=draw(INTEGERS),
        read_int=draw(INTEGERS),
        gate_per_write=draw(st.booleans()),
        bank_per_sequence=draw(st.booleans()),
        ids=draw(st.sampled_from(["distinct", "any", "repeated", "unused", "hot"])),
        gate=draw(st.sampled_from(["usual", "zero", "half_zero", -30.0])),
        save=draw(st.sampled_from(["replay", "rows"])),
    )
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 20), max_size=4))
        case = case.but(lengths=tuple(lengths))
    if draw(st.booleans()):
        names = ("dtype", "gate_dtype", "bank_dtype")
        return case.but(**{name: draw(DTYPES) for name in names})
    return case.but(dtype=torch.float64) if draw(st.booleans()) else case


SETTINGS = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@SETTINGS
@given(case=cases(), seed=st.integers(0, 2**16))
def test_against_reference(sdm, device, case, seed):
    check_case(sdm, case, device, seed=seed)


@SETTINGS
@given(case=cases(), segment=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_replay_equals_rows(sdm, device, case, segment, seed):
    module = sys.modules[sdm.chunk_sdm.__module__]
    inputs = make(case, device, seed)
    rows = results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save="rows")
    original = module.segment_chunks
    module.segment_chunks = lambda *_: segment
    try:
        replay = results(sdm.chunk_sdm, inputs, chunk_size=case.chunk, save="replay")
    finally:
        module.segment_chunks = original
    assert_same_bits(replay, rows)
