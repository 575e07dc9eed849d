# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments raise before any work and say which, what was wanted and what came."""

from dataclasses import replace

import pytest
import torch

from .helpers.compare import assert_same_bits
from .helpers.kda_cases import KdaCase, make

B, T, H, HV, K, V = 2, 12, 2, 4, 16, 32
BASE = KdaCase("errors", B=B, T=T, H=H, HV=HV, K=K, V=V)
PACKED = BASE.but(lengths=(4, 0, 8))
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "recurrent_kda_")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def call(sdm, name, inputs, **options):
    keywords = {**inputs.keywords(), **options}
    if name == "recurrent_kda_":
        return sdm.recurrent_kda_(inputs.initial_state, *inputs.tokens(), **keywords)
    return getattr(sdm, name)(*inputs.tokens(), initial_state=inputs.initial_state, **keywords)


# argument, wrong value, exception, part of the message; for all three functions
COMMON = [
    ("q", None, TypeError, "q must be a Tensor, got NoneType"),
    ("k", [[1.0]], TypeError, "k must be a Tensor, got list"),
    ("v", zeros(B, T, HV, V, dtype=torch.int64), TypeError, "v must be float32, bfloat16, float16"),
    ("g", zeros(B, T, HV, K, dtype=torch.complex64), TypeError, "g must be .* got complex64"),
    (
        "beta",
        zeros(B, T, HV, dtype=torch.float64),
        TypeError,
        "beta must be float64 exactly if q is",
    ),
    ("q", zeros(B, T, H, K, dtype=torch.float64), TypeError, "k must be float64 exactly if q is"),
    ("q", zeros(B, T, H * K), ValueError, r"q must be \[B, T, H, K\], got shape \[2, 12, 32\]"),
    ("v", zeros(B, T, HV * V), ValueError, r"v must be \[B, T, HV, V\], got shape"),
    ("q", zeros(B, T, H, 257), ValueError, "K a multiple of 16 from 16 to 256, got .*257"),
    ("q", zeros(B, T, H, 272), ValueError, "K a multiple of 16 from 16 to 256, got .*272"),
    ("q", zeros(B, T, H, 0), ValueError, "K a multiple of 16"),
    ("v", zeros(B, T, HV, 512), ValueError, "V a multiple of 16 from 16 to 256, got .*512"),
    ("v", zeros(B, T, HV, 24), ValueError, "V a multiple of 16 from 16 to 256, got .*24"),
    ("v", zeros(B, T, 3, V), ValueError, r"v must have a multiple of the 2 heads of q .* got 3"),
    ("v", zeros(B, T, 1, V), ValueError, r"v must have a multiple of the 2 heads of q .* got 1"),
    ("v", zeros(B, T, 0, V), ValueError, "v must have a multiple of the 2 heads"),
    ("q", zeros(B, T, 0, K), ValueError, "v must have a multiple of the 0 heads"),
    ("k", zeros(B, T + 1, H, K), ValueError, r"k must be \[B, T, H, K\] = \[2, 12, 2, 16\], got"),
    ("k", zeros(B, T, HV, K), ValueError, r"k must be \[B, T, H, K\] = \[2, 12, 2, 16\], got"),
    ("v", zeros(B, T + 1, HV, V), ValueError, r"v must be \[B, T, HV, V\] ="),
    ("g", zeros(B, T, HV), ValueError, r"g must be \[B, T, HV, K\] = \[2, 12, 4, 16\], got"),
    ("g", zeros(B, T, H, K), ValueError, r"g must be \[B, T, HV, K\] = \[2, 12, 4, 16\], got"),
    ("beta", zeros(B, T, H), ValueError, r"beta must be \[B, T, HV\] = \[2, 12, 4\], got"),
    ("beta", zeros(B, T, HV, 1), ValueError, r"beta must be \[B, T, HV\] = \[2, 12, 4\], got"),
    ("A_log", zeros(HV + 1), ValueError, r"A_log must be \[HV\] with 4 elements, got \[5\]"),
    ("A_log", 1.0, TypeError, "A_log must be a Tensor, got float"),
    ("dt_bias", zeros(K), ValueError, r"dt_bias must be .* with 64 elements, got \[16\]"),
    ("dt_bias", zeros(HV, K, dtype=torch.int32), TypeError, "dt_bias must be float32"),
]
STATE = [
    (
        zeros(B, HV, K, V, dtype=torch.float16),
        TypeError,
        "must be float32 or bfloat16, got float16",
    ),
    (zeros(B, HV, K, V, dtype=torch.float64), TypeError, "must be float32 or bfloat16, got"),
    (zeros(B + 1, HV, K, V), ValueError, r"must be \[N, HV, K, V\] = \[2, 4, 16, 32\], got \[3,"),
    (zeros(B, HV, V, K), ValueError, r"must be \[N, HV, K, V\] = \[2, 4, 16, 32\], got"),
    (zeros(B, H, K, V), ValueError, r"must be \[N, HV, K, V\] ="),
    (zeros(HV, K, V), ValueError, r"must be \[N, HV, K, V\], got shape"),
]


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("name, value, error, message", COMMON)
def test_tokens(sdm, func, name, value, error, message):
    inputs = replace(make(BASE), **{name: value})
    with pytest.raises(error, match=f"^{func}: .*{message}"):
        call(sdm, func, inputs)


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("value, error, message", STATE)
def test_state(sdm, func, value, error, message):
    name = "state" if func == "recurrent_kda_" else "initial_state"
    with pytest.raises(error, match=f"^{func}: {name} {message}"):
        call(sdm, func, replace(make(BASE), initial_state=value))


OPTIONS = [
    ({"scale": "1"}, TypeError, "scale must be None or a float, got str"),
    ({"scale": True}, TypeError, "scale must be None or a float, got bool"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"lower_bound": 0.0}, ValueError, "lower_bound must be below 0, got 0.0"),
    ({"lower_bound": 5}, ValueError, "lower_bound must be below 0, got 5"),
    ({"lower_bound": "-5"}, TypeError, "lower_bound must be None or a float, got str"),
    ({"lower_bound": None, "A_log": None}, ValueError, "A_log must be given with use_gate_in_ker"),
    (
        {"use_beta_sigmoid_in_kernel": False},
        ValueError,
        "allow_neg_eigval must come with use_beta_sigmoid_in_kernel",
    ),
    ({"use_qk_l2norm_in_kernel": 1}, TypeError, "use_qk_l2norm_in_kernel must be a bool, got int"),
    ({"use_gate_in_kernel": None}, TypeError, "use_gate_in_kernel must be a bool, got NoneType"),
    ({"allow_neg_eigval": "yes"}, TypeError, "allow_neg_eigval must be a bool, got str"),
    ({"state_v_first": 0}, TypeError, "state_v_first must be a bool, got int"),
]
CHUNK_OPTIONS = [
    ({"output_final_state": 1}, TypeError, "output_final_state must be a bool, got int"),
    ({"disable_recompute": 1}, TypeError, "disable_recompute must be a bool, got int"),
    ({"use_graph": 1}, TypeError, "use_graph must be a bool, got int"),
    ({"safe_gate": None}, TypeError, "safe_gate must be a bool, got NoneType"),
    ({"safe_gate": True, "lower_bound": None}, ValueError, "lower_bound must be given with safe_g"),
    ({"chunk_size": 48}, ValueError, "chunk_size must be 16, 32 or 64, got 48"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be 16, 32 or 64, got 0"),
    ({"chunk_size": None}, TypeError, "chunk_size must be an int, got NoneType"),
    ({"chunk_size": 64.0}, TypeError, "chunk_size must be an int, got float"),
    ({"chunk_size": True}, TypeError, "chunk_size must be an int, got bool"),
    ({"cp_context": object()}, NotImplementedError, "cp_context must be None .* got object"),
    ({"max_num_seqs": 1.0}, TypeError, "max_num_seqs must be None or an int, got float"),
    ({"cu_seqlens_cpu": torch.tensor([0, 12])}, ValueError, "cu_seqlens_cpu must come with cu_seq"),
]


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("options, error, message", OPTIONS)
def test_options(sdm, func, options, error, message):
    with pytest.raises(error, match=f"^{func}: {message}"):
        call(sdm, func, make(BASE), **options)


@pytest.mark.parametrize("options, error, message", CHUNK_OPTIONS)
def test_chunk_options(sdm, options, error, message):
    with pytest.raises(error, match=f"^chunk_kda: {message}"):
        call(sdm, "chunk_kda", make(BASE), **options)


@pytest.mark.parametrize("func", FUNCTIONS)
def test_unknown_keywords(sdm, func):
    with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
        call(sdm, func, make(BASE), head_first=True)


@pytest.mark.parametrize("func", FUNCTIONS)
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
    with pytest.raises(error, match=f"^{func}: cu_seqlens {message}"):
        call(sdm, func, make(PACKED), cu_seqlens=offsets)


@pytest.mark.parametrize("func", FUNCTIONS)
def test_cu_seqlens_in_combination(sdm, func):
    with pytest.raises(TypeError, match=f"^{func}: cu_seqlens must be a Tensor, got list"):
        call(sdm, func, make(PACKED), cu_seqlens=[0, 4, 4, 12])
    with pytest.raises(ValueError, match=f"^{func}: cu_seqlens must come with B = 1, got B = 2"):
        call(sdm, func, make(BASE), cu_seqlens=torch.tensor([0, 12]))
    with pytest.raises(ValueError, match=f"^{func}: cu_seqlens must be on cpu like q, got meta"):
        call(sdm, func, make(PACKED), cu_seqlens=torch.zeros(4, dtype=torch.int64, device="meta"))
    # three states for two sequences
    with pytest.raises(ValueError, match=rf"^{func}: \w*state must be \[N, HV, K, V\] = \[2,"):
        call(sdm, func, make(PACKED), cu_seqlens=torch.tensor([0, 4, 12]))


def test_offsets_on_the_host(sdm):
    inputs = make(PACKED)
    for offsets, message in (
        ([0, 4, 12], r"cu_seqlens_cpu must be \[N \+ 1\] = \[4\], got \[3\]"),
        ([0, 4, 3, 12], "cu_seqlens_cpu must not decrease and go from 0 to T = 12"),
    ):
        with pytest.raises(ValueError, match=f"^chunk_kda: {message}"):
            call(sdm, "chunk_kda", inputs, cu_seqlens_cpu=torch.tensor(offsets))
    with pytest.raises(ValueError, match="^chunk_kda: cu_seqlens must have at most max_num_seqs"):
        call(sdm, "chunk_kda", inputs, max_num_seqs=2)


@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([0, 2], ValueError, r"must be -1 or from 0 to 1 \(state has 2 rows\), got \[0, 2\]"),
        ([0, -2], ValueError, "must be -1 or from 0 to 1"),
        ([1, 1], ValueError, r"must name each row of state once, got \[1, 1\]"),
        ([0, 1, -1], ValueError, r"must be \[N\] = \[2\], got \[3\]"),
        ([0.0, 1.0], TypeError, "must be int32 or int64, got float32"),
    ],
)
def test_state_indices(sdm, rows, error, message):
    with pytest.raises(error, match=f"^recurrent_kda_: state_indices {message}"):
        call(sdm, "recurrent_kda_", make(BASE), state_indices=torch.tensor(rows))


def test_state_that_cannot_be_written(sdm):
    inputs = make(BASE)
    message = "state must have a contiguous last dimension, got strides"
    with pytest.raises(ValueError, match=f"^recurrent_kda_: {message}"):
        state = zeros(B, HV, V, K).transpose(2, 3)
        call(sdm, "recurrent_kda_", replace(inputs, initial_state=state))
    with pytest.raises(ValueError, match="^recurrent_kda_: state must not overlap itself"):
        state = zeros(1, HV, K, V).expand(B, HV, K, V)
        call(sdm, "recurrent_kda_", replace(inputs, initial_state=state))


@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("name", ["k", "v", "beta", "initial_state", "A_log", "dt_bias"])
def test_devices(sdm, func, name):
    inputs = make(BASE)
    other = replace(inputs, **{name: getattr(inputs, name).to("meta")})
    name = "state" if (func, name) == ("recurrent_kda_", "initial_state") else name
    with pytest.raises(ValueError, match=f"^{func}: {name} must be on cpu like q, got meta"):
        call(sdm, func, other)


def test_a_valid_call_follows_a_failed_one(sdm):
    inputs = make(BASE)
    expected = call(sdm, "chunk_kda", inputs)[0]
    state = inputs.initial_state.clone()
    for name, value, error, _ in COMMON:
        for func in FUNCTIONS:
            with pytest.raises(error):
                call(sdm, func, replace(inputs, **{name: value}))
    assert_same_bits(call(sdm, "chunk_kda", inputs)[0], expected)
    assert_same_bits(inputs.initial_state, state)
