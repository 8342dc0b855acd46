"""Every case on a GPU: the same code, with other kernels behind PyTorch's operators."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import pytest
import torch

from ortrain import Options, ORTModule
from ortrain.runtime.aten import AtenExecutor, draws, hash
from ortrain.runtime.aten.graphs import recorders
from ortrain.testing import check_gradients
from tests.runtime.aten.scenarios import SCENARIOS, Network, batch, run_again
from tests.runtime.test_cases import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    """cuDNN's convolutions and recurrent layers round to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(("case", "variant"), list(rows()))
def test_a_case_agrees_with_the_reference(case, variant):
    check_gradients(case, only=[variant], executor=AtenExecutor("cuda"))


# --- draws ----------------------------------------------------------------------------------------


def keep(sizes, seed, stream, device):
    """The mask of a dropout of a third."""
    return hash.keep(sizes, seed, stream, 2**32 // 3 * 2, device)


@pytest.mark.parametrize("sizes", [(), (9,), (5, 7), (70_000, 3), (3, 70_000), (2, 3, 4, 65)])
@pytest.mark.parametrize("draw", [hash.bits, draws.normal, draws.exponential, keep])
def test_draws_have_the_bits_of_the_cpu(draw, sizes):
    for seed in (0, -5, 2**62 + 3):
        keys = hash.spread(seed, [2, 0, 7]).cuda()
        streams = hash.Streams(keys, [2, 0, 7])
        for stream in (0, 7, 2):
            found = draw(sizes, streams, stream, torch.device("cuda")).cpu()
            assert torch.equal(found, draw(sizes, seed, stream, torch.device("cpu")))


# --- recordings -----------------------------------------------------------------------------------

PLAIN = Options(engine="aten", fallback="raise", cuda_graphs=False)
RECORDED = Options(engine="aten", fallback="raise", cuda_graphs=True)
# The kernels are the same ones. Those that add by atomic operations round in any order.
CLOSE = {None: {"rtol": 1e-4, "atol": 1e-6}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-3}}


def in_both(scenario, module, dtype=None):
    """What a scenario finds of a module as it is and recorded, and how that ran."""
    found = []
    for options in (PLAIN, RECORDED):
        model = ORTModule(copy.deepcopy(module), options=options)
        torch.manual_seed(5)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            found.append([*scenario(model), *model.buffers()])
    return *found, model.report.replays


@pytest.mark.filterwarnings("ignore:ORTModule runs Network in PyTorch")
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_recorded_module_does_what_it_does_unrecorded(scenario, dtype):
    plain, recorded, replays = in_both(scenario, Network().cuda(), dtype)
    for mine, its in zip(recorded, plain, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE[dtype])
    assert not replays.refused
    assert replays.replayed or scenario is run_again


def test_steps_on_several_streams_follow_each_other():
    def alternating(model):
        streams = [torch.cuda.Stream() for _ in range(3)]
        for number in range(12):
            with torch.cuda.stream(streams[number % 3]):
                streams[number % 3].wait_stream(torch.cuda.default_stream())
                y = model(*batch(model, 4, number))
                found = torch.autograd.grad(y.square().mean(), [*model.parameters()])
            torch.cuda.default_stream().wait_stream(streams[number % 3])
            yield from (y, *found)

    plain, recorded, replays = in_both(alternating, Network().cuda())
    for mine, its in zip(recorded, plain, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE[None])
    assert replays.replayed > 5


def test_a_recording_frees_its_memory_with_its_module():
    def used():
        """Bytes that are in use after a module has come and gone."""
        model = ORTModule(torch.nn.Sequential(torch.nn.Linear(512, 512)).cuda(), options=RECORDED)
        for count in (300, 400, 500):
            for _ in range(4):
                model(torch.ones(count, 512, device="cuda")).sum().backward()
        assert model.report.replays.recorded > 2
        del model
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = used()
    assert used() <= first + 2**20


def test_what_selects_by_a_mask_runs_as_it_is():
    class Selecting(torch.nn.Module):
        def forward(self, x):
            return x[x > 0] * 2

    model = ORTModule(Selecting(), options=RECORDED)
    for _ in range(4):
        x = torch.randn(100, device="cuda")
        assert torch.equal(model(x), x[x > 0] * 2)
    assert model.report.replays.refused or not model.report.replays.recorded


def test_a_failed_capture_leaves_everything_usable(monkeypatch):
    """Past the watch, which would have refused it, it is CUDA that does."""
    monkeypatch.setattr(recorders, "Watch", lambda device: nullcontext())
    recorder, x = recorders.CudaRecorder(torch.device("cuda")), torch.ones(3, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            recorder.record(lambda values: [values[0] * values[0].sum().item()], [x])
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert recorder.is_free()
        assert torch.equal(x @ x, torch.tensor(3.0, device="cuda"))
    replay, (y,) = recorder.record(lambda values: [values[0] * 2], [x])
    x.add_(1)
    replay()
    assert torch.equal(y.cpu(), torch.full((3,), 4.0))
    plain, recorded, replays = in_both(SCENARIOS[0], Network().cuda())
    for mine, its in zip(recorded, plain, strict=True):
        torch.testing.assert_close(mine, its, **CLOSE[None])
    assert replays.replayed
