# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments raise before any work and say which, what was wanted and what came."""

from dataclasses import replace

import pytest
import torch

from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits

B, T, H, S, D, W, R = 2, 12, 2, 9, 5, 3, 4
BASE = Case("errors", B=B, T=T, H=H, S=S, D=D, W=W, R=R, bank_per_sequence=True)
PACKED = BASE.but(lengths=(4, 0, 8))


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


# argument, wrong value, exception, part of the message; for all three functions
COMMON = [
    ("write_idx", zeros(B, T, H, W), TypeError, "write_idx must be int32 or int64, got float32"),
    (
        "read_idx",
        zeros(B, T, H, R, dtype=torch.int16),
        TypeError,
        "read_idx must be int32 or int64",
    ),
    ("write_idx", [[0]], TypeError, "write_idx must be a Tensor, got list"),
    ("v", None, TypeError, "v must be a Tensor, got NoneType"),
    (
        "v",
        zeros(B, T, H, D, dtype=torch.int64),
        TypeError,
        "v must be float32, bfloat16, float16 or",
    ),
    ("beta", zeros(B, T, H, dtype=torch.complex64), TypeError, "beta must be .* got complex64"),
    (
        "beta",
        zeros(B, T, H, dtype=torch.float64),
        TypeError,
        "beta must be float64 exactly if v is",
    ),
    (
        "v",
        zeros(B, T, H, D, dtype=torch.float64),
        TypeError,
        "write_val must be float64 exactly if",
    ),
    ("v", zeros(B, T, H * D), ValueError, r"v must be \[B, T, H, D\], got shape \[2, 12, 10\]"),
    ("v", zeros(B, T, 0, D), ValueError, r"v must be \[B, T, H, D\] with H, D >= 1"),
    ("v", zeros(B, T, H, 0), ValueError, r"v must be \[B, T, H, D\] with H, D >= 1"),
    ("v", zeros(B, T + 1, H, D), ValueError, r"write_idx must be \[B, T, H, W\] = \[2, 13, 2, 3\]"),
    ("write_idx", zeros(B, T, H, 0, dtype=torch.int64), ValueError, "write_idx must have W >= 1"),
    ("read_idx", zeros(B, T, H, 0, dtype=torch.int64), ValueError, "read_idx must have R >= 1"),
    ("write_val", zeros(B, T, H, W + 1), ValueError, r"write_val must be .* got \[2, 12, 2, 4\]"),
    ("read_val", zeros(B, T, H + 1, R), ValueError, r"read_val must be \[B, T, H, R\] ="),
    ("read_idx", zeros(B, T, H, dtype=torch.int64), ValueError, "read_idx must be .* got shape"),
    ("beta", zeros(B, T, H, 1), ValueError, r"beta must be \[B, T, H\] = \[2, 12, 2\], got"),
    ("beta", zeros(B, T), ValueError, r"beta must be \[B, T, H\]"),
    ("g", zeros(B, T, H, W + 1), ValueError, r"g must be \[B, T, H, W\] = \[2, 12, 2, 3\], got"),
    (
        "g",
        zeros(B, T, H + 1),
        ValueError,
        r"g must be \[B, T, H\] = \[2, 12, 2\], got \[2, 12, 3\]",
    ),
    ("g", zeros(B, T), ValueError, r"g must be \[B, T, H\] or \[B, T, H, W\], got \[2, 12\]"),
]
STATE = [
    (zeros(B, H, S, D, dtype=torch.int32), TypeError, "must be float32, .* got int32"),
    (
        zeros(B + 1, H, S, D),
        ValueError,
        r"must be \[N, H, S, D\] = \[2, 2, 9, 5\], got \[3, 2, 9, 5\]",
    ),
    (zeros(B, H + 1, S, D), ValueError, r"must be \[N, H, S, D\] ="),
    (zeros(B, H, D, S), ValueError, r"must be \[N, H, S, D\] = \[2, 2, 5, 5\]"),
    (zeros(B, H, 0, D), ValueError, "must have S >= 1"),
    (zeros(1, B, H, S, D), ValueError, r"must be \[N, H, S, D\]"),
]
FUNCTIONS = ("chunk_sdm", "chunk_sdm_", "recurrent_sdm_")


def call(sdm, func, inputs, **options):
    tokens, state = inputs.tokens(), inputs.initial_state
    args = [*tokens, state] if func == "chunk_sdm" else [state, *tokens]
    return getattr(sdm, func)(*args, **options)


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("name, value, error, message", COMMON)
def test_tokens(sdm, func, name, value, error, message):
    inputs = replace(make(BASE), **{name: value})
    with pytest.raises(error, match=f"^{func}: {message}"):
        call(sdm, func, inputs)


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("value, error, message", STATE)
def test_state(sdm, func, value, error, message):
    name = "initial_state" if func == "chunk_sdm" else "state"
    with pytest.raises(error, match=f"^{func}: {name} {message}"):
        call(sdm, func, replace(make(BASE), initial_state=value))


def test_shared_bank(sdm):
    inputs = make(BASE)
    message = r"initial_state must be \[H, S, D\] = \[2, 9, 5\], got \[3, 9, 5\]"
    with pytest.raises(ValueError, match=f"^chunk_sdm: {message}"):
        sdm.chunk_sdm(*inputs.tokens(), zeros(H + 1, S, D))
    for func in ("chunk_sdm_", "recurrent_sdm_"):
        message = r"state must be \[N, H, S, D\], got \[2, 9, 5\]"
        with pytest.raises(ValueError, match=f"^{func}: {message}"):
            getattr(sdm, func)(zeros(H, S, D), *inputs.tokens())


@pytest.mark.parametrize("func", ["chunk_sdm", "chunk_sdm_"])
@pytest.mark.parametrize(
    "value, error, message",
    [
        (0, ValueError, "chunk_size must be from 1 to 512, got 0"),
        (513, ValueError, "chunk_size must be from 1 to 512, got 513"),
        (-1, ValueError, "chunk_size must be from 1 to 512, got -1"),
        (16.0, TypeError, "chunk_size must be None or an int, got float"),
        (True, TypeError, "chunk_size must be None or an int, got bool"),
        ("64", TypeError, "chunk_size must be None or an int, got str"),
    ],
)
def test_chunk_size(sdm, func, value, error, message):
    with pytest.raises(error, match=f"^{func}: {message}"):
        call(sdm, func, make(BASE), chunk_size=value)


def test_options(sdm):
    inputs = make(BASE)
    with pytest.raises(ValueError, match="^chunk_sdm: save must be one of 'replay', .* got 'all'"):
        sdm.chunk_sdm(*inputs.args(), save="all")
    with pytest.raises(TypeError, match="^chunk_sdm: save must be one of .* got int"):
        sdm.chunk_sdm(*inputs.args(), save=1)
    with pytest.raises(TypeError, match="^chunk_sdm: output_final_state must be a bool, got int"):
        sdm.chunk_sdm(*inputs.args(), output_final_state=1)
    with pytest.raises(TypeError, match="keyword"):
        sdm.chunk_sdm(*inputs.args(), scale=1.0)
    with pytest.raises(TypeError, match="positional"):
        sdm.chunk_sdm(*inputs.args(), 64)


@pytest.mark.parametrize("func", ["chunk_sdm", "chunk_sdm_"])
@pytest.mark.parametrize(
    "offsets, error, message",
    [
        ([0, 10, 8, 12], ValueError, "must not decrease and go from 0 to T = 12, got"),
        ([0, 4, 6, 11], ValueError, "must not decrease and go from 0 to T = 12, got"),
        ([0, 4, 6, 13], ValueError, "must not decrease and go from 0 to T = 12, got"),
        ([1, 4, 6, 12], ValueError, r"must not decrease .* got \[1, 4, 6, 12\]"),
        ([0.0, 4.0, 4.0, 12.0], TypeError, "must be int32 or int64, got float32"),
        ([[0, 4], [4, 12]], ValueError, r"must be \[N \+ 1\] offsets, got shape \[2, 2\]"),
        ([], ValueError, r"must be \[N \+ 1\] offsets, got shape \[0\]"),
    ],
)
def test_cu_seqlens(sdm, func, offsets, error, message):
    offsets = torch.tensor(offsets, dtype=None if offsets else torch.int64)
    inputs = make(PACKED)
    with pytest.raises(error, match=f"^{func}: cu_seqlens {message}"):
        call(sdm, func, inputs, cu_seqlens=offsets)


@pytest.mark.parametrize("func", ["chunk_sdm", "chunk_sdm_"])
def test_cu_seqlens_in_combination(sdm, func):
    with pytest.raises(TypeError, match=f"^{func}: cu_seqlens must be a Tensor, got list"):
        call(sdm, func, make(PACKED), cu_seqlens=[0, 4, 4, 12])
    with pytest.raises(ValueError, match=f"^{func}: cu_seqlens must come with B = 1, got B = 2"):
        call(sdm, func, make(BASE), cu_seqlens=torch.tensor([0, 12]))
    with pytest.raises(ValueError, match=f"^{func}: cu_seqlens must be on cpu like v, got meta"):
        call(sdm, func, make(PACKED), cu_seqlens=torch.zeros(4, dtype=torch.int64, device="meta"))
    # three states for two sequences
    with pytest.raises(ValueError, match=rf"^{func}: \w*state must be \[N, H, S, D\] = \[2,"):
        call(sdm, func, make(PACKED), cu_seqlens=torch.tensor([0, 4, 12]))


@pytest.mark.parametrize("func", ["chunk_sdm_", "recurrent_sdm_"])
@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([0, 2], ValueError, r"must be -1 or from 0 to 1 \(state has 2 rows\), got \[0, 2\]"),
        ([0, -2], ValueError, "must be -1 or from 0 to 1"),
        ([1, 1], ValueError, r"must name each row of state once, got \[1, 1\]"),
        ([0, 1, -1], ValueError, r"must be \[N\] = \[2\], got \[3\]"),
        ([[0, 1]], ValueError, r"must be \[N\] = \[2\], got \[1, 2\]"),
        ([0.0, 1.0], TypeError, "must be int32 or int64, got float32"),
    ],
)
def test_state_indices(sdm, func, rows, error, message):
    with pytest.raises(error, match=f"^{func}: state_indices {message}"):
        call(sdm, func, make(BASE), state_indices=torch.tensor(rows))


@pytest.mark.parametrize("func", ["chunk_sdm_", "recurrent_sdm_"])
def test_state_that_cannot_be_written(sdm, func):
    inputs = make(BASE)
    message = r"state must have a contiguous last dimension, got strides \(\d+, \d+, 1, 9\)"
    with pytest.raises(ValueError, match=f"^{func}: {message}"):
        call(sdm, func, replace(inputs, initial_state=zeros(B, H, D, S).transpose(2, 3)))
    overlapping = (
        zeros(1, H, S, D).expand(B, H, S, D),
        zeros(B, H, 1, D).expand(B, H, S, D),
        zeros(1000).as_strided((B, H, S, D), (100, 10, 3, 1)),
    )
    for state in overlapping:
        with pytest.raises(ValueError, match=f"^{func}: state must not overlap itself, got shape"):
            call(sdm, func, replace(inputs, initial_state=state))


def test_devices(sdm):
    inputs = make(BASE)
    for name in ("write_idx", "beta", "read_val", "initial_state"):
        other = replace(inputs, **{name: getattr(inputs, name).to("meta")})
        with pytest.raises(ValueError, match=f"^chunk_sdm: {name} must be on cpu like v, got meta"):
            sdm.chunk_sdm(*other.args())


def test_a_valid_call_follows_a_failed_one(sdm):
    inputs = make(BASE)
    expected = sdm.chunk_sdm(*inputs.args())
    state = inputs.initial_state.clone()
    for name, value, error, _ in COMMON:
        for func in FUNCTIONS:
            with pytest.raises(error):
                call(sdm, func, replace(inputs, **{name: value}))
    assert_same_bits(sdm.chunk_sdm(*inputs.args()), expected)
    assert_same_bits(inputs.initial_state, state)


class TestCheckIndices:
    def test_good(self, sdm):
        for dtype in (torch.int32, torch.int64):
            assert sdm.check_indices(torch.tensor([0, 7, 3], dtype=dtype), 8) is None
        assert sdm.check_indices(torch.zeros(2, 0, dtype=torch.int64), 0) is None
        assert sdm.check_indices(torch.tensor(7), 8) is None

    @pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_first_bad_position(self, sdm, bad, dtype):
        ids = torch.randint(8, (2, 3, 4), dtype=dtype)
        ids[0, 2, 1] = bad
        ids[1, 0, 0] = -5
        message = rf"^check_indices: idx\[0, 2, 1\] must be from 0 to 7, got {bad}$"
        with pytest.raises(IndexError, match=message):
            sdm.check_indices(ids, 8)

    def test_wide_ids(self, sdm):
        """An id that is in range only in its low 32 bits."""
        with pytest.raises(IndexError, match=f"got {2**32 + 1}$"):
            sdm.check_indices(torch.tensor([1, 2**32 + 1]), 8)

    def test_strides(self, sdm):
        ids = torch.zeros(6, 8, dtype=torch.int64)
        ids[4, 3] = 9
        with pytest.raises(IndexError, match=r"idx\[3, 2\] must"):
            sdm.check_indices(ids.t()[::1, ::2], 8)
        ids[4, 3] = 0
        ids[3, 3] = 9
        assert sdm.check_indices(ids[::2], 8) is None
        sdm.check_indices(torch.tensor(3).expand(5, 5), 8)

    def test_scalar(self, sdm):
        with pytest.raises(IndexError, match=r"^check_indices: idx\[\] must be from 0 to 7, got 8"):
            sdm.check_indices(torch.tensor(8), 8)

    def test_wrong_arguments(self, sdm):
        with pytest.raises(
            TypeError, match="^check_indices: idx must be int32 or int64, got float"
        ):
            sdm.check_indices(torch.zeros(3), 8)
        with pytest.raises(TypeError, match="^check_indices: idx must be a Tensor, got int"):
            sdm.check_indices(3, 8)
        with pytest.raises(TypeError, match="^check_indices: num_slots must be an int, got float"):
            sdm.check_indices(torch.tensor([1]), 8.0)
        with pytest.raises(
            ValueError, match="^check_indices: num_slots must be at least 0, got -1"
        ):
            sdm.check_indices(torch.tensor([1]), -1)
