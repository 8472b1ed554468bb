"""Episodes as HTML: turn by turn, the sampled tokens shaded by their probability. Everything is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

from agentgym.core.messages import Message, text_of
from agentgym.core.trajectory import Tokens, Trajectory, Turn

OF_EACH_KIND = 3
LONGEST_TEXT = 20_000
# Below this surprise (1 - probability) a token is not shaded.
FAINTEST = 0.02

Decode = Callable[[int], str]


def examples(trajectories: Iterable[Trajectory], absent: Collection[str] = ()) -> list[Trajectory]:
    """The first few successes, failures and errors, in this order; no more is read than these take.

    Args:
        trajectories: to choose from.
        absent: the outcomes that none has, which are not waited for.
    """
    picked: dict[str, list[Trajectory]] = {kind: [] for kind in ("success", "failure", "error")}
    for trajectory in trajectories:
        alike = picked[outcome(trajectory)]
        if len(alike) < OF_EACH_KIND:
            alike.append(trajectory)
        if all(len(found) == OF_EACH_KIND for kind, found in picked.items() if kind not in absent):
            break
    return [t for found in picked.values() for t in found]


def outcome(trajectory: Trajectory) -> str:
    """ "success", "failure" or "error"."""
    return "error" if trajectory.failed else "success" if trajectory.success > 0 else "failure"


def episodes_html(trajectories: Sequence[Trajectory], decode: Decode | None = None) -> str:
    """Episodes to unfold, the first one open.

    Args:
        decode: from a token id to its text; None where nobody knows.
    """
    return "".join(_trajectory_html(t, decode, opened=i == 0) for i, t in enumerate(trajectories))


def _trajectory_html(trajectory: Trajectory, decode: Decode | None, opened: bool) -> str:
    kind = outcome(trajectory)
    written = trajectory.sampled_tokens or sum(turn.usage.get("completion_tokens", 0) for turn in trajectory.turns)
    tokens = f"{written:,} tokens, " if written else ""
    facts = f"reward {trajectory.reward:g}, {len(trajectory.turns)} turns, {tokens}{trajectory.end}, {trajectory.seconds:.1f} s"
    color = "good" if kind == "success" else "bad"
    body = [_turn_html(turn, decode) for turn in trajectory.turns]
    body += [_message_html(message) for message in trajectory.final_observation]
    if trajectory.error:
        body.append(f'<pre class="bad">{escape(_cut(trajectory.error))}</pre>')
    return (
        f'<details{" open" * opened}><summary><span class="badge {color}">{kind}</span><span class="task">{escape(trajectory.id)}</span>'
        f'<span class="facts">{escape(facts)}</span></summary><div class="turns">{"".join(body)}</div></details>'
    )


def _turn_html(turn: Turn, decode: Decode | None) -> str:
    said = _tokens_html(turn.tokens, decode) if turn.tokens and decode else _text_html(turn.reply)
    shown = "".join(_message_html(message) for message in turn.observation)
    reward = f'<p class="reward">reward {turn.reward:g}</p>' if turn.reward else ""
    return f'{shown}<div class="message assistant"><b>assistant</b><pre>{said}</pre></div>{reward}'


def _message_html(message: Message) -> str:
    role = escape(str(message.get("role")))
    return f'<div class="message {role}"><b>{role}</b><pre>{_text_html(message)}</pre></div>'


def _text_html(message: Message) -> str:
    calls = message.get("tool_calls")
    said = text_of(message)
    if calls:
        said += ("\n" if said else "") + json.dumps(calls, ensure_ascii=False, indent=1)
    return escape(_cut(said))


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= LONGEST_TEXT
        else f"{text[:LONGEST_TEXT]}\n... {len(text) - LONGEST_TEXT:,} characters more"
    )


def _tokens_html(tokens: Tokens, decode: Decode) -> str:
    spans: Sequence[str] = [
        _token_html(decode(token), math.exp(min(logprob, 0.0)))
        for token, logprob in zip(tokens.completion_ids, tokens.logprobs, strict=False)
    ]
    return "".join(spans)


def _token_html(text: str, probability: float) -> str:
    surprise = 1 - probability
    shade = f' class="token" style="--a: {0.75 * surprise:.2f}"' if surprise > FAINTEST else ""
    return f'<span{shade} title="{probability:.1%}">{escape(text)}</span>'
