"""Random numbers: a seeded run repeats exactly, and gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

DRAWS = {
    "rand": lambda d: torch.rand(50, device=d),
    "randn": lambda d: torch.randn(50, device=d),
    "randint": lambda d: torch.randint(0, 100, (50,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.3, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(10, device=d), 4),
    "exponential": lambda d: torch.empty(20, device=d).exponential_(),
    "dropout": lambda d: functional.dropout(torch.ones(100, device=d), 0.4),
    "native_dropout": lambda d: torch.native_dropout(torch.ones(100, device=d), 0.4, True)[0],
    "poisson": lambda d: torch.poisson(torch.full((20,), 3.0, device=d)),
    "gamma": lambda d: torch._standard_gamma(torch.full((20,), 2.0, device=d)),
    "rrelu": lambda d: functional.rrelu(-torch.ones(20, device=d), training=True),
    "normal": lambda d: torch.normal(torch.zeros(9, device=d), 1.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_same_numbers_as_the_cpu(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(11)
    ours = [draw("mybackend").cpu() for _ in range(3)]
    torch.manual_seed(11)
    theirs = [draw("cpu") for _ in range(3)]
    torch.manual_seed(11)
    again = [draw("mybackend").cpu() for _ in range(3)]
    for a, b, c in zip(ours, theirs, again, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("name", DRAWS)
def test_the_cpu_generator_is_not_touched(name: str) -> None:
    state = torch.get_rng_state()
    DRAWS[name]("mybackend")
    assert torch.equal(torch.get_rng_state(), state)


def test_state() -> None:
    torch.mybackend.manual_seed(5)
    state = torch.mybackend.get_rng_state()
    assert state.device.type == "cpu" and state.dtype == torch.uint8
    a = torch.rand(5, device="mybackend")
    torch.mybackend.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="mybackend"), a)
    assert torch.mybackend.initial_seed() == 5
    torch.mybackend.seed()
    assert torch.mybackend.initial_seed() != 5
    torch.mybackend.set_rng_state_all(torch.mybackend.get_rng_state_all())


def test_fork_rng() -> None:
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0], device_type="mybackend"):
        inside = torch.rand(4, device="mybackend")
    assert torch.equal(torch.rand(4, device="mybackend"), inside)


def test_generators() -> None:
    g = torch.Generator("mybackend").manual_seed(9)
    h = torch.Generator("mybackend").manual_seed(9)
    assert g.device == torch.device("mybackend", 0)
    assert torch.equal(torch.rand(3, device="mybackend", generator=g), torch.rand(3, device="mybackend", generator=h))
    clone = g.clone_state()
    assert torch.equal(
        torch.randn(3, device="mybackend", generator=g), torch.randn(3, device="mybackend", generator=clone)
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="mybackend", generator=torch.Generator())
    with pytest.raises(NotImplementedError, match="offset"):
        g.set_offset(3)
    assert len(torch.mybackend.default_generators) == 1


def test_checkpoint_preserves_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(100, device="mybackend", requires_grad=True)
    y = checkpoint(lambda t: functional.dropout(t, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_seeding_starts_nothing(run_python) -> None:
    run_python(
        """
        import torch
        torch.manual_seed(7)
        assert not torch.mybackend.is_initialized()
        for device in (1, 0):
            drawn = torch.rand(5, device=f"mybackend:{device}")
            assert torch.equal(drawn.cpu(), torch.rand(5, generator=torch.Generator().manual_seed(7)))
        torch.manual_seed(-1)
        assert torch.mybackend.initial_seed() == 2**64 - 1
        for wrong in (1 << 64, -(1 << 63) - 1):
            try:
                torch.mybackend.manual_seed_all(wrong)
                raise SystemExit("no error")
            except ValueError as error:
                assert "64-bit" in str(error)
        """,
        MYBACKEND_DEVICE_COUNT="2",
    )
