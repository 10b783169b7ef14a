"""Borrowed compute: no copy, the right identity, and nothing changed by an error."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional

import mybackend


def copies() -> int:
    return mybackend.memory.copied_output_count()


def test_results_are_adopted_not_copied() -> None:
    before = copies()
    x = torch.randn(64, 64, device="mybackend")
    for result in (
        x + x,
        x @ x,
        x.exp(),
        x.sum(0),
        torch.hypot(x, x),
        torch.linalg.svd(x)[0],
        torch.fft.fft(x),
        x.sort()[0],
        x.unique(),
        x.nonzero(),
        torch.randperm(9, device="mybackend"),
        torch.histc(x),
        x.cumsum(0),
        functional.conv2d(x[None, None], x[None, None, :3, :3]),
    ):
        assert result.device == x.device
        assert result.untyped_storage().device == x.device
    assert copies() == before


def test_outputs_and_temporaries_are_our_memory() -> None:
    x = torch.randn(256, 256, device="mybackend")
    torch.mybackend.reset_accumulated_memory_stats()
    torch.linalg.solve(x, x)
    assert torch.mybackend.memory_stats()["allocation.all.allocated"] >= 3


def test_cpu_tensors_are_not_ours() -> None:
    x = torch.randn(8, device="mybackend")
    live = torch.mybackend.tracker_stats()["allocation_count"]
    y = torch.randn(100)
    z = y + y
    assert torch.mybackend.tracker_stats()["allocation_count"] == live
    assert z.device.type == "cpu"
    del x


def test_in_place_and_identity() -> None:
    x = torch.ones(3, device="mybackend")
    assert x.add_(1) is x and x.tolist() == [2, 2, 2]
    assert torch.sub(x, 1, out=x) is x and x.tolist() == [1, 1, 1]
    version = x._version
    x.mul_(3)
    assert x._version == version + 1
    view = x[1:]
    view += 1
    assert x.tolist() == [3, 4, 4]
    assert functional.relu(x, inplace=True) is x
    assert torch.erfinv(x / 10, out=(out := torch.empty(3, device="mybackend"))) is out


def test_overlap_is_noticed() -> None:
    x = torch.arange(10.0, device="mybackend")
    with pytest.raises(
        RuntimeError,
        match="some elements of the input tensor and the written-to tensor refer to a single memory location",
    ):
        torch.add(x[:-1], 1, out=x[1:])
    with pytest.raises(
        RuntimeError, match="more than one element of the written-to tensor refers to a single memory location"
    ):
        x[:1].expand(5).add_(1)
    x.add_(x)
    assert x.tolist() == [2.0 * i for i in range(10)]


def test_a_failing_kernel_leaves_everything_as_it_was() -> None:
    x = torch.ones(3, device="mybackend")
    y = torch.ones(4, device="mybackend")
    live = torch.mybackend.tracker_stats()
    for wrong in (
        lambda: x + y,
        lambda: torch.mm(x, y),
        lambda: torch.linalg.cholesky(-torch.eye(3, device="mybackend")),
        lambda: x.view(7),
        lambda: torch.hypot(x, y),
        lambda: x[5],
        lambda: functional.embedding(torch.tensor([9], device="mybackend"), x[:, None]),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()
    gc.collect()
    now = torch.mybackend.tracker_stats()
    assert now["current_bytes"] == live["current_bytes"]
    assert (
        torch.empty(5).device.type == "cpu"
        and torch.mybackend.tracker_stats()["allocation_count"] == now["allocation_count"]
    )
    assert (x + 1).tolist() == [2, 2, 2]


def test_operators_that_cannot_run_say_so() -> None:
    x = torch.ones(3, 3, device="mybackend")
    with pytest.raises(NotImplementedError, match="mybackend"):
        x.to_sparse()
    with pytest.raises(
        NotImplementedError,
        match=r"'aten::empty.memory_format' cannot run on mybackend: sparse tensors are not supported",
    ):
        torch.empty(2, 2, layout=torch.sparse_csr, device="mybackend")
    library = torch.library.Library("mybackend_tests", "DEF")
    library.define("only_meta(Tensor x) -> Tensor")
    library.impl("only_meta", lambda x: x, "Meta")
    with pytest.raises(
        NotImplementedError,
        match=r"The operator 'mybackend_tests::only_meta' cannot run on mybackend: there is no CPU kernel",
    ):
        torch.ops.mybackend_tests.only_meta(x)


def test_custom_operators_with_a_cpu_kernel_are_borrowed() -> None:
    library = torch.library.Library("mybackend_custom", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    seen = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.device.type, x.data_ptr()))
        return x * 2

    library.impl("twice", twice, "CPU")
    x = torch.ones(3, device="mybackend")
    y = torch.ops.mybackend_custom.twice(x)
    assert seen == [("cpu", x.data_ptr())] and y.device == x.device and y.tolist() == [2, 2, 2]


def test_an_alias_kept_by_a_kernel_stays_valid() -> None:
    library = torch.library.Library("mybackend_keeper", "DEF")
    library.define("keep(Tensor x) -> Tensor")
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.extend([x, x[1:]])
        return x + 0

    library.impl("keep", keep, "CPU")
    x = torch.arange(1000.0, device="mybackend")
    y = torch.ops.mybackend_keeper.keep(x)
    del x
    gc.collect()
    other = torch.zeros(1000, device="mybackend")  # would take the freed block
    assert kept[0].sum().item() == 499500 and kept[1][0].item() == 1.0 and y.sum().item() == 499500
    assert kept[0].device.type == "cpu"
    kept.clear()
    del other


def test_results_that_are_arguments() -> None:
    x = torch.ones(3, device="mybackend")
    assert x.contiguous() is x and x.to(torch.float32) is x
    a, b = torch.broadcast_tensors(x, torch.ones(2, 3, device="mybackend"))
    assert a.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and b.shape == (2, 3)


def test_conjugate_and_negative_views() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    y = x.to("mybackend")
    assert y.conj().is_conj() and torch.equal((y.conj() * y).cpu(), x.conj() * x)
    assert torch.equal(torch.fft.fft(y.conj()).cpu(), torch.fft.fft(x.conj()))
    assert torch.equal(y.conj().imag.cpu(), x.conj().imag) and y.conj().imag.is_neg()
    assert torch.equal(y.conj().resolve_conj().cpu(), x.conj().resolve_conj())
    assert torch.equal((y.conj().to("cpu")), x.conj())


def test_sdpa_takes_the_path_of_the_cpu() -> None:
    q, k, v = (torch.randn(2, 3, 7, 8) for _ in range(3))
    ours = [t.to("mybackend").requires_grad_() for t in (q, k, v)]
    theirs = [t.clone().requires_grad_() for t in (q, k, v)]
    a = functional.scaled_dot_product_attention(*ours, is_causal=True)
    b = functional.scaled_dot_product_attention(*theirs, is_causal=True)
    assert torch.equal(a.cpu(), b) and type(a.grad_fn) is type(b.grad_fn)
    a.sum().backward()
    b.sum().backward()
    assert all(torch.equal(x.grad.cpu(), y.grad) for x, y in zip(ours, theirs, strict=True))


def test_recurrent_networks_in_every_mode() -> None:
    for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch.manual_seed(0)
        net = kind(5, 6, num_layers=2, batch_first=True)
        x = torch.randn(3, 4, 5, requires_grad=True)
        expected, _ = net(x)
        with torch.no_grad():
            expected_no_grad, _ = net(x)  # the CPU may take another path then
        with torch.inference_mode():
            expected_inference, _ = net(x)
        net.to("mybackend")
        y = x.detach().to("mybackend").requires_grad_()
        got, _ = net(y)
        assert torch.equal(got.cpu(), expected)
        got.sum().backward(retain_graph=True)
        first = y.grad.clone()
        got.sum().backward()
        assert torch.equal(y.grad, 2 * first)
        with torch.no_grad():
            assert torch.equal(net(y)[0].cpu(), expected_no_grad)
        with torch.inference_mode():
            assert torch.equal(net(y)[0].cpu(), expected_inference)
        packed = torch.nn.utils.rnn.pack_padded_sequence(y, torch.tensor([4, 3, 1]), batch_first=True)
        out, _ = net(packed)
        padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        assert padded.is_mybackend and lengths.tolist() == [4, 3, 1]
        padded.sum().backward()
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(net(y)[0].sum(), y, create_graph=True)


def test_recurrent_networks_check_what_they_are_given() -> None:
    net = torch.nn.LSTM(3, 4)
    with pytest.raises(RuntimeError, match="same device"):
        net(torch.randn(2, 1, 3, device="mybackend"))  # its weights are on the CPU
    net.to("mybackend")
    output, _ = net(torch.randn(2, 1, 3, device="mybackend"))
    with torch.no_grad():
        net.weight_hh_l0.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_inference_mode_and_no_grad() -> None:
    with torch.inference_mode():
        x = torch.ones(3, device="mybackend")
        y = x * 2
        assert y.is_inference() and y.device.type == "mybackend"
    with torch.no_grad():
        assert not (torch.ones(3, device="mybackend", requires_grad=True) * 2).requires_grad


def test_long_lists() -> None:
    """Lists longer than what is scanned, with shared storages in them."""
    before = copies()
    base = torch.arange(2000.0, device="mybackend")
    tensors = [base[i] for i in range(1000)] + [torch.full((2,), float(i), device="mybackend") for i in range(500)]
    doubled = torch._foreach_mul(tensors, 2.0)
    assert [t.sum().item() for t in doubled[::97]] == [2.0 * t.sum().item() for t in tensors[::97]]
    torch._foreach_add_(tensors, 1.0)
    assert base[:1000].tolist() == [i + 1.0 for i in range(1000)] and base[1000].item() == 1000.0
    assert torch.cat([t.reshape(-1) for t in tensors]).numel() == 2000
    assert tensors[3].untyped_storage().data_ptr() == base.data_ptr() and copies() == before


def test_foreach_over_devices_and_sizes() -> None:
    ours, theirs = torch.ones(3, device="mybackend"), torch.ones(2)
    torch._foreach_add_([ours, theirs], 1.0)  # as on CUDA: a list may mix devices
    assert ours.tolist() == [2, 2, 2] and theirs.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch._foreach_add([ours], [torch.ones(3)])
    with pytest.raises(RuntimeError):
        torch._foreach_add_([ours], [ours, ours])
    (norm,) = torch._foreach_norm([ours])
    assert norm.device == ours.device and norm.item() == torch.full((3,), 2.0).norm().item()
    x = [torch.ones(2, device="mybackend", requires_grad=True) for _ in range(2)]
    sum(t.sum() for t in torch._foreach_mul(x, 3.0)).backward()
    assert [t.grad.tolist() for t in x] == [[3, 3], [3, 3]]


def test_foreach_and_fused_optimizers() -> None:
    for cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
        results = []
        for device in ("mybackend", "cpu"):
            torch.manual_seed(0)
            model = torch.nn.Linear(7, 7).to(device)
            opt = cls(model.parameters(), lr=0.1, fused=True)
            for _ in range(3):
                opt.zero_grad()
                model(torch.arange(14.0).view(2, 7).to(device)).square().mean().backward()
                opt.step()
            results.append([p.detach().cpu() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), cls


def test_a_tensor_given_twice_is_one_tensor() -> None:
    """Kernels compare their arguments: what is read and written at once is refused as on the CPU."""
    y = torch.randn(4, 6, device="mybackend")
    x = torch.zeros(0, device="mybackend")
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.cat((x, y), dim=0, out=x)
    z = torch.ones(3, device="mybackend")
    assert z.add_(z) is z and z.tolist() == [2, 2, 2]
    assert torch.add(z, z, out=z) is z and z.tolist() == [4, 4, 4]
    torch._foreach_add_([z, z], [z, z])
    assert z.tolist() == [16, 16, 16]
    views = [z[i] for i in range(3)] * 20
    torch._foreach_add_(views, 1)
    assert z.tolist() == [36, 36, 36]


def test_lazy_clones() -> None:
    """Reading keeps the bytes shared; who writes, in whatever order of arguments, gets bytes of its own."""
    t = torch.arange(4.0, device="mybackend")
    clone = t._lazy_clone()
    assert (t + clone).tolist() == [0, 2, 4, 6]
    assert torch._C._is_cow_tensor(t) and torch._C._is_cow_tensor(clone)
    torch.mul(clone, clone, out=clone)  # read and written
    assert clone.tolist() == [0, 1, 4, 9] and t.tolist() == [0, 1, 2, 3]
    clone = t._lazy_clone()
    torch.add(clone[:2], 1, out=clone[2:])  # one storage: read first, written later
    assert clone.tolist() == [0, 1, 1, 2] and t.tolist() == [0, 1, 2, 3]
    clone = t._lazy_clone()
    torch._foreach_mul_([clone], 2)
    assert clone.tolist() == [0, 2, 4, 6] and t.tolist() == [0, 1, 2, 3]
    mean, variance = torch.zeros(3, device="mybackend"), torch.ones(3, device="mybackend")
    kept = mean._lazy_clone()
    torch.nn.functional.batch_norm(torch.randn(5, 3, device="mybackend") + 4, mean, variance, training=True)
    assert mean.abs().min().item() > 0.1 and kept.tolist() == [0, 0, 0]
    kept = t._lazy_clone()
    t[1:].view(3).sinh_()  # a boxed kernel
    assert kept.tolist() == [0, 1, 2, 3] and t[1].item() > 1.1


def test_complex_results_in_given_memory() -> None:
    """Kernels that leave an out= conjugated, and composites that call the CPU's kernels directly."""
    torch.manual_seed(0)
    a = torch.randn(3, 4, 4, dtype=torch.complex64)
    x = a.to("mybackend")
    assert torch.equal(x.clone().conj_physical_().cpu(), a.conj_physical())
    factors, pivots = torch.linalg.lu_factor(a)
    out = torch.full_like(x, 7)
    given = torch.linalg.lu_solve(factors.to("mybackend"), pivots.to("mybackend"), x, left=False, out=out)
    assert given is out and torch.equal(out.cpu(), torch.linalg.lu_solve(factors, pivots, a, left=False))
    outs = tuple(torch.full_like(t, 7).to("mybackend") for t in torch.svd(a))
    torch.svd(x, out=outs)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(outs, torch.svd(a), strict=True))


def test_the_backward_runs_on_the_calling_thread(run_python) -> None:
    """On autograd's thread for the device it would need a team of OpenMP threads of its own."""
    run_python(
        """
        import threading, torch, mybackend
        def where(device):
            threads = []
            x = torch.ones(3, device=device, requires_grad=True)
            y = x * 2
            y.register_hook(lambda grad: threads.append(threading.get_ident()))
            y.sum().backward()
            return threads == [threading.get_ident()]
        with torch.inference_mode():
            torch.ones(3, device="mybackend").add_(1)  # must not count
        assert where("mybackend")
        results = []
        thread = threading.Thread(target=lambda: results.append(where("mybackend"))); thread.start(); thread.join()
        assert results == [True]
        with torch.autograd.set_multithreading_enabled(True):
            assert not where("mybackend")  # a program may want it
        """
    )
