"""Loading a checkpoint: mapped on the device, mapped on the CPU, and read.

Tables: time, private and shared resident bytes of each way, for torch.save's format and for
safetensors (the CPU's side by that library, which is among the `models` extra); and what a round trip of a tensor to another process costs beside a CPU tensor's.
Each load runs in a process of its own; medians of interleaved rounds.

usage: bench_storage.py [--gigabytes N] [--tensors N] [--rounds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

WAYS = ["mybackend, mapped", "cpu, mapped", "mybackend, read", "cpu, read"]


def write_checkpoint(path: Path, gigabytes: float, count: int) -> None:
    each = int(gigabytes * 2**30 / count / 4)
    torch.manual_seed(0)
    torch.save({f"layer.{i}.weight": torch.randn(each) for i in range(count)}, path)


def write_safetensors(path: Path, gigabytes: float, count: int) -> None:
    each = int(gigabytes * 2**30 / count / 4)
    header = {
        f"layer.{i}.weight": {"dtype": "F32", "shape": [each], "data_offsets": [4 * each * i, 4 * each * (i + 1)]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(count):
            file.write(torch.randn(each).numpy().tobytes())


def resident() -> tuple[int, int]:
    """Private and shared resident bytes of this process."""
    private = shared = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.startswith("Private_") and key != "Private_Hugetlb":
            private += int(value.split()[0]) * 1024
        elif key in ("Shared_Clean", "Shared_Dirty"):
            shared += int(value.split()[0]) * 1024
    return private, shared


def load(way: str, path: str) -> dict[str, float]:
    import mybackend

    device, how = way.split(", ")
    torch.ones(1, device="mybackend")
    mapped = how == "mapped"
    if path.endswith(".safetensors") and device == "cpu":
        from safetensors.torch import load_file  # not counted as loading
    before = resident()
    begin = time.perf_counter()
    if path.endswith(".safetensors") and device == "cpu":
        tensors = load_file(path)
    elif path.endswith(".safetensors"):
        tensors = mybackend.storage.load_safetensors(path)
        if not mapped:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    else:
        tensors = torch.load(path, mmap=mapped, map_location=device)
    seconds = time.perf_counter() - begin
    after = resident()
    sample = {name: tensor[:1].cpu() for name, tensor in list(tensors.items())[:5]}
    assert len(sample) > 0
    total = float(sum(tensor.double().sum().item() for tensor in list(tensors.values())[:10]))
    return {"ms": seconds * 1e3, "private": after[0] - before[0], "shared": after[1] - before[1], "sum": total}


def run_self(way: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", way, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def bench_loads(path: Path, ways: list[str], rounds: int) -> None:
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            results[way].append(run_self(way, path))
    size = path.stat().st_size
    print(f"\n{path.name}, {size / 2**30:.2f} GiB{'':<10}{'time':>12}{'private':>12}{'shared':>12}{'ratio':>9}")
    base = statistics.median(r["ms"] for r in results["cpu, mapped"])
    for way, rows in results.items():
        ms = statistics.median(row["ms"] for row in rows)
        private = statistics.median(row["private"] for row in rows) / 2**20
        shared = statistics.median(row["shared"] for row in rows) / 2**20
        print(f"{way:<32}{ms:>9.1f} ms{private:>8.1f} MiB{shared:>8.1f} MiB{ms / base:>9.2f}", flush=True)
    sums = {row["sum"] for rows in results.values() for row in rows}
    print("the bytes are the same" if len(sums) == 1 else f"THE BYTES DIFFER: {sums}")


def echo(inbox, outbox) -> None:  # type: ignore[no-untyped-def]
    while (x := inbox.get()) is not None:
        outbox.put(x)


def bench_round_trip(rounds: int) -> None:
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=echo, args=(inbox, outbox))
    process.start()
    times: dict[str, list[float]] = {"cpu": [], "mybackend": []}
    tensors = {device: torch.ones(64 << 20, device=device).share_memory_() for device in times}
    before = None
    for _ in range(rounds + 3):
        for device, x in tensors.items():
            begin = time.perf_counter()
            inbox.put(x)
            back = outbox.get()
            times[device].append((time.perf_counter() - begin) * 1e3)
            assert back.device.type == device and back.data_ptr() != 0
            del back
        before = before or resident()
    growth = resident()[0] - before[0]
    inbox.put(None)
    process.join()
    medians = {device: statistics.median(t[3:]) for device, t in times.items()}
    print(f"\n256 MB to another process and back: mybackend {medians['mybackend']:.2f} ms, cpu {medians['cpu']:.2f} ms, "
          f"difference {medians['mybackend'] - medians['cpu']:.2f} ms; private memory grew by {growth / 2**20:.1f} MiB")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint (default 2)")
    parser.add_argument("--tensors", type=int, default=500, help="how many it holds (default 500)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        way, path = options.load
        print(json.dumps(load(way, path)))
        return 0
    print(
        f"{os.cpu_count()} cores, {platform.machine()}; medians of {options.rounds} rounds; the files are in the page cache"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "checkpoint.pt"
        write_checkpoint(path, options.gigabytes, options.tensors)
        bench_loads(path, WAYS, options.rounds)
        path.unlink()
        path = Path(folder) / "model.safetensors"
        write_safetensors(path, options.gigabytes, options.tensors)
        bench_loads(path, ["mybackend, mapped", "cpu, mapped", "mybackend, read"], options.rounds)
    bench_round_trip(15)
    return 0


if __name__ == "__main__":
    sys.exit(main())
