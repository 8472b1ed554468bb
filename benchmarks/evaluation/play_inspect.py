"""inspect_ai's side: a task with `generate` and `match`, and its mockllm model. Its log goes to disk, as it always does."""

from __future__ import annotations

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import exact
from inspect_ai.solver import generate
from questions import Settings, answer, measure, question, right


def instant(messages, *_) -> ModelOutput:
    output = ModelOutput.from_content("mockllm/model", answer(messages[-1].text))
    output.usage = ModelUsage(
        input_tokens=30, output_tokens=5, total_tokens=35
    )  # else it loads a tokenizer to count them
    return output


def play(settings: Settings) -> float:
    samples = [Sample(input=question(i), target=right(i), id=f"sum-{i}") for i in range(settings.episodes)]
    if settings.base_url:
        model = get_model(
            "openai/model", base_url=settings.base_url, api_key="none", responses_api=False, memoize=False
        )
    else:
        model = get_model("mockllm/model", custom_outputs=instant, memoize=False)
    [log] = eval(
        Task(dataset=MemoryDataset(samples), solver=generate(), scorer=exact()),
        model=model,
        display="none",
        log_dir=settings.folder,
        log_realtime=False,  # faster here than its default
        max_samples=settings.concurrent,
        max_connections=settings.concurrent,
    )
    assert log.status == "success", log.error
    assert log.results.completed_samples == settings.episodes
    return log.results.scores[0].metrics["mean"].value


if __name__ == "__main__":
    os.environ.setdefault("INSPECT_LOG_LEVEL", "error")
    measure(play)
