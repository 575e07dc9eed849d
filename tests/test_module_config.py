# SPDX-License-Identifier: Apache-2.0
"""Configuration, parameter names and initialisation of the mixer; errors of its call."""

import copy
import json
import math
import re

import pytest
import torch

from .helpers.plain_mixer import OPTIONS, config_of

# Names and shapes of the published state dicts, for the sizes of plain_mixer and all options on.
DIM, HEADS, SLOTS, SCORES = 24, 2, 36, 2 * (4 + 9)
LINEARS = {
    "Wq_read": (SCORES, DIM), "Wk_write": (SCORES, DIM), "Wv_write": (DIM, DIM),
    "a_proj": (HEADS, DIM), "b_proj": (HEADS, DIM), "Wo": (DIM, DIM), "Wog": (DIM, DIM),
}  # fmt: skip
PUBLISHED = {
    **{f"{name}.weight": shape for name, shape in LINEARS.items()},
    **{f"{name}.bias": shape[:1] for name, shape in LINEARS.items()},
    "A_log": (HEADS,), "dt_bias": (HEADS,), "memory": (HEADS * SLOTS, DIM // HEADS),
    "readings_norm.weight": (DIM // HEADS,), "readings_norm.bias": (DIM // HEADS,),
    **{f"{bn}.{name}": (SCORES,) for bn in ("query_bn", "key_bn")
       for name in ("weight", "bias", "running_mean", "running_var")},
    "query_bn.num_batches_tracked": (), "key_bn.num_batches_tracked": (),
}  # fmt: skip
OPTIONAL = ("Wog", "memory", "readings_norm", "query_bn", "key_bn")


@pytest.mark.kernels_ci
def test_published_state_dict_loads_strictly(sdm):
    mixer = sdm.SparseDeltaMemory(config_of(sdm, **OPTIONS["everything"]))
    assert {name: tuple(x.shape) for name, x in mixer.state_dict().items()} == PUBLISHED
    values = {name: torch.rand(shape) for name, shape in PUBLISHED.items()}
    mixer.load_state_dict(values, strict=True)
    assert torch.equal(mixer.memory, values["memory"])
    bank = mixer.initial_bank()
    assert bank.shape == (HEADS, SLOTS, DIM // HEADS)
    assert bank.data_ptr() == mixer.memory.data_ptr()


def test_optional_parameters_are_absent_by_default(sdm):
    mixer = sdm.SparseDeltaMemory(config_of(sdm, backprop_on_memory=False))
    names = {name.split(".")[0] for name in mixer.state_dict()}
    assert names == {name.split(".")[0] for name in PUBLISHED} - set(OPTIONAL)


def check_initial_values(mixer, std):
    for name, p in mixer.named_parameters():
        if name.endswith("_norm.weight") or name.endswith("_bn.weight"):
            assert (p == 1).all(), name
        elif name.endswith(".bias"):
            assert (p == 0).all(), name
        elif name not in ("A_log", "dt_bias"):
            assert p.abs().max() <= 3 * std * (1 + 1e-6), name
            if p.numel() > 1000:
                assert abs(p.std() / (std * 0.9866) - 1) < 0.08, name  # of a normal cut at 3
    low, high = mixer.config.A_init_range
    rates = mixer.A_log.exp()
    assert rates.min() >= max(low, 1e-4) * 0.999 and rates.max() <= high * 1.001
    step = torch.nn.functional.softplus(mixer.dt_bias)
    assert (step >= 0.000999).all() and (step <= 0.1001).all()
    assert mixer.A_log._no_weight_decay and mixer.dt_bias._no_weight_decay
    assert mixer.memory._is_memory_bank


def test_initialisation(sdm):
    config = sdm.SparseDeltaMemoryConfig(
        dim=64, num_heads=16, slots_per_head=64, num_writes=4, num_reads=4,
        output_gate=True, normalize_readings=True, query_batchnorm=True,
    )  # fmt: skip
    mixer = sdm.SparseDeltaMemory(config)
    check_initial_values(mixer, 64**-0.5)
    assert len(mixer.A_log.unique()) == 16 and len(mixer.dt_bias.unique()) == 16
    with torch.no_grad():
        for tensor in mixer.state_dict().values():
            tensor.fill_(77)
    mixer.reset_parameters(init_std=0.1, factor=2.0)
    check_initial_values(mixer, 0.05)
    assert (mixer.query_bn.running_mean == 0).all() and (mixer.key_bn.running_var == 1).all()


def test_marks_of_the_parameters_survive(sdm):
    """Optimisers sort by these attributes, which torch does not copy along with a parameter."""
    mixer = sdm.SparseDeltaMemory(config_of(sdm))
    meta = sdm.SparseDeltaMemory(config_of(sdm), device="meta")
    torch.nn.Sequential(meta).load_state_dict(torch.nn.Sequential(mixer).state_dict(), assign=True)
    for other in (copy.deepcopy(mixer), copy.copy(mixer), meta):
        assert other.A_log._no_weight_decay and other.dt_bias._no_weight_decay
        assert other.memory._is_memory_bank
        assert torch.equal(other.memory, mixer.memory)


def test_materialises_from_the_meta_device(sdm):
    config = config_of(sdm, **OPTIONS["everything"])
    mixer = sdm.SparseDeltaMemory(config, device="meta")
    assert all(p.is_meta for p in mixer.parameters())
    mixer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in mixer.state_dict().values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 5)
    mixer.reset_parameters()
    check_initial_values(mixer, DIM**-0.5)
    assert mixer(torch.randn(1, 3, DIM))[0].isfinite().all()


def test_dtype_of_the_constructor(sdm):
    mixer = sdm.SparseDeltaMemory(config_of(sdm), dtype=torch.bfloat16)
    assert {p.dtype for p in mixer.parameters()} == {torch.bfloat16}


def test_defaults_are_the_published_ones(sdm):
    config = sdm.SparseDeltaMemoryConfig(dim=8)
    values = config.to_dict()
    published = {
        "dim": 8, "num_heads": 1, "slots_per_head": 10000, "product_key_factor_dims": None,
        "num_writes": 64, "num_reads": 64, "chunk_size": None, "read_act": "Softmax",
        "write_act": "Softmax", "read_act_scale": 1.0, "write_act_scale": 1.0,
        "normalize_readings": False, "norm_eps": 1e-6, "output_gate": False,
        "A_init_range": [0, 16], "dt_bias_init": 0.0, "backprop_on_memory": True,
        "query_batchnorm": False, "key_weighted_decay": False, "snapshot_quant": "none",
        "grad_bank_fp32": False, "cuda_graph": False, "log_memory_access_stats": False,
        "log_memory_norms": False,
    }  # fmt: skip
    assert {name: values[name] for name in published} == published
    assert config.factor_dims == (100, 100) and config.save_mode == "replay"


def test_round_trip_through_json(sdm):
    config = config_of(sdm, product_key_factor_dims=[4, 9], snapshot_quant="fp8")
    again = sdm.SparseDeltaMemoryConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and again.factor_dims == (4, 9) and again.save_mode == "fp8"
    with pytest.raises(TypeError, match="unknown fields depth"):
        sdm.SparseDeltaMemoryConfig.from_dict({"dim": 8, "depth": 2})


def test_old_name_of_the_chunk_size(sdm):
    with pytest.warns(DeprecationWarning, match="memory_block_size"):
        assert config_of(sdm, memory_block_size=32).chunk_size == 32
    with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="memory_block_size"):
        config_of(sdm, memory_block_size=32, chunk_size=64)


BAD = {
    "dim": [-1, 0, 2.0, 25],
    "num_heads": [0, -1, True],
    "slots_per_head": [0, 35, 36.0, 2**32],
    "product_key_factor_dims": [[], [6, 7], "66", [6, -6], [6.0, 6], 36],
    "num_writes": [0, 37, 1.5, None],
    "num_reads": [0, 37, True],
    "chunk_size": [0, 513, 64.0, "64"],
    "read_act": ["softmax", "PReLU", "Linear", None, "Dropout"],
    "write_act": ["RReLU", 3],
    "read_act_scale": [math.inf, "1", None],
    "norm_eps": [0, -1e-6],
    "A_init_range": [(0, 0), (2, 1), (-1, 2), (1,), 3],
    "dt_bias_init": [0.5],
    "snapshot_quant": ["bf15", None, "replay"],
    "save": ["none", "exact"],
}


@pytest.mark.parametrize("field, value", [(f, v) for f, values in BAD.items() for v in values])
def test_bad_value_is_named(sdm, field, value):
    with pytest.raises(ValueError, match=rf"SparseDeltaMemoryConfig: .*{field}.* must be .*got"):
        config_of(sdm, **{field: value})


def test_combinations_that_mean_nothing_are_refused(sdm):
    with pytest.raises(ValueError, match="read_act_scale must be 1.0"):
        config_of(sdm, read_act="ReLU", read_act_scale=2.0)
    with pytest.raises(ValueError, match="save must be that of snapshot_quant 'fp8'"):
        config_of(sdm, snapshot_quant="fp8", save="rows")
    with pytest.raises(ValueError, match="25 or 36 are the nearest"):
        config_of(sdm, slots_per_head=35)
    for switch in ("cuda_graph", "log_memory_access_stats", "log_memory_norms"):
        with pytest.raises(NotImplementedError, match=switch):
            config_of(sdm, **{switch: True})
    with pytest.raises(TypeError):
        config_of(sdm, snapshot="fp8")
    assert config_of(sdm, grad_bank_fp32=True).grad_bank_fp32


def test_call_errors(sdm):
    mixer = sdm.SparseDeltaMemory(config_of(sdm))
    x = torch.randn(2, 5, DIM)
    state = mixer.init_state(2)
    offsets = torch.tensor([0, 2, 5])
    cases = [
        (TypeError, "x must be a tensor", ([1.0],)),
        (ValueError, "x must have shape", (x[..., :-1],)),
        (ValueError, "x must have shape", (x[0, 0],)),
        (ValueError, "seq_len must be 5", (x, None, None, 4)),
        (ValueError, "seq_len must divide", (x[0], None, None, 2)),
        (ValueError, "seq_len must be None", (x[0], None, offsets, 2)),
        (ValueError, "batch 1 with cu_seqlens", (x, None, offsets)),
        (TypeError, "state must be a Sparse", (x, {"bank": state.bank})),
        (ValueError, "bank of shape", (x[:1], state)),
        (ValueError, "bank of shape", (x, torch.zeros(2, 36, 11))),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=re.escape(message)):
            mixer(*arguments)
    with torch.no_grad(), pytest.raises(ValueError, match="bank of shape"):
        mixer(x[:1], mixer.init_state(1), torch.tensor([0, 2, 5]))
    with pytest.raises(TypeError, match="config must be"):
        sdm.SparseDeltaMemory({"dim": 8})
