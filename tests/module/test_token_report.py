"""What users see of the tokens that are left out: the report, and the densities of each step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ortrain import DebugOptions, Options, ORTModule
from ortrain.errors import OrtrainWarning
from ortrain.frontend import graph
from ortrain.step import tokens
from ortrain.step.report import Dense, Report, Saving, alone
from tests.token_cases import LENGTH, LENGTHS, WORDS, Batch, batch

WIDTH = 64
COMPUTE = "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER"
LABELS = "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER"
EMBEDDINGS = "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER"
PRINT = "ORTMODULE_PRINT_INPUT_DENSITY"


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small models, too."""
    monkeypatch.setattr(tokens, "LEAST", 0)


class Tagger(nn.Module):
    """Attention over real words, and a tag for each of them; returns the loss and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        words = self.embedding(input_ids).unsqueeze(1)
        query, key = self.query(words), self.key(words)
        mask = attention_mask.bool()[:, None, None, :]
        words = nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
        tags = self.head(words.squeeze(1))
        return nn.functional.cross_entropy(tags.flatten(0, 1), labels.flatten()), tags


class Pooled(nn.Module):
    """What a test makes of its words after a product with each."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.use(self.hidden(self.embedding(input_ids)), attention_mask)


def tagged(lengths: str, labelled: int = 2) -> Batch:
    """A label for so many words of each row, or for as many as it has."""
    given = batch(LENGTHS[lengths])
    chosen = given["attention_mask"].bool() & (torch.arange(LENGTH) < labelled)
    return {**given, "labels": torch.where(chosen, 1, -100)}


def of_real(given: Batch) -> float:
    return float(given["attention_mask"].float().mean())


def of_labelled(given: Batch) -> float:
    return float((given["labels"] >= 0).float().mean())


def wrapped(module: nn.Module, debug: DebugOptions | None = None, **settings: Any) -> ORTModule:
    options = Options(engine="aten", fallback="raise", **settings)
    return ORTModule(module, debug, options=options)


def run(model: ORTModule, given: Batch) -> None:
    output = model(**given)
    (output if isinstance(output, Tensor) else output[0]).sum().backward()


# --- the report -----------------------------------------------------------------------------------


def test_densities_are_those_of_the_batches_on_average() -> None:
    model = wrapped(Tagger())
    model.only_loss_is_read = True
    for count, lengths in enumerate(LENGTHS, start=1):
        run(model, tagged(lengths))
        given = [tagged(each) for each in [*LENGTHS][:count]]
        found = model.report.densities
        assert found["real"] == pytest.approx(sum(map(of_real, given)) / count)
        assert found["labelled"] == pytest.approx(sum(map(of_labelled, given)) / count)
    assert model.report.counted == len(LENGTHS)
    assert model.report.dense == []
    text = str(model.report)
    assert f"{found['real']:.1%} real" in text
    assert f"{found['labelled']:.1%} labelled" in text


def test_an_output_that_shows_tokens_is_told_with_both_ways_out() -> None:
    model = wrapped(Tagger())
    run(model, tagged("some"))
    (found,) = model.report.dense
    assert (found.kind, found.helps) == ("output", ("loss", "tokens"))
    assert found.share > 0.3
    text = str(model.report)
    assert "the output 'output.1' shows all tokens" in text
    assert "Options(skip_padding=True)" in text
    assert "model.only_loss_is_read = True" in text
    assert "ORTTrainer" in text


@pytest.mark.parametrize("way", ["loss", "tokens"])
def test_each_way_out_is_one(way: str) -> None:
    model = wrapped(Tagger(), skip_padding=True if way == "tokens" else None)
    model.only_loss_is_read = way == "loss"
    run(model, tagged("some"))
    assert model.report.left_out == 1
    assert "all computed" not in str(model.report)


IN_THE_WAY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a mean": (lambda w, m: w.mean(1).pow(2).mean(), "a sum or mean at (test_token_report.py:"),
    "sums": (lambda w, m: (w.cumsum(1) * m.unsqueeze(-1)).sum(1).mean(), "a cumulative sum at"),
    "an attention": (
        lambda w, m: nn.functional.scaled_dot_product_attention(w, w, w)[:, 0].mean(),
        "the attention at (test_token_report.py:",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_stands_in_the_way_is_told_by_its_line(name: str) -> None:
    use, told = IN_THE_WAY[name]
    model = wrapped(Pooled(use))
    run(model, batch(LENGTHS["some"]))
    (found,) = model.report.dense
    assert 0.5 < found.share <= 1
    assert told in str(model.report)
    assert not model.report.left_out


def test_a_module_that_needs_all_of_its_input_is_told_nothing() -> None:
    """An output that would be whole in any case is no news, nor is a module without tokens."""
    for module, given in (
        (Pooled(lambda words, mask: words), batch(LENGTHS["some"])),
        (nn.Linear(WIDTH, 2), {"input": torch.randn(3, WIDTH)}),
    ):
        model = wrapped(module)
        run(model, given)
        assert "tokens" not in str(model.report)


@pytest.mark.parametrize("why", ["small", "full"])
def test_where_nothing_was_left_out_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "small":
        monkeypatch.setattr(tokens, "LEAST", 1 << 60)
    model = wrapped(Pooled(lambda w, m: (w * m.unsqueeze(-1)).sum(1).mean()))
    run(model, batch(LENGTHS["all full"]))
    report = model.report
    assert (report.counted, report.uncounted) == ((0, 1) if why == "small" else (1, 0))
    told = "calls are too small" if why == "small" else "would save too little"
    assert f"tokens    all computed: {told}" in str(report).replace("the calls", "calls").replace(
        "to leave out those that nobody reads ", ""
    )


def test_the_first_reasons_are_told_and_how_many_more_there_are() -> None:
    rows = [Dense("operator", f"Op{i}", f"(m.py:{i})", i % 2, 0.9 - i / 10) for i in range(5)]
    text = str(Report(mode="graph", dense=rows))
    assert [f"Op{i}" in text for i in range(5)] == [True, True, True, False, False]
    assert "and 2 more of the like" in text
    assert "the operator Op1 at (m.py:1) and 1 more like it" in text


def test_means_are_over_the_calls_that_have_a_set() -> None:
    report = Report()
    for saving in (Saving(0.5, {"real": 0.2}), None, Saving(0.0, {"real": 0.4, "labelled": 0.1})):
        report.note_tokens(saving)
    assert report.densities == pytest.approx({"real": 0.3, "labelled": 0.1})
    assert (report.counted, report.uncounted, report.left_out) == (2, 1, 1)
    assert report.left_out_share == 0.5


ALONE: dict[str, tuple[list[str], list[str]]] = {
    "both": (["real", "labelled", "labelled or real"], ["real", "labelled"]),
    "one": (["real", "labelled or real"], ["real", "labelled or real"]),
    "none": (["labelled or real"], ["labelled or real"]),
    "of each input": (
        ["real of a", "labelled of b", "labelled or real of b", "real of b", "at position 0 of a"],
        ["real of a", "labelled of b", "real of b", "at position 0 of a"],
    ),
    "of another input": (
        ["real of a", "labelled of b", "labelled or real of b"],
        ["real of a", "labelled of b", "labelled or real of b"],
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_unions_of_what_is_told_are_not_told(name: str) -> None:
    given, told = ALONE[name]
    assert [*alone(dict.fromkeys(given, 0.5))] == told


# --- densities of each step -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["aten", "onnxruntime"])
@pytest.mark.parametrize("skips", [None, False])
@pytest.mark.parametrize("only_loss", [True, False])
def test_each_step_prints_its_densities(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: Any,
    skips: bool | None,
    only_loss: bool,
) -> None:
    monkeypatch.setenv(PRINT, "1")
    model = ORTModule(Tagger(), options=Options(engine=engine, skip_padding=skips))
    model.only_loss_is_read = only_loss
    for lengths in LENGTHS:
        run(model, tagged(lengths))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(LENGTHS)
    for step, (line, lengths) in enumerate(zip(lines, LENGTHS, strict=True), start=1):
        given = tagged(lengths)
        assert line.startswith(f"ORTModule step {step}: ")
        assert f"label density {of_labelled(given):.1%}" in line
        assert f"embedding density {of_real(given):.1%}" in line
        left_out = ", 0% of the multiplications left out" not in line
        assert left_out <= (skips is None)
        assert left_out >= (skips is None and only_loss)


def test_calls_without_gradients_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = wrapped(Tagger(), DebugOptions(print_input_density=True))
    with torch.no_grad():
        model(**tagged("some"))
    assert not capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_densities_of_a_gpu_are_printed_and_nothing_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = wrapped(Tagger().cuda(), DebugOptions(print_input_density=True))
    given = tagged("some")
    run(model, {name: tensor.cuda() for name, tensor in given.items()})
    line = capsys.readouterr().err
    assert f"label density {of_labelled(given):.1%}" in line
    assert f"embedding density {of_real(given):.1%}" in line
    assert "0% of the multiplications left out" in line


def test_only_the_first_process_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wrapped(Tagger(), DebugOptions(print_input_density=True))
    run(model, tagged("some"))
    assert capsys.readouterr().err
    monkeypatch.setattr("ortrain.step.progress.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("ortrain.step.progress.distributed.get_rank", lambda: 1)
    run(model, tagged("some"))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", [*IN_THE_WAY, "one word"])
def test_a_module_without_labels_or_mask_says_so(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use = IN_THE_WAY[name][0] if name in IN_THE_WAY else lambda w, m: w[:, 0].pow(2).mean()
    model = wrapped(Pooled(use), DebugOptions(print_input_density=True))
    run(model, batch(LENGTHS["some"]))
    assert "no labels and no mask" in capsys.readouterr().err


def test_switched_off_nothing_more_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(graph, "TokenCounts", None)  # which would raise where it is made
    run(wrapped(Tagger(), skip_padding=False), tagged("some"))
    assert not capsys.readouterr().err


# --- the switches of ONNX Runtime Training --------------------------------------------------------

STATES = (None, "0", "1")


@pytest.mark.parametrize(
    ("compute", "labels", "embeddings"), [*itertools.product(STATES, STATES, STATES)]
)
def test_all_off_computes_all_and_one_off_is_told(
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    compute: str | None,
    labels: str | None,
    embeddings: str | None,
) -> None:
    for name, value in ((COMPUTE, compute), (LABELS, labels), (EMBEDDINGS, embeddings)):
        if value is not None:
            monkeypatch.setenv(name, value)
    off = compute == "0" or labels == embeddings == "0"
    assert Options().skip_padding is (False if off else None)
    told = [str(each.message) for each in recwarn if each.category is OrtrainWarning]
    alone = [name for name, v in ((LABELS, labels), (EMBEDDINGS, embeddings)) if v == "0"]
    assert [message.partition("=")[0] for message in told] == ([] if off else alone)
    assert Options(skip_padding=True).skip_padding is True


@pytest.mark.parametrize("name", [COMPUTE, LABELS, EMBEDDINGS])
@pytest.mark.parametrize("value", ["2", "off", "O"])
def test_a_switch_that_is_neither_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value.lower()}': expected 0 or 1"):
        Options()


def test_printing_is_asked_for_by_the_environment_or_an_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not DebugOptions().print_input_density
    monkeypatch.setenv(PRINT, "1")
    assert DebugOptions(print_input_density=False).print_input_density
    assert DebugOptions.of(DebugOptions().plain()).print_input_density
