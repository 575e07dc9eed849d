# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of a call under one fixed loss."""

import torch

from .cases import FLOATS, make


def weights_like(x, seed):
    """Return fixed random weights of a loss, in the dtype of ``x``."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=gen, dtype=torch.float64).to(x.device, x.dtype)


def results(fn, inputs, *, grad=True, through=("out", "final_state"), only=FLOATS, **options):
    """Call ``fn(*args, cu_seqlens=, output_final_state=True, **options)``.

    Return a dict with ``out``, ``final_state`` and, for ``grad``, the gradients ``d_<name>`` of
    ``<out, W1> + <final_state, W2>``; ``through`` and ``only`` leave out terms and arguments.
    """
    leaves = inputs.map(lambda x: x.detach().requires_grad_(grad), only)
    out, state = fn(
        *leaves.args(), cu_seqlens=leaves.cu_seqlens, output_final_state=True, **options
    )
    got = {"out": out.detach(), "final_state": state.detach()}
    if not grad:
        return got
    terms = {"out": (out, weights_like(out, 11)), "final_state": (state, weights_like(state, 12))}
    used = [terms[name] for name in through]
    wanted = [getattr(leaves, name) for name in only]
    grads = torch.autograd.grad(
        [x for x, _ in used], wanted, [w for _, w in used], allow_unused=True
    )
    got.update({f"d_{name}": grad for name, grad in zip(only, grads)})
    return got


def reference_results(sdm, inputs, **options):
    """Return the results of the token recurrence in float64, fed the rounded inputs."""
    exact = _on_cpu(inputs).to(torch.float64)
    return _zeros_for_none(results(sdm.reference.sdm, exact, **options), inputs)


def low_results(sdm, inputs, chunk, **options):
    """Return the results of the token recurrence in the call's precision.

    The bank is rounded to its dtype after every ``chunk`` tokens of a sequence, as in the kernels.
    """

    def chained(*args, cu_seqlens=None, output_final_state=True):
        *tokens, state = args
        if state.dim() == 3:
            num = tokens[0].shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            state = state.expand(num, *state.shape)
        if cu_seqlens is None:
            pieces = [(tokens, state)]
        else:
            cuts = cu_seqlens.tolist()
            spans = enumerate(zip(cuts[:-1], cuts[1:]))
            pieces = [([x[:, a:b] for x in tokens], state[n : n + 1]) for n, (a, b) in spans]
        outs, states = [], []
        for part, bank in pieces:
            for first in range(0, part[0].shape[1], chunk):
                piece = [x[:, first : first + chunk] for x in part]
                out, bank = sdm.reference.sdm(*piece, bank, output_final_state=True)
                outs.append(out)
            states.append(bank)
        return torch.cat(outs, 1), torch.cat(states)

    return _zeros_for_none(results(chained, _on_cpu(inputs), **options), inputs)


def check_case(sdm, case, device, *, grad=True, scale=1.0, seed=0, **options):
    """Run a case on the kernel and compare everything with the reference."""
    from .compare import assert_close, precision

    inputs = make(case, device, seed)
    got = results(
        sdm.chunk_sdm, inputs, grad=grad, chunk_size=case.chunk, save=case.save, **options
    )
    assert_dtypes(got, inputs)
    expected = reference_results(sdm, inputs, grad=grad, **options)
    chunk = case.chunk or 64
    assert_close(
        got,
        expected,
        precision(inputs),
        low=lambda: low_results(sdm, inputs, chunk, grad=grad, **options),
        scale=scale,
    )
    return inputs, got, expected


def assert_dtypes(got, inputs):
    """Check that results and gradients have the dtype and layout that is promised."""
    likes = {"out": inputs.v, "final_state": inputs.initial_state}
    likes.update({f"d_{name}": getattr(inputs, name) for name in FLOATS})
    for name, x in got.items():
        assert x.dtype == likes[name].dtype, f"{name}: {x.dtype}, expected {likes[name].dtype}"
        assert x.device == likes[name].device
        assert x.is_contiguous(), f"{name}: strides {x.stride()} for {tuple(x.shape)}"


def _on_cpu(inputs):
    """The loop over tokens is thousands of little ops: each costs less on the CPU than a launch."""
    moved = inputs.map(lambda x: x.cpu())
    if moved.cu_seqlens is not None:
        moved.cu_seqlens = moved.cu_seqlens.cpu()
    return moved


def _zeros_for_none(got, inputs):
    for name, x in got.items():
        if x is None:
            x = torch.zeros_like(getattr(inputs, name[2:]))
        got[name] = x.to(inputs.v.device)
    return got
