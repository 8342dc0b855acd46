"""Tasks of pipelines that transformers 5 took away: answers to questions, and text from text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortrain.errors import InputError, listing

# What a task calls its texts.
KEYS = {
    "summarization": "summary_text",
    "text2text-generation": "generated_text",
    "translation": "translation_text",
}
# Of a model's parameters for a task, those that a search takes.
_OF_SEARCH = (
    "early_stopping", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beams",
)  # fmt: skip


class TextFromText:
    """Summaries, translations, and whatever else a model writes of a text.

    Args:
        task: by its old name, as ``translation_en_to_fr``.
        model: with a method ``generate``.
        tokenizer: of the model.
    """

    def __init__(self, task: str, model: Any, tokenizer: Any) -> None:
        self.task, self.model, self.tokenizer = task, model, tokenizer
        self.key = KEYS["translation" if task.startswith("translation") else task]
        known = getattr(model.config, "task_specific_params", None) or {}
        given: Mapping[str, Any] = known.get(task, {})
        self.prefix = str(given.get("prefix") or getattr(model.config, "prefix", None) or "")
        self.search = {name: given[name] for name in _OF_SEARCH if name in given}

    def __call__(self, texts: str | Sequence[str], **search: Any) -> Any:
        """Writes a text for each.

        Args:
            texts: one, or several, each of which is written of by itself.
            search: arguments of ``generate``; ``truncation`` is the tokenizer's.

        Returns:
            A list of dicts; of several sequences for each of several texts a list of lists.
        """
        truncation = search.pop("truncation", False)
        for name in ("batch_size", "return_text", "clean_up_tokenization_spaces"):
            search.pop(name, None)
        one = isinstance(texts, str)
        rows = []
        for text in [texts] if isinstance(texts, str) else texts:
            given = self.tokenizer(self.prefix + text, return_tensors="pt", truncation=truncation)
            given.pop("token_type_ids", None)
            tokens = self.model.generate(**given, **{**self.search, **search})
            written = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            rows.append([{self.key: each} for each in written])
        if one:
            return rows[0]
        return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else rows


class Answers:
    """Answers to questions, each a part of a context.

    Args:
        model: that gives where an answer begins and ends.
        tokenizer: of the model, a fast one: it knows places in a text.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(
                f"{type(tokenizer).__name__} does not tell where in a text its tokens are",
                help="take the tokenizer of AutoTokenizer.from_pretrained(…)",
            )
        self.task, self.model, self.tokenizer = "question-answering", model, tokenizer

    def __call__(
        self,
        *given: Any,
        question: str | Sequence[str] | None = None,
        context: str | Sequence[str] | None = None,
        top_k: int = 1,
        doc_stride: int | None = None,
        max_answer_len: int = 15,
        max_seq_len: int | None = None,
        handle_impossible_answer: bool = False,
        align_to_words: bool = True,
        **unused: Any,
    ) -> Any:
        """Looks for the answers.

        Args:
            given: dicts of ``question`` and ``context``, a list of them, or both texts.
            question: one, or several.
            context: one, or as many.
            top_k: how many answers there are for each.
            doc_stride: tokens that parts of a long context share; by default at most 128.
            max_answer_len: tokens of an answer, at most.
            max_seq_len: tokens of a question with a part of its context; by default at most 384.
            handle_impossible_answer: whether there may be none, an empty text.
            align_to_words: whether an answer has whole words.
            unused: of transformers' pipeline, without effect.

        Returns:
            ``{"score", "start", "end", "answer"}`` with places in the context; a list where there
            are several of them.
        """
        del unused
        if top_k < 1 or max_answer_len < 1:
            raise ValueError(f"top_k={top_k}, max_answer_len={max_answer_len}: expected 1 and more")
        pairs = _pairs(given, question, context)
        longest = min(self.tokenizer.model_max_length, 384) if max_seq_len is None else max_seq_len
        shared = min(longest // 2, 128) if doc_stride is None else doc_stride
        found = [
            self._best(q, c, top_k, longest, shared, max_answer_len, handle_impossible_answer,
                       align_to_words)
            for q, c in pairs
        ]  # fmt: skip
        return found[0] if len(found) == 1 else found

    def _best(
        self, question: str, context: str, top_k: int, longest: int, shared: int, most: int,
        impossible: bool, words: bool,
    ) -> Any:  # fmt: skip
        encoded = self.tokenizer(
            question, context, truncation="only_second", max_length=longest, stride=shared,
            return_overflowing_tokens=True, padding="longest", return_tensors="np",
        )  # fmt: skip
        names = [n for n in ("input_ids", "attention_mask", "token_type_ids") if n in encoded]
        answers: list[dict[str, Any]] = []
        none = 1.0
        for part in range(len(encoded["input_ids"])):
            row = {name: np.asarray(encoded[name])[part : part + 1] for name in names}
            result = self.model(**row)
            inside = np.asarray([each == 1 for each in encoded.sequence_ids(part)])
            first = row["input_ids"][0] == self.tokenizer.cls_token_id
            begins, ends = (
                _shares(np.asarray(scores)[0], inside | first)
                for scores in (result["start_logits"], result["end_logits"])
            )
            none = min(none, float(begins[0] * ends[0]))
            begins, ends = begins * inside, ends * inside
            both = np.tril(np.triu(np.outer(begins, ends)), most - 1)
            places = np.argsort(-both, axis=None, kind="stable")[: max(top_k, 1)]
            for begin, end in zip(*np.unravel_index(places, both.shape), strict=True):
                if inside[begin] and inside[end]:
                    start, stop = _characters(encoded, part, int(begin), int(end), words)
                    score = float(both[begin, end])
                    text = context[start:stop]
                    answers.append({"score": score, "start": start, "end": stop, "answer": text})
        if impossible:
            answers.append({"score": none, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda each: -each["score"])[:top_k]
        return answers[0] if len(answers) == 1 else answers


def _shares(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The softmax over the chosen ones; 0 for all others."""
    held = np.where(chosen, scores.astype(np.float64), -np.inf)
    powers = np.exp(held - held.max())
    shares: np.ndarray = powers / powers.sum()
    return shares


def _characters(encoded: Any, part: int, begin: int, end: int, words: bool) -> tuple[int, int]:
    if words:
        first, last = encoded.token_to_word(part, begin), encoded.token_to_word(part, end)
        if first is not None and last is not None:
            start = encoded.word_to_chars(part, first, sequence_index=1).start
            return int(start), int(encoded.word_to_chars(part, last, sequence_index=1).end)
    start, stop = encoded.token_to_chars(part, begin).start, encoded.token_to_chars(part, end).end
    return int(start), int(stop)


def _pairs(given: Sequence[Any], question: Any, context: Any) -> list[tuple[str, str]]:
    """Questions with their contexts, in whichever way they were passed."""
    if len(given) == 2 and all(isinstance(each, str) for each in given):
        given, question, context = (), *given
    if question is not None and context is not None:
        questions = [question] if isinstance(question, str) else list(question)
        contexts = [context] if isinstance(context, str) else list(context)
        if len(contexts) == 1:
            contexts *= len(questions)
        if len(questions) == len(contexts):
            return list(zip(questions, contexts, strict=True))
    rows = [row for each in given for row in ([each] if isinstance(each, Mapping) else each)]
    if rows and all(isinstance(r, Mapping) and {"question", "context"} <= r.keys() for r in rows):
        return [(row["question"], row["context"]) for row in rows]
    raise InputError(
        "expected questions with their contexts",
        because=f"there are {listing([type(each).__name__ for each in given]) or 'none'}",
        help="pass question=… and context=…, or dicts of both",
    )
