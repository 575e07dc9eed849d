# SPDX-License-Identifier: Apache-2.0
"""Checks and times of sparse delta memory and its decode step."""

import torch
from eager_sdm import eager_chunk_sdm, eager_chunk_sdm_, eager_recurrent_sdm_
from inputs import draw_sdm, num_slots, with_grad
from memory import measure_call_on_gpu, measure_memory, measure_training_on_gpu
from peers import sdm_peer
from run import relative_error
from timing import graphed
from traffic import count_rows, sdm_bytes, step_bytes

CPU_CHUNK = 64  # what chunk_size=None stands for on the CPU; the traffic is counted for it
CUDA_CHUNK = 256
OTHER_CHUNK = 96  # compared with the default: other tiles, other tails
EAGER_CHUNKS = (64, 128, 256, 512)
STEPS = 16  # decode steps in one timed call, each with its own token
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # relative L2
LABELS = ("out", "d_write_val", "d_v", "d_beta", "d_g", "d_read_val", "d_initial_state")


def train_function(function, leaves, d_out, **options):
    """A function that does forward and backward and returns out and all gradients."""
    wanted = [x for x in leaves if x.requires_grad]

    def call():
        out, _ = function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, wanted, d_out)]

    return call


def check_sdm(run, name, shape, inputs, d_out):
    """Kernel against eager or another chunk at the real size, against the token loop at a small one."""
    limit = LIMITS[inputs[2].dtype]
    leaves = with_grad(inputs)
    kernel = run.kernel.chunk_sdm
    ours = train_function(kernel, leaves, d_out)()
    try:
        if run.eager:
            who = "eager"
            chunk = min(512, shape["T"])
            other = train_function(eager_chunk_sdm, leaves, d_out, chunk_size=chunk)()
        else:
            who = f"chunk {OTHER_CHUNK}"
            other = train_function(kernel, leaves, d_out, chunk_size=OTHER_CHUNK)()
    except torch.OutOfMemoryError:
        other = []
        print(f"  {name}: eager autograd does not fit into memory, compared at the small size only")
    for label, a, b in zip(LABELS, ours, other):
        run.check(name, f"{label}, kernel and {who}", relative_error(a, b), limit)
    del other
    rows = train_function(kernel, leaves, d_out, save="rows")()
    same = all(torch.equal(a, b) for a, b in zip(ours, rows))
    run.check(name, "bits of replay and rows differ", float(not same), 0)
    del rows
    if run.cuda:
        again = train_function(kernel, leaves, d_out)()
        same = all(torch.equal(a, b) for a, b in zip(ours, again))
        run.check(name, "bits of two runs differ", float(not same), 0)
        del again
    else:
        threads = torch.get_num_threads()
        for count in sorted({1, run.all_threads}):
            run.use_threads(count)
            again = train_function(kernel, leaves, d_out)()
            same = all(torch.equal(a, b) for a, b in zip(ours, again))
            run.check(name, f"bits with {count} threads differ", float(not same), 0)
        run.use_threads(threads)
    check_small(run, name, shape, limit)


def check_small(run, name, shape, limit):
    """The same lanes on a few slots and columns against the token-by-token reference in float64."""
    small = {**shape, "T": 128, "D": 32, "factor_dims": [32, 32], "W": 8, "R": 8, "B": 1}
    inputs = draw_sdm(run.kernel, small, run.device, seed=1)
    d_out = torch.randn_like(inputs[2])
    exact = [x.cpu().double() if x.is_floating_point() else x.cpu() for x in inputs]
    reference = train_function(run.kernel.reference.sdm, with_grad(exact), d_out.cpu().double())()
    versions = [("kernel", run.kernel.chunk_sdm, {})]
    if run.eager:
        versions += [
            ("eager", eager_chunk_sdm, {"bags": False}),
            ("eager bags", eager_chunk_sdm, {"bags": True}),
        ]
    for who, function, options in versions:
        results = train_function(function, with_grad(inputs), d_out, **options)()
        for label, a, b in zip(LABELS, results, reference):
            error = relative_error(a.cpu(), b)
            run.check(name, f"{label}, {who} and reference, small", error, limit)


def fastest_chunk(run, make):
    """Return the chunk size at which an eager function is fastest, by one call each."""
    times = {}
    for chunk in EAGER_CHUNKS:
        try:
            function = make(chunk)
            times[chunk] = min(run.clock(function) for _ in range(2))
        except (torch.OutOfMemoryError, ValueError):  # does not fit; no divisor of T
            continue
    return min(times, key=times.get, default=EAGER_CHUNKS[0])


class EagerStyles:
    """The eager versions, each at its fastest chunk."""

    def __init__(self, run, inputs, state, leaves, d_out):
        self.styles = {"eager": False, "eager bags": True} if run.eager else {}
        self.inputs, self.state, self.leaves, self.d_out = inputs, state, leaves, d_out
        with torch.no_grad():
            self.forward_chunk = {
                who: fastest_chunk(run, lambda c, bags=bags: self._forward(c, bags))
                for who, bags in self.styles.items()
            }
        self.train_chunk = {
            who: fastest_chunk(run, lambda c, bags=bags: self._train(c, bags))
            for who, bags in self.styles.items()
        }

    def _forward(self, chunk, bags):
        return lambda: eager_chunk_sdm(*self.inputs, chunk_size=chunk, bags=bags)

    def _train(self, chunk, bags):
        return train_function(eager_chunk_sdm, self.leaves, self.d_out, chunk_size=chunk, bags=bags)

    def forward(self):
        found = {}
        for who, bags in self.styles.items():
            chunk = self.forward_chunk[who]
            found["forward", f"{who}, chunk {chunk}"] = self._forward(chunk, bags)
        if self.styles:
            chunk = self.forward_chunk["eager bags"]
            found["forward", f"eager bags, in place, chunk {chunk}"] = lambda: eager_chunk_sdm_(
                self.state, *self.inputs[:-1], chunk_size=chunk
            )
        return found

    def train(self):
        return {
            ("forward + backward", f"{who}, chunk {chunk}"): self._train(chunk, self.styles[who])
            for who, chunk in self.train_chunk.items()
        }


def measure_sdm(run, name, shape):
    kernel = run.kernel
    inputs = draw_sdm(kernel, shape, run.device)
    d_out = torch.randn_like(inputs[2])
    check_sdm(run, name, shape, inputs, d_out)
    chunk = CUDA_CHUNK if run.cuda else CPU_CHUNK
    rows = count_rows(inputs[0], inputs[5], num_slots(shape), chunk)
    sizes = sdm_bytes(*rows, shape["D"], inputs[-1].dtype, run.cuda)
    state = inputs[-1].clone()
    leaves = with_grad(inputs)
    run.use_threads(run.threads[-1])
    eager = EagerStyles(run, inputs, state, leaves, d_out)
    peer = sdm_peer(inputs, d_out, chunk) if run.peers else {}
    for threads in run.threads:
        run.use_threads(threads)
        forward = {
            ("forward", "kernel"): lambda: kernel.chunk_sdm(*inputs),
            ("forward", "kernel, in place"): lambda: kernel.chunk_sdm_(state, *inputs[:-1]),
        }
        moved = dict.fromkeys(forward, sizes["forward"])
        forward.update(eager.forward())
        forward.update({key: f for key, f in peer.items() if key[0] == "forward"})
        with torch.no_grad():
            run.time(name, forward, threads, moved)
        train, moved = {}, {}
        for save in ("replay", "rows"):
            key = ("forward + backward", f"kernel, {save}")
            train[key] = train_function(kernel.chunk_sdm, leaves, d_out, save=save)
            moved[key] = sizes[save]
        train.update(eager.train())
        train.update({key: f for key, f in peer.items() if key[0] != "forward"})
        run.time(name, train, threads, moved)
    if run.cuda:
        remember_memory(run, name, inputs, leaves, d_out)
    elif not run.quick:
        run.memory += measure_memory(name, run.device.type)


def remember_memory(run, name, inputs, leaves, d_out):
    kernel = run.kernel
    with torch.no_grad():
        figures = measure_call_on_gpu(lambda: kernel.chunk_sdm(*inputs), run.device)
    run.remember_memory(name, "inference", figures)
    wanted = [x for x in leaves if x.requires_grad]
    for save in ("replay", "rows"):
        figures = measure_training_on_gpu(
            lambda save=save: kernel.chunk_sdm(*leaves, save=save)[0], wanted, d_out
        )
        run.remember_memory(name, f"training, {save}", figures)


def check_step(run, name, shape, tokens, state, outs):
    """The first sequence of the steps just taken, from a copy of its bank, against float64."""
    first = [[x[:1].cpu() for x in token] for token in tokens]
    whole = [torch.cat([token[i] for token in first], 1) for i in range(len(first[0]))]
    # Only the slots that are named, renumbered: the bank in float64 would be gigabytes.
    named = torch.stack([torch.cat([whole[0][0, :, h].flatten(), whole[5][0, :, h].flatten()])
                         for h in range(shape["H"])])  # fmt: skip
    slots = named.unique()
    whole[0], whole[5] = (torch.searchsorted(slots, x.long()) for x in (whole[0], whole[5]))
    bank = state[:1].index_select(2, slots.to(state.device)).cpu()
    exact = [x.double() if x.is_floating_point() else x for x in whole]
    expected, _ = run.kernel.reference.sdm(*exact, bank.double())
    got = torch.cat([out[:1] for out in outs()], 1).cpu()
    run.check(name, "out and reference", relative_error(got, expected), LIMITS[got.dtype])


def measure_step(run, name, shape):
    """The decode step: each of STEPS tokens in its own call, banks larger than the caches."""
    kernel = run.kernel
    inputs = draw_sdm(kernel, {**shape, "T": STEPS}, run.device)
    tokens = [[x[:, t : t + 1].contiguous() for x in inputs[:-1]] for t in range(STEPS)]
    state = inputs[-1]
    size = step_bytes(inputs[0], inputs[5], num_slots(shape), shape["D"], state.dtype)

    def decode(step, state, tokens=tokens):
        return lambda: [step(state, *token) for token in tokens]

    check_step(run, name, shape, tokens, state, decode(kernel.recurrent_sdm_, state))
    functions = {("decode step", "kernel"): decode(kernel.recurrent_sdm_, state)}
    moved = {("decode step", "kernel"): size}
    if run.cuda:
        same = ("decode step", "kernel, same token")
        functions[same] = decode(kernel.recurrent_sdm_, state, [tokens[0]] * STEPS)
    if run.eager:
        functions["decode step", "eager"] = decode(eager_recurrent_sdm_, state.clone())
    with torch.no_grad():
        functions = {key: graphed(f, run.device) for key, f in functions.items()}
        for threads in run.threads:
            run.use_threads(threads)
            run.time(name, functions, threads, moved, calls=STEPS)
