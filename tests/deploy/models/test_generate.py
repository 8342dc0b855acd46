"""Decoders with a cache: PyTorch's logits and tokens, by every search, padded rows too."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from ortrain.deploy.models import ORTModelForCausalLM, ORTModelForSpeechSeq2Seq
from ortrain.errors import InputError, UnsupportedInput
from tests.breadth import crossed
from tests.deploy.decoders import batch
from tests.deploy.exported import GENERATING, folder, ort_class, ort_model, torch_model

NEW = 10
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "length_penalty": 2.0},
    "several sequences": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "sampled beams": {"do_sample": True, "num_beams": 3, "top_k": 20},
    "no cache": {"use_cache": False},
}
# What is searched by processors, or is passed on to the model.
OTHERS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "repetition of the source": {"encoder_repetition_penalty": 1.4},
    "bad words": {"bad_words_ids": [[5], [6, 7]]},
    "forced end": {"forced_eos_token_id": 2},
    "cut-offs": {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "epsilon_cutoff": 3e-4},
    "pieces of the prompt": {"prefill_chunk_size": 2},
    "watermark": {"watermarking_config": {"bias": 2.0, "greenlist_ratio": 0.3}},
    "bias": {"sequence_bias": [[[5], 4.0]]},
    "decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "a configuration": {"generation_config": GenerationConfig(max_new_tokens=NEW, num_beams=2)},
}
DECODERS = ("gpt2", "llama")
PAIRED = ("t5", "bart", "whisper")


def prompt(name: str, rows: int, length: int, **more: Any) -> dict[str, Tensor]:
    if name == "whisper":
        generator = torch.Generator().manual_seed(rows)
        return {"input_features": torch.randn(rows, 8, 40, generator=generator)}
    return batch(torch_model(name), rows, length, **more)


def both(name: str, seed: int = 7, **arguments: Any) -> tuple[Any, Any]:
    """What PyTorch generates, and what the exported model does, from one random state."""
    results = []
    for model in (torch_model(name), ort_model(name)):
        torch.manual_seed(seed)
        results.append(model.generate(**arguments))
    return results[0], results[1]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", GENERATING)
def test_each_search_gives_pytorchs_tokens(name: str, search: str) -> None:
    for rows, length in ((4, 6), (1, 3)):
        arguments = {"max_new_tokens": NEW, **SEARCHES[search]}
        expected, found = both(name, **prompt(name, rows, length), **arguments)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("search", "name"), crossed(OTHERS, GENERATING, one_in=4))
def test_processors_and_options_give_pytorchs_tokens(search: str, name: str) -> None:
    if name == "whisper" and search in ("repetition of the source", "pieces of the prompt"):
        return  # whose source are no tokens, and which PyTorch itself reads in one piece alone
    arguments = {"max_new_tokens": NEW, **copy.deepcopy(OTHERS[search])}
    expected, found = both(name, **prompt(name, 3, 6), **arguments)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static' is of no use"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' is of no use"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"output_attentions": True}, "output_attentions=True"),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_what_a_file_cannot_give_is_one_clear_error(
    name: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedInput, match=message):
        ort_model(name).generate(
            **prompt(name, 2, 5), max_new_tokens=3, return_dict_in_generate=True, **asked
        )


def test_embeddings_in_the_place_of_tokens_are_one_clear_error() -> None:
    embedded = torch.zeros(1, 3, 16)
    for name in ("gpt2", "t5"):
        with pytest.raises(UnsupportedInput, match="takes no inputs_embeds"):
            ort_model(name).generate(inputs_embeds=embedded, max_new_tokens=3)


@pytest.mark.parametrize("name", GENERATING)
def test_the_tokens_of_these_tests_vary(name: str) -> None:
    found = torch_model(name).generate(**prompt(name, 4, 6), max_new_tokens=NEW)
    rows = [tuple(row[-NEW:]) for row in found.tolist()]
    assert len({*rows}) == len(rows)
    assert min(len(set(row)) for row in rows) >= 3


@pytest.mark.parametrize("name", DECODERS)
def test_a_padded_row_writes_what_it_would_alone(name: str) -> None:
    given = prompt(name, 3, 6)
    assert not given["attention_mask"][0].all()
    together = ort_model(name).generate(**given, max_new_tokens=NEW)
    alone = ort_model(name).generate(given["input_ids"][:1, 2:], max_new_tokens=NEW)
    assert torch.equal(together[:1, 6:], alone[:, 4:])


@pytest.mark.parametrize("name", GENERATING)
def test_scores_logits_and_the_cache_are_pytorchs(name: str) -> None:
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    given = prompt(name, 3, 5)
    expected, found = both(name, **given, num_beams=2, max_new_tokens=5, **wanted)
    assert type(found) is type(expected)
    for field in ("sequences_scores", "logits", "scores"):
        torch.testing.assert_close(found[field], expected[field], rtol=0, atol=1e-4)
    pasts = (found.past_key_values, expected.past_key_values)
    if name in PAIRED:
        assert pasts[0].is_updated == pasts[1].is_updated
    for mine, its in zip(*pasts, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_answers_as_pytorch_does_with_a_cache_and_without(name: str) -> None:
    model, ours = torch_model(name), ort_model(name)
    with torch.no_grad():
        for rows, length in ((2, 6), (1, 1), (3, 9)):
            given = prompt(name, rows, length)
            expected, found = model(**given), ours(**given)
            torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
            for step in (1, 3):  # a single token, and several at once
                ids = torch.full((rows, step), 7)
                seen = expected.past_key_values.get_seq_length()
                assert found.past_key_values.get_seq_length() == seen
                mask = torch.ones(rows, seen + step, dtype=torch.int64)
                mask[:, :length] = given["attention_mask"]
                pasts = (expected.past_key_values, found.past_key_values)
                expected = model(ids, attention_mask=mask, past_key_values=pasts[0])
                found = ours(ids, attention_mask=mask, past_key_values=pasts[1])
                assert found.past_key_values is pasts[1]
                torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
            without = ours(**given, use_cache=False)
            assert without.past_key_values is None
            bare, its = ours(given["input_ids"]), model(given["input_ids"])
            torch.testing.assert_close(bare.logits, its.logits, rtol=0, atol=1e-4)
            bare = ours(ids, past_key_values=bare.past_key_values)
            its = model(ids, past_key_values=its.past_key_values)
            torch.testing.assert_close(bare.logits, its.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PAIRED)
def test_encoder_and_decoder_answer_as_pytorch_does(name: str) -> None:
    model, ours = torch_model(name), ort_model(name)
    with torch.no_grad():
        for rows, length in ((2, 6), (1, 1), (3, 9)):
            given = prompt(name, rows, length)
            start = torch.randint(3, 60, (rows, 3))
            expected = model(**given, decoder_input_ids=start)
            found = ours(**given, decoder_input_ids=start)
            for field in ("logits", "encoder_last_hidden_state"):
                torch.testing.assert_close(found[field], expected[field], rtol=0, atol=1e-4)
            states = ours.get_encoder()(**given)
            mask = {n: given[n] for n in ("attention_mask",) if n in given}
            again = ours(encoder_outputs=states, decoder_input_ids=start, **mask)
            assert torch.equal(again.logits, found.logits)
            for step in (1, 2):
                pasts = (expected.past_key_values, found.past_key_values)
                ids = torch.full((rows, step), 9)
                its, mine = (
                    each(
                        encoder_outputs=states, decoder_input_ids=ids, past_key_values=past, **mask
                    )
                    for each, past in zip((model, ours), pasts, strict=True)
                )
                torch.testing.assert_close(mine.logits, its.logits, rtol=0, atol=1e-4)


def test_of_the_logits_those_that_are_asked_for_are_given() -> None:
    """As Phi-3's own preparation of a step asks for all: ``logits_to_keep=0``."""
    model, ours, given = torch_model("llama"), ort_model("llama"), prompt("llama", 2, 6)
    for wanted in (0, 1, 3, torch.tensor([0, 4])):
        with torch.no_grad():
            expected = model(**given, logits_to_keep=wanted).logits
        found = ours(**given, logits_to_keep=wanted).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_numpy_prompts_give_numpy_logits() -> None:
    for name, more in (("gpt2", {}), ("t5", {"decoder_input_ids": torch.tensor([[0, 3], [0, 4]])})):
        given = {**prompt(name, 2, 5), **more}
        expected = ort_model(name)(**given)
        found = ort_model(name)(**{key: value.numpy() for key, value in given.items()})
        assert isinstance(found.logits, np.ndarray)
        np.testing.assert_array_equal(found.logits, expected.logits.numpy())


def test_a_cache_may_be_continued_and_a_prompt_be_read_in_pieces() -> None:
    given = prompt("gpt2", 2, 6)
    expected, found = both("gpt2", **given, prefill_chunk_size=4, max_new_tokens=6)
    assert torch.equal(found, expected)
    results = []
    for model in (torch_model("gpt2"), ort_model("gpt2")):
        first = model.generate(**given, max_new_tokens=4, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, first.sequences[:, :2]], 1)
        mask = torch.nn.functional.pad(given["attention_mask"], (0, 6), value=1)
        past = first.past_key_values
        results.append(
            model.generate(ids, attention_mask=mask, past_key_values=past, max_new_tokens=4)
        )
    assert torch.equal(results[1], results[0])


def test_assisted_generation_and_prompt_lookup_give_pytorchs_tokens() -> None:
    given = {"input_ids": torch.tensor([[5, 9, 4, 5, 9]]), "max_new_tokens": 8}
    plain = torch_model("llama").generate(**given)
    assert torch.equal(ort_model("llama").generate(**given, prompt_lookup_num_tokens=2), plain)
    found = ort_model("llama").generate(**given, assistant_model=ort_model("llama"))
    assert torch.equal(found, plain)


def test_tokens_are_streamed_as_they_come() -> None:
    class Streamer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, tokens: Tensor) -> None:
            self.seen.append(tokens.tolist())

        def end(self) -> None:
            self.seen.append("end")

    streamers = []
    for model in (torch_model("gpt2"), ort_model("gpt2")):
        streamers.append(Streamer())
        model.generate(**prompt("gpt2", 1, 4), streamer=streamers[-1], max_new_tokens=5)
    assert streamers[1].seen == streamers[0].seen
    assert len(streamers[1].seen) == 7


def test_a_generating_model_is_searched_by_the_code_of_its_pytorch_model() -> None:
    for name in GENERATING:
        ours = ort_model(name)
        assert isinstance(ours, ort_class(name))
        assert isinstance(ours, GenerationMixin)
        assert type(ours).__name__ == ort_class(name).__name__
        prepare: Any = type(ours).prepare_inputs_for_generation
        theirs = type(torch_model(name)).prepare_inputs_for_generation
        assert theirs in (prepare, getattr(prepare, "__wrapped__", None))
        assert ours.can_generate()
        assert ours.device == torch.device("cpu")
        assert ours.generation_config.to_dict() == torch_model(name).generation_config.to_dict()
    assert ort_model("whisper").main_input_name == "input_features"
    assert isinstance(ort_model("whisper"), ORTModelForSpeechSeq2Seq)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_a_long_generation_keeps_no_memory_of_its_shorter_caches() -> None:
    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    inputs, lengths = prompt("t5", 64, 5), {"min_new_tokens": 200, "max_new_tokens": 200}
    ort_model("t5").generate(**inputs, max_new_tokens=3)
    before = resident()
    ort_model("t5").generate(**inputs, **lengths)
    # The last cache takes 3 MiB, all caches together 300.
    assert resident() - before < 60


# --- what is refused ----------------------------------------------------------------------------


def test_a_cache_of_another_kind_is_refused() -> None:
    ours, given = ort_model("gpt2"), prompt("gpt2", 1, 4)
    static = StaticCache(config=ours.config, max_cache_len=20)
    with pytest.raises(UnsupportedInput, match=r"(?s)is a StaticCache.*DynamicCache\(\)"):
        ours(**given, past_key_values=static)
    with pytest.raises(UnsupportedInput, match="is a EncoderDecoderCache"):
        ours(**given, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    with pytest.raises(UnsupportedInput, match="is a DynamicCache"):
        ort_model("t5")(**prompt("t5", 1, 4), past_key_values=DynamicCache())
    with pytest.raises(UnsupportedInput, match="cache_implementation='static'"):
        ours.generate(**given, cache_implementation="static", max_new_tokens=2)
    past = DynamicCache()
    past.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(InputError, match=r"the cache has 1 layers, model\.onnx 2"):
        ours(given["input_ids"], past_key_values=past)


def test_masks_that_a_file_does_not_take_are_refused_where_they_mask_something() -> None:
    given = {**prompt("t5", 2, 5), "decoder_input_ids": torch.tensor([[0, 3], [0, 4]])}
    ours = ort_model("t5")
    expected = ours(**given).logits
    mask = torch.ones(2, 2, dtype=torch.int64)
    assert torch.equal(ours(**given, decoder_attention_mask=mask).logits, expected)
    mask[0, 0] = 0
    with pytest.raises(UnsupportedInput, match="takes no decoder_attention_mask, and some of its"):
        ours(**given, decoder_attention_mask=mask)
    with pytest.raises(InputError, match="decoder_input_ids is missing"):
        ours(**prompt("t5", 2, 5))


def test_states_that_a_file_does_not_give_are_refused() -> None:
    for name in ("gpt2", "t5"):
        with pytest.raises(UnsupportedInput, match="hidden_states"):
            ort_model(name).generate(
                **prompt(name, 1, 4),
                max_new_tokens=2,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
    with pytest.raises(ValueError, match="colour"):
        ort_model("gpt2").generate(**prompt("gpt2", 1, 4), colour=torch.ones(1))


def test_several_files_of_one_role_are_listed(tmp_path: Path) -> None:
    for path in folder("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model_quantized.onnx").write_bytes((tmp_path / "model.onnx").read_bytes())
    with pytest.raises(InputError, match=r"(?s)model\.onnx, model_quantized\.onnx.*file_name='mod"):
        ORTModelForCausalLM.from_pretrained(tmp_path)
    found = ORTModelForCausalLM.from_pretrained(tmp_path, file_name="model_quantized.onnx")
    given = prompt("gpt2", 2, 5)
    assert torch.equal(
        found.generate(**given, max_new_tokens=4),
        ort_model("gpt2").generate(**given, max_new_tokens=4),
    )
