"""Complex numbers inside of a module: pairs of real ones, and operators that stay PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ortrain import Options, ORTModule
from ortrain.errors import CaptureError
from tests.breadth import sampled
from tests.module.agreement import SAME

WINDOW = torch.hann_window(8)


class Computed(nn.Module):
    """A function of what a layer makes, of six columns."""

    def __init__(self, function: Callable[[Computed, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, 6), function
        self.mixing = nn.Parameter(torch.randn(2, 2))
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01]))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions, as the first Llama computes them."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def angles(rows: int) -> Tensor:
    """Of each row and frequency, one that a call computes."""
    return torch.outer(torch.arange(rows).float(), torch.tensor([1.0, 0.1, 0.01]))


def heard(self: Computed, x: Tensor) -> Tensor:
    spectrum = torch.stft(x.flatten(), 8, 4, window=WINDOW, return_complex=True)
    return spectrum.abs().pow(2).clamp(min=1e-6).log()


def masked(self: Computed, x: Tensor) -> Tensor:
    spectrum = torch.stft(x.flatten(), 8, 4, window=WINDOW, return_complex=True)
    return torch.istft(spectrum * spectrum.abs().sigmoid(), 8, 4, window=WINDOW)


def operator(self: Computed, x: Tensor) -> Tensor:
    """A layer of a Fourier neural operator: the lowest frequencies are mixed, the others go."""
    spectrum = torch.fft.rfft(x)
    mixed = torch.zeros(x.shape[0], 4, dtype=torch.complex64)
    weight = torch.complex(self.mixing, self.mixing.cos())
    mixed[:, :2] = torch.einsum("bi,io->bo", spectrum[:, :2], weight)
    return torch.fft.irfft(mixed, n=6)


FUNCTIONS: dict[str, Callable[[Computed, Tensor], Tensor]] = {
    "turns that the module holds": lambda self, x: turned(x, self.turns[: x.shape[0]]),
    "turns that a call makes": lambda self, x: turned(
        x, torch.polar(torch.ones(x.shape[0], 3), angles(x.shape[0]))
    ),
    "an exponential": lambda self, x: turned(x, torch.exp(1j * angles(x.shape[0]))),
    "a spectrogram": heard,
    "a masked spectrogram": masked,
    "a neural operator": operator,
    "the real part": lambda self, x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=0).real,
    "a correlation": lambda self, x: torch.fft.irfft(
        torch.fft.rfft(x) * torch.conj(torch.fft.rfft(x.flip(-1))), n=6
    ),
    "an angle": lambda self, x: torch.fft.rfft(x + 3).angle(),
    "a real factor of more axes": lambda self, x: (torch.fft.rfft(x) * x[None, :, :4]).abs(),
    "pieces": lambda self, x: torch.stack([t.abs() for t in torch.fft.rfft(x).split(2, 1)]),
    "the last of an axis": lambda self, x: torch.fft.rfft(x)[..., -1].abs(),
    "a detached factor": lambda self, x: (
        torch.fft.rfft(x) * torch.fft.rfft(x * 2).detach()
    ).real,
    "a choice": lambda self, x: torch.where(x[:, :4] > 0, torch.fft.rfft(x), 0).abs(),
    "a size": lambda self, x: (
        torch.fft.rfft(x).real * torch.arange(torch.fft.rfft(x).shape[-1])
    ),
}  # fmt: skip
SAMPLE = ("turns that the module holds", "a masked spectrogram", "a neural operator")


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("name", sampled(FUNCTIONS, SAMPLE))
def test_values_and_gradients_are_those_of_pytorch(name: str, engine: str) -> None:
    eager = Computed(FUNCTIONS[name])
    module = copy.deepcopy(eager)
    graph = ORTModule(module, options=Options(engine=engine, fallback="raise"))
    for rows in (4, 6, 4):
        x = torch.randn(rows, 5)
        found = []
        for model, inner in ((graph, module), (eager, eager)):
            inner.zero_grad()
            output = model(x)
            weights = torch.linspace(0.5, 1.5, output.numel()).view(output.shape)
            (output * weights).square().sum().backward()
            gradients = [p.grad for p in inner.parameters() if p.grad is not None]
            found.append([output.detach(), *gradients])
        for mine, its in zip(*found, strict=True):
            largest = float(its.abs().max())
            torch.testing.assert_close(mine, its, rtol=SAME, atol=SAME * largest)
    assert graph.report.mode == "graph"


def test_a_complex_output_is_refused_and_runs_in_pytorch() -> None:
    module = Computed(lambda self, x: torch.fft.rfft(x))
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    with pytest.raises(CaptureError, match="fft_rfft is complex"):
        graph(torch.randn(4, 5))


def test_a_complex_parameter_is_refused_as_before() -> None:
    module = Computed(lambda self, x: (torch.fft.rfft(x)[:, :2] @ self.mixing).abs())
    module.mixing = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
    graph = ORTModule(module, options=Options(engine="aten", fallback="raise"))
    with pytest.raises(CaptureError, match="mixing is complex"):
        graph(torch.randn(4, 5))
