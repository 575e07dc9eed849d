#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level language model with and without Sparse Delta Memory, side by side.

Both models see the same bytes of Python's standard library in the same order. They differ only in
the memory layers, which are the only path from one byte to another that is more than a few bytes
away. Afterwards the model with memory is saved, loaded again and made to write some text.

    python examples/byte_lm.py
    python examples/byte_lm.py --steps 2000 --device cuda --prompt "class Stack:"

The folder --out gets loss.png, results.json and the checkpoint (model.safetensors, config.json).
"""

import argparse
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

import kernels
import torch
import torch.nn.functional as F
from byte_lm_data import Corpus, load_corpora
from byte_lm_model import ByteLM, ByteLMConfig
from tqdm import tqdm

REPO_ID = "org/sparse-delta-memory"
ROOT = Path(__file__).resolve().parents[1]
EVAL_BYTES = 8192  # in one call of the model
SHORT_CONTEXTS = 8  # pieces of a window in the figure for short contexts
PROMPT = '''class Counter:
    """Count how often each key was seen."""

    def __init__(self, keys=()):
        self.counts = {}
        for key in keys:
            self.'''


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps of each model")
    parser.add_argument("--batch-size", type=int, default=2, help="windows in a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="bytes in a window")
    parser.add_argument("--lr", type=float, default=6e-3, help="highest learning rate")
    parser.add_argument("--eval-windows", type=int, default=64, help="windows of the final figure")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between quick figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "byte_lm", help="output folder")
    parser.add_argument("--prompt", default=PROMPT, help="text to continue")
    parser.add_argument("--generate", type=int, default=120, help="bytes to write after the prompt")
    parser.add_argument(
        "--no-ablation", action="store_true", help="train only the model with memory"
    )
    arguments = parser.parse_args()
    if not arguments.prompt:
        parser.error("--prompt must not be empty")
    if arguments.seq_len % SHORT_CONTEXTS:
        parser.error(f"--seq-len must be a multiple of {SHORT_CONTEXTS}")
    return arguments


def load_kernel():
    """The package: from LOCAL_KERNELS if set, else a build in this checkout, else the hub."""
    if any((ROOT / "build").glob("*/metadata.json")):
        os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")
    return kernels.get_kernel(REPO_ID, version=1, trust_remote_code=[REPO_ID])


def bits_per_byte(model: ByteLM, windows: torch.Tensor, context: Optional[int] = None) -> float:
    """Mean cross entropy over all bytes of the windows, in bits.

    With `context` the windows are cut and the model starts afresh after that many bytes.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if context is not None:
        inputs, targets = inputs.reshape(-1, context), targets.reshape(-1, context)
    rows = max(1, EVAL_BYTES // inputs.shape[1])
    total = 0.0
    with torch.no_grad():
        for x, y in zip(inputs.split(rows), targets.split(rows)):
            logits = model(x).flatten(0, 1)
            total += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
    return total / targets.numel() / math.log(2)


def make_optimizer(model: ByteLM, lr: float) -> torch.optim.Optimizer:
    """AdamW; gates, norms, biases and the banks get no weight decay."""
    decay, no_decay = [], []
    for parameter in model.parameters():
        is_bank = getattr(parameter, "_is_memory_bank", False)
        (no_decay if parameter.dim() < 2 or is_bank else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def lr_factor(step: int, steps: int) -> float:
    """Short warm-up, then a straight line down to a twentieth."""
    warm_up = max(1, min(20, steps // 5))
    return min(1.0, (step + 1) / warm_up) * (1.0 - 0.95 * step / max(1, steps))


def train(
    name: str, model: ByteLM, corpus: Corpus, validation: torch.Tensor, args: argparse.Namespace
) -> dict:
    """Train a model; returns its loss curves in bits per byte and the seconds it took."""
    optimizer = make_optimizer(model, args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: lr_factor(i, args.steps))
    generator = torch.Generator().manual_seed(args.seed)  # the same windows for every model
    curves = {"train": [], "validation": []}
    start = time.perf_counter()
    with tqdm(total=args.steps, desc=name, unit="step") as bar:
        for step in range(1, args.steps + 1):
            batch = corpus.random_batch(args.batch_size, generator).to(args.device)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()

            curves["train"].append((step, loss.item() / math.log(2)))
            if step % args.eval_every == 0 or step == args.steps:
                curves["validation"].append((step, bits_per_byte(model, validation)))
            shown = {kind: f"{points[-1][1]:.3f}" for kind, points in curves.items() if points}
            bar.set_postfix(shown, refresh=False)
            bar.update()
    return {"curves": curves, "seconds": time.perf_counter() - start}


def plot(results: dict, path: Path) -> None:
    """Loss curves of all models."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, (name, result) in enumerate(results.items()):
        steps, losses = zip(*result["curves"]["train"])
        axes.plot(steps, losses, color=f"C{i}", alpha=0.25, linewidth=0.8)
        steps, losses = zip(*result["curves"]["validation"])
        axes.plot(steps, losses, color=f"C{i}", marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="bits per byte", title="Validation (bold) and training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_text(model: ByteLM, args: argparse.Namespace) -> None:
    """Continue the prompt by prefill and decode, and check both against the chunked forward."""
    prompt = torch.tensor([list(args.prompt.encode())], device=args.device)
    text = model.generate(prompt, args.generate)
    print(f"\nPrompt and {args.generate} bytes written with the recurrent path (greedy):\n")
    print(bytes(text[0].tolist()).decode(errors="replace"))

    same = torch.equal(text, model.generate_slowly(prompt, args.generate))
    # Teacher forced: the logits of one chunked call, and of prefill and single steps.
    with torch.no_grad():
        chunked = model(text)
        caches, steps = model.new_caches(1), []
        for part in text.split([prompt.shape[1]] + [1] * args.generate, dim=1):
            steps.append(model(part, caches))
    error = (torch.cat(steps, dim=1) - chunked).abs().max().item()
    close = error <= 1e-3 * chunked.abs().max().item()
    print(f"\nSame text from the chunked path: {'yes' if same else 'NO'}")
    print(f"Largest difference of the logits: {error:.1e} ({'ok' if close else 'TOO LARGE'})")
    if not (same and close):
        raise SystemExit("the recurrent and the chunked path disagree")


def print_table(results: dict, seq_len: int) -> None:
    """One line a model: validation bits per byte at the full context and at short ones."""
    print(f"\n{'validation bits per byte':<26}{f'{seq_len} bytes':>12}", end="")
    print(
        f"{f'{seq_len // SHORT_CONTEXTS} bytes':>12}{'parameters':>12}{'bank':>12}{'seconds':>10}"
    )
    for name, result in results.items():
        print(
            f"{name:<26}{result['bits_per_byte']:>12.3f}{result['bits_per_byte_short']:>12.3f}"
            f"{result['parameters']:>12,}{result['bank_parameters']:>12,}{result['seconds']:>10.1f}"
        )


def main() -> None:
    """Train, compare, save, load, write."""
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    kernel = load_kernel()
    corpus, validation = load_corpora(args.seq_len + 1)
    print(
        f"{corpus.num_files} files with {len(corpus.data) / 1e6:.1f} MB to train on, "
        f"{validation.num_files} with {len(validation.data) / 1e6:.1f} MB to validate on"
    )
    quick_windows = validation.spread(args.eval_windows // 4).to(args.device)
    final_windows = validation.spread(args.eval_windows).to(args.device)

    config = ByteLMConfig()
    configs = {"with memory": config, "without memory": replace(config, memory_blocks=())}
    if args.no_ablation:
        del configs["without memory"]
    results = {}
    for name, config in configs.items():
        torch.manual_seed(args.seed)
        model = ByteLM(kernel, config).to(args.device)
        results[name] = train(name, model, corpus, quick_windows, args)
        results[name]["bits_per_byte"] = bits_per_byte(model, final_windows)
        short = args.seq_len // SHORT_CONTEXTS
        results[name]["bits_per_byte_short"] = bits_per_byte(model, final_windows, short)
        sizes = [(p.numel(), getattr(p, "_is_memory_bank", False)) for p in model.parameters()]
        results[name]["parameters"] = sum(size for size, _ in sizes)
        results[name]["bank_parameters"] = sum(size for size, is_bank in sizes if is_bank)
        if config.memory_blocks:
            model.save(args.out)

    plot(results, args.out / "loss.png")
    (args.out / "results.json").write_text(json.dumps(results) + "\n")

    model = ByteLM.load(kernel, args.out).to(args.device)
    write_text(model, args)
    print_table(results, args.seq_len)
    print(f"\nLoss curves, figures and checkpoint are in {args.out}")


if __name__ == "__main__":
    main()
