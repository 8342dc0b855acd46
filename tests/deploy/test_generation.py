"""Generation in onnxruntime: PyTorch's tokens, few captures, a model that stays as it is."""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from ortrain import Options, ORTModule, OrtrainWarning
from ortrain.deploy.generation import ORTGenerator
from ortrain.errors import NotServed
from tests.breadth import sampled
from tests.deploy.decoders import TEXT_MODELS, Branches, Peeks, batch, gpt2, mistral, t5, whisper

STRICT = Options(fallback="raise")
NEW = 14

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "length_penalty": 2.0},
    "several sequences": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "sampled beams": {"do_sample": True, "num_beams": 3, "top_k": 20},
    "no repetitions": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "lengths": {"max_new_tokens": 9, "min_new_tokens": 5},
}


@functools.cache
def shared(name: str) -> tuple[Any, ORTGenerator]:
    """A model, and its generator without a fallback; the tests leave both as they are."""
    model = TEXT_MODELS[name]()
    return model, ORTGenerator(model, options=STRICT)


@pytest.fixture(params=sampled(TEXT_MODELS, ["t5", "gpt2", "llama"]))
def served(request: pytest.FixtureRequest) -> tuple[Any, ORTGenerator]:
    return shared(request.param)


def both(model: Any, generator: ORTGenerator, seed: int = 7, **arguments: Any) -> tuple[Any, Any]:
    """What PyTorch generates, and what the generator does, from the same random state."""
    results = []
    for generate in (model.generate, generator.generate):
        torch.manual_seed(seed)
        results.append(generate(**arguments))
    return results[0], results[1]


def state_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(part)) for name, part in model.named_modules()}


def assert_untouched(model: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """The very same objects under the same names, in every module."""
    now = state_of(model)
    assert now.keys() == before.keys()
    for part, attributes in now.items():
        assert attributes.keys() == before[part].keys()
        assert all(value is before[part][name] for name, value in attributes.items()), part


# --- the same tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("search", SEARCHES)
def test_each_search_gives_pytorchs_tokens(served: tuple[Any, ORTGenerator], search: str) -> None:
    model, generator = served
    report = generator.report
    before = (report.graph_calls, report.encoder_runs)
    arguments = {"max_new_tokens": NEW, **SEARCHES[search]}
    expected, found = both(model, generator, **batch(model, 4, 6), **arguments)
    assert torch.equal(found, expected)
    encoders = 1 if model.config.is_encoder_decoder else 0
    assert (report.graph_calls, report.encoder_runs) == (before[0] + 1, before[1] + encoders)
    assert (report.fallback_calls, report.torch_runs) == (0, 0)


def test_the_tokens_of_these_tests_vary(served: tuple[Any, ORTGenerator]) -> None:
    model, _ = served
    for search in SEARCHES.values():
        torch.manual_seed(7)
        found = model.generate(**batch(model, 4, 6), **{"max_new_tokens": NEW, **search})
        rows = [row[-NEW:] for row in found.tolist()]
        assert len({tuple(row) for row in rows}) == len(rows)
        distinct = [len(set(row)) for row in rows]
        assert min(distinct) >= 3
        assert sum(distinct) / len(distinct) > 4.5


def test_the_decoder_runs_once_for_each_token(served: tuple[Any, ORTGenerator]) -> None:
    model, generator = served
    for beams in (1, 3):
        before = generator.report.decoder_runs
        lengths = {"min_new_tokens": 7, "max_new_tokens": 7}
        generator.generate(**batch(model, 2, 5), num_beams=beams, **lengths)
        assert generator.report.decoder_runs - before == 7


def test_generation_stops_at_the_end_token(served: tuple[Any, ORTGenerator]) -> None:
    model, generator = served
    inputs = batch(model, 4, 6)
    plain = model.generate(**inputs, max_new_tokens=NEW)
    end = int(plain[1, -NEW:][3])
    for beams in (1, 3):
        arguments = {"max_new_tokens": NEW, "eos_token_id": [end, 2], "num_beams": beams}
        expected, found = both(model, generator, **inputs, **arguments)
        assert torch.equal(found, expected)
        assert not torch.equal(expected, plain)


def test_scores_and_logits_are_those_of_pytorch(served: tuple[Any, ORTGenerator]) -> None:
    model, generator = served
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    arguments = {"num_beams": 2, "max_new_tokens": 5, **wanted}
    expected, found = both(model, generator, **batch(model, 3, 5), **arguments)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
    for mine, its in zip(found.past_key_values, expected.past_key_values, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    if model.config.is_encoder_decoder:
        assert found.past_key_values.is_updated == expected.past_key_values.is_updated


def test_a_speech_model_generates_from_its_frames() -> None:
    model = whisper()
    generator = ORTGenerator(model, options=STRICT)
    for rows, beams in ((3, 1), (1, 1), (2, 3)):
        frames = torch.randn(rows, 8, 40)
        arguments = {"input_features": frames, "num_beams": beams, "max_new_tokens": 10}
        expected, found = both(model, generator, **arguments)
        assert torch.equal(found, expected)
    # The encoder, the first token, the second, whose past is of one, and all others.
    assert generator.report.captures == 4


def test_a_decoder_may_be_given_its_first_tokens_and_a_mask_of_them() -> None:
    model, generator = shared("t5")
    inputs = batch(model, 2, 5)
    generator.generate(**inputs, max_new_tokens=3)
    captures = generator.report.captures
    start = torch.tensor([[0, 5, 9], [0, 0, 7]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    masked = {"decoder_input_ids": start, "decoder_attention_mask": mask}
    # In the last, the first past is one token long and the mask two.
    short = {name: value[:, -1:] for name, value in masked.items()}
    for more in ({"decoder_input_ids": start}, masked, short):
        assert torch.equal(*both(model, generator, **inputs, **more, max_new_tokens=6))
    # Of several first tokens, and first and later ones with that mask.
    assert generator.report.captures == captures + 3


def test_a_prompt_may_be_read_in_pieces_or_as_embeddings_and_a_cache_be_continued() -> None:
    model, generator = shared("gpt2")
    inputs = batch(model, 2, 6)
    expected, found = both(model, generator, **inputs, prefill_chunk_size=4, max_new_tokens=6)
    assert torch.equal(found, expected)

    embedded = {"inputs_embeds": model.transformer.wte(inputs["input_ids"]).detach()}
    mask = {"attention_mask": inputs["attention_mask"]}
    expected, found = both(model, generator, **embedded, **mask, max_new_tokens=6)
    assert torch.equal(found, expected)

    results = []
    for generate in (model.generate, generator.generate):
        first = generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, first.sequences[:, :2]], 1)
        mask = {"attention_mask": nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)}
        past = first.past_key_values
        results.append(generate(input_ids=ids, **mask, past_key_values=past, max_new_tokens=4))
    assert torch.equal(results[1], results[0])


def test_tokens_are_streamed_as_they_come() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, tokens: Tensor) -> None:
            self.seen.append(tokens.tolist())

        def end(self) -> None:
            self.seen.append("end")

    model, generator = shared("gpt2")
    streamers = Streamer(), Streamer()
    for streamer, generate in zip(streamers, (model.generate, generator.generate), strict=True):
        generate(**batch(model, 1, 4), streamer=streamer, max_new_tokens=5)
    assert streamers[1].seen == streamers[0].seen
    assert len(streamers[1].seen) == 7


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_a_long_generation_keeps_no_memory_of_its_shorter_caches() -> None:
    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    model, generator = shared("t5")
    inputs, lengths = batch(model, 64, 5), {"min_new_tokens": 300, "max_new_tokens": 300}
    generator.generate(**inputs, max_new_tokens=3)
    before = resident()
    generator.generate(**inputs, **lengths)
    # The last cache takes 5 MiB, all caches together 700.
    assert resident() - before < 100


# --- captures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, t5])
def test_rows_lengths_and_beams_need_no_further_capture_and_one_of_them_has_its_own(
    make: Any,
) -> None:
    model = make()
    generator = ORTGenerator(model, options=STRICT)
    # A decoder alone is captured with a mask and, where nothing is padded, without one.
    paired = model.config.is_encoder_decoder

    def run(*sizes: tuple[int, int, int]) -> int:
        for rows, length, beams in sizes:
            inputs = batch(model, rows, length, padded=paired)
            expected, found = both(model, generator, **inputs, num_beams=beams, max_new_tokens=6)
            assert torch.equal(found, expected)
        return generator.report.captures

    # The encoder, the first token, the second, whose past is of one, and all others.
    assert run((2, 5, 3), (3, 4, 1), (4, 7, 2)) == (4 if paired else 2)
    if paired:  # which Seq2SeqTrainer passes
        labels = torch.ones(2, 9, dtype=torch.int64)
        generator.generate(**batch(model, 2, 5), labels=labels, max_new_tokens=3)
    ones = run((1, 1, 1), (1, 4, 1), (1, 1, 3), (2, 1, 1))
    assert run((1, 1, 1), (1, 6, 1), (1, 1, 2), (4, 1, 1), (2, 6, 2)) == ones
    if not paired:
        counts = []
        for rows, length in ((2, 5), (3, 4), (4, 7)):
            results = both(model, generator, **batch(model, rows, length), max_new_tokens=6)
            assert torch.equal(*results)
            counts.append(generator.report.captures)
        assert len({*counts}) == 1


def test_what_training_changes_is_seen_without_a_capture() -> None:
    model, generator = shared("t5")
    inputs, seen, captures = batch(model, 2, 5), [], []
    weights = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        expected, found = both(model, generator, **inputs, num_beams=2, max_new_tokens=8)
        assert torch.equal(found, expected)
        seen.append(found.tolist())
        captures.append(generator.report.captures)
        model.train()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
    model.load_state_dict(weights)
    assert seen[0] != seen[1] != seen[2]
    assert captures[0] == captures[1] == captures[2]


def test_what_is_replaced_is_seen() -> None:
    model = gpt2()
    generator = ORTGenerator(model, options=STRICT)
    inputs = batch(model, 1, 5)
    first = generator.generate(**inputs, max_new_tokens=6)
    model.set_output_embeddings(nn.Linear(16, 60, bias=False))
    model.transformer.h[1].mlp.c_fc.weight.data = torch.randn(16, 64)
    expected, found = both(model, generator, **inputs, max_new_tokens=6)
    assert torch.equal(found, expected)
    assert not torch.equal(found, first)


def test_settings_of_generation_need_no_capture() -> None:
    model, generator = shared("t5")
    settings, captures = model.generation_config, []
    for beams in (1, 2, 3):
        model.generation_config = copy.deepcopy(settings)
        model.generation_config.num_beams = beams
        model.generation_config.max_length = 5 + beams
        assert torch.equal(*both(model, generator, **batch(model, 2, 5)))
        captures.append(generator.report.captures)
    model.generation_config = settings
    assert captures[0] == captures[1] == captures[2]


# --- the model stays as it is -------------------------------------------------------------------


def test_the_model_stays_as_it_is(served: tuple[Any, ORTGenerator]) -> None:
    model, generator = served
    before, config = state_of(model), model.config.to_dict()
    settings = model.generation_config.to_dict()
    generator.generate(**batch(model, 2, 5), num_beams=2, max_new_tokens=4)
    assert_untouched(model, before)
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == settings


def test_an_error_in_the_middle_leaves_the_model_as_it_is(
    served: tuple[Any, ORTGenerator],
) -> None:
    model, generator = served
    inputs, before = batch(model, 2, 5), state_of(model)
    calls = (generator.report.graph_calls, generator.report.fallback_calls)
    count = iter(range(3))

    def failing(ids: Tensor, scores: Tensor) -> Tensor:
        next(count)
        return scores

    processors = LogitsProcessorList([failing])
    with pytest.raises(StopIteration):
        generator.generate(**inputs, logits_processor=processors, max_new_tokens=9)
    assert_untouched(model, before)
    assert (generator.report.graph_calls, generator.report.fallback_calls) == calls
    expected, found = both(model, generator, **inputs, max_new_tokens=6)
    assert torch.equal(found, expected)


def test_the_generator_stands_in_the_place_of_generate_for_a_while() -> None:
    model = gpt2()
    generator = ORTGenerator(ORTModule(model), options=STRICT)
    expected = model.generate(**batch(model, 2, 5), max_new_tokens=4)
    for _ in range(2):
        with generator.in_place():
            assert torch.equal(model.generate(**batch(model, 2, 5), max_new_tokens=4), expected)
        assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="unknown"), generator.in_place():
        model.generate(**batch(model, 2, 5), unknown=1)
    assert "generate" not in vars(model)
    assert generator.report.graph_calls == 2


# --- what runs in PyTorch -----------------------------------------------------------------------

REASONS: list[tuple[str, dict[str, Any]]] = [
    ("output_attentions=True", {"output_attentions": True, "return_dict_in_generate": True}),
    ("output_hidden_states=True", {"output_hidden_states": True, "return_dict_in_generate": True}),
    ("a StaticCache", {"cache_implementation": "static"}),
    ("there is no key-value cache", {"use_cache": False}),
    (r"assisted generation \(prompt_lookup_num_tokens\)", {"prompt_lookup_num_tokens": 2}),
    ("synced_gpus=True", {"synced_gpus": True}),
]


@pytest.mark.parametrize(("reason", "arguments"), REASONS, ids=[r for r, _ in REASONS])
def test_what_no_graph_serves_runs_in_pytorch_with_one_warning(
    reason: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.GenerationMixin._has_unfinished_sequences",
        lambda self, finished, synced_gpus, device: not finished,  # there are no other processes
    )
    model = gpt2()
    expected = model.generate(**batch(model, 1, 6), **arguments, max_new_tokens=6)
    generator = ORTGenerator(model)
    with pytest.warns(OrtrainWarning, match=f"GPT2LMHeadModel in PyTorch: {reason}"):
        found = generator.generate(**batch(model, 1, 6), **arguments, max_new_tokens=6)
    again = generator.generate(**batch(model, 1, 6), **arguments, max_new_tokens=6)
    for each in (found, again):
        assert torch.equal(*[getattr(e, "sequences", e) for e in (each, expected)])
    report = generator.report
    assert (report.graph_calls, report.fallback_calls, report.decoder_runs) == (0, 2, 0)
    assert f"2 in PyTorch ({reason.replace(chr(92), '')})" in str(report)
    with pytest.raises(NotServed, match=reason):
        ORTGenerator(model, options=STRICT).generate(
            **batch(model, 1, 6), **arguments, max_new_tokens=6
        )


def test_a_model_in_training_mode_generates_in_pytorch_and_stays_in_it() -> None:
    model = t5().train()
    generator = ORTGenerator(model)
    with pytest.warns(OrtrainWarning, match=r"training mode; call eval\(\) first"):
        expected, found = both(model, generator, **batch(model, 2, 5), max_new_tokens=4)
    assert torch.equal(found, expected)
    assert model.training
    assert generator.report.fallback_calls == 1


def test_a_cache_of_windows_is_left_to_pytorch() -> None:
    model = mistral()
    generator = ORTGenerator(model)
    with pytest.warns(OrtrainWarning, match="a cache of DynamicSlidingWindowLayers"):
        expected, found = both(model, generator, **batch(model, 2, 5), max_new_tokens=9)
    assert torch.equal(found, expected)
    assert (generator.report.decoder_runs, generator.report.torch_runs) == (0, 9)


@pytest.mark.parametrize("kind", [Peeks, Branches])
def test_a_model_that_goes_by_the_values_of_tensors_generates_pytorchs(kind: Any) -> None:
    plain = t5()
    plain.__class__ = kind
    generator = ORTGenerator(copy.deepcopy(plain), options=STRICT)
    arguments = {"do_sample": True, "num_beams": 2, "max_new_tokens": 12, "min_new_tokens": 12}
    for rows in (2, 3):
        assert torch.equal(*both(plain, generator, **batch(plain, rows, 5), **arguments))
    report = generator.report
    assert (report.graph_calls, report.fallback_calls) == (2, 0)
    assert (report.encoder_runs, report.decoder_runs, report.torch_runs) == (2, 24, 0)
    assert report.decoder.breaks


def test_hooks_of_the_model_are_called_as_often_as_in_pytorch() -> None:
    model = t5()
    generator = ORTGenerator(model, options=STRICT)
    calls = {"model": 0, "encoder": 0}

    def counts(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    model.register_forward_hook(counts("model"))
    model.encoder.register_forward_hook(counts("encoder"))
    generator.generate(**batch(model, 2, 5), max_new_tokens=6, min_new_tokens=6)
    assert calls == {"model": 6, "encoder": 1}
    assert generator.report.graph_calls == 1


def test_what_is_no_transformers_model_generates_by_itself() -> None:
    class Repeats(nn.Module):
        def generate(self, ids: Tensor, times: int = 2) -> Tensor:
            return ids.repeat(1, times)

    generator = ORTGenerator(Repeats())
    with pytest.warns(OrtrainWarning, match="Repeats is not a transformers model"):
        assert generator.generate(torch.ones(1, 2), times=3).shape == (1, 6)
    assert generator.report.fallback_calls == 1
    with pytest.raises(TypeError, match="Linear has no method generate"):
        ORTGenerator(nn.Linear(2, 2))


def test_a_method_generate_of_the_instance_is_called_and_put_back() -> None:
    model = gpt2()
    own = model.generate = lambda **_: torch.zeros(1)
    generator = ORTGenerator(model)
    with (
        pytest.warns(OrtrainWarning, match="its method generate has been replaced"),
        generator.in_place(),
    ):
        assert model.generate(input_ids=torch.ones(1, 2)).tolist() == [0]
    assert vars(model)["generate"] is own


def test_a_search_that_never_calls_the_model_is_no_call_of_a_graph() -> None:
    model = gpt2()

    def echo(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        return input_ids

    generator = ORTGenerator(model)
    with pytest.warns(OrtrainWarning, match="goes around its forward"):
        generator.generate(**batch(model, 2, 5), custom_generate=echo, max_new_tokens=6)
    assert (generator.report.graph_calls, generator.report.fallback_calls) == (0, 1)
