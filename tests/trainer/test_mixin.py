"""Any subclass of transformers' Trainer, with parameters in any order, trains through a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import ortrain
from ortrain import Options, ORTModule, ORTSeq2SeqTrainer, ORTTrainer, ORTTrainerMixin
from tests.trainer.models import arguments, bert, collate, texts, train

GRAPH = Options(engine="onnxruntime", fallback="raise")


class Towards(Trainer):
    """Stays near the logits of another model; its arguments come in an order of its own."""

    def __init__(
        self,
        model: Any = None,
        reference: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        tokenizer: Any = None,
        *,
        weight: float = 1.0,
    ) -> None:
        self.reference, self.weight, self.given = reference, weight, tokenizer
        super().__init__(model, args, data_collator, train_dataset, eval_dataset)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.reference(**inputs).logits
        loss: Tensor = outputs.loss + self.weight * (outputs.logits - wanted).square().mean()
        return (loss, outputs) if return_outputs else loss


class ThroughGraph(ORTTrainerMixin, Towards):
    pass


class AsBefore(ORTTrainer, Towards):
    """The mixin by the name that it had."""


class AnyArguments(Towards):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class ThroughAnyArguments(ORTTrainerMixin, AnyArguments):
    pass


def plain(folder: Path) -> Any:
    return arguments(folder, TrainingArguments, max_steps=3)


def reference() -> Any:
    model = bert()
    torch.nn.init.normal_(model.classifier.weight)
    return model


def test_it_trains_as_the_trainer_behind_it(tmp_path: Path) -> None:
    eager = train(Towards, plain(tmp_path), bert(), texts(), reference=reference())
    ours = train(
        ThroughGraph, plain(tmp_path), bert(), texts(), reference=reference(), options=GRAPH
    )
    assert ours.losses == pytest.approx(eager.losses, rel=1e-5)
    assert ours.norms == pytest.approx(eager.norms, rel=1e-4)
    assert ours.trainer.ort_report.graph_calls == 3
    assert ours.trainer.ort_report.fallback_calls == 0


@pytest.mark.parametrize("kind", [ThroughGraph, AsBefore, ThroughAnyArguments])
def test_arguments_by_position_are_those_of_that_trainer(tmp_path: Path, kind: type) -> None:
    model, other, rows = bert(), reference(), texts()
    args = plain(tmp_path)
    found: Any = kind(model, other, args, rows, collate, weight=0.5, options=GRAPH)
    assert found.model is model
    assert found.reference is other
    assert found.args is args
    assert found.train_dataset is rows
    assert found.data_collator is collate
    assert found.weight == 0.5


def test_a_trainer_may_have_a_tokenizer_of_that_name(tmp_path: Path) -> None:
    tokenizer = object()
    found = ThroughGraph(bert(), reference(), plain(tmp_path), tokenizer=tokenizer)
    assert found.given is tokenizer


def test_an_ort_module_is_unwrapped(tmp_path: Path) -> None:
    model = bert()
    assert ThroughGraph(ORTModule(model), reference(), plain(tmp_path)).model is model


@pytest.mark.parametrize(
    ("given", "named", "match"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8), {}, "positional"),
        ((None,), {"model": None}, "multiple values"),
        ((), {"no_such": 1}, "no_such"),
    ],
)
def test_what_the_trainer_does_not_take_is_its_own_error(
    given: tuple[Any, ...], named: dict[str, Any], match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        ThroughGraph(*given, **named)


def test_settings_among_its_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="options=Options"):
        ThroughGraph(bert(), GRAPH, plain(tmp_path))


def test_it_is_public_and_what_both_trainers_are_made_of() -> None:
    assert ortrain.ORTTrainerMixin is ORTTrainerMixin
    assert issubclass(ORTTrainer, ORTTrainerMixin)
    assert issubclass(ORTSeq2SeqTrainer, ORTTrainerMixin)
