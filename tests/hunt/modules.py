"""Small modules of many kinds, with batches for them: what generated scripts work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ortrain.hooks import SubscriberBase

WIDTH = 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.last(hidden)  # type: ignore[no-any-return]


class ConvolutionAndNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(image)))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.gru = (
            nn.Embedding(11, 5, padding_idx=0),
            nn.GRU(5, 4, batch_first=True),
        )

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.embedding(ids))  # type: ignore[no-any-return]


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(x, state)
        return self.head(hidden), state


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.layer(self.embedding(ids), src_mask=mask))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """With a loss where there are labels, as language models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.inner(self.embedding(ids))))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "width": 6}


class Normed(nn.Module):
    """Its weights are computed of others; the spectral norm writes to buffers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, 5))
        self.last = parametrizations.spectral_norm(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x)))  # type: ignore[no-any-return]


class Siamese(nn.Module):
    """A part that runs twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())
        self.right = self.left
        self.mix = nn.Bilinear(4, 4, 2)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        left, right = self.left(a), self.right(b)
        return [left, right, self.mix(left, right)]


class Running(nn.Module):
    """Buffers that the forward writes, in place and by assignment."""

    mean: Tensor
    seen: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
                self.seen += 1
                self.last = x.sum(0)
        return self.layer(x - self.mean) + self.last.sum() * 0.01  # type: ignore[no-any-return]


@dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(
        self, x: Tensor, *, labels: Tensor | None = None, scale: float = 1.0, deep: bool = False
    ) -> Result:
        first = torch.tanh(self.first(x)) * scale
        logits = self.last(first)
        loss = None if labels is None else nn.functional.mse_loss(logits, labels)
        hidden = (first, first * 2) if deep else ()
        return Result(
            logits, hidden, loss, {"choice": logits.argmax(-1), "scale": scale, "no": None}
        )


class Pair(NamedTuple):
    value: Tensor
    choice: Tensor
    note: str


class Flagged(nn.Module):
    """Goes by attributes, and by whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.flag, self.scale, self.depth = True, 1.5, 2
        self.settings = {"shift": 0.5, "names": ["a", "b"]}

    def forward(self, x: Tensor) -> Pair:
        for layer in [*self.layers][: self.depth]:
            x = torch.tanh(layer(x)) if self.flag else torch.sigmoid(layer(x))
        if self.training:
            x = x * self.scale
        x = x + self.settings["shift"]  # type: ignore[operator]
        return Pair(x, (x > 0.5).sum(-1), "trains" if self.training else "rests")


class Adapted(nn.Module):
    """Adapters of low rank beside frozen weights, one of which is chosen by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2, 4, bias=False) for _ in range(2))
        self.active, self.enabled = 0, True

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        if self.enabled:
            result = result + 0.5 * self.up[self.active](self.down[self.active](x))
        return result


class Mixed(nn.Module):
    """A part in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return hidden, self.last(hidden.to(self.last.weight.dtype))


class Classified(nn.Module):
    """Its loss is all it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), labels)


class Same(nn.Module):
    """Returns an argument, a parameter, a buffer and one tensor twice."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x) + self.bias * self.table
        return {"x": x, "y": y, "again": y, "bias": self.bias, "table": self.table, "n": None}


class Listed(nn.Module):
    """Parameters in lists and dictionaries, one of them scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.tensor(1.5))})
        self.constant = [torch.linspace(0, 1, WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x * weight) + self.constant[0].to(x.dtype)
        return x * self.named["gain"]


class Detached(nn.Module):
    """A student and its teacher, of which no gradient is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            target = torch.softmax(self.teacher(x), -1)
        student = self.student(x)
        return (
            student,
            target,
            -(target * torch.log_softmax(student.detach() * 0.5 + student, -1)).sum(),
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Choosy(nn.Module):
    """Refuses some arguments, before and after it has written to a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, strict: bool = False) -> Tensor:
        if x.shape[-1] != WIDTH:
            raise ValueError(f"a width of {WIDTH} is needed")
        self.count += 1
        if strict:
            raise KeyError("strict")
        return torch.relu(self.layer(x))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)).square()

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self._inner, x, use_reentrant=False)
        return self.last(hidden)  # type: ignore[no-any-return]


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Straight.apply(torch.tanh(self.first(x)))
        return self.last(hidden)  # type: ignore[no-any-return]


class Counted(nn.Module):
    """Counts its calls in an attribute, in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(torch.relu(self.first(x))) * (1 + 0.1 * (self.calls % 3))  # type: ignore[no-any-return]


class Written(nn.Module):
    """Writes in place: to hidden values, and to a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        hidden[:, :2] = hidden[:, :2] * 0.5
        hidden.clamp_(-1.0, 1.0)
        y = self.last(torch.tanh(hidden))
        y += 1
        return y, (x > 0).to(torch.int32)


class Chosen(torch.autograd.Function):
    """Two results, one of whole numbers; the gradient is none of the forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: dict[str, float]) -> Any:
        y = x @ weight
        choice = y.argmax(-1)
        ctx.mark_non_differentiable(choice)
        ctx.save_for_backward(x, weight)
        ctx.scale = settings["scale"]
        return y, choice

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T * ctx.scale, x.T @ gradient, None


class Kept(nn.Module):
    """A custom function that stays PyTorch's, within a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 4), nn.Linear(5, 2)
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.settings = {"scale": 0.5}

    def _inner(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Chosen.apply(torch.tanh(self.first(x)), self.weight, self.settings)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, choice = checkpoint(self._inner, x, use_reentrant=False)
        return self.last(y), choice


class Dropped(nn.Module):
    """Leaves layers out at random, so that no graph has it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or float(torch.rand([])) > 0.3:
                x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Spectral(nn.Module):
    """Complex numbers between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.tanh(self.first(x)), dim=-1)
        return self.last(mixed.real + mixed.imag.square())  # type: ignore[no-any-return]


class Routed(nn.Module):
    """Experts, each for the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = torch.softmax(self.gate(x), -1).max(-1)
        out = x.new_zeros(x.shape[0], 4)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A kind of module.

    Attributes:
        make: one with weights of its own, from torch's generator.
        batch: arguments by the number of rows, another length, and a dtype.
        ids: whether the arguments are whole numbers alone, which take no gradients.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.dtype], Batch]
    ids: bool = False


def _rows(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randn(n, WIDTH, dtype=dtype),), {}


def _ids(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randint(0, 11, (n, length)),), {}


def _images(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randn(n, 2, length + 2, 5, dtype=dtype),), {}


def _two(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randn(n, WIDTH, dtype=dtype),), {"b": torch.randn(n, WIDTH, dtype=dtype)}


def _sequence(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randn(length, n, WIDTH, dtype=dtype),), {}


def _labelled_ids(n: int, length: int, dtype: torch.dtype) -> Batch:
    ids = torch.randint(0, 11, (n, length))
    return (ids,), {"labels": ids.roll(1, 1)} if length % 2 else {}


def _masked_ids(n: int, length: int, dtype: torch.dtype) -> Batch:
    mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
    return (torch.randint(0, 11, (n, length)),), {"mask": mask} if length % 2 else {}


def _structured(n: int, length: int, dtype: torch.dtype) -> Batch:
    keywords: dict[str, Any] = {"scale": 0.5 * length, "deep": bool(n % 2)}
    if length % 2:
        keywords["labels"] = torch.randn(n, 3, dtype=dtype)
    return (torch.randn(n, WIDTH, dtype=dtype),), keywords


def _classes(n: int, length: int, dtype: torch.dtype) -> Batch:
    return (torch.randn(n, WIDTH, dtype=dtype), torch.randint(0, 4, (n,))), {}


def _attended(n: int, length: int, dtype: torch.dtype) -> Batch:
    x = torch.randn(n, length, 8, dtype=dtype)
    if length % 3 == 0:
        return (x,), {"causal": True}
    return (x, torch.rand(length, length).fill_diagonal_(1) > 0.4), {}


MODULES = {
    "mlp": Subject(Mlp, _rows),
    "convolution and norm": Subject(ConvolutionAndNorm, _images),
    "gru": Subject(Gated, _ids, ids=True),
    "lstm": Subject(Memory, _sequence),
    "transformer layer": Subject(Layer, _masked_ids, ids=True),
    "tied weights": Subject(Tied, _labelled_ids, ids=True),
    "computed weights": Subject(Normed, _rows),
    "siamese": Subject(Siamese, _two),
    "running buffers": Subject(Running, _rows),
    "dataclass": Subject(Structured, _structured),
    "flags": Subject(Flagged, _rows),
    "adapters": Subject(Adapted, _rows),
    "two dtypes": Subject(Mixed, _rows),
    "loss inside": Subject(Classified, _classes),
    "same tensors": Subject(Same, _rows),
    "parameter lists": Subject(Listed, _rows),
    "teacher": Subject(Detached, _rows),
    "attention": Subject(Attention, _attended),
    "refuses": Subject(Choosy, _rows),
    "checkpoint": Subject(Recomputed, _rows),
    "custom function": Subject(Rounded, _rows),
    "counts": Subject(Counted, _rows),
    "writes": Subject(Written, _rows),
    "kept function": Subject(Kept, _rows),
    "layers left out": Subject(Dropped, _rows),
    "complex numbers": Subject(Spectral, _rows),
    "experts": Subject(Routed, _rows),
}


# What scripts put into a module, or have listen to it.


class Doubling(SubscriberBase):
    """Doubles what each module gives, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def post_forward_tensor_apply_impl(
        self, run_rtx: Any, module: nn.Module, tensor_index: int, tensor: Tensor
    ) -> Tensor:
        self.seen += 1
        return tensor * 2 if tensor.is_floating_point() else tensor


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


class Lora(nn.Module):
    """An adapter around a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        weight = base.weight
        self.down = nn.Parameter(torch.randn(2, base.in_features).to(weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2).to(weight.dtype) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


class Around(nn.Module):
    """A module around another, with a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.tensor(1.25))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out * self.gain if isinstance(out, Tensor) else out
