"""Forked children use the device; what they do stays theirs."""

from __future__ import annotations


def test_child_after_use(run_python) -> None:
    run_python(
        """
        import os, torch
        x = torch.arange(1000., device="mybackend")
        live = torch.mybackend.tracker_stats()["current_bytes"]
        pid = os.fork()
        if pid == 0:
            try:
                assert x.sum().item() == 499500
                y = x * 2; x.zero_()
                assert y.sum().item() == 999000 and torch.mybackend.tracker_stats()["current_bytes"] > live
                model = torch.nn.Linear(1000, 2).to("mybackend"); model(y).sum().backward()
                s = torch.mybackend.Stream(); s.synchronize(); torch.mybackend.synchronize()
                import mybackend; mybackend.memory.check_invariants()
            except BaseException:
                import traceback; traceback.print_exc(); os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert x.sum().item() == 499500 and torch.mybackend.tracker_stats()["current_bytes"] == live
        """
    )


def test_forks_while_threads_allocate(run_python) -> None:
    run_python(
        """
        import os, threading, torch, mybackend
        torch.set_num_threads(1)
        torch.ones(1, device="mybackend")
        stop = False
        def churn():
            while not stop:
                a = torch.empty(5000, device="mybackend"); b = mybackend.allocate_aligned_bytes(3000); a.fill_(1.0); del a, b
        def check():
            x = torch.full((100,), 2., device="mybackend")
            return (x + x).sum().item() == 400 and len(mybackend.allocate_aligned_bytes(70)) == 70
        # Every kernel once, before the forks: torch chooses its kernels in function-local statics at their first call,
        # and a child waits for ever for one that another thread was in.
        torch.empty(5000, device="mybackend").fill_(1.0)
        assert check()
        threads = [threading.Thread(target=churn) for _ in range(3)]
        [t.start() for t in threads]
        for _ in range(15):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if check() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stop = True
        [t.join() for t in threads]
        """
    )


def test_dataloader_workers(run_python) -> None:
    run_python(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.ones(1, device="mybackend")
        data = TensorDataset(torch.arange(64.))
        if __name__ == "__main__":
            total = sum(batch[0].to("mybackend").sum().item() for batch in DataLoader(data, batch_size=8, num_workers=2))
            assert total == 2016
        """
    )


def test_a_driver_that_cannot_survive_a_fork(run_python) -> None:
    run_python(
        """
        import os, torch, mybackend
        torch.ones(1, device="mybackend")
        mybackend._C._set_fault("prepare_fork", 1)
        pid = os.fork()
        if pid == 0:
            try:
                assert torch.mybackend._is_in_bad_fork()
                torch.ones(1, device="mybackend")
            except RuntimeError as error:
                os._exit(0 if "Cannot re-initialize mybackend in forked subprocess" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not torch.mybackend._is_in_bad_fork() and torch.ones(2, device="mybackend").sum().item() == 2
        """
    )
