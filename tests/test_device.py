"""The device as a whole: names, guard, indices, copies, several devices, autoload."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import mybackend


def test_names() -> None:
    x = torch.ones(2, device="mybackend")
    assert x.device == torch.device("mybackend", 0) and x.is_mybackend and x.device.type == "mybackend"
    assert torch.mybackend.is_available() and torch.mybackend.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("mybackend")
    assert torch.get_device_module("mybackend") is torch.mybackend
    assert torch.tensor([1.0]).mybackend().device.type == "mybackend"
    assert torch.nn.Linear(2, 2).mybackend().weight.is_mybackend
    assert torch.ones(2).untyped_storage().mybackend().device.type == "mybackend"


def test_mirrors_torch_cuda_by_name() -> None:
    for name in [
        "memory_stats",
        "memory_stats_as_nested_dict",
        "memory_summary",
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "empty_cache",
        "mem_get_info",
        "get_device_properties",
        "set_per_process_memory_fraction",
        "synchronize",
        "current_device",
        "set_device",
        "device",
        "device_of",
        "device_count",
        "stream",
        "Stream",
        "Event",
        "current_stream",
        "default_stream",
        "set_stream",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "initial_seed",
        "get_rng_state",
        "set_rng_state",
        "get_rng_state_all",
        "set_rng_state_all",
        "get_device_name",
        "is_initialized",
        "init",
    ]:
        assert hasattr(torch.cuda, name), name
        assert hasattr(torch.mybackend, name), name


@pytest.mark.parametrize("index", [1, 7, 100])
def test_impossible_index(index: int) -> None:
    with pytest.raises(RuntimeError, match=f"invalid device ordinal {index}"):
        torch.ones(2, device=f"mybackend:{index}")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.mybackend.set_device(index)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.mybackend.memory_stats(index)
    assert torch.mybackend.current_device() == 0


def test_wrong_device_arguments() -> None:
    with pytest.raises(ValueError, match="Expected a mybackend device"):
        torch.mybackend.memory_allocated("cpu")
    with pytest.raises(TypeError):
        torch.mybackend.set_device(1.5)


def test_round_trip_and_dtypes() -> None:
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.uint8,
    ):
        x = torch.arange(24).reshape(2, 3, 4).to(dtype)
        y = x.to("mybackend")
        assert y.dtype == dtype and torch.equal(y.cpu(), x)
        assert torch.equal(y.transpose(0, 2).cpu(), x.transpose(0, 2))
        assert torch.equal(y[:, 1:].to(torch.float32).cpu(), x[:, 1:].to(torch.float32)) or dtype.is_complex
    assert torch.equal(torch.ones(3).to("mybackend").to("cpu"), torch.ones(3))


def test_printing() -> None:
    assert repr(torch.arange(3, device="mybackend")) == "tensor([0, 1, 2], device='mybackend:0')"
    assert "mybackend" in repr(torch.nn.Parameter(torch.ones(1, device="mybackend")))


def test_deepcopy_and_pickle() -> None:
    x = torch.randn(3, 4, device="mybackend")
    view = x[1:]
    a, b = copy.deepcopy([x, view])
    assert a.device == x.device and torch.equal(a, x) and a.data_ptr() != x.data_ptr()
    assert b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    c = pickle.loads(pickle.dumps(x))
    assert c.device == x.device and torch.equal(c, x)
    p = copy.deepcopy(torch.nn.Parameter(x))
    assert isinstance(p, torch.nn.Parameter) and p.requires_grad


def test_numpy_conversion_errors_as_on_cuda() -> None:
    x = torch.ones(2, device="mybackend")
    with pytest.raises(TypeError, match=r"can't convert mybackend:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError, match="can't convert mybackend:0 device type tensor to numpy"):
        np.asarray(x)
    assert x.numpy(force=True).tolist() == [1.0, 1.0]
    assert x.tolist() == [1.0, 1.0]


def test_data_assignment_across_devices() -> None:
    t = torch.nn.Parameter(torch.ones(3))
    t.data = torch.full((2,), 5.0, device="mybackend")
    assert t.device.type == "mybackend" and t.tolist() == [5.0, 5.0]
    (t * 2).sum().backward()
    assert t.grad is not None and t.grad.is_mybackend
    t.grad = None
    t.data = torch.zeros(1)
    assert t.device.type == "cpu"
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        t.data = torch.empty(1, device="meta")


def test_module_to_keeps_parameter_objects() -> None:
    model = torch.nn.Linear(3, 3)
    before = list(model.parameters())
    model.to("mybackend")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model.weight.is_mybackend


def test_dlpack_both_ways() -> None:
    x = torch.arange(6.0, device="mybackend").reshape(2, 3)
    assert x.__dlpack_device__() == (12, 0)
    y = torch.from_dlpack(x)
    assert y.device == x.device and y.data_ptr() == x.data_ptr() and torch.equal(x, y)
    z = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x.t()))
    assert z.device == x.device and z.shape == (3, 2) and z.stride() == (1, 3)
    del x
    assert y[1, 2].item() == 5.0


def test_tensors_of_two_devices_are_refused() -> None:
    x, c = torch.ones(3, device="mybackend"), torch.ones(3)
    for wrong in (
        lambda: x + c,
        lambda: c + x,
        lambda: torch.add(x, c),
        lambda: torch.hypot(x, c),
        lambda: torch.mm(x[None], c[:, None]),
        lambda: x.add_(c),
        lambda: torch.cat([x, c]),
        lambda: torch.add(x, x, out=c),
        lambda: torch.nn.functional.linear(x, c[None]),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()
    assert torch.equal(x.cpu(), torch.ones(3)) and torch.equal(c, torch.ones(3))
    assert torch.equal((x + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.tensor(1.0).add_(x[0])


def test_cpu_indices_are_allowed_as_on_cuda() -> None:
    x = torch.arange(5.0, device="mybackend")
    assert x[torch.tensor([3, 1])].tolist() == [3.0, 1.0]
    x[torch.tensor([0])] = torch.tensor(9.0)
    assert x[0].item() == 9.0


def test_current_stream_and_guard() -> None:
    stream = torch.mybackend.current_stream()
    assert stream.device == torch.device("mybackend", 0)
    with torch.mybackend.device(0) as d:
        assert d.idx == 0 and torch.mybackend.current_device() == 0
    torch.mybackend.synchronize()
    torch.accelerator.synchronize()
    assert torch.mybackend.get_device_properties().total_memory > 0
    assert torch.mybackend.get_device_name().startswith("mybackend")


def test_several_devices(run_python) -> None:
    run_python(
        """
        import torch, copy
        assert torch.mybackend.device_count() == 3
        x = torch.arange(4., device="mybackend:2")
        y = x.to("mybackend:1")
        assert y.device.index == 1 and y.tolist() == x.tolist() and y.data_ptr() != x.data_ptr()
        z = torch.empty(4, device="mybackend:0"); z.copy_(y); assert z.tolist() == x.tolist()
        assert [torch.mybackend.memory_allocated(i) for i in range(3)] == [512, 512, 512]
        try: x + y
        except RuntimeError as e: assert "at least two devices, mybackend:2 and mybackend:1" in str(e), e
        else: raise SystemExit("no error")
        with torch.mybackend.device(1):
            assert torch.empty(1, device="mybackend").device.index == 1
            assert (x + x).device.index == 2
        assert torch.mybackend.current_device() == 0
        torch.mybackend.manual_seed_all(3)
        a = torch.rand(3, device="mybackend:0"); b = torch.rand(3, device="mybackend:2")
        assert torch.equal(a.cpu(), b.cpu())
        lin = torch.nn.Linear(4, 4).to("mybackend:2"); lin(x).sum().backward(); assert lin.weight.grad.device.index == 2
        assert torch.load(__import__("io").BytesIO((lambda f: (torch.save(x, f), f.getvalue())[1])(__import__("io").BytesIO())), map_location={"mybackend:2": "mybackend:1"}).device.index == 1
        del a, b, x, y, z, lin
        """,
        MYBACKEND_DEVICE_COUNT="3",
    )


def test_a_lazy_clones_bytes_come_from_its_device(run_python) -> None:
    run_python(
        """
        import torch
        allocated = torch.mybackend.memory_allocated
        x = torch.arange(100.0, device="mybackend:1")
        writes = [lambda t: t.add_(1), lambda t: t.sinh_(), lambda t: torch._foreach_mul_([t], 2), lambda t: t[:50].copy_(t[50:])]
        for count, write in enumerate(writes, 1):
            clone = x._lazy_clone()
            write(clone)
            assert clone.untyped_storage().device == clone.device == torch.device("mybackend:1")
            assert (allocated(0), allocated(1)) == (0, 1024) and torch.mybackend.current_device() == 0
        """,
        MYBACKEND_DEVICE_COUNT="2",
    )


def test_bad_device_count(run_python) -> None:
    done = run_python("import torch\ntorch.ones(1, device='mybackend')", expect=1, MYBACKEND_DEVICE_COUNT="many")
    assert "MYBACKEND_DEVICE_COUNT: bad value 'many'" in done.stderr


def test_autoload(run_python) -> None:
    assert run_python("import torch; print(hasattr(torch, 'mybackend'))").stdout.strip() == "True"
    assert (
        run_python("import torch; print(hasattr(torch, 'mybackend'))", MYBACKEND_AUTOLOAD="0").stdout.strip() == "False"
    )
    assert (
        run_python(
            "import torch, sys; print('mybackend' in sys.modules)", TORCH_DEVICE_BACKEND_AUTOLOAD="0"
        ).stdout.strip()
        == "False"
    )
    assert (
        run_python("import mybackend, torch; print(torch.ones(1).mybackend().device)").stdout.strip() == "mybackend:0"
    )


def test_autoload_is_quiet_where_a_gpu_is(run_python) -> None:
    code = """
        import mybackend_autoload as a, sys
        import torch
        assert "mybackend" not in sys.modules
        a.has_gpu = lambda: True
        a.autoload(); assert "mybackend" not in sys.modules
        import os; os.environ["MYBACKEND_AUTOLOAD"] = "1"
        a.autoload(); assert "mybackend" in sys.modules
        """
    run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_where_a_gpu_is_the_device_is_registered_when_asked_for(run_python) -> None:
    code = """
        import mybackend_autoload, os, torch
        torch.version.cuda = torch.version.cuda or "13.0"
        exists = os.path.exists
        os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
        import mybackend
        print(hasattr(torch, "mybackend"), end=" ")
        {ask}
        print(torch.ones(1, device="mybackend").device)
        """
    for ask, registered, environment in (
        ("mybackend.register()", False, {}),
        ("mybackend.config.set('driver:sim')", False, {"MYBACKEND_ALLOC_CONF": "max_split_size_mb:64"}),
        ("", True, {"MYBACKEND_ALLOC_CONF": "driver:sim"}),
        ("", True, {"MYBACKEND_DEVICE": "1"}),
        ("mybackend.register()", False, {"MYBACKEND_DEVICE": "0"}),
        ("", True, {"CUDA_VISIBLE_DEVICES": ""}),
    ):
        environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": "0"} | environment
        done = run_python(code.format(ask=ask), **environment)
        assert done.stdout.split() == [str(registered), "mybackend:0"], (ask, environment)
    assert run_python("import mybackend, torch; print(hasattr(torch, 'mybackend'))", TORCH_DEVICE_BACKEND_AUTOLOAD="0",
                      MYBACKEND_DEVICE="0").stdout.strip() == "False"  # fmt: skip


def test_a_torch_it_was_not_built_for(run_python) -> None:
    done = run_python(
        "import torch\ntorch.__version__ = '2.99.0'\nimport mybackend", expect=1, TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert "was built for torch" in done.stderr and "2.99.0" in done.stderr


def test_another_backend_in_the_way(run_python) -> None:
    done = run_python(
        "import torch\ntorch.utils.rename_privateuse1_backend('other')\nimport mybackend",
        expect=1,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "another backend is loaded as PrivateUse1" in done.stderr


def test_version() -> None:
    assert mybackend.__version__ == "0.1.0"
