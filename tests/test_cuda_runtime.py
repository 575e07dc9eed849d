# SPDX-License-Identifier: Apache-2.0
"""Manners of the ops on CUDA: streams, devices, waiting, memory, failures."""

import gc

import pytest
import torch

from .helpers.calls import BY_NAME, CALLS
from .helpers.cases import Case, make
from .helpers.compare import assert_same_bits
from .helpers.memory import run_python

pytestmark = pytest.mark.gpu

# Long beside what the host needs for a call, short beside a test: 10 ms at 2 GHz.
SLEEP = 20_000_000


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.fixture(params=CALLS, ids=lambda call: call.name)
def call(request):
    return request.param


def copied(tensors):
    return [x.clone() for x in tensors]


def test_runs_on_the_current_stream(sdm, device, call):
    """Work behind a busy stream sees what that stream wrote, and later work sees the results."""
    arguments, others = call.draw(device), call.draw(device, seed=1)
    expected = copied(call.run(sdm, arguments))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(6):
        late = copied(others)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
            for x, value in zip(late, arguments):
                x.copy_(value)
            got = copied(call.run(sdm, late))
            for x, value in zip(late, others):  # after the op in stream order
                x.copy_(value)
        stream.synchronize()
        assert_same_bits(got, expected)


def test_two_streams_at_once(sdm, device, call):
    """Workspaces of calls that run side by side are apart."""
    arguments = [call.draw(device, seed) for seed in range(3)]
    expected = [copied(call.run(sdm, x)) for x in arguments]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in arguments]
    results = []
    for _ in range(4):
        for stream, x in zip(streams, arguments):
            with torch.cuda.stream(stream):
                results.append(call.run(sdm, x))
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        assert_same_bits(got, expected[i % len(arguments)])


def test_memory_freed_early_is_safe(sdm, device, call):
    """Arguments dropped right after the call are not handed out before the op has read them."""
    arguments = call.draw(device)
    expected = copied(call.run(sdm, arguments))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            temporary = copied(arguments)
            torch.cuda._sleep(SLEEP)
            got = call.run(sdm, temporary)
            sizes = [x.shape for x in temporary]
            dtypes = [x.dtype for x in temporary]
            del temporary
            for size, dtype in zip(sizes, dtypes):  # likely the same memory
                torch.full(size, 1, dtype=dtype, device=device)
            stream.synchronize()
            assert_same_bits(got, expected)


def test_record_stream(sdm, device, call):
    """Results made on one stream, used on another and dropped, with record_stream: as for torch."""
    arguments = call.draw(device)
    expected = copied(call.run(sdm, arguments))
    torch.cuda.synchronize()
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(4):
        with torch.cuda.stream(producer):
            got = list(call.run(sdm, arguments))
        consumer.wait_stream(producer)
        with torch.cuda.stream(consumer):
            torch.cuda._sleep(SLEEP)
            kept = copied(got)
            for x in got:
                x.record_stream(consumer)
        sizes = [(x.shape, x.dtype) for x in got]
        del got, x
        with torch.cuda.stream(producer):
            for size, dtype in sizes:
                torch.full(size, 1, dtype=dtype, device=device)
        torch.cuda.synchronize()
        assert_same_bits(kept, expected)


def test_never_waits(sdm, device, call):
    """The host comes back while the stream is still busy, and torch notices no synchronisation."""
    arguments = call.draw(device)
    for _ in range(2):  # all memory is in torch's cache, all code is loaded
        call.run(sdm, arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(20 * SLEEP)
        slept = torch.cuda.Event()
        slept.record()
        call.run(sdm, arguments)
        busy = not slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    assert busy, "the call came back after the work that was queued before it had ended"


def test_check_indices_is_the_one_that_waits(sdm, device):
    ids = torch.arange(12, device=device).view(3, 4)
    sdm.check_indices(ids, 12)
    with pytest.raises(IndexError, match=r"idx\[2, 3\] must be from 0 to 10, got 11"):
        sdm.check_indices(ids, 11)


def test_gives_its_memory_back(sdm, device, call):
    arguments = call.draw(device)
    call.run(sdm, arguments)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        call.run(sdm, arguments)
    torch.cuda.synchronize()
    gc.collect()  # what a backward kept may hang on cycles of its graph
    assert torch.cuda.memory_allocated() <= before


def test_arguments_stay_as_they_are(sdm, device, call):
    arguments = call.draw(device)
    before = copied(arguments)
    call.run(sdm, arguments)
    assert_same_bits(arguments, before)


def test_out_of_memory_is_an_error(sdm, device):
    """A workspace or result that does not fit raises; the next call works."""
    call = BY_NAME["backward_rows"]
    arguments = call.draw(device)
    expected = copied(call.run(sdm, arguments))
    tokens = [x[:1, :1].expand(1, 400_000, *x.shape[2:]) for x in arguments[:7]]
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
    try:
        with pytest.raises(RuntimeError):
            sdm.chunk_sdm(*tokens, arguments[7])
        assert_same_bits(call.run(sdm, arguments), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_bits(call.run(sdm, arguments), expected)


BROKEN = """
sys.path.insert(0, ".")
from tests.helpers.cases import Case, make
x = make(Case(bank_per_sequence=True), "cuda")
calls = {
    "chunk_sdm": lambda: sdm.chunk_sdm(*x.args()),
    "chunk_sdm_": lambda: sdm.chunk_sdm_(x.initial_state, *x.tokens()),
    "recurrent_sdm_": lambda: sdm.recurrent_sdm_(x.initial_state, *x.tokens()),
    "product_key_topk": lambda: sdm.product_key_topk(x.v, (2, 3), 2),
}
for call in calls.values():
    call()
torch.cuda.synchronize()
table = torch.zeros(4, device="cuda")
try:  # a fault of another kernel: from here on every launch fails
    table[torch.full((2,), 1000, device="cuda")].sum().item()
except RuntimeError:
    pass
silent = []
for name, call in calls.items():
    try:
        call()
        silent.append(name)
    except RuntimeError:
        pass
print(json.dumps(silent))
sys.stdout.flush()
os._exit(0)  # the context is lost, an orderly end may hang
"""


def test_a_launch_that_fails_raises():
    assert run_python(BROKEN) == []


def test_float64_is_refused(sdm, device):
    inputs = make(Case(bank_per_sequence=True), device)
    exact = inputs.to(torch.float64)
    state = exact.initial_state
    before = state.clone()
    for function, arguments in (
        (sdm.chunk_sdm, exact.args()),
        (sdm.chunk_sdm_, (state, *exact.tokens())),
        (sdm.recurrent_sdm_, (state, *exact.tokens())),
    ):
        with pytest.raises(
            NotImplementedError, match=f"{function.__name__}: .* on CUDA, got float"
        ):
            function(*arguments)
    with pytest.raises(NotImplementedError, match="product_key_topk: scores .*float64"):
        sdm.product_key_topk(exact.v[..., :4], (2, 2), 2)
    assert_same_bits(state, before)
    with pytest.raises(TypeError, match="float64 is all or none"):
        sdm.chunk_sdm(*inputs.tokens(), state)
    out, _ = sdm.chunk_sdm(*inputs.args())
    assert out.isfinite().all()


def test_direct_call_with_float64_is_refused(ops, device):
    exact = make(Case(), device).to(torch.float64)
    with pytest.raises(RuntimeError, match="sdm_chunk_fwd"):
        ops.sdm_chunk_fwd(*exact.args(), None, 8, True, 0, 1)


@pytest.mark.parametrize("name", ["write_idx", "beta", "read_val", "initial_state"])
def test_mixed_devices_raise(sdm, device, name):
    inputs = make(Case(bank_per_sequence=True), device).map(lambda x: x.cpu(), [name])
    with pytest.raises(ValueError, match=f"chunk_sdm: {name} must be on cuda"):
        sdm.chunk_sdm(*inputs.args())
    wanted = "state" if name == "initial_state" else name
    for function in (sdm.chunk_sdm_, sdm.recurrent_sdm_):
        with pytest.raises(ValueError, match=f"{function.__name__}: {wanted} must be on cuda"):
            function(inputs.initial_state, *inputs.tokens())


def test_offsets_on_another_device_raise(sdm, device):
    inputs = make(Case(lengths=(4, 5)), device)
    with pytest.raises(ValueError, match="cu_seqlens must be on cuda"):
        sdm.chunk_sdm(*inputs.args(), cu_seqlens=inputs.cu_seqlens.cpu())


def test_wild_ids_touch_nothing(sdm, device):
    """Ids, offsets and rows of a pool that can't be checked: no fault, nothing outside is written."""
    inputs = make(Case(T=40, S=16, D=32, chunk=16, bank_per_sequence=True), device)
    big = 2**31 - 1
    wild = torch.tensor([-1, 16, big, -(2**31)], device=device)
    for name in ("write_idx", "read_idx"):
        ids = getattr(inputs, name)
        setattr(inputs, name, torch.where(torch.rand(ids.shape, device=device) < 0.5,
                                          wild[ids % 4], ids))  # fmt: skip
    fence = torch.full((4, *inputs.initial_state.shape[1:]), float("nan"), device=device)
    fence[1:3] = inputs.initial_state
    before = fence.clone()
    sdm.chunk_sdm_(fence[1:3], *inputs.tokens(), chunk_size=16)
    sdm.recurrent_sdm_(fence[1:3], *inputs.tokens())
    torch.cuda.synchronize()
    assert_same_bits(fence[[0, 3]], before[[0, 3]])
    assert fence[1:3].isfinite().all()


@pytest.mark.parametrize(
    "offsets", [[0, 30, 10, 40], [0, 10, 20, 30], [0, 10, 20, 90], [-5, 10, 20, 40]]
)
def test_malformed_offsets_touch_nothing(sdm, device, offsets):
    """Offsets on the device are not looked at: no fault, no write beside the results."""
    inputs = make(Case(lengths=(20, 10, 10), S=16, D=32, chunk=16, bank_per_sequence=True), device)
    inputs.cu_seqlens = torch.tensor(offsets, device=device)
    fence = torch.full((5, *inputs.initial_state.shape[1:]), float("nan"), device=device)
    fence[1:4] = inputs.initial_state
    before = fence.clone()
    leaves = inputs.map(lambda x: x.requires_grad_(), ("v", "initial_state"))
    for save in ("rows", "replay"):
        out, state = sdm.chunk_sdm(
            *leaves.args(), cu_seqlens=inputs.cu_seqlens, chunk_size=16, save=save,
            output_final_state=True,
        )  # fmt: skip
        torch.autograd.grad((out.sum(), state.sum()), (leaves.v, leaves.initial_state))
    with torch.no_grad():
        sdm.chunk_sdm_(fence[1:4], *inputs.tokens(), cu_seqlens=inputs.cu_seqlens, chunk_size=16)
    torch.cuda.synchronize()
    assert_same_bits(fence[[0, 4]], before[[0, 4]])


def test_rows_outside_the_pool_touch_nothing(sdm, device):
    inputs = make(Case(B=4, T=1, S=16, D=32), device)
    pool = torch.randn(6, *inputs.initial_state.shape, device=device)
    state, before = pool[1:5], pool.clone()
    index = torch.tensor([2, -1, 4, -7], device=device)  # 4 is behind the last row
    for function in (sdm.recurrent_sdm_, sdm.chunk_sdm_):
        out = function(state, *inputs.tokens(), state_indices=index)
        torch.cuda.synchronize()
        assert_same_bits(pool[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])
        assert not out[1].any()


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
def test_tensors_on_another_device(sdm, call):
    """The current device is 0, the tensors are on 1: all work and memory is there."""
    there = torch.device("cuda", 1)
    arguments = call.draw(there)
    with torch.cuda.device(1):
        expected = copied(call.run(sdm, arguments))
    torch.cuda.synchronize(0)
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    with torch.cuda.device(0):
        got = call.run(sdm, arguments)
        assert torch.cuda.current_device() == 0
    assert all(x.device == there for x in got)
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.max_memory_allocated(0) == before
    assert_same_bits(got, expected)
    assert_same_bits([x.cpu() for x in got], [x.cpu() for x in call.run(sdm, call.draw("cuda:0"))])


@needs_two
def test_two_devices_do_not_mix(sdm):
    inputs = make(Case(), "cuda:0").map(lambda x: x.to("cuda:1"), ["beta"])
    with pytest.raises(ValueError, match="beta must be on cuda:0 like v, got cuda:1"):
        sdm.chunk_sdm(*inputs.args())


CROWDED = """
import sys
sys.path.insert(0, ".")
from tests.helpers.calls import CALLS
from tests.helpers.cases import Case, make
from tests.helpers.compare import assert_same_bits
from tests.helpers.calls import Train, BASE
from dataclasses import replace

# Blocks of one stream's bank wait for each other; many banks, several calls and a matrix product
# compete for the multiprocessors.
calls = [Train("many", replace(BASE, B=40, H=4, save=save)) for save in ("rows", "replay")]
arguments = [call.draw("cuda", seed) for seed, call in enumerate(calls)]
expected = [[x.clone() for x in call.run(sdm, a)] for call, a in zip(calls, arguments)]
torch.cuda.synchronize()
streams = [torch.cuda.Stream() for _ in range(4)]
busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
results = []
for turn in range(6):
    with torch.cuda.stream(streams[3]):
        for _ in range(20):
            torch.mm(busy, busy)
    for i, stream in enumerate(streams[:3]):
        with torch.cuda.stream(stream):
            results.append((i % 2, calls[i % 2].run(sdm, arguments[i % 2])))
torch.cuda.synchronize()
for i, got in results:
    assert_same_bits(got, expected[i])
print(json.dumps(len(results)))
"""


def test_crowded_device_neither_hangs_nor_changes_bits():
    assert run_python(CROWDED, timeout=180) == 18
