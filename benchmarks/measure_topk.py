# SPDX-License-Identifier: Apache-2.0
"""Checks and times of the product-key top-k."""

import torch
from eager_sdm import eager_product_key_topk
from run import relative_error

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative L2


def measure_topk(run, name, shape):
    torch.manual_seed(0)
    dims, k = shape["factor_dims"], shape["k"]
    scores = torch.randn(shape["rows"], sum(dims)).to(getattr(torch, shape["dtype"]))
    scores = scores.to(run.device)
    function = run.kernel.product_key_topk
    few = scores[:4096]
    ours, eager = function(few, dims, k), eager_product_key_topk(few, dims, k)
    if scores.dtype == torch.float32:  # no ties: the same slots and sums
        run.check(name, "slots differ", float((ours[1] != eager[1]).sum()), 0)
    error = relative_error(ours[0].sort(-1)[0], eager[0].sort(-1)[0])
    run.check(name, "values, kernel and eager", error, LIMITS[scores.dtype])
    if run.cuda:
        values, indices = function(few.cpu(), dims, k)
        same = torch.equal(ours[1].cpu(), indices) and torch.equal(ours[0].cpu(), values)
        run.check(name, "bits of CUDA and the CPU differ", float(not same), 0)
    functions = {("top-k", "kernel"): lambda: function(scores, dims, k)}
    size = shape["rows"] * (sum(dims) * scores.element_size() + k * (scores.element_size() + 4))
    moved = {("top-k", "kernel"): size} if run.cuda else None
    if run.eager:
        functions["top-k", "eager"] = lambda: eager_product_key_topk(scores, dims, k)
    for threads in run.threads:
        run.use_threads(threads)
        with torch.no_grad():
            run.time(name, functions, threads, moved, items=shape["rows"])
