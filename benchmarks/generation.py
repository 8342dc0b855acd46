"""`generate` of transformers models in PyTorch and in onnxruntime, alternating in one process.

python benchmarks/generation.py [--rounds N] [--json FILE]

Each call generates as many tokens as every other, which must be PyTorch's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from measurement import Results, Row, alternate, arguments, compared, table
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from ortrain.deploy.generation import ORTGenerator

BATCH, PROMPT, TOKENS = 8, 32, 64
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "4 beams": {"do_sample": False, "num_beams": 4},
}


def models() -> dict[str, Any]:
    """Random models of 4 layers and width 256, by name; of weights that amplify no rounding."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_heads": 4}
    sizes |= {"num_layers": 4, "decoder_start_token_id": 0}
    t5 = T5Config(vocab_size=8000, initializer_factor=1.5, **sizes)
    known: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4, **known)
    return {"T5": T5ForConditionalGeneration(t5).eval(), "GPT-2": GPT2LMHeadModel(gpt2).eval()}


def measure(model: Any, search: dict[str, Any], rounds: int) -> dict[str, Row]:
    """The times of both, and how many of onnxruntime's tokens are PyTorch's."""
    vocabulary = model.config.vocab_size
    prompt = torch.randint(3, vocabulary, (BATCH, PROMPT))
    call = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS,
        "pad_token_id": 0,
        **search,
    }
    generators = {"PyTorch": model, "onnxruntime": ORTGenerator(model)}
    found = {name: each.generate(**call) for name, each in generators.items()}
    calls = {name: partial(each.generate, **call) for name, each in generators.items()}
    rows = compared(alternate(calls, rounds))
    for name, tokens in found.items():
        rows[name]["equal_tokens"] = (tokens == found["PyTorch"]).float().mean().item()
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    results = Results("generation", options.json)
    print(f"{TOKENS} tokens for each of {BATCH} prompts of {PROMPT}")
    for name, model in models().items():
        for search, settings in SEARCHES.items():
            title = f"{name}, {search}"
            rows = measure(model, settings, options.rounds)
            results.save(calls={title: rows})
            print(table(title, rows, lambda row: f"{row['equal_tokens']:>8.1%} equal"), flush=True)


if __name__ == "__main__":
    main()
