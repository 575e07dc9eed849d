# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: captured from the first call on, replayed with other values, offsets and rows."""

import pytest
import torch

from .helpers.calls import BY_NAME, CALLS
from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits
from .helpers.memory import run_python

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


def capture(function):
    """Return a graph of one call, captured in the strictest mode, and the call's results.

    The global mode refuses what may wait or allocate: cudaMalloc, synchronisation, copies to the host.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # loads code, starts autograd's threads
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        results = function()
    return graph, list(results)


def refill(tensors, values):
    for x, value in zip(tensors, values):
        x.copy_(value)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_replay_with_other_values(sdm, device, call):
    arguments = [x.clone() for x in call.draw(device)]
    graph, results = capture(lambda: call.run(sdm, arguments))
    for seed in (1, 2, 1):
        values = call.draw(device, seed)
        refill(arguments, values)
        for x in results:
            x.fill_(float("nan") if x.is_floating_point() else -1)
        graph.replay()
        got = [x.clone() for x in results]
        assert_same_bits(got, list(call.run(sdm, values)))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_replays_in_a_row_beside_eager_calls(sdm, device, call):
    """The graph's memory is its own: eager calls between replays change nothing."""
    arguments = call.draw(device)
    expected = [x.clone() for x in call.run(sdm, arguments)]
    others = call.draw(device, seed=1)
    graph, results = capture(lambda: call.run(sdm, arguments))
    for _ in range(4):
        graph.replay()
        call.run(sdm, others)
        graph.replay()
        assert_same_bits([x.clone() for x in results], expected)


OFFSETS = [(70, 0, 33, 47), (0, 0, 0, 150), (1, 64, 65, 20), (150, 0, 0, 0), (37, 38, 38, 37)]


@pytest.mark.parametrize("name", ["chunk_sdm_packed", "backward_packed", "chunk_sdm_packed_"])
def test_replay_with_other_offsets(sdm, device, name):
    call = BY_NAME[name]
    arguments = [x.clone() for x in call.draw(device)]
    graph, results = capture(lambda: call.run(sdm, arguments))
    for lengths in OFFSETS:
        offsets = torch.tensor((0, *lengths), device=device).cumsum(0)
        arguments[8].copy_(offsets)
        graph.replay()
        got = [x.clone() for x in results]
        assert_same_bits(got, list(call.run(sdm, arguments)))


@pytest.mark.parametrize("save", ["rows", "replay", "bf16", "int4"])
def test_training_step_of_many_sequences(sdm, device, save):
    """Eight sequences in 4096 tokens, offsets of A at capture and of B at replay."""
    case = Case(lengths=(512,) * 8, S=128, D=64, W=16, R=16, chunk=None, dtype=torch.bfloat16)
    inputs = make(case, device)
    leaves = inputs.map(lambda x: x.requires_grad_(), ("v", "g", "write_val", "initial_state"))
    wanted = (leaves.v, leaves.g, leaves.write_val, leaves.initial_state)
    offsets = inputs.cu_seqlens

    def step():
        out, _ = sdm.chunk_sdm(*leaves.args(), cu_seqlens=offsets, save=save)
        return [out.detach(), *torch.autograd.grad(out, wanted, out.detach())]

    graph, results = capture(step)
    lengths = torch.tensor([0, 5, 1000, 3, 1500, 88, 0, 1500], device=device)
    offsets[1:] = lengths.cumsum(0)
    graph.replay()
    got = [x.clone() for x in results]
    assert_same_bits(got, step())


@pytest.mark.parametrize("name", ["chunk_sdm_", "recurrent_sdm_"])
def test_replay_with_other_rows_of_the_pool(sdm, device, name):
    call = BY_NAME[name]
    arguments = [x.clone() for x in call.draw(device)]
    graph, results = capture(lambda: call.run(sdm, arguments))
    for rows in ([1, 2], [2, 0], [-1, 1], [-1, -1], [0, -1]):
        arguments[-1].copy_(torch.tensor(rows))
        graph.replay()
        got = [x.clone() for x in results]
        assert_same_bits(got, list(call.run(sdm, arguments)))


def test_decode_loop_in_one_graph(sdm, device):
    """Many steps on one bank in a graph, its state read on: replays go on where the last one ended."""
    case = Case(B=3, T=1, S=64, D=128, W=8, R=8, dtype=torch.bfloat16, bank_per_sequence=True)
    tokens = [make(case, device, seed).tokens() for seed in range(12)]
    start = make(case, device).initial_state
    state = start.clone()
    graph, outs = capture(lambda: [sdm.recurrent_sdm_(state, *token) for token in tokens])
    state.copy_(start)
    got = []
    for _ in range(3):
        graph.replay()
        got += [x.clone() for x in outs]
    other = start.clone()
    expected = [sdm.recurrent_sdm_(other, *token) for _ in range(3) for token in tokens]
    assert_same_bits(got, expected)
    assert_same_bits(state, other)


def test_prefill_and_decode_in_one_graph(sdm, device):
    case = Case(B=2, T=70, S=64, D=40, W=8, R=8, bank_per_sequence=True)
    x, token = make(case, device), make(case, device, 1).part(0, 1)
    start = x.initial_state.clone()
    state = start.clone()

    def serve(state):
        state.copy_(start)
        out = sdm.chunk_sdm_(state, *x.tokens(), chunk_size=32)
        return out, sdm.recurrent_sdm_(state, *token.tokens()), state

    graph, results = capture(lambda: serve(state))
    start.add_(1)
    x.v.mul_(0.5)
    graph.replay()
    got = [x.clone() for x in results]
    assert_same_bits(got, list(serve(torch.empty_like(start))))


FIRST = """
sys.path.insert(0, ".")
from tests.helpers.calls import BY_NAME
from tests.helpers.compare import assert_same_bits
call = BY_NAME[{name!r}]
arguments, values = call.draw("cuda"), call.draw("cuda", 1)
# What belongs to torch: autograd's thread of the device, the kernels of these little ops.
x = torch.ones(2, device="cuda", requires_grad=True)
torch.autograd.grad((x.detach() * 0.5 + 1 + x).sum(), x)
torch.autograd.grad((x.bfloat16() * 0.5).sum(), x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    results = list(call.run(sdm, arguments))
for x, value in zip(arguments, values):
    x.copy_(value)
graph.replay()
got = [x.clone() for x in results]
assert_same_bits(got, list(call.run(sdm, values)))
print(json.dumps("same"))
"""


@pytest.mark.parametrize("name", [call.name for call in CALLS])
def test_captured_at_the_first_call(name):
    """Nothing of ours has run in the process: code is loaded and sized while torch captures."""
    assert run_python(FIRST.format(name=name)) == "same"


@pytest.mark.parametrize("name", ["chunk_sdm", "recurrent_sdm_", "backward_rows"])
def test_graph_of_a_compiled_function(sdm, device, name):
    call = BY_NAME[name]
    arguments = [x.clone() for x in call.draw(device)]
    compiled = torch.compile(lambda *x: tuple(call.run(sdm, x)), backend="aot_eager")
    graph, results = capture(lambda: compiled(*arguments))
    values = call.draw(device, 1)
    refill(arguments, values)
    graph.replay()
    got = [x.clone() for x in results]
    assert_same_bits(got, list(call.run(sdm, values)))
