"""transformers' own training arguments take the fields of then, under their own name."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import HfArgumentParser

import ortrain.compat  # noqa: F401
from ortrain.compat.old_fields import OldFields, extend, with_old_fields
from ortrain.errors import OrtrainWarning

# Those of transformers, as scripts find them under ortrain.compat.
training_args: Any = importlib.import_module("transformers.training_args")
seq2seq: Any = importlib.import_module("transformers.training_args_seq2seq")
KINDS = [training_args.TrainingArguments, seq2seq.Seq2SeqTrainingArguments]


def lines(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is OrtrainWarning]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_then_acts_and_says_so_once(kind: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = kind(
            str(tmp_path), evaluation_strategy="steps", eval_steps=5, no_cuda=True, report_to="none"
        )
    assert (arguments.eval_strategy, arguments.use_cpu) == ("steps", True)
    assert lines(caught) == [
        "training arguments: evaluation_strategy is eval_strategy now",
        "training arguments: no_cuda is use_cpu now",
    ]
    assert not arguments.overwrite_output_dir
    assert not arguments.ort


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::ortrain.errors.OrtrainWarning")
def test_classes_made_of_them_and_command_lines_have_them_too(kind: Any, tmp_path: Path) -> None:
    @dataclass
    class Own(kind):  # type: ignore[misc]
        optim: str = field(default="adamw_torch")
        cache_dir: str | None = None

    line = f"--output_dir {tmp_path} --overwrite_output_dir --warmup_ratio 0.1 --cache_dir here"
    line += " --ort --report_to none"
    (arguments,) = HfArgumentParser(Own).parse_args_into_dataclasses(line.split())
    assert (arguments.warmup_steps, arguments.cache_dir) == (0.1, "here")
    assert arguments.overwrite_output_dir
    assert arguments.ort


@pytest.mark.parametrize("kind", KINDS)
def test_their_files_know_them_by_the_name_of_transformers(kind: Any, tmp_path: Path) -> None:
    arguments = kind(str(tmp_path), report_to="none")
    assert f"c{kind.__module__}\n{kind.__name__}\n".encode() in pickle.dumps(arguments, protocol=0)
    assert pickle.loads(pickle.dumps(arguments)).output_dir == str(tmp_path)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Training arguments as a script has them that imported them before ortrain.compat."""

    @dataclass
    class TrainingArguments:
        output_dir: str = ""
        seed: int = 42

        def __post_init__(self) -> None:
            pass

    module = ModuleType("transformers.training_args_of_a_test")
    TrainingArguments.__module__, TrainingArguments.__qualname__ = (
        module.__name__,
        "TrainingArguments",
    )
    vars(module)["TrainingArguments"] = TrainingArguments
    monkeypatch.setitem(sys.modules, module.__name__, module)
    extend(module)
    return TrainingArguments


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arguments_of_a_class_that_was_imported_before_are_saved(
    before: Any, protocol: int
) -> None:
    loaded = pickle.loads(pickle.dumps(before("here", seed=5), protocol))
    assert type(loaded) is vars(sys.modules[before.__module__])["TrainingArguments"]
    assert issubclass(type(loaded), before)
    assert (loaded.output_dir, loaded.seed, loaded.overwrite_output_dir) == ("here", 5, False)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_those_of_a_class_that_was_made_of_it_before_keep_theirs(
    before: Any, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived = type("Derived", (before,), {"__module__": __name__, "__qualname__": "Derived"})
    monkeypatch.setitem(globals(), "Derived", derived)
    loaded = pickle.loads(pickle.dumps(derived("here"), protocol))
    assert (type(loaded), loaded.output_dir) == (derived, "here")


def test_copies_of_them_are_training_arguments(before: Any) -> None:
    arguments = before("here", seed=5)
    for made in (copy.copy(arguments), copy.deepcopy(arguments), replace(arguments)):
        assert isinstance(made, before)
        assert (made.output_dir, made.seed) == ("here", 5)


def test_a_class_that_has_them_stays_as_it_is() -> None:
    for kind in KINDS:
        assert issubclass(kind, OldFields)
        assert with_old_fields(kind) is kind
    before = training_args.TrainingArguments
    extend(training_args)
    assert training_args.TrainingArguments is before


def test_a_version_of_transformers_that_has_them_itself_stays_so() -> None:
    @dataclass
    class TrainingArguments:
        output_dir: str = ""
        evaluation_strategy: str = "no"

    module = ModuleType("transformers.training_args")
    TrainingArguments.__module__ = module.__name__
    vars(module)["TrainingArguments"] = TrainingArguments
    extend(module)
    assert vars(module)["TrainingArguments"] is TrainingArguments
    assert [each.name for each in fields(TrainingArguments)][-1] == "evaluation_strategy"
