"""The allocator under the real `torch.cuda`, on the stand-in driver and runtime: both swap-ins, and
the native allocator beside ours. scripts/test_cuda_standin.sh builds what is needed and runs this."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from standin import COMPLETE, FOLDER, NATIVE, PLAIN, run

pytestmark = pytest.mark.skipif(not FOLDER, reason="run by scripts/test_cuda_standin.sh")

TRACES = sorted((Path(__file__).resolve().parent.parent / "data" / "traces").glob("*.gz"))
GIB = 1 << 30


# --- The plain swap-in ---------------------------------------------------------------------------


def test_plain_tensors_and_statistics() -> None:
    run(
        """
        x = torch.empty(1000, 1000, device="cuda")
        assert x.data_ptr() == 0x700000000000
        y = x.view(-1)[10:20]; z = torch.arange(10.).to("cuda"); y.copy_(z)
        assert y.cpu().tolist() == list(range(10))
        stats = mybackend.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 4_000_256 + 512, stats["allocated_bytes.all.current"]
        assert len(mybackend.cuda.memory_snapshot()) == 2
        side = torch.cuda.Stream()
        x.record_stream(side)
        del x, y, z
        assert mybackend.cuda.memory_stats()["allocated_bytes.all.current"] == 0
        torch.cuda.empty_cache()
        assert st.standin_used_bytes(0) == 0
        t = torch.empty(10, device="cuda:1")
        assert st.standin_used_bytes(1) == 2 << 20 and mybackend.cuda.memory_stats("cuda:1")["allocation.all.current"] == 1
        torch.cuda.memory.set_per_process_memory_fraction(0.5)
        try:
            torch.empty(5 << 30, dtype=torch.uint8, device="cuda:0")
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "memory fraction" in str(error), error
        """,
        PLAIN,
    )


def test_plain_out_of_memory_and_exit() -> None:
    out = run(
        """
        import atexit
        x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
            raise SystemExit("no error")
        except RuntimeError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate 100.00 MiB"), error
            assert "64.00 MiB" in str(error)
        assert torch.empty(30 << 20, dtype=torch.uint8, device="cuda").numel() == 30 << 20
        del x
        torch.cuda.empty_cache()
        print(st.standin_used_bytes(0))
        """,
        PLAIN,
        MYBACKEND_STANDIN_CAPACITY=str(64 << 20),
    )
    assert out.strip() == "0"


def test_plain_pools_and_a_second_allocator() -> None:
    run(
        """
        import mybackend
        plugged = mybackend.cuda.pluggable_allocator()
        native = torch.empty(1000, device="cuda")          # torch's own allocator stays the default
        pool = torch.cuda.MemPool(plugged.allocator())
        with torch.cuda.use_mem_pool(pool):
            x = torch.empty(1000, device="cuda")
        assert mybackend.cuda.memory_stats()["allocation.all.current"] == 1    # the pool's segment
        del x, native
        """,
        NATIVE,
    )


# --- The complete swap-in ------------------------------------------------------------------------


def test_complete_statistics_and_snapshots() -> None:
    run(
        """
        assert mybackend.cuda.installed() and torch.cuda.memory.get_allocator_backend() == "mybackend"
        mybackend.cuda.install()                                                # again: nothing to do
        torch.cuda.memory._record_memory_history(stacks="python")
        def deep():
            return torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        x = deep(); y = torch.empty(10, device="cuda:1"); z = torch.empty(7, device="cuda"); del z
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 3 << 20 and torch.cuda.memory_allocated() == 3 << 20
        assert torch.cuda.memory_allocated(1) == 512 and torch.cuda.memory_reserved(1) == 2 << 20
        assert torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info()[1] - (22 << 20)
        assert "Allocated memory" in torch.cuda.memory_summary()
        snapshot = torch.cuda.memory._snapshot()
        assert [e["action"] for e in snapshot["device_traces"][0]] == [
            "segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed"]
        assert torch.cuda.memory._snapshot()["device_traces"][0][-1]["action"] == "snapshot"
        entry = snapshot["device_traces"][0][1]
        assert any(f["name"] == "deep" for f in entry["frames"]), entry
        assert abs(entry["time_us"] / 1e6 - __import__("time").time()) < 60
        (segment,) = [s for s in snapshot["segments"] if s["device"] == 0 and s["segment_type"] == "large"]
        assert segment["blocks"][0]["state"] == "active_allocated" and segment["blocks"][0]["size"] == 3 << 20
        assert any(f["name"] == "deep" for f in segment["blocks"][0]["frames"])
        torch.cuda.memory._dump_snapshot(sys.argv[0] + "snapshot.pickle")
        from torch.cuda import _memory_viz
        import pickle
        with open(sys.argv[0] + "snapshot.pickle", "rb") as file:
            data = pickle.load(file)
        os.unlink(sys.argv[0] + "snapshot.pickle")
        assert "viz" in _memory_viz.trace_plot(data).lower()
        assert "b = a[0:3.0MiB]" in _memory_viz.trace(data)
        assert len(_memory_viz.segsum(data)) > 100
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.reset_peak_memory_stats(); torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
        del x, y
        torch.cuda.empty_cache()
        assert st.standin_used_bytes(0) == st.standin_used_bytes(1) == 0
        """
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_complete_out_of_memory(conf: str) -> None:
    run(
        """
        seen = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *a: seen.append(a))
        x = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
            raise SystemExit("no error")
        except torch.cuda.OutOfMemoryError as error:
            assert str(error).startswith("CUDA out of memory. Tried to allocate 50.00 MiB"), error
        assert len(seen) == 1 and seen[0][1] == 50 << 20
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del x
        y = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        try:
            torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
            raise SystemExit("no error")
        except torch.cuda.OutOfMemoryError as error:
            assert "memory fraction" in str(error)
        """,
        MYBACKEND_STANDIN_CAPACITY=str(64 << 20),
        PYTORCH_ALLOC_CONF=conf,
    )


def test_complete_streams_and_pools() -> None:
    run(
        """
        x = torch.empty(1000, device="cuda"); place = x.data_ptr()
        side = torch.cuda.Stream()
        x.record_stream(side); del x
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == 4096
        y = torch.empty(1000, device="cuda"); assert y.data_ptr() != place
        st.standin_advance(side.cuda_stream)
        z = torch.empty(1000, device="cuda"); assert z.data_ptr() == place
        with torch.cuda.stream(side):
            w = torch.empty(1000, device="cuda")
        assert [s["stream"] for s in torch.cuda.memory_snapshot()] == [0, side.cuda_stream]

        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            p = torch.empty(1000, device="cuda")
        assert len(pool.snapshot()) == 1 and pool.snapshot()[0]["segment_pool_id"] == pool.id
        assert pool.use_count() == 1
        assert torch.cuda.memory_stats()["segment.all.current"] == 3
        del p, pool
        torch.cuda.empty_cache()
        assert torch.cuda.memory_stats()["segment.all.current"] == 2
        own = torch.cuda.MemPool(mybackend.cuda.pluggable_allocator().allocator())
        try:
            with torch.cuda.use_mem_pool(own):
                torch.empty(1000, device="cuda")
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "the allocator that it belongs to" in str(error), error
        assert torch.cuda.memory_stats()["segment.all.current"] == 2
        """,
        MYBACKEND_STANDIN_LAZY="1",
    )


POOL_ALLOCATOR = """
#include <stdlib.h>
#include <sys/types.h>
static int mallocs = 0, frees = 0, fail = 0;
void* pool_malloc(ssize_t size, int device, void* stream) {
  if (fail) return 0;
  ++mallocs;
  return aligned_alloc(2 << 20, (size + (2 << 20) - 1) >> 21 << 21);
}
void pool_free(void* ptr, ssize_t size, int device, void* stream) { ++frees; free(ptr); }
int pool_mallocs(void) { return mallocs; }
int pool_frees(void) { return frees; }
void pool_fail(int on) { fail = on; }
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_pools_with_an_allocator_of_their_own(conf: str, tmp_path: Path) -> None:
    """Counts, statistics and the snapshot's shape are the native allocator's."""
    (tmp_path / "pool.c").write_text(POOL_ALLOCATOR)
    library = tmp_path / "pool.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "pool.c")], check=True)
    code = f"""
        import ctypes, json, gc
        functions = ctypes.CDLL({str(library)!r})
        plugged = torch.cuda.memory.CUDAPluggableAllocator({str(library)!r}, "pool_malloc", "pool_free")
        pool = torch.cuda.MemPool(plugged.allocator())
        counts = lambda: (functions.pool_mallocs(), functions.pool_frees())
        out = []
        outside = torch.empty(1000, device="cuda"); out.append(counts())
        with torch.cuda.use_mem_pool(pool):
            small = [torch.empty(1000 * i, device="cuda") for i in range(1, 5)]
            large = torch.empty(3 << 20, device="cuda"); out.append(counts())
            del small[1]
            again = torch.empty(2000, device="cuda"); out.append(counts())
        out.append([[(b["size"], b["state"]) for b in s["blocks"]] for s in pool.snapshot()])
        out.append([s["is_expandable"] for s in pool.snapshot()])
        with torch.cuda.use_mem_pool(pool):
            functions.pool_fail(1)
            try:
                torch.empty(30 << 20, device="cuda")
                raise SystemExit("no error")
            except torch.cuda.OutOfMemoryError:
                pass
            functions.pool_fail(0)
        keep = ("allocated_bytes", "reserved_bytes", "segment", "active", "num_ooms", "num_alloc_retries", "num_device")
        stats = torch.cuda.memory_stats()
        out.append({{k: v for k, v in stats.items() if k.startswith(keep) and "all" in k or k.startswith("num_")}})
        del small, large, again, pool; gc.collect()
        torch.cuda.empty_cache()
        out.append(counts()); out.append(torch.cuda.memory_stats()["segment.all.current"])
        print(json.dumps(out))
    """
    native = run(code, NATIVE, PYTORCH_CUDA_ALLOC_CONF=conf)
    ours = run(code, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert json.loads(ours.splitlines()[-1]) == json.loads(native.splitlines()[-1])


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_complete_checkpoints(conf: str) -> None:
    """What graph trees do: note a pool's live blocks, go on, and come back to them."""
    run(
        """
        from torch._C import _cuda_beginAllocateCurrentThreadToPool as begin, _cuda_endAllocateToPool as end
        id = torch.cuda.graph_pool_handle()
        def in_pool(function):
            begin(0, id)
            try: return function()
            finally: end(0, id)
        keep = torch.empty(100, device="cuda")                                 # the default pool is untouched
        a, b, c = in_pool(lambda: [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (3000, 700, 5 << 20)])
        places = [t.data_ptr() for t in (a, b, c)]
        del b
        state = torch._C._cuda_getCheckpointState(0, id)
        assert torch._C._cuda_checkPoolLiveAllocations(0, id, {places[0], places[2]})
        assert not torch._C._cuda_checkPoolLiveAllocations(0, id, {places[0]})
        before = torch.cuda.memory_stats()
        more = in_pool(lambda: [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (700, 100, 3 << 20)])
        late = [t.data_ptr() for t in more]
        stale = [t.untyped_storage()._cdata for t in more]
        old = [t.untyped_storage()._cdata for t in (a, c)]
        torch._C._cuda_setCheckpointPoolState(0, state, stale + old, [])
        assert torch._C._cuda_checkPoolLiveAllocations(0, id, {places[0], places[2]})
        after = torch.cuda.memory_stats()
        for key in before:
            if key.endswith(".current"):
                assert before[key] == after[key], (key, before[key], after[key])
        again = in_pool(lambda: torch.empty(700, dtype=torch.uint8, device="cuda"))
        assert again.data_ptr() == places[1]
        """,
        PYTORCH_ALLOC_CONF=conf,
    )


@pytest.mark.parametrize("swap", [PLAIN, COMPLETE], ids=["plain", "complete"])
def test_training_and_compiling_under_the_swap_in(swap: str) -> None:
    run(
        f"""
        sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
        import standin_kernels; standin_kernels.install()
        torch.manual_seed(0)
        host = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        x = torch.randn(4, 5)
        import copy
        results = []
        for model, data in ((host, x), (copy.deepcopy(host).cuda(), x.cuda())):
            optimizer = torch.optim.AdamW(model.parameters())
            for compiled in (model, torch.compile(model, backend="aot_eager")):
                loss = compiled(data).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([p.detach().cpu() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results))
        del optimizer, model, compiled, loss, data
        torch._dynamo.reset()
        gc.collect()
        assert mybackend.cuda.memory_stats()["allocated_bytes.all.current"] == 0
        """,
        swap,
    )


SHARING = """
import ctypes, os, torch
import torch.multiprocessing as mp
import mybackend
mybackend.cuda.install()

def child(tensors, back):
    x, y, whole = tensors.get(), tensors.get(), tensors.get()
    back.put((x.device.type, x.cpu().tolist(), y.cpu().tolist(), whole[-3:].cpu().tolist()))
    x.copy_(torch.arange(100, 110.))                 # seen by the other process
    back.put(torch.cuda.memory_allocated())
    del x, y, whole
    back.put("dropped")

def main(report):
    context = mp.get_context("spawn")
    tensors, back = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(tensors, back))
    process.start()
    base = torch.arange(1000.).to("cuda")
    filler = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(30)]
    whole = torch.arange(5 << 20, dtype=torch.int32).to("cuda")     # of several pages
    x, y = base[10:20], base[500:502]
    for t in (x, y, whole):
        tensors.put(t)
    assert back.get(timeout=60) == ("cuda", list(range(10, 20)), [500, 501], list(range((5 << 20) - 3, 5 << 20)))
    assert back.get(timeout=60) == 0                           # nothing was allocated for them there
    assert back.get(timeout=60) == "dropped"
    process.join()
    assert process.exitcode == 0
    assert base[10:20].cpu().tolist() == list(range(100, 110)) and base[9].item() == 9
    report["done"] = True
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_tensors_for_another_process(conf: str, tmp_path: Path) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    run(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import sharing
        report = {{}}
        sharing.main(report)
        assert report["done"]
        files = len(os.listdir("/proc/self/fd"))
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
        assert st.standin_used_bytes(0) == 0
        # The descriptors of the pages went with them.
        assert not {bool(conf)} or len(os.listdir("/proc/self/fd")) < files
        """,
        MYBACKEND_ALLOC_CONF=conf,
        MYBACKEND_STANDIN_SHARED="1",
    )


def test_a_handle_of_an_ended_process_is_refused() -> None:
    run(
        """
        x = torch.arange(10.).to("cuda")
        device, handle, *rest = x.untyped_storage()._share_cuda_()
        assert b"mybackend:cuda:pages:1:" in handle
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        at = handle.index(b":1:") + 3
        gone = handle[:at] + pid.to_bytes(4, "little") + handle[at + 4:]
        for broken, words in ((gone, "cannot be opened"), (handle[:at + 10], "broken handle"), (b"\\x00nonsense", "without mybackend.cuda.install()")):
            try:
                torch.UntypedStorage._new_shared_cuda(device, broken, *rest)
                raise SystemExit("no error")
            except (RuntimeError, ValueError) as error:
                assert words in str(error), error
        """,
        MYBACKEND_ALLOC_CONF="expandable_segments:True",
    )


def test_another_device_may_use_expandable_segments() -> None:
    run(
        """
        st.standin_accessor_count.argtypes = [ctypes.c_void_p]
        before = torch.empty(30 << 20, dtype=torch.uint8, device="cuda:0")
        x = torch.arange(6.).to("cuda:1")
        assert st.standin_accessor_count(before.data_ptr()) == 1 == st.standin_accessor_count(x.data_ptr())
        y = x.to("cuda:0")                              # device 1 copies: torch lets it reach device 0
        assert y.cpu().tolist() == list(range(6))
        later = torch.empty(60 << 20, dtype=torch.uint8, device="cuda:0")
        for tensor in (before, y, later):
            assert st.standin_accessor_count(tensor.data_ptr()) == 2
        assert st.standin_accessor_count(x.data_ptr()) == 1
        """,
        MYBACKEND_ALLOC_CONF="expandable_segments:True",
    )


def test_complete_history_extras() -> None:
    run(
        """
        torch.cuda.memory._record_memory_history(stacks="python", skip_actions=["free_requested"])
        torch.cuda.memory._set_memory_metadata("phase one")
        x = torch.empty(10, device="cuda")
        assert torch.cuda.memory._get_memory_metadata() == "phase one"
        torch.cuda.memory._set_memory_metadata("")
        assert torch._C._cuda_memoryMetadataSupported()
        torch.cuda.memory._annotate_tensor(x, "weights")
        del x
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        assert trace[1]["user_metadata"] == "phase one" and trace[0]["user_metadata"] == "phase one"
        assert [e["action"] for e in trace] == ["segment_alloc", "alloc", "annotate", "free_completed"]
        assert trace[2]["user_metadata"] == "weights" and trace[2]["addr"] == trace[1]["addr"]
        """
    )


def test_what_cannot_work_says_so() -> None:
    # after torch.cuda was initialized
    run(
        """
        torch.empty(1, device="cuda")
        import mybackend
        try:
            mybackend.cuda.install()
            raise SystemExit("no error")
        except RuntimeError as error:
            assert "already initialized" in str(error)
        assert not mybackend.cuda.installed() and torch.cuda.memory.get_allocator_backend() == "native"
        """,
        NATIVE,
    )
    # host memory
    run(
        """
        import mybackend
        try:
            mybackend.cuda.install()
            raise SystemExit("no error")
        except ValueError as error:
            assert "backend:pool is host memory" in str(error)
        torch.empty(1, device="cuda")
        """,
        NATIVE,
        MYBACKEND_ALLOC_CONF="backend:pool",
    )
    # no driver
    for swap in ("mybackend.cuda.install()", "mybackend.cuda.pluggable_allocator()"):
        run(
            f"""
            import mybackend
            try:
                {swap}
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "no CUDA driver: libcuda.so.1 cannot be loaded" in str(error), error
            assert mybackend.config.explain("driver")
            """,
            "",
            standin=False,
        )


@pytest.mark.parametrize("swap", [PLAIN, COMPLETE], ids=["plain", "complete"])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_every_call_fails_once(swap: str, conf: str) -> None:
    run(
        """
        calls = ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease",
                 "cuMemAddressReserve", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize",
                 "cuStreamSynchronize", "cuCtxGetCurrent", "cuMemGetInfo_v2"]
        torch.empty(1, device="cuda")
        side = torch.cuda.Stream()
        failed = 0
        for call in calls:
            for result in (2, 719):
                st.standin_fail(call.encode(), 1, result)
                try:
                    x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
                    x.record_stream(side); del x
                    y = torch.empty(64 << 20, dtype=torch.uint8, device="cuda"); del y
                    torch.cuda.empty_cache()
                except RuntimeError as error:
                    failed += 1
                    assert "719" in str(error) or "out of memory" in str(error).lower() or "CUDA error" in str(error), error
                st.standin_fail(call.encode(), 0, 0)
                st.standin_advance(side.cuda_stream)
                gc.collect()
                stats = mybackend.cuda.memory_stats()
                x = None
                torch.cuda.empty_cache()
        assert failed >= 1, failed
        stats = mybackend.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == 0, stats
        torch.cuda.empty_cache()
        assert st.standin_used_bytes(0) == 0 == mybackend.cuda.memory_stats()["reserved_bytes.all.current"], st.standin_used_bytes(0)
        """,
        swap,
        MYBACKEND_STANDIN_LAZY="1",
        PYTORCH_ALLOC_CONF=conf,
    )


# --- Beside the native allocator -----------------------------------------------------------------

SCRIPT = """
import random
random.seed(3)
torch.cuda.memory._record_memory_history(stacks="python") if HISTORY else None
side = torch.cuda.Stream(); live = []; pool = torch.cuda.MemPool()
for step in range(3000):
    what = random.random()
    if what < 0.5 or not live:
        size = int(2 ** random.uniform(0, 25))
        try:
            if what < 0.05:
                with torch.cuda.stream(side): live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            elif what < 0.1:
                with torch.cuda.use_mem_pool(pool): live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            else:
                live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            live.clear()
    elif what < 0.93:
        live.pop(random.randrange(len(live)))
    elif what < 0.97:
        random.choice(live).record_stream(side)
    elif what < 0.98:
        torch.cuda.synchronize()
    elif what < 0.985:
        torch.cuda.empty_cache()
    elif what < 0.99:
        torch.cuda.reset_peak_memory_stats()
stats = torch.cuda.memory_stats()
snapshot = torch.cuda.memory._snapshot()
segments = [[s["address"], s["total_size"], s["stream"] != 0, s["segment_type"], s["segment_pool_id"],
             [[b["size"], b["requested_size"], b["state"]] for b in s["blocks"]]] for s in snapshot["segments"]]
actions = [[e["action"], e.get("addr"), e["size"], e["stream"] != 0] for e in snapshot["device_traces"][0]]
print(json.dumps([stats, segments, actions, snapshot["allocator_settings"]]))
"""


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:24",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.6",
    ],
)
@pytest.mark.parametrize("capacity", [8 * GIB, 300 << 20])
def test_a_program_leaves_the_same_statistics(conf: str, capacity: int) -> None:
    results = []
    for swap in (NATIVE, COMPLETE):
        out = run(
            "HISTORY = True\n" + SCRIPT,
            swap,
            PYTORCH_ALLOC_CONF=conf,
            MYBACKEND_STANDIN_CAPACITY=str(capacity),
            MYBACKEND_STANDIN_LAZY="1",
        )
        results.append(json.loads(out))
    native, ours = results
    assert native[0] == ours[0], {k: (v, ours[0].get(k)) for k, v in native[0].items() if ours[0].get(k) != v}
    assert native[1] == ours[1]
    assert native[2] == ours[2]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:128,roundup_power2_divisions:8"])
@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name.split(".")[0])
def test_traces(trace: Path, conf: str, tmp_path: Path) -> None:
    """Both allocators, the same trace, read through the same interface of torch."""
    import gzip

    plain = tmp_path / "trace"
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    results = []
    for swap in (NATIVE, COMPLETE):
        out = run(
            f"""
            torch.cuda.init()
            replay = ctypes.CDLL({FOLDER + "/libreplay.so"!r})
            replay.replay_trace.restype = ctypes.c_char_p
            print(replay.replay_trace({str(plain)!r}).decode())
            """,
            swap,
            PYTORCH_ALLOC_CONF=conf,
            MYBACKEND_STANDIN_CAPACITY=str(64 * GIB),
            MYBACKEND_STANDIN_LAZY="1",
        )
        results.append(json.loads(out))
    native, ours = results
    assert native["stats"] == ours["stats"], {
        k: (v, ours["stats"].get(k)) for k, v in native["stats"].items() if ours["stats"].get(k) != v
    }
    assert native["oom"] == ours["oom"]
    assert native["segments"] == ours["segments"]
    assert len(native["actions"]) == len(ours["actions"])
    assert native["actions"] == ours["actions"]
