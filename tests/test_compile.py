# SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export: no graph break, one compile for every length, equal results."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from .helpers.cases import FLOATS, ORDER, Case, make
from .helpers.compare import assert_close, assert_same_bits
from .helpers.grads import results
from .helpers.poison import LAYOUTS

CASE = Case("compile", T=40, S=16, D=8, W=4, R=4, chunk=16)
TOKENS = ("write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, backend="aot_eager", **options):
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("save", ["replay", "rows", "fp8"])
@pytest.mark.parametrize("lengths", [None, (17, 0, 23)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_equals_eager(sdm, device, backend, lengths, save):
    inputs = make(CASE.but(lengths=lengths, gate_per_write=True), device)
    expected = results(sdm.chunk_sdm, inputs, chunk_size=16, save=save)
    got = results(compiled(sdm.chunk_sdm, backend), inputs, chunk_size=16, save=save)
    assert_same_bits(got, expected)
    expected = results(sdm.chunk_sdm, inputs, grad=False)
    assert_same_bits(results(compiled(sdm.chunk_sdm, backend), inputs, grad=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(sdm, device, dynamic):
    inputs = make(CASE, device)

    def layer(*args, cu_seqlens=None, output_final_state=True):
        # torch 2.11 takes the rest of an unpacking for a tuple.
        tokens, bank = list(args[:-1]), args[-1]
        tokens[2] = tokens[2] * 2 + 1
        out, state = sdm.chunk_sdm(*tokens, bank, output_final_state=output_final_state)
        return out.tanh(), state

    expected = results(layer, inputs)
    got = results(compiled(layer, "inductor", dynamic=dynamic), inputs)
    assert_close(got, expected, "f32")


@pytest.mark.parametrize("save", ["replay", "rows"])
@pytest.mark.parametrize("mark", [False, True])
def test_lengths_compile_once(sdm, device, save, mark):
    """Marked as dynamic, T compiles once; unmarked, it is found dynamic at its first change."""
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(sdm.chunk_sdm, fullgraph=True, backend=counter)
    for count, length in enumerate((128, 130, 200, 64, 63)):
        inputs = make(CASE.but(T=length), device)
        leaves = inputs.map(lambda x: x.requires_grad_(), FLOATS)
        if mark:
            for name in TOKENS:
                torch._dynamo.mark_dynamic(getattr(leaves, name), 1)
        out, state = fn(*leaves.args(), output_final_state=True, save=save)
        (out.square().sum() + state.sum()).backward()
        compiled_grads = {name: getattr(leaves, name).grad for name in FLOATS}
        assert counter.frame_count == (1 if mark or count == 0 else 2)

        eager = make(CASE.but(T=length), device).map(lambda x: x.requires_grad_(), FLOATS)
        out2, state2 = sdm.chunk_sdm(*eager.args(), output_final_state=True, save=save)
        (out2.square().sum() + state2.sum()).backward()
        assert_same_bits((out, state), (out2, state2))
        assert_same_bits(compiled_grads, {name: getattr(eager, name).grad for name in FLOATS})


def test_packed_lengths_compile_once(sdm, device):
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(sdm.chunk_sdm, fullgraph=True, backend=counter)

    def marked(*args, cu_seqlens, **options):
        for x in args[:7]:
            torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(cu_seqlens, 0)
        return fn(*args, cu_seqlens=cu_seqlens, **options)

    for lengths in ((30, 7, 50), (60, 1, 4, 40), (20, 20)):
        inputs = make(CASE.but(lengths=lengths), device)
        assert_same_bits(results(marked, inputs), results(sdm.chunk_sdm, inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", FLOATS)
def test_one_gradient_at_a_time(sdm, device, name):
    inputs = make(CASE, device)
    expected = results(sdm.chunk_sdm, inputs, only=(name,))
    assert_same_bits(results(compiled(sdm.chunk_sdm), inputs, only=(name,)), expected)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_in_place_on_views(sdm, device, backend):
    """Rows and slices of a pool, read before and after, in one compiled function."""
    inputs = make(CASE.but(T=2, bank_per_sequence=True), device)

    def steps(pool, rows, *tokens):
        before = pool[1:3].sum()
        one = sdm.recurrent_sdm_(pool[1:3], *tokens)
        between = pool[1:3].sum()
        two = sdm.chunk_sdm_(pool, *tokens, state_indices=rows)
        three = sdm.recurrent_sdm_(pool[4:], *tokens)
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


@pytest.mark.parametrize("reentrant", [False])
def test_compiled_checkpoint(sdm, device, reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs = make(CASE, device)

    def layer(*args, cu_seqlens=None, output_final_state=True):
        return checkpoint(
            lambda *x: sdm.chunk_sdm(*x, output_final_state=True), *args, use_reentrant=reentrant
        )

    assert_same_bits(results(compiled(layer), inputs), results(sdm.chunk_sdm, inputs))


@pytest.mark.parametrize("final", [False, True])
def test_export(sdm, device, final):
    inputs = make(CASE, device)

    class Memory(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bank = torch.nn.Parameter(inputs.initial_state.clone())

        def forward(self, *tokens):
            return sdm.chunk_sdm(*tokens, self.bank, output_final_state=final)

    module = Memory()
    length = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(
        module, tuple(inputs.tokens()), dynamic_shapes=(tuple({1: length} for _ in TOKENS),)
    )
    for T in (40, 41, 130):
        tokens = make(CASE.but(T=T), device).tokens()
        assert_same_bits(program.module()(*tokens), module(*tokens))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda fn: fn.__name__)
def test_layouts(sdm, device, layout):
    inputs = make(CASE.but(gate_per_write=True, bank_per_sequence=True), device)
    laid_out = inputs.map(layout, [name for name in ORDER if name != "beta"])
    got = results(compiled(sdm.chunk_sdm), laid_out)
    assert_same_bits(got, results(sdm.chunk_sdm, inputs))


def test_values_are_checked_by_the_op(sdm, device):
    """A trace can't look at offsets and rows; the CPU op does, before it touches anything."""
    inputs = make(CASE.but(lengths=(17, 23)), device)
    for offsets in ([0, 50, 40], [0, 17, 39], [0, 17, 41], [1, 17, 40], [0, -3, 40]):
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            compiled(sdm.chunk_sdm)(*inputs.args(), cu_seqlens=torch.tensor(offsets))
    inputs = make(CASE.but(bank_per_sequence=True), device)
    state = inputs.initial_state.clone()
    for rows in ([0, 2], [-2, 0], [1, 1]):
        for fn in (sdm.recurrent_sdm_, sdm.chunk_sdm_):
            with pytest.raises(RuntimeError, match="state_indices"):
                compiled(fn)(state, *inputs.tokens(), state_indices=torch.tensor(rows))
    assert_same_bits(state, inputs.initial_state)


def test_errors_stay_errors(sdm, device):
    """A wrong argument is reported under compile as well."""
    inputs = make(CASE, device)
    inputs.beta = inputs.beta[..., :1]
    with pytest.raises(Exception, match=r"chunk_sdm: beta must be \[B, T, H\]"):
        compiled(sdm.chunk_sdm)(*inputs.args())


def test_check_indices_breaks_the_graph_cleanly(sdm, device):
    def fn(idx):
        sdm.check_indices(idx, 4)
        return idx + 1

    fn = torch.compile(fn, backend="eager")
    assert fn(torch.tensor([1, 3], device=device)).tolist() == [2, 4]
    with pytest.raises(IndexError, match=r"idx\[1\] must be from 0 to 3, got 4"):
        fn(torch.tensor([1, 4], device=device))
