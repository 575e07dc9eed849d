# SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export of KDA: no graph break, one compile for every length, same bits."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .helpers.compare import assert_close, assert_same_bits
from .helpers.kda_cases import TOKENS, KdaCase, make
from .helpers.kda_grads import results
from .helpers.poison import fused, poisoned, sparse_last

CASE = KdaCase("compile", T=70, K=16, V=16)
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend="aot_eager", **options):
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("form", ["activated", "softplus", "bounded"])
@pytest.mark.parametrize("lengths", [None, (17, 0, 53)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_equals_eager(sdm, device, backend, lengths, form, name):
    inputs = make(CASE.but(lengths=lengths, form=form), device)
    fn = getattr(sdm, name)
    options = [{}] if name != "chunk_kda" else [{}, {"disable_recompute": True}]
    for option in options:
        expected = results(fn, inputs, **option)
        assert_same_bits(results(compiled(fn, backend), inputs, **option), expected)
    expected = results(fn, inputs, grad=False)
    assert_same_bits(results(compiled(fn, backend), inputs, grad=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(sdm, device, dynamic):
    inputs = make(CASE, device)

    def layer(q, k, v, g, beta, **options):
        out, state = sdm.chunk_kda(q * 2, k, v + 1, g, beta, **options)
        return out.tanh(), state

    got = results(compiled(layer, "inductor", dynamic=dynamic), inputs)
    assert_close(got, results(layer, inputs), "kda-f32")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mark", [False, True])
def test_lengths_compile_once(sdm, device, mark, keep):
    """Marked as dynamic, T compiles once; unmarked, it is found dynamic at its first change."""
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(sdm.chunk_kda, fullgraph=True, backend=counter)

    def run(fn, inputs):
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        if mark:
            for name in TOKENS:
                torch._dynamo.mark_dynamic(getattr(leaves, name), 1)
        out, state = fn(
            *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
            disable_recompute=keep, **leaves.keywords(),
        )  # fmt: skip
        (out.square().sum() + state.sum()).backward()
        return [out, state, *(x.grad for x in leaves.args())]

    for count, length in enumerate((128, 130, 200, 64, 63)):
        inputs = make(CASE.but(T=length), device)
        assert_same_bits(run(fn, inputs), run(sdm.chunk_kda, inputs))
        assert counter.frame_count == (1 if mark or count == 0 else 2)


def test_packed_lengths_compile_once(sdm, device):
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(sdm.chunk_kda, fullgraph=True, backend=counter)

    def marked(*tokens, cu_seqlens, **options):
        for x in tokens:
            torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        return fn(*tokens, cu_seqlens=cu_seqlens, **options)

    for lengths in ((30, 7, 50), (60, 1, 4, 40), (20, 20)):
        inputs = make(CASE.but(lengths=lengths, initial=False), device)
        assert_same_bits(results(marked, inputs), results(sdm.chunk_kda, inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["q", "v", "beta", "initial_state", "A_log"])
def test_one_gradient_at_a_time(sdm, device, name):
    inputs = make(CASE, device)
    expected = results(sdm.chunk_kda, inputs, only=(name,))
    assert_same_bits(results(compiled(sdm.chunk_kda), inputs, only=(name,)), expected)


def test_mixed_dtypes(sdm, device):
    case = CASE.but(dtype=torch.bfloat16, gate_dtype=torch.float32, state_dtype=torch.bfloat16)
    inputs = make(case, device).map(lambda x: x.float(), ("v",))
    assert_same_bits(results(compiled(sdm.chunk_kda), inputs), results(sdm.chunk_kda, inputs))


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_in_place_on_views(sdm, device, backend):
    """Rows and slices of a pool, read before and after, in one compiled function."""
    inputs = make(CASE.but(T=2), device)
    options = inputs.keywords()

    def steps(pool, rows, *tokens):
        before = pool[1:3].sum()
        one = sdm.recurrent_kda_(pool[1:3], *tokens, **options)
        between = pool[1:3].sum()
        two = sdm.recurrent_kda_(pool, *tokens, state_indices=rows, **options)
        three = sdm.recurrent_kda_(pool[4:], *tokens, **options)
        return before, one, between, two, three, pool.sum()

    rows = torch.tensor([0, -1], device=device)
    pool = torch.randn(6, *inputs.initial_state.shape[1:], device=device)
    other = pool.clone()
    fn = compiled(steps, backend)
    for _ in range(20):
        expected = steps(pool, rows, *inputs.tokens())
        got = fn(other, rows, *inputs.tokens())
        assert_same_bits(other, pool)
        ours = (1, 3, 4)
        assert_same_bits([got[i] for i in ours], [expected[i] for i in ours])
        torch.testing.assert_close(got, expected)


def test_intermediate_states(sdm, device):
    inputs = make(CASE, device)

    def call():
        return sdm.chunk_kda(
            *inputs.tokens(), return_intermediate_states=True, chunk_size=16, **inputs.keywords()
        )

    assert_same_bits(compiled(call)(), call())


def test_compiled_checkpoint(sdm, device):
    from torch.utils.checkpoint import checkpoint

    inputs = make(CASE, device)

    def layer(*tokens, **options):
        return checkpoint(lambda *x: sdm.chunk_kda(*x, **options), *tokens, use_reentrant=False)

    assert_same_bits(results(compiled(layer), inputs), results(sdm.chunk_kda, inputs))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_export(sdm, device, name, final):
    class Attention(torch.nn.Module):
        def forward(self, *tokens):
            out, state = getattr(sdm, name)(
                *tokens, use_qk_l2norm_in_kernel=True, output_final_state=final
            )
            return (out, state) if final else out

    case = CASE.but(form="activated", strength="activated")
    module, length = Attention(), torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(
        module,
        tuple(make(case, device).tokens()),
        dynamic_shapes=(tuple({1: length} for _ in TOKENS),),
    )
    for T in (40, 41, 130):
        tokens = make(case.but(T=T), device).tokens()
        assert_same_bits(program.module()(*tokens), module(*tokens))


@pytest.mark.parametrize("layout", [poisoned, fused, sparse_last], ids=lambda fn: fn.__name__)
def test_layouts(sdm, device, layout):
    inputs = make(CASE, device)
    laid_out = inputs.map(layout, ("q", "k", "v", "g", "initial_state"))
    assert_same_bits(results(compiled(sdm.chunk_kda), laid_out), results(sdm.chunk_kda, inputs))


def test_values_are_checked_by_the_op(sdm, device):
    """A trace can't look at offsets and rows; the CPU op does, before it touches anything."""
    if device.type != "cpu":
        pytest.skip("on CUDA looking would wait for the device")
    inputs = make(CASE.but(lengths=(17, 53)), device)
    for offsets in ([0, 80, 70], [0, 17, 69], [0, 17, 71], [1, 17, 70], [0, -3, 70]):
        inputs.cu_seqlens = torch.tensor(offsets)
        for name in FUNCTIONS:
            with pytest.raises(RuntimeError, match="cu_seqlens"):
                results(compiled(getattr(sdm, name)), inputs, grad=False)
    inputs = make(CASE.but(T=2), device)
    state = inputs.initial_state.clone()
    for rows in ([0, 2], [-2, 0], [1, 1]):
        with pytest.raises(RuntimeError, match="state_indices"):
            compiled(sdm.recurrent_kda_)(
                state, *inputs.tokens(), state_indices=torch.tensor(rows), **inputs.keywords()
            )
    assert_same_bits(state, inputs.initial_state)


def test_errors_stay_errors(sdm, device):
    """A wrong argument is reported under compile as well."""
    inputs = make(CASE, device)
    inputs.beta = inputs.beta[..., :1]
    with pytest.raises(Exception, match=r"chunk_kda: beta must be \[B, T, HV\]"):
        results(compiled(sdm.chunk_kda), inputs, grad=False)
