"""Storages: their own tensors, views, sizes, lifetimes and files."""

from __future__ import annotations

import gc
import io

import pytest
import torch


def test_untyped_storage() -> None:
    s = torch.UntypedStorage(16, device="mybackend")
    assert s.device == torch.device("mybackend", 0) and s.nbytes() == 16 and len(s) == 16
    s.fill_(7)
    assert s.tolist() == [7] * 16
    s[3] = 9
    assert s[3] == 9
    part = s[2:6]
    assert part.tolist() == [7, 9, 7, 7] and part.data_ptr() == s.data_ptr() + 2
    part.fill_(1)
    assert s.tolist()[:7] == [7, 7, 1, 1, 1, 1, 7]
    cpu = s.cpu()
    assert cpu.device.type == "cpu" and cpu.tolist() == s.tolist()
    t = torch.UntypedStorage(16, device="mybackend")
    t.copy_(cpu)
    assert t.tolist() == s.tolist()
    del s
    gc.collect()
    assert part.tolist() == [1, 1, 1, 1]


def test_resize() -> None:
    s = torch.UntypedStorage(8, device="mybackend")
    s.fill_(3)
    s.resize_(20)
    assert s.nbytes() == 20 and s.tolist()[:8] == [3] * 8
    s.resize_(4)
    assert s.tolist() == [3] * 4
    s.resize_(0)
    assert s.nbytes() == 0
    x = torch.arange(4.0, device="mybackend")
    base = x.untyped_storage()
    x.resize_(3, 5)
    assert x.shape == (3, 5) and x.flatten()[:4].tolist() == [0, 1, 2, 3] and base.data_ptr() == x.data_ptr()


def test_a_resize_beyond_capacity_changes_nothing() -> None:
    x = torch.arange(4.0, device="mybackend")
    with pytest.raises(torch.OutOfMemoryError):
        x.resize_(1 << 48)
    assert x.tolist() == [0, 1, 2, 3] and x.untyped_storage().nbytes() == 16
    s = torch.UntypedStorage(8, device="mybackend")
    with pytest.raises(torch.OutOfMemoryError):
        s.resize_(1 << 50)
    assert s.nbytes() == 8


@pytest.mark.parametrize("size", [-1, -(1 << 40)])
def test_negative_sizes(size: int) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        torch.empty(size, device="mybackend")
    with pytest.raises((RuntimeError, ValueError)):
        torch.UntypedStorage(size, device="mybackend")


def test_overflowing_sizes() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(1 << 40, 1 << 40, device="mybackend")
    with pytest.raises(torch.OutOfMemoryError, match="1EB"):
        torch.empty(1 << 60, dtype=torch.uint8, device="mybackend")


def test_views_outlive_their_base() -> None:
    base = torch.arange(12.0, device="mybackend").view(3, 4)
    row, column, strided = base[1], base[:, 2], base.as_strided((2, 2), (5, 1), 1)
    pointer = base.data_ptr()
    del base
    gc.collect()
    assert row.tolist() == [4, 5, 6, 7] and column.tolist() == [2, 6, 10] and strided.tolist() == [[1, 2], [6, 7]]
    assert row.untyped_storage().data_ptr() == pointer
    row.zero_()
    assert column.tolist() == [2, 0, 10]


def test_views_from_kernels_share_the_base() -> None:
    x = torch.randn(4, 6, dtype=torch.complex64, device="mybackend")
    for view in (
        torch.view_as_real(x),
        x.unfold(1, 2, 2),
        x.diagonal(),
        x.view(torch.float32),
        x.expand(2, 4, 6),
        x.real,
        x.imag,
        x.mT,
        x.unflatten(1, (2, 3)),
    ):
        assert view.device == x.device and view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    chunks = torch.arange(10, device="mybackend").tensor_split(3)
    assert all(c.untyped_storage().data_ptr() == chunks[0].untyped_storage().data_ptr() for c in chunks)


def test_out_variants_resize_the_same_storage() -> None:
    out = torch.empty(0, device="mybackend")
    storage = out.untyped_storage()
    x = torch.arange(3.0, device="mybackend")
    assert torch.add(x, x, out=out) is out
    assert (
        out.tolist() == [0, 2, 4] and out.untyped_storage().data_ptr() == storage.data_ptr() and storage.nbytes() == 12
    )
    y = torch.empty(0, device="mybackend", dtype=torch.int64)
    values = torch.empty(0, device="mybackend")
    torch.sort(-x, out=(values, y))
    assert values.tolist() == [-2, -1, 0] and y.tolist() == [2, 1, 0]


def test_set() -> None:
    x = torch.arange(6.0, device="mybackend")
    y = torch.empty(0, device="mybackend")
    y.set_(x)
    assert y.is_set_to(x) and y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert y.tolist() == [[2, 3], [4, 5]]
    y.set_()
    assert y.numel() == 0 and y.device == x.device
    with pytest.raises(RuntimeError, match="devices must match"):
        y.set_(torch.ones(3).untyped_storage())


def test_storages_of_different_dtypes() -> None:
    x = torch.zeros(4, dtype=torch.int32, device="mybackend")
    f = torch.empty(0, dtype=torch.float32, device="mybackend").set_(x.untyped_storage())
    f.fill_(1.0)
    assert x.tolist() == [0x3F800000] * 4
    assert x.view(torch.float32).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "location",
    [
        "mybackend",
        "mybackend:0",
        "cpu",
        torch.device("mybackend"),
        {"mybackend:0": "cpu"},
        lambda storage, _: storage,
        None,
    ],
)
def test_save_and_load(location: object) -> None:
    x = torch.randn(5, 3, device="mybackend")
    state = {"x": x, "view": x[2:], "parameter": torch.nn.Parameter(x.clone())}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location, weights_only=True)
    wanted = "cpu" if location in ("cpu",) or isinstance(location, dict) or callable(location) else "mybackend"
    assert loaded["x"].device.type == wanted and torch.equal(loaded["x"].cpu(), x.cpu())
    assert loaded["view"].untyped_storage().data_ptr() == loaded["x"].untyped_storage().data_ptr()
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    file = io.BytesIO()
    torch.save(x.cpu(), file)
    file.seek(0)
    assert torch.load(file, map_location="mybackend").device.type == "mybackend"


def test_module_state_dict_round_trip() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("mybackend")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(torch.load(file, map_location="cpu"))
    x = torch.randn(6, 3)
    assert torch.equal(model(x.to("mybackend")).cpu(), other(x))


def test_record_stream_and_data_ptr() -> None:
    x = torch.ones(4, device="mybackend")
    x.record_stream(torch.mybackend.current_stream())
    assert x.data_ptr() % 512 == 0
    assert torch.empty(0, device="mybackend").data_ptr() == 0


def test_empty_tensors_touch_no_counter() -> None:
    before = torch.mybackend.memory_stats()["allocation.all.allocated"]
    x = torch.empty(0, 5, device="mybackend")
    y = x + x
    assert y.shape == (0, 5)
    assert torch.mybackend.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64])
def test_uninitialized_memory_of_deterministic_programs(dtype: torch.dtype) -> None:
    def made(device: str) -> list[torch.Tensor]:
        grown = torch.ones(3, dtype=dtype, device=device).resize_(10)
        return [
            torch.empty(5, dtype=dtype, device=device),
            torch.empty_strided((2, 3), (3, 1), dtype=dtype, device=device),
            grown,
        ]

    torch.use_deterministic_algorithms(True)
    try:
        for ours, theirs in zip(made("mybackend"), made("cpu"), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)
