"""What PyTorch has beside its operators, modules and optimizers, beside the CPU: distributions,
autograd functions, torch.func, dtypes without arithmetic; and what the device refuses by name."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions as D
from torch.utils.checkpoint import checkpoint

DEVICE = "mybackend"
DEVICES = ("cpu", DEVICE)


def on_both(function: Callable[[str], Any]) -> None:
    """The same tensors on both devices, bit for bit, from the same seed."""
    results = []
    for device in DEVICES:
        torch.manual_seed(0)
        leaves = torch.utils._pytree.tree_leaves(function(device))
        assert all(leaf.device.type == device for leaf in leaves if isinstance(leaf, torch.Tensor))
        results.append([leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    assert len(results[0]) == len(results[1]) > 0
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# --- Random numbers -----------------------------------------------------------------------------------


def positive(device: str) -> torch.Tensor:
    return torch.linspace(0.5, 2, 5, device=device).requires_grad_()


def probabilities(device: str) -> torch.Tensor:
    return torch.linspace(0.1, 0.9, 5, device=device).requires_grad_()


def covariance(device: str) -> torch.Tensor:
    return torch.eye(3, device=device) + 0.1


DISTRIBUTIONS: dict[str, Callable[[str], D.Distribution]] = {
    "Bernoulli": lambda d: D.Bernoulli(probabilities(d)),
    "Beta": lambda d: D.Beta(positive(d), positive(d) + 1),
    "Binomial": lambda d: D.Binomial(10, probabilities(d)),
    "Categorical": lambda d: D.Categorical(positive(d)),
    "Cauchy": lambda d: D.Cauchy(positive(d), positive(d)),
    "Chi2": lambda d: D.Chi2(positive(d)),
    "ContinuousBernoulli": lambda d: D.ContinuousBernoulli(probabilities(d)),
    "Dirichlet": lambda d: D.Dirichlet(positive(d)),
    "Exponential": lambda d: D.Exponential(positive(d)),
    "FisherSnedecor": lambda d: D.FisherSnedecor(positive(d), positive(d) + 2),
    "Gamma": lambda d: D.Gamma(positive(d), positive(d)),
    "Geometric": lambda d: D.Geometric(probabilities(d)),
    "Gumbel": lambda d: D.Gumbel(positive(d), positive(d)),
    "HalfCauchy": lambda d: D.HalfCauchy(positive(d)),
    "HalfNormal": lambda d: D.HalfNormal(positive(d)),
    "Independent": lambda d: D.Independent(D.Normal(positive(d), positive(d)), 1),
    "Kumaraswamy": lambda d: D.Kumaraswamy(positive(d), positive(d)),
    "Laplace": lambda d: D.Laplace(positive(d), positive(d)),
    "LKJCholesky": lambda d: D.LKJCholesky(3, torch.tensor(1.5, device=d)),
    "LogNormal": lambda d: D.LogNormal(positive(d), positive(d)),
    "LogisticNormal": lambda d: D.LogisticNormal(positive(d), positive(d)),
    "LowRankMultivariateNormal": lambda d: D.LowRankMultivariateNormal(
        torch.zeros(3, device=d), torch.ones(3, 1, device=d), torch.ones(3, device=d)
    ),
    "MixtureSameFamily": lambda d: D.MixtureSameFamily(D.Categorical(positive(d)), D.Normal(positive(d), positive(d))),
    "Multinomial": lambda d: D.Multinomial(20, positive(d)),
    "MultivariateNormal": lambda d: D.MultivariateNormal(torch.zeros(3, device=d), covariance(d)),
    "NegativeBinomial": lambda d: D.NegativeBinomial(positive(d) * 5, probabilities(d)),
    "Normal": lambda d: D.Normal(positive(d), positive(d)),
    "OneHotCategorical": lambda d: D.OneHotCategorical(positive(d)),
    "Pareto": lambda d: D.Pareto(positive(d), positive(d)),
    "Poisson": lambda d: D.Poisson(positive(d) * 3),
    "RelaxedBernoulli": lambda d: D.RelaxedBernoulli(torch.tensor(0.5, device=d), probabilities(d)),
    "RelaxedOneHotCategorical": lambda d: D.RelaxedOneHotCategorical(torch.tensor(0.5, device=d), positive(d)),
    "StudentT": lambda d: D.StudentT(positive(d) + 2),
    "TransformedDistribution": lambda d: D.TransformedDistribution(
        D.Normal(positive(d), positive(d)), [D.SigmoidTransform(), D.AffineTransform(1.0, 2.0)]
    ),
    "Uniform": lambda d: D.Uniform(positive(d), positive(d) + 1),
    "VonMises": lambda d: D.VonMises(positive(d), positive(d)),
    "Weibull": lambda d: D.Weibull(positive(d), positive(d)),
    "Wishart": lambda d: D.Wishart(torch.tensor(4.0, device=d), covariance(d)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name: str) -> None:
    def draw(device: str) -> Any:
        distribution = DISTRIBUTIONS[name](device)
        sample = distribution.sample((4,))
        results = [sample, distribution.log_prob(sample)]
        if distribution.has_rsample:
            results.append(distribution.rsample((2,)))
        for what in ("mean", "variance"):
            with contextlib.suppress(NotImplementedError):
                results.append(getattr(distribution, what))
        return results

    on_both(draw)


def test_generators() -> None:
    def draw(device: str) -> Any:
        generator = torch.Generator(device).manual_seed(3)
        first = torch.rand(5, generator=generator, device=device)
        state = generator.get_state()
        second = torch.randperm(7, generator=generator, device=device)
        generator.set_state(state)
        assert torch.equal(second, torch.randperm(7, generator=generator, device=device))
        with torch.random.fork_rng(devices=[0] if device != "cpu" else [], device_type=DEVICE):
            torch.rand(10, device=device)
        return first, second, torch.randn(4, device=device) if device != "cpu" else torch.randn(4)

    on_both(lambda device: draw(device)[:2])


# --- Autograd -----------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_autograd_functions() -> None:
    def run(device: str) -> Any:
        x = torch.linspace(-1, 1, 6, device=device).requires_grad_()
        (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        hooked: list[torch.Tensor] = []
        y = x * 2
        y.register_hook(lambda grad: hooked.append(grad.clone()))
        y.sum().backward()
        z = checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False).sum()
        (third,) = torch.autograd.grad(z, x)
        with torch.autograd.graph.save_on_cpu():
            (fourth,) = torch.autograd.grad((x * x).sum(), x)
        return first, second, hooked, third, fourth, torch.autograd.functional.jacobian(torch.sin, x.detach())

    on_both(run)


def test_gradcheck() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    w = torch.randn(2, 4, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: (a @ b).tanh(), (x, w), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda a, b: (a @ b).tanh(), (x, w))


def test_anomalies_and_changes_in_place_are_noticed() -> None:
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan"):
        (x * 0).sqrt().mul(0).sum().backward()


def test_func() -> None:
    def run(device: str) -> Any:
        x = torch.linspace(0.1, 1, 4, device=device)

        def f(t: torch.Tensor) -> torch.Tensor:
            return (t.sin() * t).sum()

        model = torch.nn.Linear(4, 2).to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        parameters = dict(model.named_parameters())

        def loss(p: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, p, (sample,)).square().sum()

        batch = torch.linspace(-1, 1, 12, device=device).reshape(3, 4)
        return (
            torch.func.grad(f)(x), torch.func.hessian(f)(x), torch.func.jacfwd(torch.cos)(x), torch.func.jacrev(torch.cos)(x),
            torch.func.vjp(torch.exp, x)[1](x), torch.func.jvp(torch.exp, (x,), (x,)), torch.vmap(torch.dot)(batch, batch),
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch), torch.func.linearize(torch.exp, x)[1](x),
        )  # fmt: skip

    on_both(run)


# --- Dtypes -------------------------------------------------------------------------------------------

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.uint16, torch.uint32, torch.uint64, torch.complex32])
def test_dtypes_for_storage(dtype: torch.dtype) -> None:
    def run(device: str) -> Any:
        x = torch.linspace(1, 9, 8, device=device).to(dtype)
        y = torch.empty(4, 4, dtype=dtype, device=device)
        y.view(torch.uint8).zero_()
        y[1, :] = x[:4]
        file = io.BytesIO()  # (PyTorch cannot unpickle these dtypes, but load them.)
        torch.save(x, file)
        file.seek(0)
        back = copy.deepcopy(torch.load(file))
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return x.to(wide), y.to(wide), back.to(wide), torch.cat([x, x]).to(wide), x.view(torch.uint8)

    on_both(run)


def test_jagged_tensors() -> None:
    """Nested tensors of the jagged layout are made of ordinary ones."""

    def run(device: str) -> Any:
        parts = [torch.arange(float(3 * n)).reshape(n, 3).to(device) for n in (2, 4, 1)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, device=device)
        y = (x * 2 + x).sin()
        return [part.clone() for part in y.unbind()], y.sum(dim=-1).values()

    on_both(run)


# --- Refused by name ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "COO": ("[Ss]parse", lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), device=DEVICE)),
    "CSR": ("[Ss]parse", lambda: torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 1), device=DEVICE)),
    "to_sparse": ("[Ss]parse", lambda: torch.ones(2, 2, device=DEVICE).to_sparse()),
    "to_sparse_csr": ("[Ss]parse", lambda: torch.ones(2, 2, device=DEVICE).to_sparse_csr()),
    "to_sparse_bsr": ("[Ss]parse", lambda: torch.ones(2, 2, device=DEVICE).to_sparse_bsr((1, 1))),
    "sparse from the CPU": ("[Ss]parse", lambda: torch.eye(3).to_sparse().to(DEVICE)),
    "sparse gradient": (
        "[Ss]parse",
        lambda: torch.nn.Embedding(4, 2, sparse=True).to(DEVICE)(torch.tensor([1], device=DEVICE)).sum().backward(),
    ),
    "quantized": ("quantized", lambda: torch.quantize_per_tensor(torch.ones(3, device=DEVICE), 0.1, 0, torch.qint8)),
    "quantized from the CPU": (
        "[Qq]uantized|[Qq]uantize",
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to(DEVICE),
    ),
    # (PyTorch makes these without asking the device.)
    "nested": ("[Nn]ested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=DEVICE) + 1),
    "mkldnn": ("mkldnn|[Mm]kl", lambda: torch.ones(2, 2, device=DEVICE).to_mkldnn()),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str) -> None:
    words, function = REFUSED[what]
    with pytest.raises((NotImplementedError, RuntimeError), match=words) as error:
        function()
    assert "INTERNAL ASSERT" not in str(error.value)
    del error
    assert torch.ones(2, device=DEVICE).sum().item() == 2  # (and conftest.py looks that no memory stays)
