"""Trains a small BERT on sentences of different lengths, as a graph, and prints what that brought.

    python examples/quickstart.py

It takes about 40 seconds on two cores, and downloads nothing.
"""

import time

import torch
from transformers import BertConfig, BertForSequenceClassification

from ortrain import ORTModule

STEPS, BATCH, LENGTH, WORDS = 60, 32, 64, 8000


def sentences() -> dict[str, torch.Tensor]:
    """A batch of sentences of 8 to 64 words, padded; class 1 has more words of the upper half."""
    lengths = torch.randint(8, LENGTH + 1, (BATCH, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = torch.randint(0, 2, (BATCH,))
    upper = torch.rand(BATCH, LENGTH) < 0.1 + 0.8 * labels[:, None]
    words = torch.randint(1, WORDS // 2, (BATCH, LENGTH)) + upper * (WORDS // 2)
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    model = ORTModule(BertForSequenceClassification(config).train())  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    start = time.perf_counter()
    for step in range(1, STEPS + 1):
        loss = model(**sentences()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  {time.perf_counter() - start:5.1f} s")
    print(model.report)


if __name__ == "__main__":
    main()
