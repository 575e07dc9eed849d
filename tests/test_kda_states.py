# SPDX-License-Identifier: Apache-2.0
"""The states at chunk boundaries, and the arguments that only say how to work."""

import pytest
import torch

from .helpers.compare import assert_same_bits, relative_error
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import results

CASE = KdaCase("states", B=3, T=150, K=32, V=16)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3, torch.float64: 1e-13}


def call(fn, inputs, **options):
    return fn(
        *inputs.tokens(), initial_state=inputs.initial_state, return_intermediate_states=True,
        **inputs.keywords(), **options,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lengths", [None, (64, 0, 1, 16, 65, 64)], ids=str)
def test_intermediate_states(sdm, device, lengths, v_first, chunk, dtype):
    case = CASE.but(dtype=dtype, v_first=v_first, lengths=lengths)
    inputs = make(case, device)
    out, final, states = call(sdm.chunk_kda, inputs, chunk_size=chunk, output_final_state=True)
    _, _, expected = call(
        sdm.reference.kda, inputs.to(torch.float64), chunk_size=chunk, output_final_state=True
    )
    assert states.shape == expected.shape
    assert states.dtype == dtype
    assert states.shape[1] == sum(-(-n // chunk) for n in lengths or (150,))
    assert relative_error(states, expected) < LIMIT[dtype]
    plain = results(sdm.chunk_kda, inputs, grad=False, chunk_size=chunk)
    assert_same_bits({"out": out, "final_state": final}, plain)
    if lengths is not None:
        offsets = inputs.cu_seqlens.cpu()
        again = call(sdm.chunk_kda, inputs, chunk_size=chunk, cu_seqlens_cpu=offsets)
        assert again[1] is None
        assert_same_bits(again[2], states)


def test_states_of_empty_calls(sdm, device):
    for changes in ({"T": 0}, {"B": 0}, {"lengths": (0, 0)}):
        states = call(sdm.chunk_kda, make(CASE.but(**changes), device))[2]
        assert states.numel() == 0
        assert states.shape[2:] == (2, 32, 16)


def test_states_and_gradients_exclude_each_other(sdm, device):
    inputs = make(CASE, device).map(lambda x: x.requires_grad_(), ("A_log",))
    message = "^chunk_kda: return_intermediate_states must be False where a gradient is asked for"
    with pytest.raises(ValueError, match=message):
        call(sdm.chunk_kda, inputs)
    with torch.no_grad():
        assert len(call(sdm.chunk_kda, inputs)) == 3


def test_arguments_without_influence(sdm, device):
    inputs = make(CASE.but(lengths=(70, 0, 80)), device)
    expected = results(sdm.chunk_kda, inputs)
    extras = {"use_graph": True, "max_num_seqs": 3, "safe_gate": True}
    offsets = inputs.cu_seqlens.cpu()
    assert_same_bits(results(sdm.chunk_kda, inputs, cu_seqlens_cpu=offsets, **extras), expected)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_unused_gate_arguments(sdm, device, name):
    """Without ``use_gate_in_kernel`` a model may hand over its parameters all the same."""
    inputs = make(CASE.but(form="activated"), device)
    expected = results(getattr(sdm, name), inputs)
    extras = {"A_log": torch.ones(2, device=device), "dt_bias": torch.ones(64, device=device)}
    inputs.options["lower_bound"] = -5.0
    assert_same_bits(results(getattr(sdm, name), inputs, **extras), expected)


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_deprecated_layout_name(sdm, device, name):
    inputs = make(CASE.but(v_first=True), device)
    expected = results(getattr(sdm, name), inputs, grad=False)
    del inputs.options["state_v_first"]
    with pytest.warns(FutureWarning, match="transpose_state_layout is deprecated"):
        got = results(getattr(sdm, name), inputs, grad=False, transpose_state_layout=True)
    assert_same_bits(got, expected)
    message = "transpose_state_layout must not come with state_v_first"
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        results(getattr(sdm, name), inputs, transpose_state_layout=True, state_v_first=True)


def test_positional_arguments(sdm, device):
    """The order of the arguments is part of the contract."""
    inputs = make(CASE.but(form="activated", strength="activated", B=1), device)
    q, k, v, g, beta = inputs.tokens()
    state = inputs.initial_state
    expected = results(sdm.chunk_kda, inputs, grad=False)
    scale = q.shape[-1] ** -0.5
    got = sdm.chunk_kda(
        q, k, v, g, beta, scale, state, True, True, False, False, False, False, None, False, False,
        False, None, None, None, False, None,
    )  # fmt: skip
    assert_same_bits(got, (expected["out"], expected["final_state"]))
    expected = results(sdm.fused_recurrent_kda, inputs, grad=False)
    got = sdm.fused_recurrent_kda(
        q, k, v, g, beta, None, None, scale, state, True, True, False, False, False, None, False,
        None,
    )  # fmt: skip
    assert_same_bits(got, (expected["out"], expected["final_state"]))
