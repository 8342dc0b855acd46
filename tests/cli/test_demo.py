from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from ortrain.cli import demo, docstrings, main


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


def test_a_directory_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "exists already; remove it, or choose another --output" in capsys.readouterr().err
    assert tmp_path.exists()


def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(model: Path, directory: Path, out: object) -> None:
        (directory / "begun").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_model_directory", lambda: tmp_path)
    monkeypatch.setattr(demo, "_run", press)
    assert main(["demo", "--output", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing is kept\n"
    assert not (tmp_path / "out").exists()
