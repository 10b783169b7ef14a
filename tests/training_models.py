"""The models that device and CPU are compared on. Each factory returns (model, batch, loss_of):
`loss_of(model, batch)` is the scalar loss of one training step. `scale` multiplies the widths: 1 for
tests, more for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Built = tuple[nn.Module, Any, Callable[[nn.Module, Any], torch.Tensor]]


def _classify(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def mlp(scale: int = 1) -> Built:
    width = 64 * scale
    model = nn.Sequential(
        nn.Linear(20, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 5)
    )
    return model, (torch.randn(32, 20), torch.randint(0, 5, (32,))), _classify


def cnn(scale: int = 1) -> Built:
    narrow, wide = 8 * scale, 16 * scale
    model = nn.Sequential(
        nn.Conv2d(3, narrow, 3, padding=1), nn.BatchNorm2d(narrow), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(narrow, wide, 3, stride=2, bias=False), nn.BatchNorm2d(wide), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(wide, 7),
    )  # fmt: skip
    return model, (torch.randn(8, 3, 20, 20), torch.randint(0, 7, (8,))), _classify


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], scale: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16 * scale)
        self.recurrent = kind(16 * scale, 24 * scale, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(48 * scale, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = self.recurrent(self.embedding(tokens))
        return self.head(output)


def _next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def lstm(scale: int = 1) -> Built:
    return _Recurrent(nn.LSTM, scale), torch.randint(0, 50, (4, 13)), _next_token


def gru(scale: int = 1) -> Built:
    return _Recurrent(nn.GRU, scale), torch.randint(0, 50, (4, 13)), _next_token


class _Encoder(nn.Module):
    def __init__(self, scale: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32 * scale, 4, 64 * scale, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32 * scale, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs).mean(1))


def transformer_encoder(scale: int = 1) -> Built:
    return _Encoder(scale), (torch.randn(4, 10, 32 * scale), torch.randint(0, 3, (4,))), _classify


def _language_model_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def gpt2(scale: int = 1) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=101, n_positions=32, n_embd=32 * scale, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return GPT2LMHeadModel(config), torch.randint(0, 101, (2, 17)), _language_model_loss


def bert(scale: int = 1) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=101, hidden_size=32 * scale, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64 * scale,
                        max_position_embeddings=32)  # fmt: skip
    return BertForMaskedLM(config), torch.randint(0, 101, (2, 17)), _language_model_loss


MODELS: dict[str, Callable[..., Built]] = {
    "mlp": mlp, "cnn": cnn, "lstm": lstm, "gru": gru, "transformer_encoder": transformer_encoder, "gpt2": gpt2, "bert": bert,
}  # fmt: skip
