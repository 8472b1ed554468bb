"""verifiers' side: `SingleTurnEnv.evaluate` with a client that answers in process; results are saved to disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import verifiers
from datasets import Dataset
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from questions import Settings, answer, measure, question, right
from verifiers.clients import OpenAIChatCompletionsClient


class Instant(OpenAIChatCompletionsClient):
    """Answers at once, through verifiers' own reading of OpenAI's answers."""

    def __init__(self):
        super().__init__(object())

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        message = {"role": "assistant", "content": answer(prompt[-1]["content"])}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        made = {"id": "1", "created": 1, "model": model, "object": "chat.completion", "choices": [choice]}
        return ChatCompletion.model_validate(made)


def exact(completion, answer) -> float:
    return float(completion[-1]["content"].strip() == answer)


def play(settings: Settings) -> float:
    rows = [{"question": question(i), "answer": right(i)} for i in range(settings.episodes)]
    env = verifiers.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=verifiers.Rubric(funcs=[exact]))

    async def run():
        client = Instant()
        if settings.base_url:
            client = OpenAIChatCompletionsClient(AsyncOpenAI(base_url=settings.base_url, api_key="none"))
        return await env.evaluate(
            client,
            "model",
            max_concurrent=settings.concurrent,
            save_results=True,
            results_path=Path(settings.folder),
            on_progress=lambda *_: None,
        )

    outputs = asyncio.run(run())["outputs"]
    assert len(outputs) == settings.episodes
    assert not any(output.get("error") for output in outputs)
    return sum(output["reward"] for output in outputs) / len(outputs)


if __name__ == "__main__":
    measure(play)
