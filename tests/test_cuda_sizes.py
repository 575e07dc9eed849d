# SPDX-License-Identifier: Apache-2.0
"""Sizes that only a GPU is asked for: past 2^31 elements, and every shape of the slow paths."""

import fcntl

import pytest
import torch

from .helpers.cases import FLOATS, Case, make
from .helpers.compare import assert_close, assert_same_bits, precision
from .helpers.grads import check_case, low_results, reference_results, results

pytestmark = pytest.mark.gpu

GIB = 2**30
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.fixture
def room(tmp_path_factory):
    """Give the test a function that skips where less than so many GiB are free; one test at a time."""
    base = tmp_path_factory.getbasetemp()
    with open(base.parent / "large_tests.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def need(gib):
            free = torch.cuda.mem_get_info()[0] / GIB
            if free < gib:
                pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")

        yield need
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------
# Offsets of more than 31 bits


def spread_over(inputs, num_slots):
    """The same tokens on slots at both ends and in the middle of a larger bank."""
    spread = [0, 5, num_slots // 3, num_slots // 2, num_slots - 300]
    spread = torch.tensor([*spread, *range(num_slots - 3, num_slots)], device=inputs.v.device)
    return inputs.map(lambda ids: spread[ids.long()].to(ids.dtype), ("write_idx", "read_idx"))


def last_head(inputs):
    names = [name for name in inputs.__dataclass_fields__ if name not in ("cu_seqlens",)]
    tokens = [name for name in names if name != "initial_state"]
    return inputs.map(lambda x: x[:, :, -1:].contiguous(), tokens)


@pytest.mark.parametrize("save", ["rows", "replay"])
def test_bank(sdm, device, room, save):
    """A bank of 2.3e9 elements: its last head gives what it gives alone, gradients included."""
    room(40)
    H, S, D = 3, 750_000, 1024
    case = Case(B=1, T=70, H=H, S=8, D=D, W=4, R=4, dtype=BF16)
    inputs = spread_over(make(case, device), S)
    inputs.initial_state = torch.randn(H, S, D, device=device, dtype=BF16)
    assert inputs.initial_state.numel() > 2**31
    alone = last_head(inputs)
    alone.initial_state = inputs.initial_state[-1:].clone()
    d_out = torch.randn_like(inputs.v)
    d_state = torch.randn(1, 1, S, D, device=device, dtype=BF16).expand(1, H, S, D)

    def run(x, d_out, d_state):
        leaves = x.map(lambda x: x.requires_grad_(), FLOATS)
        out, state = sdm.chunk_sdm(
            *leaves.args(), chunk_size=32, save=save, output_final_state=True
        )
        grads = torch.autograd.grad(
            (out, state), [getattr(leaves, name) for name in FLOATS], (d_out, d_state)
        )
        return out.detach(), state.detach(), *grads

    out, state, *grads = run(inputs, d_out, d_state)
    expected = run(alone, d_out[:, :, -1:], d_state[:, -1:])
    assert_same_bits(out[:, :, -1:], expected[0], "out")
    assert_same_bits(state[:, -1:], expected[1], "final_state")
    for name, got, value in zip(FLOATS, grads, expected[2:]):
        part = got[-1:] if name == "initial_state" else got[:, :, -1:]
        assert_same_bits(part, value, f"d_{name}")


@pytest.mark.parametrize("fn", ["chunk_sdm_", "recurrent_sdm_"])
def test_bank_in_place(sdm, device, room, fn):
    room(16)
    H, S, D = 3, 750_000, 1024
    inputs = spread_over(make(Case(B=1, T=20, H=H, S=8, D=D, W=4, R=4, dtype=BF16), device), S)
    state = torch.randn(1, H, S, D, device=device, dtype=BF16)
    alone = state[:, -1:].clone()
    out = getattr(sdm, fn)(state, *inputs.tokens())
    expected = getattr(sdm, fn)(alone, *last_head(inputs).tokens())
    assert_same_bits(out[:, :, -1:], expected)
    assert_same_bits(state[:, -1:], alone)


@pytest.mark.parametrize(
    "name", ["write_idx", "write_val", "v", "beta", "g", "read_idx", "read_val"]
)
def test_tokens_far_apart(sdm, device, room, name):
    """Tokens 2^28 elements apart, ten of them."""
    room(22)
    case = Case(B=1, T=10, H=2, S=30, D=40, W=5, R=3, chunk=4, dtype=BF16, bank_per_sequence=True)
    case = case.but(write_int=torch.int32, read_int=torch.int32, gate_per_write=name == "g")
    inputs = make(case, device)
    x = getattr(inputs, name)
    step = 2**28
    strides = (1, step, x[0, 0].numel() // 2, 1)[: x.dim()]
    far = torch.empty(9 * step + x[0, 0].numel(), dtype=x.dtype, device=device)
    far = far.as_strided(x.shape, strides).copy_(x)
    moved = inputs.map(lambda _: far, [name])
    for save in ("rows", "replay"):
        expected = results(sdm.chunk_sdm, inputs, chunk_size=4, save=save)
        assert_same_bits(results(sdm.chunk_sdm, moved, chunk_size=4, save=save), expected)
    state, other = inputs.initial_state.clone(), inputs.initial_state.clone()
    assert_same_bits(
        sdm.recurrent_sdm_(state, *moved.tokens()), sdm.recurrent_sdm_(other, *inputs.tokens())
    )
    assert_same_bits(state, other)


@pytest.mark.parametrize("fn", ["chunk_sdm_", "recurrent_sdm_"])
def test_pool_far_apart(sdm, device, room, fn):
    """Banks and heads of a pool more than 2^31 elements apart."""
    room(14)
    inputs = make(Case(B=2, T=20, H=2, S=30, D=40, W=5, R=3, dtype=BF16), device)
    step = 2**31 + 64
    shape = (2, 2, 30, 40)
    far = torch.empty(2 * step + 30 * 64, dtype=BF16, device=device)
    state = far.as_strided(shape, (step, step // 2, 64, 1))
    state.copy_(inputs.initial_state.expand(shape))
    near = state.contiguous()
    out = getattr(sdm, fn)(state, *inputs.tokens())
    assert_same_bits(out, getattr(sdm, fn)(near, *inputs.tokens()))
    assert_same_bits(state.contiguous(), near)


def test_results(sdm, device, room):
    """out and the gradient of v of 2.15e9 elements: the second sequence gives what it gives alone."""
    room(60)
    T, H, S, D = 525_000, 2, 64, 1024
    gen = torch.Generator(device=device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=gen, device=device, dtype=BF16)

    v, d_out = normal(1, T, H, D).expand(2, T, H, D), normal(1, T, H, D).expand(2, T, H, D)
    assert v.numel() > 2**31
    ids = torch.randint(S, (2, T, H, 2), generator=gen, device=device, dtype=torch.int32)
    val, beta, g = normal(2, T, H, 2), normal(2, T, H).sigmoid(), -normal(2, T, H).float().abs()
    bank = normal(2, H, S, D)

    def run(rows):
        args = [x[rows] for x in (ids, val, v, beta, g, ids, val, bank)]
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in args]
        out, _ = sdm.chunk_sdm(*leaves, save="rows")
        wanted = [leaves[i] for i in (1, 2, 3, 4, 6, 7)]
        return out.detach(), *torch.autograd.grad(out, wanted, d_out[rows])

    expected = run(slice(1, 2))
    got = run(slice(0, 2))
    for name, x, value in zip(("out", *FLOATS), got, expected):
        assert x.isfinite().all(), name
        assert_same_bits(x[1:], value, name)


def test_saved_rows(sdm, device, room):
    """Rows kept for the backward of 2.3e9 elements: the bits of replay, which keeps none."""
    room(24)
    T, W, S, D = 9_000, 256, 65536, 1024
    gen = torch.Generator(device=device).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=gen, device=device, dtype=BF16)

    def slots(lanes):
        part = S // lanes
        first = part * torch.arange(lanes, device=device)
        return first + torch.randint(part, (1, T, 1, lanes), generator=gen, device=device)

    args = [slots(W), normal(1, T, 1, W).softmax(-1), normal(1, T, 1, D), normal(1, T, 1).sigmoid(),
            -normal(1, T, 1).abs(), slots(8), normal(1, T, 1, 8), normal(1, S, D)]  # fmt: skip
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in args]
    wanted = [x for x in leaves if x.requires_grad]
    got = {}
    for save in ("rows", "replay"):
        out, _ = sdm.chunk_sdm(*leaves, save=save)
        got[save] = [out.detach(), *torch.autograd.grad(out, wanted, leaves[2].detach())]
    for x in got["rows"]:
        assert x.isfinite().all()
    assert_same_bits(got["rows"], got["replay"])


def test_topk_rows(sdm, device, room):
    """Scores of 2.2e9 elements and their gradient: the last rows give what they give alone."""
    room(30)
    rows, dims, k = 4_300_000, (256, 256), 8
    scores = torch.randn(rows, 512, device=device, dtype=BF16).requires_grad_()
    assert scores.numel() > 2**31
    values, ids = sdm.product_key_topk(scores, dims, k)
    (grad,) = torch.autograd.grad(values, scores, values.detach())
    tail = scores[-100:].detach().requires_grad_()
    expected, expected_ids = sdm.product_key_topk(tail, dims, k)
    (expected_grad,) = torch.autograd.grad(expected, tail, expected.detach())
    assert_same_bits(ids[-100:], expected_ids)
    assert_same_bits(values[-100:], expected)
    assert_same_bits(grad[-100:], expected_grad)


# ------------------------------------------------------------------------------------------------
# Shapes off the beaten track

ODD = [1, 2, 3, 7, 15, 31, 33, 63, 65, 97, 127, 129, 250, 257, 511, 1001, 1025, 2050]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", ODD)
def test_odd_columns(sdm, device, dim, dtype):
    case = Case(f"D{dim}", T=40, S=40, D=dim, W=5, R=3, chunk=16, dtype=dtype, gate_per_write=True)
    check_case(sdm, case, device)
    inputs = make(case.but(bank_per_sequence=True, T=4), device)
    state = inputs.initial_state.clone()
    out = sdm.recurrent_sdm_(state, *inputs.tokens())
    expected = reference_results(sdm, inputs, grad=False)
    got = {"out": out, "final_state": state}
    low = lambda: low_results(sdm, inputs, 1, grad=False)  # noqa: E731
    assert_close(got, expected, precision(inputs), low=low)


LANES = [(1024, 1), (1, 1024), (1024, 1024), (1000, 513), (257, 129), (31, 1), (128, 500)]


@pytest.mark.parametrize("ids", ["distinct", "any", "unused"])
@pytest.mark.parametrize("lanes", LANES, ids=str)
def test_many_lanes(sdm, device, lanes, ids):
    W, R = lanes
    case = Case("lanes", B=1, T=20, H=2, S=1500, D=24, W=W, R=R, chunk=8, ids=ids)
    check_case(sdm, case, device)
    check_case(sdm, case.but(save="rows", gate_per_write=True, chunk=None), device)
    inputs = make(case.but(bank_per_sequence=True, T=3), device)
    state = inputs.initial_state.clone()
    out = sdm.recurrent_sdm_(state, *inputs.tokens())
    expected = reference_results(sdm, inputs, grad=False)
    assert_close({"out": out, "final_state": state}, expected, precision(inputs))


CHUNKS = [*range(1, 34), 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 143, 144, 145, 160, 191, 192,
          193, 200, 255, 256, 257, 300, 400, 511, 512]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_every_chunk_size(sdm, device, dtype):
    """One sequence of 530 tokens in chunks of 1 to 512."""
    inputs = make(Case("C", B=1, T=530, H=2, S=30, D=16, W=3, R=2, dtype=dtype), device)
    expected = reference_results(sdm, inputs)
    for chunk in CHUNKS:
        got = results(sdm.chunk_sdm, inputs, chunk_size=chunk)
        low = lambda chunk=chunk: low_results(sdm, inputs, min(chunk, 256))  # noqa: E731
        assert_close(got, expected, precision(inputs), low=low)


@pytest.mark.parametrize("chunk", [16, 64, 100, 256])
def test_every_tail(sdm, device, chunk):
    """Every length around one and two chunks."""
    for length in sorted(
        {*range(1, 18), *range(chunk - 2, chunk + 3), *range(2 * chunk - 2, 2 * chunk + 3)}
    ):
        inputs = make(Case("T", B=1, T=length, H=2, S=30, D=16, W=3, R=2), device)
        expected = reference_results(sdm, inputs)
        assert_close(results(sdm.chunk_sdm, inputs, chunk_size=chunk), expected, "f32")


def test_many_sequences_and_heads(sdm, device):
    """More sequences times heads than a 16-bit grid axis has, forward and backward: equal to halves."""
    num, heads = 2_100, 32
    case = Case("docs", lengths=(3,) * num, H=heads, S=4, D=8, W=2, R=1, ids="any",
                bank_per_sequence=True)  # fmt: skip
    assert num * heads > 65_535
    inputs = make(case, device)
    whole = results(sdm.chunk_sdm, inputs)
    half = inputs.part(0, 3 * num // 2)
    half.initial_state = inputs.initial_state[: num // 2]
    half.cu_seqlens = inputs.cu_seqlens[: num // 2 + 1]
    got = results(sdm.chunk_sdm, half, grad=False)
    assert_same_bits(got["out"], whole["out"][:, : 3 * num // 2])
    assert_same_bits(got["final_state"], whole["final_state"][: num // 2])
    for name, x in whole.items():
        assert x.isfinite().all(), name
