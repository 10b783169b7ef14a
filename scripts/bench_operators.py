"""The 200 operators that bench_ops.py times on 8x8 operands: those that common models call most (dense
networks, convolutional and recurrent ones, transformers, their losses and optimizers), by kind.

Each is a function of the namespace `v` of operands(), whose tensors are on one device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn import functional as F

N = 8


def operands(device: str) -> SimpleNamespace:
    torch.manual_seed(0)
    made = {
        "a": torch.rand(N, N) + 0.5,
        "b": torch.rand(N, N) + 0.5,
        "o": torch.rand(N, N) + 0.5,  # what the in-place operators change
        "w": torch.rand(N) + 0.5,
        "one": torch.tensor(0.5),
        "i": torch.randint(0, N, (N, N)),
        "k": torch.randint(0, N, (N,)),
        "m": torch.rand(N, N) > 0.5,
        "x": torch.rand(1, N, N, N) + 0.5,
        "s": torch.rand(1, N, N) + 0.5,
        "f": torch.rand(N, N, 3, 3) - 0.5,
        "f1": torch.rand(N, N, 3) - 0.5,
        "mean": torch.zeros(N),
        "variance": torch.ones(N),
    }
    return SimpleNamespace(**{name: tensor.to(device) for name, tensor in made.items()})


Operator = Callable[[SimpleNamespace], object]

POINTWISE: dict[str, Operator] = {
    "add": lambda v: v.a + v.b, "sub": lambda v: v.a - v.b, "mul": lambda v: v.a * v.b, "div": lambda v: v.a / v.b,
    "add.Scalar": lambda v: v.a + 1.0, "mul.Scalar": lambda v: v.a * 2.0, "rsub": lambda v: 1.0 - v.a,
    "neg": lambda v: -v.a, "abs": lambda v: v.a.abs(), "exp": lambda v: v.a.exp(), "exp2": lambda v: v.a.exp2(),
    "expm1": lambda v: v.a.expm1(), "log": lambda v: v.a.log(), "log2": lambda v: v.a.log2(), "log1p": lambda v: v.a.log1p(),
    "sqrt": lambda v: v.a.sqrt(), "rsqrt": lambda v: v.a.rsqrt(), "square": lambda v: v.a.square(),
    "reciprocal": lambda v: v.a.reciprocal(), "sin": lambda v: v.a.sin(), "cos": lambda v: v.a.cos(),
    "tanh": lambda v: v.a.tanh(), "sigmoid": lambda v: v.a.sigmoid(), "erf": lambda v: v.a.erf(), "floor": lambda v: v.a.floor(),
    "ceil": lambda v: v.a.ceil(), "round": lambda v: v.a.round(), "sign": lambda v: v.a.sign(), "atan2": lambda v: torch.atan2(v.a, v.b),
    "relu": lambda v: F.relu(v.a), "leaky_relu": lambda v: F.leaky_relu(v.a), "elu": lambda v: F.elu(v.a),
    "gelu": lambda v: F.gelu(v.a), "gelu.tanh": lambda v: F.gelu(v.a, approximate="tanh"), "silu": lambda v: F.silu(v.a),
    "mish": lambda v: F.mish(v.a), "hardswish": lambda v: F.hardswish(v.a), "hardsigmoid": lambda v: F.hardsigmoid(v.a),
    "hardtanh": lambda v: F.hardtanh(v.a), "relu6": lambda v: F.relu6(v.a), "softplus": lambda v: F.softplus(v.a),
    "logsigmoid": lambda v: F.logsigmoid(v.a), "prelu": lambda v: F.prelu(v.a, v.one), "glu": lambda v: F.glu(v.a),
    "clamp": lambda v: v.a.clamp(0.6, 1.2), "clamp_min": lambda v: v.a.clamp_min(0.6),
    "pow.Scalar": lambda v: v.a.pow(2), "pow": lambda v: v.a.pow(v.b), "maximum": lambda v: torch.maximum(v.a, v.b),
    "minimum": lambda v: torch.minimum(v.a, v.b), "fmod": lambda v: torch.fmod(v.a, v.b), "remainder": lambda v: torch.remainder(v.a, v.b),
    "floor_divide": lambda v: v.a // v.b, "lerp": lambda v: torch.lerp(v.a, v.b, 0.5), "addcmul": lambda v: torch.addcmul(v.a, v.a, v.b),
    "addcdiv": lambda v: torch.addcdiv(v.a, v.a, v.b), "where": lambda v: torch.where(v.m, v.a, v.b),
    "masked_fill": lambda v: v.a.masked_fill(v.m, 0.0), "eq": lambda v: v.a == v.b, "ne": lambda v: v.a != v.b,
    "lt": lambda v: v.a < v.b, "le": lambda v: v.a <= v.b, "gt": lambda v: v.a > v.b, "ge": lambda v: v.a >= v.b,
    "gt.Scalar": lambda v: v.a > 0.7, "logical_and": lambda v: v.m.logical_and(v.m), "logical_not": lambda v: v.m.logical_not(),
    "bitwise_and": lambda v: v.m & v.m, "bitwise_not": lambda v: ~v.m, "isnan": lambda v: v.a.isnan(), "isfinite": lambda v: v.a.isfinite(),
    "nan_to_num": lambda v: v.a.nan_to_num(), "xlogy": lambda v: torch.xlogy(v.a, v.b), "logaddexp": lambda v: torch.logaddexp(v.a, v.b),
}  # fmt: skip
IN_PLACE: dict[str, Operator] = {
    "add_": lambda v: v.o.add_(v.b, alpha=0.01), "mul_": lambda v: v.o.mul_(1.0), "div_": lambda v: v.o.div_(1.0),
    "copy_": lambda v: v.o.copy_(v.b), "zero_": lambda v: v.o.zero_(), "fill_": lambda v: v.o.fill_(0.5),
    "addcmul_": lambda v: v.o.addcmul_(v.a, v.b, value=0.01), "addcdiv_": lambda v: v.o.addcdiv_(v.a, v.b, value=0.01),
    "lerp_": lambda v: v.o.lerp_(v.b, 0.5), "clamp_": lambda v: v.o.clamp_(0.5, 1.0), "relu_": lambda v: v.o.relu_(),
    "sigmoid_": lambda v: v.o.sigmoid_(), "sqrt_": lambda v: v.o.sqrt_(), "masked_fill_": lambda v: v.o.masked_fill_(v.m, 0.5),
    "index_add_": lambda v: v.o.index_add_(0, v.k, v.b, alpha=0.01), "scatter_add_": lambda v: v.o.scatter_add_(0, v.i, v.b),
    "uniform_": lambda v: v.o.uniform_(), "normal_": lambda v: v.o.normal_(), "bernoulli_": lambda v: v.o.bernoulli_(0.5),
}  # fmt: skip
REDUCTIONS: dict[str, Operator] = {
    "sum": lambda v: v.a.sum(), "sum.dim": lambda v: v.a.sum(1), "mean": lambda v: v.a.mean(), "mean.dim": lambda v: v.a.mean(1),
    "amax": lambda v: v.a.amax(1), "amin": lambda v: v.a.amin(1), "max": lambda v: v.a.max(), "max.dim": lambda v: v.a.max(1),
    "min.dim": lambda v: v.a.min(1), "argmax": lambda v: v.a.argmax(1), "prod": lambda v: v.a.prod(),
    "std": lambda v: v.a.std(1), "var": lambda v: v.a.var(1), "var_mean": lambda v: torch.var_mean(v.a, 1),
    "vector_norm": lambda v: torch.linalg.vector_norm(v.a), "norm": lambda v: v.a.norm(), "logsumexp": lambda v: v.a.logsumexp(1),
    "cumsum": lambda v: v.a.cumsum(1), "cumprod": lambda v: v.a.cumprod(1), "any": lambda v: v.m.any(), "all": lambda v: v.m.all(),
    "topk": lambda v: v.a.topk(2), "sort": lambda v: v.a.sort(), "argsort": lambda v: v.a.argsort(), "softmax": lambda v: v.a.softmax(1),
    "log_softmax": lambda v: v.a.log_softmax(1),
}  # fmt: skip
LOSSES: dict[str, Operator] = {
    "cross_entropy": lambda v: F.cross_entropy(v.a, v.k), "nll_loss": lambda v: F.nll_loss(v.a, v.k),
    "mse_loss": lambda v: F.mse_loss(v.a, v.b), "l1_loss": lambda v: F.l1_loss(v.a, v.b), "smooth_l1_loss": lambda v: F.smooth_l1_loss(v.a, v.b),
    "huber_loss": lambda v: F.huber_loss(v.a, v.b), "binary_cross_entropy_with_logits": lambda v: F.binary_cross_entropy_with_logits(v.a, v.b),
    "kl_div": lambda v: F.kl_div(v.a, v.b, reduction="batchmean"), "cosine_similarity": lambda v: F.cosine_similarity(v.a, v.b),
    "normalize": lambda v: F.normalize(v.a),
}  # fmt: skip
MATRICES: dict[str, Operator] = {
    "mm": lambda v: v.a @ v.b, "bmm": lambda v: torch.bmm(v.s, v.s), "matmul.batch": lambda v: v.x @ v.b, "addmm": lambda v: torch.addmm(v.a, v.a, v.b),
    "mv": lambda v: v.a @ v.w, "dot": lambda v: v.w @ v.w, "baddbmm": lambda v: torch.baddbmm(v.s, v.s, v.s),
    "linear": lambda v: F.linear(v.a, v.b), "linear.bias": lambda v: F.linear(v.a, v.b, v.w), "outer": lambda v: torch.outer(v.w, v.w),
    "einsum": lambda v: torch.einsum("ij,jk->ik", v.a, v.b),
}  # fmt: skip
SHAPES: dict[str, Operator] = {
    "cat": lambda v: torch.cat((v.a, v.b)), "stack": lambda v: torch.stack((v.a, v.b)), "clone": lambda v: v.a.clone(),
    "contiguous": lambda v: v.a.t().contiguous(), "t": lambda v: v.a.t(), "transpose": lambda v: v.a.transpose(0, 1),
    "permute": lambda v: v.x.permute(0, 2, 3, 1), "view": lambda v: v.a.view(4, 16), "reshape": lambda v: v.a.reshape(4, 16),
    "flatten": lambda v: v.x.flatten(1), "unsqueeze": lambda v: v.a.unsqueeze(1), "squeeze": lambda v: v.x.squeeze(0),
    "expand": lambda v: v.w.expand(N, N), "select": lambda v: v.a[2], "slice": lambda v: v.a[2:6], "split": lambda v: v.a.split(4),
    "chunk": lambda v: v.a.chunk(2), "unbind": lambda v: v.a.unbind(), "index_select": lambda v: v.a.index_select(0, v.k),
    "gather": lambda v: v.a.gather(1, v.i), "scatter": lambda v: v.a.scatter(1, v.i, v.b), "index": lambda v: v.a[v.k],
    "index_put": lambda v: v.a.index_put((v.k,), v.w), "masked_select": lambda v: v.a[v.m], "repeat": lambda v: v.w.repeat(2, 1),
    "repeat_interleave": lambda v: v.a.repeat_interleave(2, 0), "roll": lambda v: v.a.roll(1), "flip": lambda v: v.a.flip(0),
    "tril": lambda v: v.a.tril(), "triu": lambda v: v.a.triu(), "pad": lambda v: F.pad(v.a, (1, 1)), "one_hot": lambda v: F.one_hot(v.k, N),
    "embedding": lambda v: F.embedding(v.k, v.a), "diagonal": lambda v: v.a.diagonal(), "detach": lambda v: v.a.detach(),
}  # fmt: skip
FACTORIES: dict[str, Operator] = {
    "empty_like": lambda v: torch.empty_like(v.a), "zeros_like": lambda v: torch.zeros_like(v.a), "ones_like": lambda v: torch.ones_like(v.a),
    "full_like": lambda v: torch.full_like(v.a, 2.0), "rand_like": lambda v: torch.rand_like(v.a), "randn_like": lambda v: torch.randn_like(v.a),
    "new_zeros": lambda v: v.a.new_zeros(N, N), "arange": lambda v: torch.arange(N, device=v.a.device),
    "to.float64": lambda v: v.a.double(), "to.bfloat16": lambda v: v.a.bfloat16(),
}  # fmt: skip
LAYERS: dict[str, Operator] = {
    "layer_norm": lambda v: F.layer_norm(v.a, (N,), v.w, v.w), "rms_norm": lambda v: F.rms_norm(v.a, (N,), v.w),
    "group_norm": lambda v: F.group_norm(v.x, 2), "batch_norm": lambda v: F.batch_norm(v.x, v.mean, v.variance, v.w, v.w, training=True),
    "batch_norm.eval": lambda v: F.batch_norm(v.x, v.mean, v.variance, v.w, v.w), "conv1d": lambda v: F.conv1d(v.s, v.f1),
    "conv2d": lambda v: F.conv2d(v.x, v.f), "conv_transpose2d": lambda v: F.conv_transpose2d(v.x, v.f),
    "max_pool2d": lambda v: F.max_pool2d(v.x, 2), "avg_pool2d": lambda v: F.avg_pool2d(v.x, 2), "adaptive_avg_pool2d": lambda v: F.adaptive_avg_pool2d(v.x, 2),
    "interpolate.nearest": lambda v: F.interpolate(v.x, scale_factor=2), "interpolate.bilinear": lambda v: F.interpolate(v.x, scale_factor=2, mode="bilinear"),
    "dropout": lambda v: F.dropout(v.a, 0.1), "scaled_dot_product_attention": lambda v: F.scaled_dot_product_attention(v.x, v.x, v.x),
}  # fmt: skip

KINDS: dict[str, dict[str, Operator]] = {
    "pointwise": POINTWISE, "in place": IN_PLACE, "reductions": REDUCTIONS, "losses": LOSSES, "matrices": MATRICES,
    "shapes": SHAPES, "factories": FACTORIES, "layers": LAYERS,
}  # fmt: skip
OPERATORS: dict[str, Operator] = {name: function for kind in KINDS.values() for name, function in kind.items()}
assert len(OPERATORS) == 200
