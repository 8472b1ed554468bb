"""The table of `agent-train --dry-run` for the modes sft, dpo and rm."""

from __future__ import annotations

from agent_train.config.schema import Config
from agent_train.trainer.offline.records import Example, form_of, read_examples
from agent_train.trainer.offline.schedule import step_count
from agent_train.trainer.offline.validation import MODES, longest_row

LOSSES = {"dpo": "DPO", "ipo": "IPO, margins per token", "kto": "KTO"}


def what(config: Config) -> list[tuple[str, str]]:
    """The rows about data and objective."""
    data, form = config.data, form_of(config)
    train = read_examples(str(data.train), form, data.min_reward)
    held_out = read_examples(data.test, form, data.min_reward) if data.test else []
    rows = [
        ("mode", f"{config.mode}: {MODES[config.mode]}"),
        ("data", f"{_counted(train)} of {data.train} to learn from"),
        (
            "held out",
            f"{_counted(held_out)} of {data.test}" if held_out else "nothing: set data.test=FILE to measure on",
        ),
    ]
    longest = longest_row(config)
    if longest is not None:
        rows.append(("length", f"examples of more than {longest:,} tokens are left out"))
    if config.mode == "dpo":
        reference = config.reference.path or "the model as the run starts"
        rows.append(
            (
                "loss",
                f"{LOSSES[data.loss]}, beta {data.beta:g}; reference: {reference}, asked once before the first step",
            )
        )
    steps = step_count(len(train), data.batch_rows, data.epochs)
    each = f"{data.batch_rows:,} examples a step, {steps:,} step{'s' * (steps != 1)} in {data.epochs} epoch{'s' * (data.epochs != 1)}"
    return [*rows, ("steps", each)]


def _counted(examples: list[Example]) -> str:
    if not examples:
        return "nothing"
    kind = "pair" if examples[0].is_pair else "conversation"
    return f"{len(examples):,} {kind}{'s' * (len(examples) != 1)}"
