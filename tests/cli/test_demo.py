from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from ortrain.cli import demo, docstrings, main
from ortrain.cli.text_classification.examples import Example
from ortrain.cli.text_classification.settings import Precision, Settings
from tests.cli.tiny import make_model


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose sources cannot be imported, only parsed."""
    package = tmp_path / "sparkle"
    (package / "tests").mkdir(parents=True)
    prose = "sums what a numpy array holds, element by element, and gives the total back to you."
    for number in range(20):
        functions = "\n".join(
            f'def f{number}_{index}():\n    """Number {number}_{index} {prose}\n\n'
            f'    >>> 1 + 1\n    2\n    """'
            for index in range(12)
        )
        (package / f"m{number}.py").write_text(f'raise SystemExit("imported")\n{functions}\n')
    (package / "__init__.py").write_text('raise SystemExit("imported")\n')
    (package / "broken.py").write_text("def (:\n")
    (package / "tests" / "t.py").write_text(f'"""A test of the torch that {prose}"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(docstrings.LIBRARIES, "sparkle", ("sparkle",))
    return "sparkle"


def test_docstrings_are_parsed_and_cleaned(library: str) -> None:
    collected = docstrings.collect(1000, 1000, [library])
    assert {text.library for text in collected} == {"sparkle"}
    assert len(collected) == 20 * 8  # eight of each file, none of tests or of what does not parse
    for text in collected:
        assert "numpy" not in text.text
        assert ">>>" not in text.text
        assert "a array holds" in text.text


def test_a_file_is_held_out_as_a_whole(library: str) -> None:
    collected = docstrings.collect(1000, 1000, [library])
    sides: dict[str, set[bool]] = {}
    for text in collected:
        sides.setdefault(text.text.split("_")[0], set()).add(text.held_out)
    assert all(len(side) == 1 for side in sides.values())
    assert {side for found in sides.values() for side in found} == {True, False}


def test_the_choice_is_the_same_every_time_and_as_large_as_asked(library: str) -> None:
    first = docstrings.collect(10, 5, [library])
    assert first == docstrings.collect(10, 5, [library])
    assert [sum(text.held_out == side for text in first) for side in (False, True)] == [10, 5]


def test_every_library_of_the_demo_is_there_in_number() -> None:
    collected = docstrings.collect(40, 10)
    for library, held_out in itertools.product(docstrings.LIBRARIES, (False, True)):
        found = [t for t in collected if t.library == library and t.held_out == held_out]
        assert len(found) == (10 if held_out else 40)
    assert len({text.text for text in collected}) == len(collected)


def test_the_comparison_states_speed_and_agreement() -> None:
    eager = demo.Steps([1.0, 0.5, 0.25, 0.125], [9.0, 1.0, 1.0, 1.0])
    ortrain = demo.Steps([1.0, 0.5, 0.25, 0.12502], [9.0, 0.5, 0.5, 0.5])
    lines = demo.comparison(eager, ortrain).splitlines()
    assert lines[-2:] == [
        "largest difference of a loss: 2.0e-05",
        "typical step: eager 1.000 s, ortrain 0.500 s, 2.00 times as fast",
    ]
    assert lines[4].split() == ["4", "0.12500", "0.12502", "2.0e-05", "1.000", "0.500"]


def steps(seconds: list[float], as_graph: list[bool] | None = None, reason: str = "") -> demo.Steps:
    return demo.Steps([1.0] * len(seconds), seconds, as_graph or [], reason)


EAGER_FIRST = [False, False, False, True, True, False]


def test_a_typical_step_is_one_of_the_graphs_where_the_graph_ran() -> None:
    seconds = [9.0, 1.0, 1.0, 0.5, 0.7, 1.0]
    assert steps(seconds, EAGER_FIRST).typical_seconds == pytest.approx(0.6)
    assert steps(seconds, [False] * 6).typical_seconds == 0.7
    assert steps(seconds).typical_seconds == 0.7


@pytest.mark.parametrize(("precision", "name"), [("fp32", "float32"), ("bf16", "bfloat16")])
@pytest.mark.parametrize("graph", [0.99, 1.0, 1.3])
def test_where_there_is_no_gain_it_says_so_in_a_sentence(
    graph: float, precision: Precision, name: str
) -> None:
    ours = steps([1.0, 1.0, 1.0, graph, graph, 1.0], EAGER_FIRST)
    told = demo.gain(steps([1.0] * 6), ours, precision)
    figures = f"typical step: eager 1.000 s, ortrain {graph:.3f} s"
    assert told == (
        f"{figures}: no gain in {name} on this processor,\n"
        "where PyTorch by itself is as fast. ortrain times both during the first steps of a\n"
        "training and goes on with the faster one, so that a model is not slower for being wrapped."
    )


def test_a_gain_that_only_the_graphs_steps_have_is_told() -> None:
    ours = steps([1.0, 1.0, 1.0, 0.5, 0.5, 1.0], EAGER_FIRST)
    told = demo.gain(steps([1.0] * 6), ours, "bf16")
    assert told == "typical step: eager 1.000 s, ortrain 0.500 s, 2.00 times as fast"


def test_where_ortrain_ran_no_graph_it_says_why_and_compares_nothing() -> None:
    ours = steps([0.5] * 4, [False] * 4, "autocast is on: not served yet\n  and more")
    assert demo.gain(steps([1.0] * 4), ours, "bf16") == (
        "typical step: eager 1.000 s. ortrain ran its steps in PyTorch as well, so that there is "
        "nothing to compare:\nautocast is on: not served yet"
    )


@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_both_runs_are_in_the_precision_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model")
    monkeypatch.setattr(demo, "STEPS", 2)
    settings = Settings(
        model=str(tmp_path / "model"),
        training_file=tmp_path,
        evaluation_file=tmp_path,
        output=tmp_path,
        batch_size=4,
        max_length=16,
    )
    examples = [Example(f"the film was {word}", word, 0) for word in ("good", "bad")] * 4
    losses = {}
    for precision in demo.PRECISIONS:
        eager, ours = (demo._steps(settings, examples, e, precision) for e in ("torch", "ortrain"))
        assert eager.losses == ours.losses  # two steps are eager's turn in the contest
        assert (eager.as_graph, ours.as_graph) == ([], [False, False])
        losses[precision] = eager.losses
    assert losses["fp32"] == pytest.approx(losses["bf16"], abs=1e-2)
    assert losses["fp32"] != losses["bf16"]


def test_a_directory_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "exists already; remove it, or choose another --output" in capsys.readouterr().err
    assert tmp_path.exists()


def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(model: Path, directory: Path, out: object, precision: str) -> None:
        assert precision == "fp32"
        (directory / "begun").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_model_directory", lambda: tmp_path)
    monkeypatch.setattr(demo, "_run", press)
    assert main(["demo", "--output", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing is kept\n"
    assert not (tmp_path / "out").exists()
