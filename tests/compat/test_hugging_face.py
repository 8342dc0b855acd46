"""What transformers 5 and datasets 5 took away works as it did; only what they lack is added."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ortrain.compat.adamw import AdamW
from ortrain.compat.available import is_torch_tpu_available
from ortrain.compat.hugging_face import EXTENSIONS, HOSTS
from ortrain.compat.metrics import load_metric
from ortrain.compat.targets import as_target_tokenizer
from ortrain.compat.targets import extend as add_targets
from ortrain.compat.telemetry import send_example_telemetry
from ortrain.compat.tokens import extend as rename_tokens
from ortrain.compat.tokens import taking
from ortrain.errors import MissingPackage, OrtrainWarning

ROOT = Path(__file__).parents[2]
MARK = "_ortrain_takes_use_auth_token"


def python(script: str, *options: str, path: str = str(ROOT)) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert not done.returncode, done.stderr
    return done.stdout


# --- where names and arguments are added -------------------------------------------------------


def test_without_ortrain_compat_the_packages_are_as_they_are() -> None:
    python(
        "import ortrain, transformers, transformers.utils, datasets\n"
        "assert not hasattr(transformers, 'AdamW') and not hasattr(datasets, 'load_metric')\n"
        "assert not hasattr(transformers.utils, 'send_example_telemetry')\n"
        "assert not hasattr(transformers.PreTrainedTokenizerBase, 'as_target_tokenizer')\n"
        f"assert not hasattr(transformers.AutoConfig.from_pretrained.__func__, {MARK!r})\n"
        f"assert not hasattr(datasets.load_dataset, {MARK!r})\n"
    )


def test_packages_that_are_not_installed_are_not_made_up() -> None:
    # Without site-packages: programs ask for a package's spec to see whether they can use it.
    script = (
        "import ortrain.compat, importlib.util\n"
        f"assert not any(importlib.util.find_spec(name) for name in {sorted(HOSTS)})\n"
    )
    python(script, "-S")


@pytest.mark.parametrize("first", ["ortrain.compat, transformers, datasets", "{0}, ortrain.compat"])
def test_what_a_package_has_stays_its_own(first: str, tmp_path: Path) -> None:
    files = {
        "transformers/__init__.py": "class AdamW: own = True\n",
        "transformers/utils/__init__.py": "def is_offline_mode(): return 'its own'\n",
        "transformers/tokenization_utils_base.py": "class PreTrainedTokenizerBase:\n"
        "    def as_target_tokenizer(self): return 'its own'\n",
        "datasets/__init__.py": "from .load import load_dataset, load_dataset_builder\n"
        "def load_metric(path): return 'its own'\n",
        "datasets/load.py": "def load_dataset(path, *, token=1, split=None): return token, split\n"
        "def load_dataset_builder(path): return path\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    modules = "transformers.utils, transformers.tokenization_utils_base, datasets.load"
    script = (
        f"import {first.format(modules)}\n"
        "import transformers.utils, transformers.tokenization_utils_base, datasets, warnings\n"
        "assert transformers.AdamW.own and datasets.load_metric(1) == 'its own'\n"
        "assert transformers.utils.is_offline_mode() == 'its own'\n"
        "base = transformers.tokenization_utils_base.PreTrainedTokenizerBase\n"
        "assert base().as_target_tokenizer() == 'its own'\n"
        "assert datasets.load_dataset is datasets.load.load_dataset\n"
        "assert datasets.load_dataset('x', use_auth_token=None) == (1, None)\n"
        "assert datasets.load_dataset('x', token=2, split='y') == (2, 'y')\n"
        "warnings.simplefilter('ignore')\n"
        "assert datasets.load_dataset('x', use_auth_token='t') == ('t', None)\n"
    )
    python(script, path=os.pathsep.join([str(tmp_path), str(ROOT)]))


def test_packages_that_must_not_be_imported_stay_so() -> None:
    python(
        "import sys\n"
        "sys.modules['transformers'] = sys.modules['datasets.load'] = None\n"
        "import ortrain.compat\n"
        "assert sys.modules['transformers'] is None\n"
    )


def test_names_outlive_the_second_run_of_the_package() -> None:
    # transformers.processing_utils runs transformers/__init__.py again: another module is there.
    python(
        "import ortrain.compat, sys\n"
        "import transformers\n"
        "from transformers import ProcessorMixin\n"
        "again = sys.modules['transformers']\n"
        "from transformers import is_torch_tpu_available, AdamW\n"
        "assert not hasattr(again, 'AdamV') and not hasattr(transformers, 'AdamV')\n"
    )


def test_what_is_nowhere_is_told_in_the_packages_words() -> None:
    import transformers

    with pytest.raises(AttributeError, match=r"^module transformers has no attribute AdamV$"):
        transformers.AdamV  # noqa: B018


# --- use_auth_token ----------------------------------------------------------------------------


def load(path: str, token: Any = None, **others: Any) -> tuple[Any, ...]:
    return path, token, others


def test_use_auth_token_is_token() -> None:
    called = taking(load)
    assert called("x", use_auth_token=None) == ("x", None, {})
    assert called("x", token="t", use_auth_token=None) == ("x", "t", {})
    assert called("x", "t", b=1) == ("x", "t", {"b": 1})
    with pytest.warns(OrtrainWarning, match="^load: use_auth_token is token now$") as seen:
        assert called("x", use_auth_token=False, token=None) == ("x", False, {})
    assert seen[0].filename == __file__
    with pytest.raises(ValueError, match="load: use_auth_token and token are one: give token"):
        called("x", token="t", use_auth_token="u")


TAKING = [module for module, names in EXTENSIONS.items() if "ortrain.compat.tokens:extend" in names]


@pytest.mark.parametrize("module", TAKING)
def test_each_from_pretrained_takes_it_once(module: str) -> None:
    found = importlib.import_module(module)
    methods = {
        value: vars(value)["from_pretrained"].__func__
        for value in vars(found).values()
        if isinstance(value, type) and "from_pretrained" in vars(value)
    }
    assert methods
    for value, method in methods.items():
        if value.__module__.startswith("transformers."):
            assert hasattr(method, MARK), value
    rename_tokens(found)
    assert methods == {value: vars(value)["from_pretrained"].__func__ for value in methods}


def test_models_and_what_belongs_to_them_load_with_it(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for kind in (AutoModelForSequenceClassification, BertForSequenceClassification):
        loaded = kind.from_pretrained(tmp_path, use_auth_token=None, hidden_act="relu")
        assert loaded.config.hidden_act == "relu"
    for kind in (AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, BertConfig):
        kind.from_pretrained(tmp_path, use_auth_token=None)
        with pytest.warns(OrtrainWarning, match="use_auth_token is token now"):
            loaded = kind.from_pretrained(tmp_path, use_auth_token="secret")
        if hasattr(loaded, "init_kwargs"):
            assert not {"use_auth_token", "token"} & loaded.init_kwargs.keys()
        # As an argument that nobody knows, it would be written beside the model.
        loaded.save_pretrained(tmp_path / "again")
        for file in (tmp_path / "again").iterdir():
            assert "secret" not in file.read_text()


# --- targets -----------------------------------------------------------------------------------


class Languages(PreTrainedTokenizerFast):
    """A tokenizer with a mark of the language in front, as mBART's."""

    def _switch_to_input_mode(self) -> None:
        self._mark("<en>")

    def _switch_to_target_mode(self) -> None:
        self._mark("<ro>")

    def _mark(self, language: str) -> None:
        from tokenizers.processors import TemplateProcessing

        mark = (language, self.convert_tokens_to_ids(language))
        self._tokenizer.post_processor = TemplateProcessing(f"{language} $A", None, [mark])


def words(kind: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", "<en>", "<ro>", "a", "b", "c"]
    own = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return kind(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]")


@pytest.fixture
def tokenizer() -> Any:
    return words(PreTrainedTokenizerFast)


def test_within_the_block_a_tokenizer_is_that_of_the_targets(tokenizer: Any) -> None:
    texts = ["a b", "c"]
    several = words(Languages)
    assert several(texts)["input_ids"] == [[2, 4, 5], [2, 6]]
    with several.as_target_tokenizer():
        labels = several(texts, max_length=4, padding="max_length", truncation=True)
        assert several(texts)["input_ids"] == several(texts)["input_ids"] == [[3, 4, 5], [3, 6]]
        assert several.encode("a") == [3, 4]
    other = several(text_target=texts, max_length=4, padding="max_length", truncation=True)
    assert labels["input_ids"] == other["input_ids"] == [[3, 4, 5, 0], [3, 6, 0, 0]]
    assert several(texts)["input_ids"] == [[2, 4, 5], [2, 6]]
    with pytest.raises(KeyError), several.as_target_tokenizer():
        raise KeyError
    assert several(texts)["input_ids"] == [[2, 4, 5], [2, 6]]
    with tokenizer.as_target_tokenizer():
        assert tokenizer(texts)["input_ids"] == [[4, 5], [6]]


def test_a_tokenizer_that_has_the_block_keeps_it() -> None:
    own = type("PreTrainedTokenizerBase", (), {"as_target_tokenizer": lambda self: "its own"})
    add_targets(SimpleNamespace(PreTrainedTokenizerBase=own))  # type: ignore[arg-type]
    assert own().as_target_tokenizer() == "its own"
    assert PreTrainedTokenizerBase.as_target_tokenizer is as_target_tokenizer


# --- names -------------------------------------------------------------------------------------


def test_of_examples_nothing_is_sent() -> None:
    with pytest.warns(OrtrainWarning, match="nothing is sent of run_glue") as seen:
        send_example_telemetry("run_glue", object(), object(), framework="pytorch")
    assert seen[0].filename == __file__


def test_there_is_a_tpu_where_torch_xla_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import import_utils

    assert is_torch_tpu_available() is False
    asked: list[bool] = []
    monkeypatch.setattr(
        import_utils,
        "is_torch_xla_available",
        lambda check_is_tpu: not asked.append(check_is_tpu),  # type: ignore[func-returns-value]
    )
    assert is_torch_tpu_available() is True
    assert is_torch_tpu_available(check_device=False) is True
    assert asked == [True, False]


def test_metrics_need_the_package_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="needs the package 'evaluate'") as error:
        load_metric("accuracy")
    assert error.value.help == "pip install evaluate"


def test_metrics_are_those_of_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, {name: value for name, value in kwargs.items() if value is not None}

    stub = ModuleType("evaluate")
    stub.__spec__ = ModuleSpec("evaluate", None)
    stub.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evaluate", stub)
    plain = {"process_id": 0, "num_process": 1, "keep_in_memory": False}
    assert load_metric("glue", "mrpc") == (("glue", "mrpc"), plain)
    assert load_metric("f1", None, 1, 2, trust_remote_code=True, seed=3) == (
        ("f1", None),
        {**plain, "process_id": 1, "num_process": 2, "seed": 3},
    )


# --- AdamW -------------------------------------------------------------------------------------


def steps_of_then(
    p: torch.Tensor, gradients: list[torch.Tensor], decay: float, correct: bool
) -> torch.Tensor:
    """Loshchilov and Hutter 2017 with the epsilon of BERT's code, as transformers 4 had it."""
    lr, b1, b2, eps = 1e-2, 0.8, 0.95, 1e-3
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        rate = lr * (1 - b2**t) ** 0.5 / (1 - b1**t) if correct else lr
        p = p - rate * m / (v.sqrt() + eps)
        p = p - lr * decay * p
    return p


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_computes_as_it_did(correct: bool, decay: float) -> None:
    start = torch.randn(7, dtype=torch.float64)
    gradients = [torch.randn(7, dtype=torch.float64) for _ in range(4)]
    weight = start.clone().requires_grad_()
    optimizer = AdamW([weight], 1e-2, (0.8, 0.95), 1e-3, decay, correct, True)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected = steps_of_then(start, gradients, decay, correct)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)


def test_adamw_has_the_groups_and_state_dicts_of_then() -> None:
    weight, bias = (torch.randn(3, requires_grad=True) for _ in range(2))
    optimizer = AdamW([{"params": [weight], "correct_bias": False}, {"params": [bias]}])
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, True]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert optimizer.defaults["eps"] == 1e-6
    zeros = torch.zeros(3)
    old = {
        "state": {i: {"step": 3, "exp_avg": zeros, "exp_avg_sq": zeros} for i in range(2)},
        "param_groups": [
            {
                "lr": 1e-3,
                "betas": (0.9, 0.999),
                "eps": 1e-6,
                "weight_decay": 0.1,
                "correct_bias": bool(i),
                "params": [i],
            }
            for i in range(2)
        ],
    }
    optimizer.load_state_dict(old)
    assert [group["bias_correction"] for group in optimizer.param_groups] == [False, True]
    assert "correct_bias" not in optimizer.param_groups[0]
    assert optimizer.state[bias]["step"] == 3
    assert old["param_groups"][0]["correct_bias"] is False  # type: ignore[index]
