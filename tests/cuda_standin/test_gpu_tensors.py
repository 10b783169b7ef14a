"""Tensors of `mybackend` in GPU memory (driver:cuda), on the stand-in driver and runtime. Where a test
needs kernels, they are those of standin_kernels.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin import COMPLETE, FOLDER, NATIVE, PLAIN, run

pytestmark = pytest.mark.skipif(not FOLDER, reason="run by scripts/test_cuda_standin.sh")

HERE = Path(__file__).resolve().parent
DEVICE = 'import mybackend; mybackend.config.set("driver:cuda")'
KERNELS = f"""
import mybackend; mybackend.config.set("driver:cuda")
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import standin_kernels; standin_kernels.install()
"""


def test_tensors_lie_in_gpu_memory_that_is_ours() -> None:
    run(
        """
        x = torch.empty(1000, 1000, device="mybackend")
        assert x.data_ptr() == 0x700000000000 and x.device == torch.device("mybackend:0")
        assert mybackend.cuda.installed() and torch.mybackend.device_count() == 2
        assert torch.mybackend.memory_allocated() == 4_000_256 == torch.cuda.memory_allocated()
        y = torch.arange(10.).to("mybackend")
        x.view(-1)[10:20].copy_(y)
        assert x.view(-1)[10:20].cpu().tolist() == list(range(10))
        assert y[3].item() == 3.0
        z = torch.arange(6).to("mybackend:1")
        assert torch.mybackend.memory_allocated(1) == 512 and st.standin_used_bytes(1) == 2 << 20
        assert z.to("mybackend:0").cpu().tolist() == list(range(6))
        z.untyped_storage().resize_(1024)
        assert z.cpu().tolist() == list(range(6)) and z.untyped_storage().nbytes() == 1024
        assert torch.mybackend.get_device_name() == "stand-in"
        assert torch.mybackend.memory_stats()["allocation.all.current"] == 2
        assert "Allocated memory" in torch.mybackend.memory_summary()
        del x, y, z
        assert torch.mybackend.memory_allocated() == 0 == torch.mybackend.memory_allocated(1)
        torch.mybackend.empty_cache()
        assert st.standin_used_bytes(0) == 0 == st.standin_used_bytes(1)
        assert mybackend._C._copied_output_count() == 0
        """,
        DEVICE,
    )


def test_out_of_memory_explains_itself() -> None:
    run(
        """
        seen = []
        torch.mybackend.attach_out_of_memory_observer(lambda *a: seen.append(a))
        x = torch.empty(30 << 20, dtype=torch.uint8, device="mybackend")
        try:
            torch.empty(100 << 20, dtype=torch.uint8, device="mybackend")
            raise SystemExit("no error")
        except torch.OutOfMemoryError as error:
            assert "Tried to allocate 100.00 MiB" in str(error) and "64.00 MiB" in str(error), error
        assert len(seen) == 1 and torch.mybackend.memory_stats()["num_ooms"] == 1
        assert torch.mybackend.memory_allocated() == 30 << 20
        del x
        assert torch.empty(60 << 20, dtype=torch.uint8, device="mybackend").numel() == 60 << 20
        """,
        DEVICE,
        MYBACKEND_STANDIN_CAPACITY=str(64 << 20),
    )


def test_history_and_snapshot() -> None:
    run(
        """
        torch.mybackend._record_memory_history(stacks="python")
        def deep():
            return torch.empty(3 << 20, dtype=torch.uint8, device="mybackend")
        x = deep()
        snapshot = torch.mybackend._snapshot()
        (entry,) = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
        assert entry["size"] == 3 << 20 and any(f["name"] == "deep" for f in entry["frames"]), entry
        assert snapshot["segments"][0]["blocks"][0]["state"] == "active_allocated"
        """,
        DEVICE,
    )


# --- Kernels -------------------------------------------------------------------------------------


def test_results_are_adopted_and_arguments_keep_their_identity() -> None:
    run(
        """
        torch.manual_seed(1)
        a, b = torch.randn(4, 5), torch.randn(5, 3)
        A, B = a.to("mybackend"), b.to("mybackend")
        C = A @ B                                                   # typed
        assert C.device.type == "mybackend" and torch.equal(C.cpu(), a @ b)
        assert torch.equal(torch.cdist(A, A).cpu(), torch.cdist(a, a))    # boxed
        before, address = torch.mybackend.memory_allocated(), C.data_ptr()
        C.mul_(2).add_(1)
        assert C.data_ptr() == address and torch.equal(C.cpu(), (a @ b).mul_(2).add_(1))
        out = torch.empty(0, device="mybackend")
        assert torch.add(A, 1, out=out) is out and torch.equal(out.cpu(), a + 1)      # resized by the kernel
        view = A.t()[1:3]
        view.zero_()
        a.t()[1:3].zero_()
        assert torch.equal(A.cpu(), a) and torch.equal(A.t().contiguous().cpu(), a.t())
        values, indices = A.max(dim=1)
        assert torch.equal(indices.cpu(), a.max(dim=1).indices) and values.device.type == "mybackend"
        assert [t.shape for t in torch.split(A, 2)] == [t.shape for t in torch.split(a, 2)]
        A[0, 0] = 7.0
        assert A[0, 0].item() == 7.0 and bool((A == A).all())
        assert torch.equal(A[torch.tensor([2, 0])].cpu(), torch.tensor(A.cpu()[[2, 0]]))
        assert torch.equal((A + torch.tensor(2.0)).cpu(), A.cpu() + 2.0)              # a scalar of the CPU
        for wrong in (torch.ones(4, 5), torch.ones(4, 5, device="mybackend:1"), torch.ones(4, 5, device="cuda")):
            try:
                A + wrong
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "Expected all tensors to be on the same device" in str(error), error
        assert standin_kernels.calls["aten::mm"] == 1 and mybackend._C._copied_output_count() == 0
        del A, B, C, out, view, values, indices, wrong
        gc.collect()
        assert torch.mybackend.memory_allocated() == 0, torch.mybackend.memory_allocated()
        """,
        KERNELS,
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer_encoder"])
def test_training_equals_the_cpus_bit_for_bit(model: str, conf: str) -> None:
    run(
        f"""
        import copy, models
        from torch.nn.attention import SDPBackend, sdpa_kernel
        # The stand-in has no cuDNN, and the kernels are the CPU's plain ones.
        torch.backends.cudnn.enabled = torch.backends.mkldnn.enabled = False
        torch.manual_seed(0)
        host, batch, loss_of = models.{model}()
        for module in host.modules():       # CUDA's random numbers are not the CPU's
            if isinstance(module, torch.nn.Dropout):
                module.p = 0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        device = copy.deepcopy(host).to("mybackend")
        def move(x):
            return tuple(map(move, x)) if isinstance(x, tuple) else x.to("mybackend")
        runs = [(m, b, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m, b in ((host, batch), (device, move(batch)))]
        with sdpa_kernel(SDPBackend.MATH):
            for step in range(4):
                losses = []
                for m, b, optimizer in runs:
                    optimizer.zero_grad()
                    loss = loss_of(m, b)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach().cpu())
                assert torch.equal(*losses), (step, losses)
        for p, q in zip(host.parameters(), device.parameters()):
            assert torch.equal(p, q.cpu()) and torch.equal(p.grad, q.grad.cpu())
        assert mybackend._C._copied_output_count() == 0 and len(standin_kernels.calls) > 10
        assert mybackend._C._check_invariants(0) == ""
        del m, b, optimizer, loss, runs, device, p, q
        gc.collect()
        assert torch.mybackend.memory_allocated() == 0, torch.mybackend.memory_allocated()
        """,
        KERNELS,
        MYBACKEND_ALLOC_CONF=f"driver:cuda{',' if conf else ''}{conf}",
    )


def test_recurrent_layers_take_cudas_fused_cell() -> None:
    run(
        """
        torch.backends.cudnn.enabled = torch.backends.mkldnn.enabled = False
        torch.manual_seed(2)
        host = torch.nn.LSTM(5, 7, num_layers=2, batch_first=True, bidirectional=True)
        import copy
        device = copy.deepcopy(host).to("mybackend")
        x = torch.randn(3, 6, 5)
        results = []
        for m, data in ((host, x), (device, x.to("mybackend"))):
            out, (h, c) = m(data)
            (out.square().sum() + h.sum() + c.sum()).backward()
            results.append([t.cpu() for t in (out.detach(), h.detach(), c.detach(), *[p.grad for p in m.parameters()])])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)
        assert standin_kernels.calls["aten::_thnn_fused_lstm_cell"] == 24 and standin_kernels.calls["aten::_thnn_fused_lstm_cell_backward_impl"] == 24
        assert mybackend._C._copied_output_count() == 0
        """,
        KERNELS,
    )


def test_kernels_run_on_our_device_and_stream_and_leave_torch_cudas() -> None:
    run(
        """
        places = []
        def launched(x):
            places.append((torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream))
            return x.clone()
        torch.library.define("standin::where", "(Tensor x) -> Tensor")
        torch.library.impl("standin::where", "CUDA", launched)
        x = torch.ones(3).to("mybackend:1")
        torch.ops.standin.where(x)
        side = torch.mybackend.Stream("mybackend:1")
        with side:
            y = torch.ops.standin.where(x)
            assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(1).cuda_stream == 0
        theirs = torch.cuda.Stream(1)
        with torch.cuda.stream(theirs):
            torch.ops.standin.where(x)
            assert torch.cuda.current_stream(1) == theirs and torch.cuda.current_device() == 1
        assert places == [(1, 0), (1, side.native_handle if hasattr(side, "native_handle") else side.stream_id), (1, 0)], places
        (block,) = [b for s in torch.mybackend.memory_snapshot("mybackend:1") if s["stream"] == places[1][1] for b in s["blocks"]
                    if b["state"] == "active_allocated"]
        assert block["address"] == y.data_ptr()         # made on the side stream, kept for it
        """,
        KERNELS,
    )


def test_a_block_used_by_another_stream_waits_for_it() -> None:
    run(
        """
        x = torch.empty(1000, device="mybackend")
        address = x.data_ptr()
        side = torch.mybackend.Stream()
        torch.mybackend.current_stream().synchronize()
        event = torch.mybackend.Event()
        event.record(side)
        x.record_stream(side)
        del x
        y = torch.empty(1000, device="mybackend")
        assert y.data_ptr() != address                  # the event of the side stream is not complete
        side.synchronize()
        del y
        z = [torch.empty(1000, device="mybackend") for _ in range(2)]
        assert address in [t.data_ptr() for t in z]
        """,
        DEVICE,
        MYBACKEND_STANDIN_LAZY="1",
    )


def test_copies_between_torch_cudas_tensors_and_ours() -> None:
    run(
        """
        x = torch.arange(6.).to("mybackend")
        c = x.to("cuda")
        assert c.device.type == "cuda" and c.cpu().tolist() == list(range(6))
        before = st.standin_calls(b"cuStreamWaitEvent")
        with torch.cuda.stream(torch.cuda.Stream()):
            x.copy_(c)
        assert st.standin_calls(b"cuStreamWaitEvent") == before + 2        # ours after theirs, theirs after ours
        d = torch.arange(6, 12.).to("cuda:1")
        x.copy_(d)
        assert x.cpu().tolist() == list(range(6, 12))
        assert c.data_ptr() != x.data_ptr() and mybackend.memory.memory_allocated() == 1024
        """,
        DEVICE,
    )


def test_asynchronous_copies_from_pinned_memory() -> None:
    run(
        """
        host = torch.arange(1000.).pin_memory()
        assert host.is_pinned() and st.standin_calls(b"cuMemHostRegister_v2") == 1
        x = host.to("mybackend", non_blocking=True)
        back = torch.empty(1000).pin_memory()
        assert st.standin_calls(b"cuMemHostRegister_v2") == 2
        back.copy_(x, non_blocking=True)
        event = torch.mybackend.Event(); event.record(); event.synchronize()
        assert torch.equal(back, host)
        address = back.data_ptr()
        del back
        torch.mybackend.synchronize()
        assert torch.empty(1000).pin_memory().data_ptr() == address
        del host
        torch.mybackend.empty_host_cache()
        assert st.standin_calls(b"cuMemHostUnregister") == 2
        assert torch.mybackend.host_memory_stats()["allocated_bytes.current"] == 0
        """,
        DEVICE,
    )


def test_generators_are_cudas() -> None:
    run(
        """
        torch.manual_seed(5)                            # before the devices start
        assert st.standin_calls(b"cuInit") == 0         # and starts nothing
        x = torch.empty(4, device="mybackend").uniform_()
        assert standin_kernels.generators[-1].device == torch.device("cuda:0") and standin_kernels.generators[-1].initial_seed() == 5
        assert torch.equal(x.cpu(), torch.empty(4).uniform_(generator=torch.Generator().manual_seed(5)))
        assert torch.mybackend.initial_seed() == 5 == torch.cuda.initial_seed()
        own = torch.Generator("mybackend").manual_seed(9)
        torch.randn(3, generator=own, device="mybackend")
        assert standin_kernels.generators[-1].initial_seed() == 9 and standin_kernels.generators[-1].device.type == "cuda"
        state = torch.mybackend.get_rng_state()
        torch.mybackend.manual_seed(11)
        assert torch.cuda.initial_seed() == 11
        torch.mybackend.set_rng_state(state)
        assert torch.cuda.initial_seed() == 5
        own.set_offset(8)
        assert own.get_offset() == 8
        layer = torch.nn.Dropout(0.5)
        layer(torch.ones(8, device="mybackend"))
        assert standin_kernels.calls["aten::native_dropout"] == 1
        """,
        KERNELS,
    )


def test_autocast_and_scaler() -> None:
    run(
        """
        a = torch.randn(4, 4).to("mybackend").requires_grad_()
        with torch.autocast("mybackend", dtype=torch.bfloat16):
            loss = (a @ a).float().sum()
        assert (a @ a).dtype == torch.float32 and standin_kernels.calls["aten::mm"] == 2
        scaler = torch.amp.GradScaler("mybackend", init_scale=8.0)
        optimizer = torch.optim.SGD([a], lr=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer); scaler.update()
        assert scaler.get_scale() == 8.0 and torch.isfinite(a.cpu()).all()
        """,
        KERNELS,
    )


def test_the_device_is_registered_only_when_asked_for() -> None:
    """Beside a registered device, PyTorch cannot run the backward of CUDA tensors."""
    run(
        """
        import mybackend
        mybackend.cuda.install()
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        mybackend.config.set("max_split_size_mb:64")
        assert torch.accelerator.current_accelerator().type == "cuda" and not hasattr(torch, "mybackend")
        mybackend.config.set("driver:cuda")             # names the device
        assert torch.empty(3, device="mybackend").device.type == "mybackend"
        """,
        NATIVE,
    )
    for function in ("install()", "pluggable_allocator()"):
        run(
            f"""
            import mybackend
            assert torch.mybackend.device_count() == 2
            try:
                mybackend.cuda.{function}
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "cannot run the backward of CUDA tensors" in str(error) and "MYBACKEND_DEVICE=0" in str(error), error
            """,
            NATIVE,
            MYBACKEND_DEVICE="1",
        )
    for conf, registers in (("", False), ("max_split_size_mb:64", False), ("driver:cuda", True), ("driver:sim", True)):
        run(
            f"""
            import mybackend_autoload
            mybackend_autoload.has_gpu = lambda: True
            import mybackend
            assert hasattr(torch, "mybackend") == {registers}
            mybackend.register()
            assert torch.mybackend.device_count() in (1, 2)
            """,
            NATIVE,
            MYBACKEND_DEVICE="",
            MYBACKEND_ALLOC_CONF=conf,
        )


# --- What cannot be ------------------------------------------------------------------------------


def test_host_memory_is_refused_by_name() -> None:
    run(
        """
        import tempfile
        x = torch.ones(4).to("mybackend")
        def refused(action, *words):
            try:
                action()
                raise SystemExit(f"no error: {words}")
            except NotImplementedError as error:
                assert all(w in str(error) for w in words), error
        def with_kind(kind):
            with mybackend.memory.use(kind):
                torch.empty(4, device="mybackend")
        for kind in ("pool", "mmap"):
            refused(lambda: with_kind(kind), f"backend:{kind} is host memory")
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(64)); file.flush()
            refused(lambda: torch.from_file(file.name, size=4, device="mybackend"), "needs host memory", "driver:cuda")
        refused(lambda: x.share_memory_(), "needs host memory")
        assert x.cpu().tolist() == [1, 1, 1, 1] and torch.mybackend.memory_allocated() == 512
        """,
        DEVICE,
    )


@pytest.mark.parametrize("swap", [NATIVE, PLAIN], ids=["native", "plain"])
def test_a_used_torch_cuda_cannot_lend(swap: str) -> None:
    run(
        """
        kept = torch.empty(3, device="cuda")
        import mybackend
        mybackend.config.set("driver:cuda")
        for attempt in range(2):
            try:
                torch.empty(3, device="mybackend")
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "driver:cuda: mybackend.cuda.install: torch.cuda is already initialized" in str(error), error
        assert not torch.mybackend.is_initialized() and torch.empty(3, device="cuda").numel() == 3
        mybackend.config.set("driver:sim")
        assert torch.ones(3, device="mybackend").sum().item() == 3
        """,
        swap,
    )


def test_after_install_by_hand_and_use_of_torch_cuda() -> None:
    run(
        """
        c = torch.empty(3, device="cuda")
        x = torch.empty(3, device="mybackend")
        assert torch.cuda.memory_allocated() == 1024 == torch.mybackend.memory_allocated()
        """,
        COMPLETE + '; mybackend.config.set("driver:cuda")',
    )


AUTO = "import mybackend; mybackend.register()\n"


def test_auto_takes_the_gpu_that_nobody_uses() -> None:
    run("assert torch.empty(3, device='mybackend').data_ptr() >= 0x700000000000", AUTO)
    run(
        """
        kept = torch.empty(3, device="cuda")
        assert torch.ones(3, device="mybackend").sum().item() == 3 and mybackend._C._driver_name() == "sim"
        """,
        AUTO,
    )
    run("assert torch.ones(3, device='mybackend').sum().item() == 3", AUTO, standin=False)


def test_a_forked_child_says_so() -> None:
    run(
        """
        torch.manual_seed(3)
        x = torch.ones(3).to("mybackend")
        pid = os.fork()
        if pid == 0:
            torch.manual_seed(4)                        # as a DataLoader's worker does
            assert torch.arange(4).sum().item() == 6
            try:
                torch.empty(3, device="mybackend")
            except RuntimeError as error:
                assert "Cannot re-initialize" in str(error), error
                sys.exit(0)                             # with all that is done at exit
            sys.exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert x.cpu().tolist() == [1, 1, 1]
        """,
        DEVICE,
    )


def test_exit_with_living_tensors_is_quiet() -> None:
    assert run("x = torch.ones(3).to('mybackend'); print('ok')", DEVICE).strip() == "ok"
