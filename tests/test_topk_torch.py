# SPDX-License-Identifier: Apache-2.0
"""product_key_topk as a torch op: gradients, schema, compile, messages."""

import copy

import pytest
import torch

from .helpers.compare import assert_same_bits
from .test_topk_oracle import DTYPES

CASES = (((11,), 4), ((9, 8), 13), ((4, 5, 3), 7), ((2, 3, 2, 2), 9))


@pytest.mark.parametrize("dims, k", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_an_exact_scatter(sdm, dims, k, dtype):
    scores = torch.randn(3, 5, sum(dims)).to(dtype).requires_grad_()
    values, ids = sdm.product_key_topk(scores, dims, k)
    weight = torch.randn(values.shape).to(dtype)
    (gradient,) = torch.autograd.grad(values, scores, weight)
    assert gradient.dtype == dtype and not ids.requires_grad
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = torch.zeros(15, sum(dims), dtype=wide)
    for row, (index, weights) in enumerate(zip(ids.view(15, -1).tolist(), weight.view(15, -1))):
        for slot, w in zip(index, weights.to(wide)):  # lane order
            offset = sum(dims)
            for n in reversed(dims):
                offset -= n
                expected[row, offset + slot % n] += w
                slot //= n
    assert_same_bits(gradient, expected.to(dtype).view(scores.shape))


@pytest.mark.parametrize("dims, k", CASES, ids=str)
def test_gradcheck(sdm, dims, k):
    # Scores far enough apart that the selection survives the step of the finite difference.
    scores = torch.rand(2, sum(dims), dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sdm.product_key_topk(x, dims, k)[0], (scores,))
    reference = lambda x: sdm.reference.product_key_topk(x, dims, k)[0]  # noqa: E731
    assert torch.autograd.gradcheck(reference, (scores,))
    assert torch.autograd.gradgradcheck(reference, (scores,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_equals_the_reference(sdm, dtype):
    scores = torch.randn(7, 60).to(dtype).requires_grad_()
    for dims, k in (((60,), 10), ((30, 30), 25), ((20, 30, 10), 40)):
        weight = torch.randn(7, k).to(dtype)
        grads = [
            torch.autograd.grad(f(scores, dims, k)[0], scores, weight)[0]
            for f in (sdm.product_key_topk, sdm.reference.product_key_topk)
        ]
        assert_same_bits(grads[0], grads[1])


def test_gradient_arrives_expanded_or_strided(sdm):
    scores = torch.randn(3, 20, requires_grad=True)
    values, _ = sdm.product_key_topk(scores, (10, 10), 6)
    ones = torch.ones(1).expand(3, 6)
    strided = torch.ones(6, 3).t()
    dense = torch.ones(3, 6)
    grads = [
        torch.autograd.grad(values, scores, g, retain_graph=True)[0]
        for g in (ones, strided, dense, dense)
    ]
    for gradient in grads:
        assert_same_bits(gradient, grads[2])


def test_backward_skips_ids_out_of_range(ops):
    ids = torch.tensor([[-1, 0, 5, 6, 2**31 - 1, -(2**31)]], dtype=torch.int32)
    for dtype in DTYPES:
        d_values = torch.arange(1, 7, dtype=dtype)[None]
        for index in (ids, ids.long()):
            d_scores = ops.product_key_topk_bwd(d_values, index, [2, 3])
            assert d_scores.tolist() == [[2.0, 3.0, 2.0, 0.0, 3.0]]


def test_double_backward_raises(sdm):
    scores = torch.randn(2, 8, requires_grad=True)
    values, _ = sdm.product_key_topk(scores, (4, 4), 3)
    (gradient,) = torch.autograd.grad((values**2).sum(), scores, create_graph=True)
    with pytest.raises(NotImplementedError, match="^product_key_topk: the gradient of a grad"):
        gradient.sum().backward()


def test_grad_modes(sdm):
    scores = torch.randn(2, 8, requires_grad=True)
    with torch.no_grad():
        assert not sdm.product_key_topk(scores, (4, 4), 3)[0].requires_grad
    with torch.inference_mode():
        sdm.product_key_topk(scores, (4, 4), 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdm.product_key_topk(scores, (4, 4), 3)[0].dtype == torch.float32
    values, ids = sdm.product_key_topk(scores, (4, 4), 3)
    other = copy.copy(ids)
    values.sum().backward()
    assert torch.equal(other, ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(ops, dtype):
    for dims, k in (([6], 2), ([4, 5], 30), ([2**16, 2**16], 3), ([3, 2, 2], 4)):
        scores = torch.randn(2, 3, sum(dims)).to(dtype).requires_grad_()
        if sum(dims) > 1000:  # the index dtype matters here, not the gradient
            scores = scores.detach()
        torch.library.opcheck(ops.product_key_topk_fwd, (scores, dims, k))
    values, ids = ops.product_key_topk_fwd(torch.randn(2, 9).to(dtype), [4, 5], 7)
    torch.library.opcheck(ops.product_key_topk_bwd, (values, ids, [4, 5]))


@pytest.mark.parametrize("shape", ((3, 4), (0,), ()), ids=str)
def test_fake_equals_real(ops, shape):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for make in (lambda x: x, lambda x: x.flip(0) if x.dim() > 1 else x):
        scores = make(torch.randn(*shape, 9))
        if scores.dim() == 3:
            scores = scores.transpose(0, 1)
        real = ops.product_key_topk_fwd(scores, [4, 5], 7)
        with FakeTensorMode() as mode:
            fake = ops.product_key_topk_fwd(mode.from_tensor(scores), [4, 5], 7)
        for a, b in zip(real, fake):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compile(sdm, backend):
    def f(scores):
        values, ids = sdm.product_key_topk(scores * 2, (8, 9), 12)
        return (values.softmax(-1) * ids).sum(-1)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=True)
    for length in (128, 130, 200, 7):
        scores = torch.randn(2, length, 17, requires_grad=True)
        out, expected = compiled(scores), f(scores)
        assert_same_bits(out.detach(), expected.detach())
        grads = [torch.autograd.grad(y.cos().sum(), scores)[0] for y in (out, expected)]
        assert_same_bits(grads[0], grads[1])
    assert counter.frame_count == 1
    compiled(torch.randn(17, 6, 2).transpose(0, 2))  # not contiguous: a copy, still one graph
    torch._dynamo.reset()


BAD = (
    (lambda x: (x.long(), (4, 5), 3), TypeError, "scores must be float32, .*, got int64"),
    (lambda x: ([1.0], (1,), 1), TypeError, "scores must be a Tensor, got list"),
    (lambda x: (x.to_sparse(), (4, 5), 3), TypeError, "scores must be a strided"),
    (lambda x: (x, 9, 3), TypeError, "factor_dims must be a sequence of ints, got int"),
    (
        lambda x: (x, (4.0, 5), 3),
        TypeError,
        "factor_dims must be a sequence of ints, got one with float",
    ),
    (
        lambda x: (x, (True, 8), 3),
        TypeError,
        "factor_dims must be a sequence of ints, got one with bool",
    ),
    (lambda x: (x, (4, 5), 3.0), TypeError, "k must be an int, got float"),
    (lambda x: (x, (4, 5), True), TypeError, "k must be an int, got bool"),
    (lambda x: (x, (), 3), ValueError, "factor_dims must have at least one factor"),
    (lambda x: (x, (9, 0), 3), ValueError, r"factor_dims must be at least 1 each, got \[9, 0\]"),
    (lambda x: (x, (10, -1), 3), ValueError, "factor_dims must be at least 1 each"),
    (lambda x: (x, (4, 6), 3), ValueError, r"scores must be \[..., 10\] .*, got shape \[2, 9\]"),
    (lambda x: (x[0, 0], (1,), 1), ValueError, r"scores must be .* got shape \[\]"),
    (lambda x: (x, (4, 5), 0), ValueError, "k must be from 1 to 1024, got 0"),
    (lambda x: (x, (4, 5), 1025), ValueError, "k must be from 1 to 1024, got 1025"),
    (lambda x: (x, (2**31,), 1), ValueError, "factor_dims must be at most"),
    (lambda x: (x, (512,) * 7, 1), ValueError, r"factor_dims must have a product below 2\*\*63"),
)


@pytest.mark.parametrize("case", range(len(BAD)))
def test_wrong_arguments(sdm, case):
    make, error, message = BAD[case]
    scores = torch.randn(2, 9)
    with pytest.raises(error, match="product_key_topk: " + message):
        sdm.product_key_topk(*make(scores))
    sdm.product_key_topk(scores, (4, 5), 3)  # and the next call works


def test_op_checks_again(ops):
    scores = torch.randn(2, 9)
    for args in (
        (scores, [], 1),
        (scores, [9, 0], 1),
        (scores, [4, 4], 1),
        (scores, [4, 5], 0),
        (scores, [4, 5], 2000),
        (scores, [2**32, 2**32], 1),
        (scores.int(), [4, 5], 1),
        (scores[:, :1].expand(2, 9), [4, 5], 1),
        (scores[0, 0], [1], 1),
    ):
        with pytest.raises(RuntimeError):
            ops.product_key_topk_fwd(*args)
    with pytest.raises(RuntimeError):
        ops.product_key_topk_bwd(scores, torch.zeros(2, 8, dtype=torch.int32), [4, 5])
    with pytest.raises(RuntimeError):
        ops.product_key_topk_bwd(scores, torch.zeros(2, 9), [4, 5])
