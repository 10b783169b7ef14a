"""The checks of scripts/test_gpu.sh: each one in a process of its own, under the native allocator,
the plain swap-in and the complete one, and with tensors of the device `mybackend` in GPU memory.
Prints a table and writes JSON; exits with 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

SWAPS = {
    "native": "",
    "plain": """
        import mybackend_cuda as cuda
        torch.cuda.memory.change_current_allocator(cuda.pluggable_allocator())
    """,
    "complete": """
        from mybackend import cuda
        cuda.install()
    """,
    "device": """
        import mybackend
        mybackend.config.set("driver:cuda")
        cuda = torch.mybackend
    """,
}


def for_device(code: str) -> str:
    """The same program with tensors of `mybackend`."""
    for cuda, ours in (('"cuda"', '"mybackend"'), ("torch.cuda.", "torch.mybackend."), (".cuda()", '.to("mybackend")')):
        code = code.replace(cuda, ours)
    return code


# name: (swap-ins, needs kernels, code)
CHECKS: dict[str, tuple[tuple[str, ...], bool, str]] = {
    "copies and views": (("plain", "complete", "device"), False, """
        x = torch.arange(1e6).to("cuda"); y = x.view(1000, 1000)[3:5]
        assert y.cpu().flatten().tolist()[:3] == [3000.0, 3001.0, 3002.0]
        del x, y
        assert cuda.memory_stats(0)["allocated_bytes.all.current"] == 0
        torch.cuda.empty_cache()
        assert cuda.memory_stats(0)["reserved_bytes.all.current"] == 0
    """),
    "training as under the native one": (("native", "plain", "complete", "device"), True, """
        torch.manual_seed(0); torch.use_deterministic_algorithms(True)
        model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(512, 512), torch.nn.ReLU())]).cuda()
        optimizer = torch.optim.AdamW(model.parameters()); data = torch.randn(64, 512, device="cuda")
        for _ in range(20):
            optimizer.zero_grad(); loss = (model(data) - data).square().mean(); loss.backward(); optimizer.step()
        result["loss"] = loss.item()
    """),
    "streams": (("plain", "complete", "device"), True, """
        side = torch.cuda.Stream()
        for _ in range(200):
            x = torch.full((1 << 20,), 3.0, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = (x * 2).sum()
            x.record_stream(side); del x
            torch.full((1 << 20,), 9.0, device="cuda")
        torch.cuda.synchronize()
        assert y.item() == 6.0 * (1 << 20)
    """),
    "out of memory": (("plain", "complete", "device"), False, """
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "out of memory. Tried to allocate" in str(error), error
        torch.empty(1 << 20, device="cuda")
    """),
    "expandable segments": (("plain", "complete", "device"), False, """
        a = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del a
        b = torch.arange(60 << 20, dtype=torch.int32).to("cuda")
        assert b[-5:].cpu().tolist() == list(range((60 << 20) - 5, 60 << 20))
        assert all(s["is_expandable"] for s in cuda.memory_snapshot(0))
    """),
    "snapshot and statistics": (("complete",), False, """
        torch.cuda.memory._record_memory_history(stacks="python")
        x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() == 3 << 20
        snapshot = torch.cuda.memory._snapshot()
        assert snapshot["device_traces"][0][1]["frames"] and len(snapshot["segments"]) == 1
        assert "Allocated memory" in torch.cuda.memory_summary()
    """),
    "graphs": (("complete",), True, """
        model = torch.nn.Linear(256, 256).cuda(); data = torch.randn(32, 256, device="cuda")
        stream = torch.cuda.Stream(); stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(data)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(data).relu()
        for _ in range(5):
            data.copy_(torch.randn(32, 256)); graph.replay()
            torch.testing.assert_close(out, model(data).relu())
        graphed = torch.cuda.make_graphed_callables(torch.nn.Linear(256, 256).cuda(), (torch.randn(32, 256, device="cuda"),))
        graphed(data).sum().backward()
    """),
    "torch.compile": (("native", "complete"), True, """
        torch.manual_seed(0)
        step = torch.compile(lambda x: (x.sin() * 2 + x).relu().square().sum())
        data = torch.randn(1000, device="cuda", requires_grad=True)
        step(data).backward()
        expected = torch.autograd.grad((data.sin() * 2 + data).relu().square().sum(), data)[0]
        torch.testing.assert_close(data.grad, expected)
    """),
    "pools": (("complete",), False, """
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            x = torch.empty(1 << 20, device="cuda")
        assert pool.snapshot()[0]["segment_pool_id"] == pool.id
    """),
    "time: allocate and free": (("native", "plain", "complete", "device"), False, """
        import time
        for size in (100, 100_000, 10_000_000):
            torch.empty(size, device="cuda")
            times = []
            for _ in range(15):
                start = time.perf_counter()
                for _ in range(2000): torch.empty(size, device="cuda")
                times.append((time.perf_counter() - start) / 2000 * 1e9)
            result[f"ns at {4 * size} bytes"] = statistics.median(times)
    """),
    "time: training steps": (("native", "plain", "complete", "device"), True, """
        import time
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 6).cuda(); optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(16, 128, 512, device="cuda")
        def steps(n):
            start = time.perf_counter()
            for _ in range(n):
                optimizer.zero_grad(); model(data).square().mean().backward(); optimizer.step()
            torch.cuda.synchronize()
            return n / (time.perf_counter() - start)
        steps(10)
        result["steps per second"] = statistics.median(steps(10) for _ in range(7))
    """),
}  # fmt: skip


def run(name: str, swap: str, code: str, plain: Path) -> dict[str, object]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(plain), environment.get("PYTHONPATH", "")])
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = environment["MYBACKEND_DEVICE"] = "0"
    if name == "expandable segments":
        environment["MYBACKEND_ALLOC_CONF"] = "expandable_segments:True"
    text = "import json, statistics, torch\nresult = {}\n" + textwrap.dedent(SWAPS[swap])
    text += for_device(textwrap.dedent(code)) if swap == "device" else textwrap.dedent(code)
    text += "\nprint('RESULT ' + json.dumps(result))\n"
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not lines:
        return {"passed": False, "error": (done.stderr or done.stdout)[-1500:]}
    return {"passed": True, **json.loads(lines[-1].removeprefix("RESULT "))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", type=Path, required=True, help="folder with libmybackend_core.so, mybackend_cuda.py")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="where the JSON goes")
    parser.add_argument("--no-kernels", action="store_true", help="skip what runs GPU kernels (for a stand-in)")
    options = parser.parse_args()
    import torch

    report: dict[str, object] = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "checks": {}}
    has_complete = find_spec("mybackend") is not None
    failed = 0
    for name, (swaps, needs_kernels, code) in CHECKS.items():
        if needs_kernels and options.no_kernels:
            print(f"{name:36} skipped: --no-kernels")
            continue
        results = {}
        for swap in swaps:
            if swap in ("complete", "device") and not has_complete:
                print(f"{name:36} {swap}: skipped, not built for torch {torch.__version__}")
                continue
            results[swap] = run(name, swap, code, options.plain)
        report["checks"][name] = results  # type: ignore[index]
        losses = {r.get("loss") for r in results.values() if r["passed"]}
        if len(losses) > 1:
            results["all"] = {"passed": False, "error": f"different losses: {losses}"}
        for swap, result in results.items():
            failed += not result["passed"]
            numbers = ", ".join(f"{k} {v:.4g}" for k, v in result.items() if isinstance(v, float))
            print(f"{name:36} {swap:9} {'ok' if result['passed'] else 'FAILED'}  {numbers}", flush=True)
            if not result["passed"]:
                print(textwrap.indent(str(result["error"]), "    "))
    if not has_complete:
        report["skipped"] = f"the complete swap-in and the device: mybackend is not built for torch {torch.__version__}"
    options.output.write_text(json.dumps(report, indent=1))
    print(f"written to {options.output}; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
