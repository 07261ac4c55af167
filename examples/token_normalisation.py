"""A step that was cut into micro-batches, and is another training since: the walk-through of docs/verify.md.

    python examples/token_normalisation.py --micro-batches 1 runs/whole.rec     the loop as it was: one batch a step
    python examples/token_normalisation.py --micro-batches 4 runs/cut.rec       the same batch in four parts
    shardbook verify runs/cut.rec runs/whole.rec

A small recurrent model learns to write sentences letter by letter. Sentences are of different lengths, so that micro-batches are of
different numbers of tokens.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardbook as sb

SENTENCES = (
    "Yes.", "No.", "Not yet.", "Who keeps the books?",
    "The books are kept by those who spend.", "A loss is a sum.", "A mean is a sum that was divided.",
    "Whoever divides has to say by what.", "Four means of four are one mean.", "Four means of seven, three, eleven and two are not.",
    "A short sentence has few letters.", "A long sentence, such as this one, has a good many more letters than a short one has.",
    "If each counts for as much as the other,", "then a letter of the short one counts for more.",
    "The machine does not mind.", "It learns what it is told to learn, and it tells nobody that it was told something else.",
)  # fmt: skip
LENGTH = 96
NOTHING = -100  # what cross_entropy leaves out
NUM_STEPS = 5


class Writer(nn.Module):
    """Bytes to the next byte's logits."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(inputs))[0])


def train(path: Path, num_micro_batches: int = 1) -> None:
    """Train for a few steps and record them."""
    torch.manual_seed(0)
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with sb.record(model, optimizer, path) as recorder:
        for inputs, targets in batches():
            micro_batches = list(zip(inputs.chunk(num_micro_batches), targets.chunk(num_micro_batches), strict=True))
            total = 0.0
            for part, wanted in micro_batches:
                logits = model(part).transpose(1, 2)
                loss = F.cross_entropy(logits, wanted) / len(micro_batches)  # the line in question
                loss.backward()
                total += loss.item()
            recorder.step(loss=total, batch=micro_batches)
            optimizer.step()
            optimizer.zero_grad()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """All sentences in each step: bytes, and the bytes after them."""
    rows = torch.zeros(len(SENTENCES), LENGTH + 1, dtype=torch.long)
    targets = torch.full((len(SENTENCES), LENGTH), NOTHING)
    for row, sentence in enumerate(SENTENCES):
        letters = torch.tensor([10, *sentence.encode(), 10])
        rows[row, : len(letters)] = letters
        targets[row, : len(letters) - 1] = letters[1:]
    for _ in range(NUM_STEPS):
        yield rows[:, :-1], targets


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of the record")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of each batch")
    arguments = parser.parse_args()
    train(arguments.path, arguments.micro_batches)
