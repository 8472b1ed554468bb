"""A learner of one rank in this process behind the driver's interface, and data files, for the tests of the modes."""

import dataclasses
import json
import math

import torch
from transformers import AutoModelForSequenceClassification

from agent_train.data.packing import rank_batches


@dataclasses.dataclass
class InProcess:
    """What the driver calls, without Ray: one rank, micro-batches of `budget` tokens."""

    worker: object
    budget: int = 10_000

    @property
    def role(self):
        return self.worker.role

    async def sft(self, rows, lr):
        return self.worker.sft(self._share(rows), lr)

    async def logprobs(self, rows):
        return self._by_row("logprobs", rows)

    async def scores(self, rows):
        return self._by_row("scores", rows)

    async def apply_loss_gradients(self, rows, derivatives, lr):
        return self.worker.apply_loss_gradients(self._share(along(rows, derivatives)), lr)

    def _by_row(self, method, rows):
        share = self._share(rows)
        said = getattr(self.worker, method)(share)
        found = {
            row.id: one
            for packed, own in zip(share.micro_batches, said, strict=True)
            for row, one in zip(packed, own, strict=True)
        }
        return [found[row.id] for row in rows]

    def _share(self, rows):
        return rank_batches(rows, 1, self.budget)[0]


def along(rows, derivatives):
    """The rows as the learner deals them to its ranks for a step along derivatives."""
    return [dataclasses.replace(row, advantages=list(own)) for row, own in zip(rows, derivatives, strict=True)]


def nan_outside(row, values):
    """The values on sampled tokens and NaN elsewhere: what is not learned may be anything."""
    return [value if on else math.nan for value, on in zip(values, row.mask, strict=True)]


def write_reward_model(model_dir, folder):
    """A reward model with a wide head, so that a mistake shows, as transformers itself writes it."""
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(str(model_dir), num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_()
    model.save_pretrained(str(folder))
    return folder


def write_lines(path, records):
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def call(name, arguments):
    """An assistant message that calls a function."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def spoken(number):
    """A question and its right answer, which one word of the question decides."""
    return f"cell {number} is {('ice', 'hole')[number % 2]}: safe?", ("yes", "no")[number % 2]


def pairs(numbers):
    """Records that prefer the right answer."""
    return [
        {"prompt": question, "chosen": right, "rejected": {"yes": "no", "no": "yes"}[right]}
        for question, right in map(spoken, numbers)
    ]
