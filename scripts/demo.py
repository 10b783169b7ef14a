"""Trains a small decoder-only transformer on English text, on `mybackend` and on the CPU.

The text is the Python language reference that ships with Python (`pydoc_data.topics`), read
character by character. Both runs start from the same seed; the table at the end puts their
losses, their speed and the device's memory side by side.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import mybackend

SIZES = {
    # name: (layers, heads, width, context, batch)
    "tiny": (2, 2, 64, 64, 8),
    "small": (4, 4, 128, 128, 16),
    "medium": (6, 6, 384, 256, 16),
}


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm, each added to its input.

    x: [batch, time, width] -> [batch, time, width]"""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """tokens: [batch, time] -> logits: [batch, time, vocabulary]"""

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


@dataclass
class Run:
    """What one training run leaves behind."""

    device: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    text: str = ""


def read_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def progress(label: str, step: int, steps: int, loss: float, started: float) -> None:
    """A bar on one line; a line each tenth where there is no terminal."""
    done = (step + 1) / steps
    left = (time.perf_counter() - started) / done * (1 - done)
    if sys.stderr.isatty():
        bar = "█" * int(30 * done)
        print(
            f"\r{label:<10} [{bar:<30}] {step + 1}/{steps}  loss {loss:.4f}  {left:4.0f} s left ",
            end="\n" if done == 1 else "",
            file=sys.stderr,
            flush=True,
        )
    elif (step + 1) % max(1, steps // 10) == 0:
        print(f"{label}: step {step + 1}/{steps}, loss {loss:.4f}", file=sys.stderr, flush=True)


def train(device: str, data: torch.Tensor, alphabet: list[str], options: argparse.Namespace) -> Run:
    """Trains from the options' seed on `device`, and writes a few lines."""
    layers, heads, width, context, batch_size = SIZES[options.size]
    torch.manual_seed(options.seed)
    model = Transformer(len(alphabet), layers, heads, width, context, dropout=0.1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, foreach=True)
    # A generator of its own draws the batches: the device's and the CPU's own generators then
    # serve dropout alone, and give the same numbers.
    batches = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    run = Run(device)
    started = time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(data) - context - 1, (batch_size,), generator=batches)
        window = torch.stack([data[s : s + context + 1] for s in starts])
        begin = time.perf_counter()
        window = window.to(device)
        loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - begin)
        progress(device, step, options.steps, run.losses[-1], started)
    run.text = generate(model.eval(), alphabet, options.characters, device)
    return run


@torch.no_grad()
def generate(model: Transformer, alphabet: list[str], count: int, device: str) -> str:
    """Continues "The " by `count` characters."""
    index = {character: i for i, character in enumerate(alphabet)}
    tokens = torch.tensor([[index[c] for c in "The "]], device=device)
    for _ in range(count):
        logits = model(tokens[:, -model.context :])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(functional.softmax(logits / 0.8, -1), 1)], 1)
    return "".join(alphabet[i] for i in tokens[0].tolist())


def report(runs: list[Run], options: argparse.Namespace) -> bool:
    """Prints the tables; returns whether the losses of all runs are equal."""
    _, _, _, context, batch = SIZES[options.size]
    print(
        f"\n{'step':>6}"
        + "".join(f"{run.device + ' loss':>20}" for run in runs)
        + (f"{'equal':>8}" if len(runs) == 2 else "")
    )
    shown = sorted({0, options.steps - 1, *range(0, options.steps, max(1, options.steps // 8))})
    for step in shown:
        values = [run.losses[step] for run in runs]
        equal = f"{'yes' if values[0] == values[-1] else 'NO':>8}" if len(runs) == 2 else ""
        print(f"{step + 1:>6}" + "".join(f"{value:>20.9f}" for value in values) + equal)
    print()
    skip = min(3, options.steps - 1)  # the first steps allocate what later ones find in the cache
    speeds = [batch * context / statistics.median(run.seconds[skip:]) for run in runs]
    for run, speed in zip(runs, speeds, strict=True):
        print(
            f"{run.device:<10} {speed:>10,.0f} tokens/s (median step {statistics.median(run.seconds[skip:]) * 1e3:.1f} ms)"
        )
    if len(runs) == 2:
        print(f"{'ratio':<10} {speeds[0] / speeds[1]:>10.3f}   ({runs[0].device} / {runs[1].device})")
        same = runs[0].losses == runs[1].losses
        print(f"\nlosses of all {options.steps} steps: {'equal, bit for bit' if same else 'DIFFERENT'}")
        return same
    return True


def report_memory() -> None:
    stats = torch.mybackend.memory_stats()
    tracker = torch.mybackend.tracker_stats()
    allocations, calls = stats["allocation.all.allocated"], stats["num_device_alloc"]
    print(f"\npeak allocated  {stats['allocated_bytes.all.peak']:>15,} bytes")
    print(f"peak reserved   {stats['reserved_bytes.all.peak']:>15,} bytes")
    print(f"allocations     {allocations:>15,}")
    print(f"cache hit rate  {1 - calls / allocations:>15.4%}   ({calls} calls to the driver)")
    print(f"copied outputs  {mybackend.memory.copied_output_count():>15,}")
    print(f"live at the end {tracker['current_bytes']:>15,} bytes")
    print("\n" + torch.mybackend.memory_summary())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model (default small)")
    parser.add_argument(
        "--device", choices=("both", "mybackend", "cpu"), default="both", help="where to train (default both)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of everything random (default 1)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW (default 1e-3)")
    parser.add_argument("--characters", type=int, default=200, help="characters to write at the end (default 200)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: at least 1")
    text = read_text()
    alphabet = sorted(set(text))
    index = {character: i for i, character in enumerate(alphabet)}
    data = torch.tensor([index[character] for character in text])
    print(
        f"{len(text):,} characters of text, {len(alphabet)} different; size {options.size}, {options.steps} steps, seed {options.seed}"
    )
    devices = ("mybackend", "cpu") if options.device == "both" else (options.device,)
    runs = [train(device, data, alphabet, options) for device in devices]
    equal = report(runs, options)
    if "mybackend" in devices:
        report_memory()
    print(f"\nWritten by the model trained on {runs[0].device}:\n{runs[0].text}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
