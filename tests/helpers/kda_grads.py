# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of a KDA call under one fixed loss, and their comparison."""

import torch

from .compare import LIMITS, assert_close
from .grads import weights_like
from .kda_cases import LOW, make

KINDS = {torch.float64: "f64", torch.float32: "kda-f32"}


def results(
    fn, inputs, *, grad=True, through=("out", "final_state"), only=None, initial=True, **options
):
    """Call ``fn`` with the final state and return a dict of results and gradients ``d_<name>``.

    The loss is ``<out, W1> + <final_state, W2>``; ``through`` and ``only`` leave out terms and
    arguments.
    """
    only = inputs.names() if only is None else only
    leaves = inputs.map(lambda x: x.detach().requires_grad_(grad), only)
    out, state = fn(
        *leaves.tokens(),
        initial_state=leaves.initial_state if initial else None,
        output_final_state=True,
        **leaves.keywords(),
        **options,
    )
    got = {"out": out.detach(), "final_state": state.detach()}
    if not grad:
        return got
    terms = {"out": (out, weights_like(out, 11)), "final_state": (state, weights_like(state, 12))}
    # A reference of no tokens has results that depend on nothing.
    used = [terms[name] for name in through if terms[name][0].requires_grad]
    wanted = [getattr(leaves, name) for name in only]
    grads = [None] * len(wanted)
    if used:
        grads = torch.autograd.grad(
            [x for x, _ in used], wanted, [w for _, w in used], allow_unused=True
        )
    got.update({f"d_{name}": grad for name, grad in zip(only, grads)})
    return got


def reference_results(sdm, inputs, dtype=torch.float64, **options):
    """Return the results of the token recurrence, in float64, fed the rounded inputs.

    The upstream gradient of the output is the one that a call in the inputs' dtype gets.
    """

    def rounded(*tokens, **keywords):
        out, state = sdm.reference.kda(*tokens, **keywords)
        return _Upstream.apply(out, inputs.q.dtype), state

    got = results(rounded, inputs.to(dtype), **options)
    for name in got:
        if got[name] is None:
            got[name] = torch.zeros_like(getattr(inputs, name[2:]))
    return got


class _Upstream(torch.autograd.Function):
    """Identity whose gradient is rounded to the dtype that the call under test gets it in."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


def limits_of(inputs):
    """Return the class of compare.LIMITS for a call."""
    dtypes = {x.dtype for x in inputs.args()}
    return "kda-low" if dtypes & set(LOW) else KINDS[inputs.q.dtype]


def check_case(sdm, case, device, *, fn=None, grad=True, seed=0, scale=1.0, **options):
    """Run a case on the kernel and compare everything with the reference."""
    inputs = make(case, device, seed)
    keywords = {} if fn is not None else {"chunk_size": case.chunk}
    got = results(fn or sdm.chunk_kda, inputs, grad=grad, **keywords, **options)
    assert_dtypes(got, inputs)
    expected = reference_results(sdm, inputs, grad=grad, **options)
    compare(sdm, inputs, got, expected, scale=scale, grad=grad, **options)
    return inputs, got, expected


def compare(sdm, inputs, got, expected, *, scale=1.0, **options):
    """Compare results with the float64 reference.

    Where the problem itself is ill conditioned, so that the token recurrence in the call's own
    precision misses the limit too, three times its error is allowed.
    """
    low = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    kind = limits_of(inputs)
    cancelled = _within_the_size_of_their_terms(inputs, got, expected, scale * LIMITS[kind]["grad"])
    got = {name: x for name, x in got.items() if name not in cancelled}
    expected = {name: x for name, x in expected.items() if name not in cancelled}
    assert_close(
        got,
        expected,
        kind,
        low=lambda: _rounded(reference_results(sdm, inputs, low, **options), got),
        scale=scale,
    )


def _within_the_size_of_their_terms(inputs, got, expected, limit):
    """Return the gate's parameters whose errors are small beside the terms of their sums.

    Those gradients are sums over all tokens that may cancel; then no error is small beside the sum.
    """
    if inputs.A_log is None and inputs.dt_bias is None or expected.get("d_g") is None:
        return ()
    raw, slope = inputs.g.double(), expected["d_g"]
    z = raw if inputs.dt_bias is None else raw + inputs.dt_bias.double()
    if inputs.options["lower_bound"] is None:  # the gradient of A_log has softplus(z) for z
        rate = torch.nn.functional.softplus(z) / z.sigmoid()
    else:
        rate = z
    terms = {"d_A_log": (slope * rate).flatten(3).flatten(0, 1), "d_dt_bias": slope.flatten(0, 1)}
    small = []
    for name, x in terms.items():
        if got.get(name) is None:
            continue
        x = x.square().sum(0).sum(-1) if name == "d_A_log" else x.square().sum(0)
        error = got[name].double() - expected[name].to(got[name].device)
        if error.isfinite().all() and error.norm() <= limit * x.sum().sqrt():
            small.append(name)
    return small


def assert_dtypes(got, inputs):
    """Check that results and gradients have the dtype and layout that is promised."""
    wide = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    dtypes = {"out": inputs.q.dtype, "final_state": wide}
    dtypes.update({f"d_{name}": getattr(inputs, name).dtype for name in inputs.names()})
    for name, x in got.items():
        if x is None:
            continue
        assert x.dtype == dtypes[name], f"{name}: {x.dtype}, expected {dtypes[name]}"
        assert x.device == inputs.q.device
        assert x.is_contiguous(), f"{name}: strides {x.stride()} for {tuple(x.shape)}"


def _rounded(got, like):
    return {name: got[name] if x is None else got[name].to(x.dtype) for name, x in like.items()}
