# SPDX-License-Identifier: Apache-2.0
"""Seconds until a fresh process has its first results: loading the kernel, then each op once.

    python benchmarks/first_call.py [--device cpu|cuda]

torch, its context on the device and the inputs are there before the clock starts: they belong to no
kernel. Prints one line of JSON.
"""

import argparse
import json
import os
import time

import torch
from machine import ROOT

REPO = "org/sparse-delta-memory"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    os.environ.setdefault("LOCAL_KERNELS", f"{REPO}={ROOT}")

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    B, T, H, S, D, W = 2, 512, 2, 4096, 128, 16
    idx = torch.randint(S, (B, T, H, W), device=device, dtype=torch.int32)
    val, v = torch.rand(B, T, H, W, device=device), torch.randn(B, T, H, D, device=device)
    beta, g = torch.rand(B, T, H, device=device), -torch.rand(B, T, H, device=device)
    bank = torch.randn(B, H, S, D, device=device)
    args = [idx, val, v, beta, g, idx, val, bank]
    args = [x.bfloat16() if x.is_floating_point() else x for x in args]
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in args]
    tokens, scores = [x[:, :1] for x in args[:7]], torch.randn(B * T, 128, device=device)
    q, k, kda_v, kda_g = (torch.randn(B, T, H, 128, device=device).bfloat16() for _ in range(4))
    kda = {"q": q, "k": k, "v": kda_v, "g": -kda_g.abs(), "beta": beta.bfloat16()}
    kda_leaves = {name: x.clone().requires_grad_() for name, x in kda.items()}
    kda_token = {name: x[:, :1] for name, x in kda.items()}
    torch.autograd.grad(leaves[2].sum(), leaves[2])
    wait()
    found = {}

    def timed(name, function):
        start = time.perf_counter()
        result = function()
        wait()
        found[name] = time.perf_counter() - start
        return result

    def load():
        import kernels

        return kernels.get_kernel(REPO, version=1)

    start = time.perf_counter()
    kernel = timed("load", load)
    out, _ = timed("chunk_sdm, forward", lambda: kernel.chunk_sdm(*leaves))
    timed("chunk_sdm, backward", lambda: out.float().sum().backward())
    with torch.no_grad():
        timed("chunk_sdm_", lambda: kernel.chunk_sdm_(bank, *args[:7]))
        timed("recurrent_sdm_", lambda: kernel.recurrent_sdm_(bank, *tokens))
        timed("product_key_topk", lambda: kernel.product_key_topk(scores, (64, 64), 16))
    options = {"use_qk_l2norm_in_kernel": True}
    out, _ = timed("chunk_kda, forward", lambda: kernel.chunk_kda(**kda_leaves, **options))
    timed("chunk_kda, backward", lambda: out.float().sum().backward())
    with torch.no_grad():
        timed("fused_recurrent_kda", lambda: kernel.fused_recurrent_kda(**kda_token, **options))
    found["everything"] = time.perf_counter() - start
    print(json.dumps({name: round(seconds, 4) for name, seconds in found.items()}))


if __name__ == "__main__":
    main()
