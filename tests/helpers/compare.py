# SPDX-License-Identifier: Apache-2.0
"""The one assertion about numbers, and the one about bits."""

import torch

# Relative error (norm of the difference over norm of the value) allowed for each class of call and
# kind of result; the largest single error may be PEAK times that, relative to the largest value.
# The classes are those of docs/numerics.md: everything float64, everything float32, float32
# arithmetic on 16-bit inputs with a float32 bank, and a 16-bit bank, rounded once a chunk.
LIMITS = {
    "f64": {"value": 1e-14, "grad": 1e-13, "gate": 1e-13},
    "f32": {"value": 5e-6, "grad": 5e-5, "gate": 5e-5},
    "low": {"value": 3e-3, "grad": 5e-3, "gate": 5e-3},
    # Kimi delta attention (docs/kda.md): all float32, and 16-bit inputs with a float32 state.
    "kda-f32": {"value": 1e-5, "grad": 1e-4, "gate": 1e-4},
    "kda-low": {"value": 5e-3, "grad": 5e-3, "gate": 6e-3},
}
PEAK = 4.0
# Where the same recurrence in the same precision, token by token, is not better than the limit (the
# problem itself is ill conditioned), a result may be this many times as far off as that.
FACTOR = 3.0

GATES = ("d_beta", "d_g")


def precision(inputs):
    """Return the class of a call."""
    dtypes = {x.dtype for x in inputs.args() if x.is_floating_point()}
    if torch.float64 in dtypes:
        return "f64"
    return "f32" if dtypes == {torch.float32} else "low"


def assert_close(got, ref64, kind, *, low=None, scale=1.0):
    """Compare the results of a call (a dict by name) with the float64 reference.

    ``kind`` is a class of LIMITS, ``low`` an optional function that gives the results of the
    reference in the precision of the call, ``scale`` widens the limit.
    """
    assert got.keys() == ref64.keys()
    low_results = None
    for name, ref in ref64.items():
        x = got[name]
        assert (x is None) == (ref is None), f"{name}: only one of the two results is None"
        if x is None:
            continue
        assert x.shape == ref.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
        group = "gate" if name in GATES else "grad" if name.startswith("d_") else "value"
        limit = scale * LIMITS[kind][group]
        message = _differs(name, x, ref, limit)
        if message and low is not None:
            low_results = low() if low_results is None else low_results
            message = _differs(name, x, ref, limit, low_results[name])
        assert not message, message


def assert_same_bits(got, expected, what=""):
    """Compare tensors, or dicts or sequences of them, bit by bit (NaN equals the same NaN)."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected:
            assert_same_bits(got[name], expected[name], f"{what} {name}")
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for i, (x, y) in enumerate(zip(got, expected)):
            assert_same_bits(x, y, f"{what}[{i}]")
    elif expected is None or got is None:
        assert got is expected, f"{what}: only one of the two results is None"
    else:
        assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
        assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
        x, y = bits(got), bits(expected)
        if not torch.equal(x, y):
            where = (x != y).nonzero()
            first = tuple(where[0].tolist())
            raise AssertionError(
                f"{what}: {len(where)} of {x.numel()} values differ in their bits, first at "
                f"{list(first)}: {got[first].item()!r}, expected {expected[first].item()!r}"
            )


def bits(x):
    """Return the bits of a tensor as integers."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(sizes[x.element_size()])


def relative_error(x, ref):
    """Return the norm of the difference over the norm of ``ref``, in float64."""
    x, ref = x.detach().double(), ref.detach().double()
    return ((x - ref).norm() / ref.norm()).item()


def _differs(name, x, ref, limit, low=None):
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    for what, test in (("NaN", torch.isnan), ("inf", torch.isinf)):
        if not torch.equal(test(x), test(ref)):
            return f"{name}: {what} at {int(test(x).sum())} places, expected {int(test(ref).sum())}"
    finite = torch.isfinite(ref)
    x, ref = x[finite], ref[finite]
    if ref.numel() == 0:
        return ""
    error = (x - ref).abs()
    norm_limit, peak_limit = limit * ref.norm(), PEAK * limit * ref.abs().max()
    if low is not None:
        low_error = (low.detach().double().cpu()[finite] - ref).abs()
        norm_limit = torch.maximum(norm_limit, FACTOR * low_error.norm())
        peak_limit = torch.maximum(peak_limit, PEAK * FACTOR * low_error.max())
    tiny = torch.finfo(torch.float32).tiny
    if error.norm() <= norm_limit + tiny and error.max() <= peak_limit + tiny:
        return ""
    worst = int(error.argmax())
    place = [int(i) for i in finite.nonzero()[worst]]
    return (
        f"{name}: norm of the error {error.norm():.3g} (limit {norm_limit:.3g}), largest error "
        f"{error.max():.3g} (limit {peak_limit:.3g}) at {place}: {x[worst]:.9g}, "
        f"expected {ref[worst]:.9g}"
    )
