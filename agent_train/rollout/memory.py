"""Memories: what replaces the whole conversation of a long episode in the model's prompt.

Recent: the opening and the last exchanges; the prompt of a turn then no longer extends the one before, so each turn is a training
sample of its own (as in verl-agent, arXiv 2505.10978).

Summary: when the context is nearly full, the model is asked for a summary of its work, by the conversation that it knows and one request. It
goes on with the opening, the summary and the last exchange. The summary's tokens are trained like those of any turn, which agents
need to learn what to keep (arXiv 2607.05378).
"""

from collections.abc import Sequence
from typing import Any

from agent_train.config.schema import MemoryConfig
from agent_train.rollout.renderer import Rendered, Renderer, RendererError
from agentgym.core.messages import Message, instructed, text_of, user

REQUEST = """\
Your context is nearly full. Everything above except the task itself will be removed, and you will go on from your own summary.
Write that summary now, as plain text, without calling a tool and without acting on the task. Keep all that the rest of the work needs:
- what you have done so far and what came of it, with exact names, paths, numbers and error messages;
- what you have found out about the problem, and what you have tried that did not work;
- the present state, and what you were about to do next.
Leave out what is of no further use. Your last action and its result stay, so do not repeat them."""
HEADING = "Summary of your work so far, which you wrote yourself when your context was full:"
LEFT_OUT = "(Your first {count} turns are left out here. You have taken {turns} turns so far.)"
HELD = "(This result is left out here, and is shown to you after the summary.)"
TEMPLATE_TOKENS = 64  # that a template may write around a request


class RecentMemory:
    """The opening, how many turns are left out, and the last `exchanges` of them: answers with what the environment said to them."""

    def __init__(self, exchanges: int):
        self._exchanges = exchanges

    def view(self, messages: Sequence[Message]) -> list[Message]:
        answers = _answers(messages)
        if (count := len(answers) - self._exchanges) <= 0:
            return list(messages)
        told = LEFT_OUT.format(count=count, turns=len(answers))
        return [*instructed(messages[: answers[0]], told), *messages[answers[count] :]]


class SummaryMemory:
    """The prompt's view of one episode's conversation. Until the first summary, that is the conversation itself."""

    def __init__(self, settings: MemoryConfig, renderer: Renderer, max_model_len: int, max_tokens: int):
        """For answers of at most `max_tokens` tokens by a model that reads and writes `max_model_len`.

        Raises RendererError if a summary leaves nothing of these to the conversation.
        """
        needed = max_tokens + settings.tokens + len(renderer.encode(HELD + REQUEST)) + TEMPLATE_TOKENS
        if needed >= max_model_len:
            takes = f"an answer, the request and a summary take {needed} tokens of engine.max_model_len={max_model_len}"
            raise RendererError(f"memory.name=summary: {takes}: raise it, or lower memory.tokens={settings.tokens}")
        self._settings = settings
        self._renderer = renderer
        self._longest = max_model_len - max(settings.room or 0, needed)
        self._count = 0
        self._text = ""
        self._kept: int | None = None  # the first message that the last summary left as it was

    @property
    def tokens(self) -> int:
        """The most tokens of a summary."""
        return self._settings.tokens

    def view(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the model sees it."""
        if self._kept is None:
            return list(messages)
        opening = messages[: _answers(messages)[0]]
        return [*instructed(opening, f"{HEADING}\n\n{self._text}"), *messages[self._kept :]]

    def is_due(self, messages: Sequence[Message], prompt: Rendered) -> bool:
        """True if the prompt leaves too little room, and a summary would replace at least one exchange before the last one."""
        if len(prompt.ids) <= self._longest or self._count == self._settings.summaries:
            return False
        answers = _answers(messages)
        return bool(answers) and answers[-1] > (answers[0] if self._kept is None else self._kept)

    def request(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], previous: Rendered | None
    ) -> tuple[list[Message], Rendered]:
        """The request for a summary, and its prompt: the last prompt, the tokens sampled after it, and the request.

        The newest observation may be of any length, and is not in it. A tool call needs an answer, so a line stands for each.
        """
        last = _answers(messages)[-1]
        known = [*self.view(messages[: last + 1])]
        held = [{**message, "content": HELD} for message in messages[last + 1 :] if message["role"] == "tool"]
        asked = [*held, user(REQUEST)]
        try:
            return asked, self._renderer.prompt([*known, *asked], tools, previous)
        except RendererError:  # a template that takes no user's message after a tool's
            if not held:
                raise
            asked = instructed(held, REQUEST)
            return asked, self._renderer.prompt([*known, *asked], tools, previous)

    def take(self, messages: Sequence[Message], summary: Message, finish_reason: str) -> bool:
        """Go on with a summary of the messages; False if it was cut off, or says nothing."""
        self._text = text_of(summary).rpartition("</think>")[2].strip()
        self._kept, self._count = _answers(messages)[-1], self._count + 1
        return bool(self._text) and finish_reason != "length"


def _answers(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]
