"""Train a small Mixture-of-Experts model in MXFP8 and in BF16 from the same seed, and compare their losses.

The model predicts the next character of an invented language. Its text is drawn anew for each step, so nothing can be
learnt by heart, and the least loss possible is known. Runs in BF16 from other seeds show how much of a difference is
chance. Takes about two minutes on the CPU.

python docs/examples/moe_training.py --plot losses.png
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from report import describe, pick_device, print_table
from torch import nn
from torch.nn import functional

import mxfp8_cutlass as mx

Precision = Literal["mxfp8", "bf16"]

LETTERS, WORDS, CONTEXT = 26, 1000, 8
"""Of the language, in which character 26 ends a word; and characters that the model sees."""
TOP_K, BLOCKS, RATE = 2, 2, 2e-3
SEEDS = (0, 1, 2)
"""Of the initial weights in BF16; MXFP8 takes the first."""
SMOOTHING = 25
"""A loss in the table or the picture is the mean of as many steps."""


@dataclass(frozen=True)
class Sizes:
    """Of a model and its training."""

    hidden: int
    intermediate: int
    experts: int
    tokens: int
    steps: int


ON_CPU = Sizes(hidden=256, intermediate=128, experts=8, tokens=512, steps=300)
ON_GPU = Sizes(hidden=1024, intermediate=512, experts=16, tokens=8192, steps=600)


class Language:
    """Words of 4 to 8 random letters, some far more frequent than others (Zipf's law)."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)  # on the CPU: the same text on every device
        letters = torch.randint(LETTERS, (WORDS, 9), generator=self.random)
        length = torch.randint(4, 9, (WORDS, 1), generator=self.random)
        place = torch.arange(9)
        self.words = letters.where(place < length, LETTERS).where(place <= length, -1)
        self.share = 1 / torch.arange(1, WORDS + 1)
        self.share /= self.share.sum()
        # Of a character, in nats: in the long run no model's loss is less.
        self.entropy = float(-(self.share * self.share.log()).sum() / (self.share * (length[:, 0] + 1)).sum())

    def batch(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contexts (tokens, CONTEXT) and the character that follows each (tokens,)."""
        words = self.share.multinomial(tokens // 4 + CONTEXT, replacement=True, generator=self.random)
        text = self.words[words].flatten()
        windows = text[text >= 0].unfold(0, CONTEXT + 1, 1)[:tokens]
        return windows[:, :-1], windows[:, -1]


def multiply(layer: mx.GroupedLinear, x: torch.Tensor, offs: torch.Tensor, precision: Precision) -> torch.Tensor:
    """(M, K) times each expert's weight: (M, N). BF16 is written out, an expert at a time."""
    if precision == "mxfp8":
        return layer.forward(x, offs)
    groups = x.tensor_split(offs[:-1].tolist())
    return torch.cat([rows @ weight.T for rows, weight in zip(groups, layer.weight.bfloat16(), strict=True)])


class Experts(nn.Module):
    """A Mixture-of-Experts block: SwiGLU networks, of which each token goes to TOP_K."""

    def __init__(self, sizes: Sizes, precision: Precision, wgrad: Precision) -> None:
        super().__init__()
        groups, hidden, intermediate = sizes.experts, sizes.hidden, sizes.intermediate
        self.precision = precision
        self.router = nn.Linear(hidden, groups, bias=False)
        self.gate_up = mx.GroupedLinear(groups, hidden, 2 * intermediate, wgrad=wgrad, dtype=torch.float32)
        self.down = mx.GroupedLinear(groups, intermediate, hidden, wgrad=wgrad, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, hidden), float32."""
        # Route: the experts of each token, and their shares in its output.
        share, expert = self.router(x).softmax(-1).topk(TOP_K)
        share = share / share.sum(-1, keepdim=True)
        # Permute: a row for each token and expert of it, sorted by expert, and where each expert's rows end.
        by_expert, order = expert.flatten().sort(stable=True)
        experts = torch.arange(self.router.out_features, device=x.device)
        offs = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        rows = x.bfloat16()[order // TOP_K]
        # Two products, with SwiGLU between them.
        gate, up = multiply(self.gate_up, rows, offs, self.precision).chunk(2, dim=-1)
        rows = multiply(self.down, functional.silu(gate) * up, offs, self.precision)
        # Combine: each token's rows together again, weighted by their shares.
        rows = rows[order.argsort()].view(*expert.shape, -1)
        return torch.einsum("tke,tk->te", rows.float(), share)


class Model(nn.Module):
    """Embeddings of the context side by side, residual blocks, logits. All but the experts is float32."""

    def __init__(self, sizes: Sizes, precision: Precision, wgrad: Precision) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS + 1, sizes.hidden // CONTEXT)
        self.blocks = nn.ModuleList(Experts(sizes, precision, wgrad) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden) for _ in range(BLOCKS + 1))
        self.head = nn.Linear(sizes.hidden, LETTERS + 1)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """(T, CONTEXT) -> (T, LETTERS + 1)."""
        x = self.embedding(context).flatten(1)
        for norm, block in zip(self.norms, self.blocks, strict=False):
            x = x + block(norm(x))
        logits: torch.Tensor = self.head(self.norms[-1](x))
        return logits


def train(precision: Precision, seed: int, sizes: Sizes, device: torch.device, wgrad: Precision) -> torch.Tensor:
    """Return the loss of each step, (steps,). The seed is the initial weights'; the text is always the same."""
    torch.manual_seed(seed)
    model = Model(sizes, precision, wgrad).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, sizes.steps)
    language, losses = Language(), []
    for _ in range(sizes.steps):
        context, following = language.batch(sizes.tokens)
        loss = functional.cross_entropy(model(context.to(device)), following.to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def smooth(losses: torch.Tensor) -> torch.Tensor:
    """For each step, the mean of the last ones up to it."""
    return torch.stack([losses[max(0, end - SMOOTHING) : end].mean() for end in range(1, len(losses) + 1)])


def plot(path: Path, mxfp8: torch.Tensor, bf16: torch.Tensor, title: str) -> None:
    """Draw smoothed losses, (steps,) and (seeds, steps)."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    steps = range(1, len(mxfp8) + 1)
    for axes, base in ((top, torch.zeros(())), (bottom, bf16[0])):
        axes.plot(steps, (bf16[1:] - base).T, color="#bdbdbd", label=["BF16, other seeds", *["_"] * (len(bf16) - 2)])
        axes.plot(steps, bf16[0] - base, color="#2f5d9b", linewidth=3, label="BF16")
        axes.plot(steps, mxfp8 - base, color="#c0392b", linestyle="--", label="MXFP8")
    top.axhline(Language().entropy, color="black", linestyle=":", label="entropy of the language")
    top.set(ylabel=f"loss in nats, mean of {SMOOTHING} steps")
    top.set_title(title, fontsize=9)
    top.legend()
    bottom.set(xlabel="step", ylabel="difference from BF16")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, print a table of losses, and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, help="without it, 300 on the CPU and 600 on a GPU")
    parser.add_argument("--device", help="cpu or cuda; without it, a Hopper GPU if there is one")
    parser.add_argument("--wgrad", choices=("mxfp8", "bf16"), default="mxfp8", help="weight gradients of the MXFP8 run")
    parser.add_argument("--plot", type=Path, help="file of the picture, .png or .svg; needs the extra `bench`")
    options = parser.parse_args()
    device = pick_device(options.device)
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    sizes = replace(sizes, steps=options.steps or sizes.steps)

    facts = ", ".join(f"{name} {value}" for name, value in asdict(sizes).items())
    title = f"{describe(device)}; {facts}; wgrad {options.wgrad}"
    print(f"{title}; entropy of the language {Language().entropy:.4f}\n")
    mxfp8 = smooth(train("mxfp8", SEEDS[0], sizes, device, options.wgrad))
    bf16 = torch.stack([smooth(train("bf16", seed, sizes, device, "bf16")) for seed in SEEDS])
    steps = sorted({*range(50, sizes.steps + 1, 50), sizes.steps})
    columns = mxfp8, bf16[0], mxfp8 - bf16[0], bf16.amax(0) - bf16.amin(0)
    rows = ((str(step), *(f"{column[step - 1]:.4f}" for column in columns)) for step in steps)
    print_table(("step", "MXFP8", "BF16", "difference", "BF16, between seeds"), rows)
    if options.plot is not None:
        plot(options.plot, mxfp8, bf16, title)


if __name__ == "__main__":
    main()
