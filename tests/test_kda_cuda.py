# SPDX-License-Identifier: Apache-2.0
"""KDA on CUDA: no waiting, graphs with other offsets, sizes beyond 32 bits."""

import pytest
import torch

from .helpers.compare import assert_close, assert_same_bits
from .helpers.kda_cases import KdaCase, make
from .helpers.kda_grads import check_case, results

pytestmark = pytest.mark.gpu
BASE = KdaCase("cuda", T=200, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16)
CASES = [BASE, BASE.but(lengths=(70, 0, 100, 30)), BASE.but(dtype=torch.float32, K=48, V=80)]


@pytest.fixture(autouse=True)
def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_waits_for_the_device(sdm, device, case):
    inputs = make(case, device)
    state = inputs.initial_state.clone()
    rows = torch.arange(case.num, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(sdm.chunk_kda, inputs, disable_recompute=True, grad=False)
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        for fn in (sdm.chunk_kda, sdm.fused_recurrent_kda):
            out, final = fn(
                *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
                **leaves.keywords(),
            )  # fmt: skip
            torch.autograd.backward((out, final), (out.detach(), final.detach()))
        sdm.recurrent_kda_(state, *inputs.tokens(), state_indices=rows, **inputs.keywords())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_with_other_offsets(sdm, device):
    """Captured with some offsets, replayed with others of the same count."""
    case = BASE.but(lengths=(70, 0, 100, 30))
    inputs = make(case, device)
    leaves = inputs.map(lambda x: x.detach().clone().requires_grad_())

    def train():
        out, state = sdm.chunk_kda(
            *leaves.tokens(), initial_state=leaves.initial_state, output_final_state=True,
            use_graph=True, max_num_seqs=4, **leaves.keywords(),
        )  # fmt: skip
        grads = torch.autograd.grad((out, state), leaves.args(), (out.detach(), state.detach()))
        return [out.detach(), state.detach(), *grads]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        train()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    for offsets, seed in (
        ((0, 70, 70, 170, 200), 1),
        ((0, 1, 64, 129, 200), 2),
        ((0, 200, 200, 200, 200), 3),
    ):
        other = make(case, device, seed)
        with torch.no_grad():
            for name in inputs.names():
                getattr(leaves, name).copy_(getattr(other, name))
        leaves.cu_seqlens.copy_(torch.tensor(offsets))
        graph.replay()
        got = [x.clone() for x in captured]
        assert_same_bits(got, train())


def test_other_stream_and_device(sdm, device):
    """The last device and a side stream, while the first device is the current one."""
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    inputs = make(BASE, device)
    expected = results(sdm.chunk_kda, inputs)
    stream = torch.cuda.Stream(other)
    with torch.cuda.stream(stream) if other.index == 0 else torch.cuda.device(0):
        got = results(sdm.chunk_kda, make(BASE, other))
    torch.cuda.synchronize(other)
    assert_same_bits([x.cpu() for x in got.values()], [x.cpu() for x in expected.values()])


def test_cpu_and_cuda_agree(sdm, device):
    for case in (BASE, BASE.but(dtype=torch.float32, form="softplus")):
        got = results(sdm.chunk_kda, make(case, device))
        expected = results(sdm.chunk_kda, make(case))
        kind = "kda-f32" if case.dtype == torch.float32 else "kda-low"
        assert_close(got, expected, kind, scale=2.0)


@pytest.mark.slow
def test_offsets_beyond_32_bits(sdm, device):
    """More than 2**31 elements a tensor: the last row has the bits that it has alone."""
    length, heads, dim = 262_272, 64, 64
    if torch.cuda.get_device_properties(device).total_memory < 120 * 2**30:
        pytest.skip("needs 120 GiB")
    gen = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, device=device, dtype=torch.bfloat16)

    sizes = (2, length, heads)
    tokens = [draw(*sizes, dim) for _ in range(4)] + [draw(*sizes)]
    tokens[3] = tokens[3].abs_().neg_()
    tokens[4] = tokens[4].sigmoid_()
    leaves = [x.requires_grad_() for x in tokens]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    out, state = sdm.chunk_kda(*leaves, **options)
    grads = torch.autograd.grad((out, state), leaves, (out.detach(), state.detach()))
    whole = [x[1:2].clone() for x in (out.detach(), state.detach(), *grads)]
    del out, state, grads
    alone = [x.detach()[1:2].requires_grad_() for x in tokens]
    out, state = sdm.chunk_kda(*alone, **options)
    grads = torch.autograd.grad((out, state), alone, (out.detach(), state.detach()))
    assert_same_bits([out.detach(), state.detach(), *grads], whole)


@pytest.mark.slow
def test_strides_beyond_32_bits(sdm, device):
    """q, k and v as slices of one buffer whose strides times T pass 2**31."""
    length, heads, dim = 100_000, 64, 128
    fused = torch.randn(1, length, 3, heads, dim, device=device, dtype=torch.bfloat16)
    q, k, v = fused.unbind(2)
    g = torch.full((1, 1, 1, 1), -0.1, device=device).expand(1, length, heads, dim).contiguous()
    beta = torch.full((1, length, heads), 0.5, device=device)
    with torch.no_grad():
        got = sdm.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]
        copies = [x.contiguous() for x in (q, k, v)]
        expected = sdm.chunk_kda(*copies, g, beta, use_qk_l2norm_in_kernel=True)[0]
    assert_same_bits(got, expected)


@pytest.mark.slow
def test_many_chunks(sdm, device):
    """65,537 chunks of one sequence, in one call and in two chained halves."""
    length = 65_537 * 64
    case = KdaCase("long", B=1, T=length, H=1, HV=1, K=16, V=16, initial=False)
    inputs = make(case, device)
    whole = results(sdm.chunk_kda, inputs, grad=False)
    cut = 32_768 * 64
    state, outs = None, []
    for part in (inputs.part(0, cut), inputs.part(cut, length)):
        out, state = sdm.chunk_kda(
            *part.tokens(), initial_state=state, output_final_state=True, **part.keywords()
        )
        outs.append(out)
    assert_same_bits(torch.cat(outs, 1), whole["out"])
    assert_same_bits(state, whole["final_state"])


def test_peak_memory(sdm, device):
    """Forward and backward of a layer keep and need no more than the documented multiple."""
    B, T, H, D = 1, 2048, 32, 128
    tokens = [torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for _ in range(4)]
    tokens.append(torch.randn(B, T, H, device=device, dtype=torch.bfloat16))
    leaves = [x.requires_grad_() for x in tokens]
    A_log = torch.zeros(H, device=device, requires_grad=True)
    options = {
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "lower_bound": -5.0,
        "use_beta_sigmoid_in_kernel": True, "A_log": A_log,
    }  # fmt: skip
    size = sum(x.nbytes for x in tokens)
    for keep, saved_limit in ((False, 0.35), (True, 1.1)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, _ = sdm.chunk_kda(*leaves, disable_recompute=keep, **options)
        saved = torch.cuda.memory_allocated() - before
        assert saved < saved_limit * size, (keep, saved, size)
        out.backward(out.detach())
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 4 * size, (keep, peak, size)
        for x in (*leaves, A_log):
            x.grad = None
        del out


def test_grouped_values_at_full_size(sdm, device):
    """Twice as many value heads as keys: gradients of q and k are the sums of their groups."""
    case = BASE.but(B=4, T=256, H=16, HV=32)
    inputs = make(case, device)
    got = results(sdm.chunk_kda, inputs)
    repeated = inputs.map(lambda x: x.repeat_interleave(2, dim=2), ("q", "k"))
    expected = results(sdm.chunk_kda, repeated)
    for name in ("d_q", "d_k"):
        expected[name] = expected[name].float().unflatten(2, (16, 2)).sum(3)
    assert_close(got, expected, "kda-low")


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_both_paths_agree(sdm, device, chunk):
    """The tensor-core path and the plain one, which takes other chunk lengths."""
    check_case(sdm, BASE.but(chunk=chunk), device)
