# SPDX-License-Identifier: Apache-2.0
"""Checks and times of Kimi delta attention, from raw inputs: gate, norm and sigmoid inside."""

import torch
from eager_kda import eager_chunk_kda
from inputs import draw_kda
from memory import measure_call_on_gpu, measure_training_on_gpu
from peers import kda_peer
from run import relative_error
from timing import graphed

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # relative L2
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}
CHECKED = 256  # tokens that are compared with the reference
EAGER_CHUNKS = (32, 64, 128)
STEPS = 16  # decode steps in one timed call, each with its own token


def kda_bytes(shape):
    """Bytes that a call must move: each tensor once, states that stay on the chip not counted."""
    size = torch.finfo(getattr(torch, shape["dtype"])).bits // 8
    tokens = shape["B"] * shape["T"] * shape["H"] * size
    K, V = shape["K"], shape["V"]
    forward = tokens * (3 * K + 2 * V + 1)  # q, k, g; v, out; beta
    backward = forward + tokens * (3 * K + V + 1)  # with d_out for out; five gradients
    return {"forward": forward, "forward + backward": forward + backward}


def train_function(kernel, arguments, d_out, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}

    def forward():
        return kernel.chunk_kda(**leaves, **FLAGS, **options)[0]

    def call():
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), d_out)]

    return call, forward, list(leaves.values())


def check_kda(run, name, arguments):
    """The first tokens of two heads of every kind of result against the token loop in float64."""
    heads = min(2, arguments["q"].shape[2])
    few = {key: x[:1, :CHECKED, :heads] for key, x in arguments.items() if x.dim() > 2}
    few["A_log"] = arguments["A_log"][:heads]
    few["dt_bias"] = arguments["dt_bias"].view(arguments["q"].shape[2], -1)[:heads].flatten()
    exact = {key: x.cpu().double().requires_grad_() for key, x in few.items()}
    out, _ = run.kernel.reference.kda(**exact, **FLAGS)
    d_out = torch.randn_like(few["v"])
    expected = [out, *torch.autograd.grad(out, list(exact.values()), d_out.cpu().double())]
    limit = LIMITS[few["q"].dtype]
    got = train_function(run.kernel, few, d_out)[0]()
    for label, a, b in zip(("out", *exact), got, expected):
        run.check(name, f"{label}, kernel and reference", relative_error(a.cpu(), b), limit)
    with torch.no_grad():
        whole = run.kernel.chunk_kda(**arguments, **FLAGS)[0]
        again = run.kernel.chunk_kda(**arguments, **FLAGS)[0]
    error = relative_error(whole[:1, :CHECKED, :heads], got[0])
    run.check(name, "out, the whole and its first tokens", error, limit)
    run.check(name, "bits of two runs differ", float(not torch.equal(whole, again)), 0)


def eager_functions(run, name, arguments, d_out, ours):
    """The eager version, checked, at its fastest chunk for each use."""
    leaves = {key: x.detach().clone().requires_grad_() for key, x in arguments.items()}

    def forward(chunk):
        return lambda: eager_chunk_kda(**arguments, chunk_size=chunk)

    def train(chunk):
        def call():
            out, _ = eager_chunk_kda(**leaves, chunk_size=chunk)
            return torch.autograd.grad(out, list(leaves.values()), d_out)

        return call

    def fastest(make):
        functions = {chunk: make(chunk) for chunk in EAGER_CHUNKS}
        return min(functions, key=lambda chunk: min(run.clock(functions[chunk]) for _ in range(2)))

    run.use_threads(run.threads[-1])
    error = relative_error(ours[0], forward(64)()[0])
    run.check(name, "out, kernel and eager", error, LIMITS[ours[0].dtype])
    with torch.no_grad():
        chunk = fastest(forward)
    train_chunk = fastest(train)
    return {
        ("forward", f"eager, chunk {chunk}"): forward(chunk),
        ("forward + backward", f"eager, chunk {train_chunk}"): train(train_chunk),
    }


def measure_kda(run, name, shape):
    kernel = run.kernel
    if not hasattr(kernel, "chunk_kda"):
        raise RuntimeError("this build has no chunk_kda")
    arguments = draw_kda(shape, run.device)
    check_kda(run, name, arguments)
    d_out = torch.randn_like(arguments["v"])
    sizes = kda_bytes(shape)
    functions = {("forward", "kernel"): lambda: kernel.chunk_kda(**arguments, **FLAGS)}
    train, forward, leaves = train_function(kernel, arguments, d_out)
    kept, kept_forward, kept_leaves = train_function(
        kernel, arguments, d_out, disable_recompute=True
    )
    trains = {
        ("forward + backward", "kernel"): train,
        ("forward + backward", "kernel, nothing recomputed"): kept,
    }
    if run.eager:
        eager = eager_functions(run, name, arguments, d_out, functions["forward", "kernel"]())
        functions.update({key: f for key, f in eager.items() if key[0] == "forward"})
        trains.update({key: f for key, f in eager.items() if key[0] != "forward"})
    if run.peers:
        peers = kda_peer(arguments, d_out, FLAGS)
        functions.update({key: f for key, f in peers.items() if key[0] == "forward"})
        trains.update({key: f for key, f in peers.items() if key[0] != "forward"})
    moved = {key: sizes[key[0]] for key in (*functions, *trains) if key[1].startswith("kernel")}
    for threads in run.threads:
        run.use_threads(threads)
        with torch.no_grad():
            run.time(name, functions, threads, moved)
        run.time(name, trains, threads, moved)
    if run.cuda:
        with torch.no_grad():
            figures = measure_call_on_gpu(lambda: functions["forward", "kernel"](), run.device)
        run.remember_memory(name, "inference", figures)
        figures = measure_training_on_gpu(forward, leaves, d_out)
        run.remember_memory(name, "training", figures)
        figures = measure_training_on_gpu(kept_forward, kept_leaves, d_out)
        run.remember_memory(name, "training, nothing recomputed", figures)


def measure_kda_step(run, name, shape):
    """The decode step: each of STEPS tokens in its own call; float states, in and out."""
    kernel = run.kernel
    arguments = draw_kda({**shape, "T": STEPS}, run.device)
    names = ("q", "k", "v", "g", "beta")
    tokens = [[arguments[n][:, t : t + 1].contiguous() for n in names] for t in range(STEPS)]
    gate = {n: arguments[n] for n in ("A_log", "dt_bias")}
    flags = {key: value for key, value in FLAGS.items() if key != "safe_gate"}
    B, H, K, V = (shape[letter] for letter in "BHKV")
    state = torch.randn(B, H, K, V, device=run.device)

    def decode():
        return [kernel.recurrent_kda_(state, *token, **gate, **flags) for token in tokens]

    with torch.no_grad():
        exact = {n: arguments[n][:1].cpu().double() for n in names}
        exact.update({n: x.cpu().double() for n, x in gate.items()})
        before = state[:1].cpu().double()
        options = {**FLAGS, "initial_state": before, "output_final_state": True}
        expected, expected_state = kernel.reference.kda(**exact, **options)
        got = torch.cat([out[:1] for out in decode()], 1).cpu()
        limit = LIMITS[got.dtype]
        run.check(name, "out and reference", relative_error(got, expected), limit)
        error = relative_error(state[:1].cpu(), expected_state)
        run.check(name, "state and reference", error, limit)
        functions = {("decode step", "kernel"): graphed(decode, run.device)}
        moved = {("decode step", "kernel"): 2 * state.numel() * state.element_size()}
        for threads in run.threads:
            run.use_threads(threads)
            run.time(name, functions, threads, moved, calls=STEPS)
