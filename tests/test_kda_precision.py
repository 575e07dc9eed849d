# SPDX-License-Identifier: Apache-2.0
"""bfloat16 errors against the float64 recurrence, kind of gate by kind of gate.

The limits are the project's own: below what the public kernels reach on the same problem.
"""

import pytest
import torch

from .helpers.compare import relative_error
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import reference_results, results

LIMITS = {
    "out": 0.0034, "final_state": 0.0034, "d_q": 0.0034, "d_k": 0.0034, "d_v": 0.0034,
    "d_g": 0.0036, "d_beta": 0.0034, "d_initial_state": 0.0034, "d_A_log": 0.0030,
    "d_dt_bias": 0.0030,
}  # fmt: skip
# Where almost nothing decays, roundings of the whole sequence meet in each result.
SLOW = {**LIMITS, "d_g": 0.0060, "d_k": 0.0050, "d_q": 0.0050, "d_v": 0.0050, "d_beta": 0.0060,
        "out": 0.0050, "final_state": 0.0050, "d_initial_state": 0.0050, "d_A_log": 0.0050,
        "d_dt_bias": 0.0050}  # fmt: skip

KINDS = {
    "bounded": ({"form": "bounded"}, "usual", LIMITS),
    "softplus": ({"form": "softplus"}, "usual", LIMITS),
    "activated": ({"form": "activated"}, "usual", LIMITS),
    "bounded at -20": ({"form": "bounded", "lower_bound": -20.0}, "usual", LIMITS),
    "activated, slow": ({"form": "activated"}, -0.03, SLOW),
    "activated, very slow": ({"form": "activated"}, -0.001, SLOW),
    "bounded, slow": ({"form": "bounded", "parameters": False}, -5.0, SLOW),
    "softplus, slow": ({"form": "softplus", "parameters": False}, -5.0, SLOW),
}


def table(sdm, device, changes, decay, **options):
    """Return the errors of all results, over the heads together."""
    big = device.type == "cuda"
    case = KdaCase(
        "precision", B=1, T=512 if big else 160, H=4 if big else 2, HV=4 if big else 2, K=128,
        V=128, dtype=torch.bfloat16, gate_dtype=torch.float32, beta_dtype=torch.float32,
        strength="sigmoid", **changes,
    )  # fmt: skip
    inputs = make(case, device)
    if decay != "usual":
        inputs.g = decay * (1 + 0.2 * torch.rand(inputs.g.shape, device=device))
    got = results(sdm.chunk_kda, inputs, **options)
    expected = reference_results(sdm, inputs)
    return {name: relative_error(x, expected[name]) for name, x in got.items()}


@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "states kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_errors(sdm, device, kind, keep, record_property):
    changes, decay, limits = KINDS[kind]
    errors = table(sdm, device, changes, decay, disable_recompute=keep)
    for name, error in errors.items():
        record_property(name, f"{error:.2e}")
    print(f"{kind}: " + ", ".join(f"{name} {error:.2e}" for name, error in errors.items()))
    over = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not over
