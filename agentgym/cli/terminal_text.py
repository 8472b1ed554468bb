"""An episode on a terminal while it is played: observations, replies, and the reward of each turn.

Text of environments and models is printed literally: never as markup or terminal control codes.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from agentgym.core.env import Env, Wrapper, is_async
from agentgym.core.messages import Action, Message, text_of
from agentgym.core.trajectory import Trajectory
from agentgym.policies.base import Policy, Reply

_COLOURS = {"system": "magenta", "user": "cyan", "tool": "blue", "assistant": "green"}
# Escape and its kind could move the cursor, set the title or hide text; they get a picture of themselves instead.
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_TURNING = (0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS |= dict.fromkeys((*range(0x7F, 0xA0), *_TURNING), "\N{REPLACEMENT CHARACTER}")


def plain(text: str) -> str:
    """Text without control characters, and without those that turn the reading direction."""
    return text.replace("\r\n", "\n").translate(_CONTROLS).encode("utf-8", "replace").decode()


class Screen:
    def __init__(self, console: Console):
        self.console = console

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(plain(text), style=style))

    def message(self, message: Message) -> None:
        role = message["role"]
        title = plain(f"{role} {message.get('name', '')}".strip())
        self.console.print(Rule(Text(title, style=_COLOURS.get(role, "")), align="left", style="dim"))
        for name in ("reasoning_content", "reasoning"):
            if isinstance(message.get(name), str):
                self.say(message[name], "dim italic")
        content = message.get("content")
        text = text_of(message)
        if isinstance(content, list):
            text = "\n".join(p["text"] if p.get("type") == "text" else f"[{p.get('type')}]" for p in content)
        if text:
            self.say(text)
        for call in message.get("tool_calls") or ():
            self.say(_call_of(call), "yellow")

    def turn(self, number: int, reward: float) -> None:
        self.say(f"turn {number}: reward {reward:+g}", "bold")

    def end(self, trajectory: Trajectory, seen: int) -> None:
        for message in trajectory.messages()[seen:]:
            self.message(message)
        if trajectory.turns and trajectory.turns[-1].reward and len(trajectory.turns) > 1:
            self.turn(len(trajectory.turns), trajectory.turns[-1].reward)
        self.console.print(Rule(style="dim"))
        if trajectory.failed:
            self.say(f"failed: {trajectory.error}", "bold red")
            return
        count = len(trajectory.turns)
        text = f"{trajectory.end} after {count} turn{'' if count == 1 else 's'}: reward {trajectory.reward:g}"
        if trajectory.rewards:
            text += f" ({', '.join(f'{player} {reward:g}' for player, reward in trajectory.rewards.items())})"
        if "success" in trajectory.metrics:
            text += ", success" if trajectory.success else ", no success"
        self.say(text, "bold green" if trajectory.success else "bold")


def _call_of(call: Any) -> str:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"calls {function['name']}({shown})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"calls {call!r}"


class ShownPolicy:
    """Shows on a screen the messages that another policy is given, and its answers, unless a person has typed them (`replies`).

    `rewards` are those of the steps so far; `pause` is called after each answer that is shown.
    """

    def __init__(
        self,
        policy: Policy,
        screen: Screen,
        rewards: Sequence[float],
        *,
        replies: bool = True,
        pause: Callable[[], None] = lambda: None,
    ):
        self._policy, self._screen, self._rewards = policy, screen, rewards
        self._replies, self._pause = replies, pause
        self._player: str | None = None
        self._shown: Counter[str | None] = Counter()  # messages, by player

    @property
    def seen(self) -> int:
        return self._shown.total()

    def for_player(self, name: str) -> "ShownPolicy":
        """The same for a player, who is announced before each turn."""
        policy = getattr(self._policy, "for_player", lambda _: self._policy)(name)
        own = ShownPolicy(policy, self._screen, self._rewards, replies=self._replies, pause=self._pause)
        own._player, own._shown = name, self._shown
        return own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)  # `attach`, where that policy has it

    async def act(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Reply:
        if self._player is not None:
            self._screen.say(f"{self._player}'s turn", "bold")
        for message in messages[self._shown[self._player] :]:
            self._screen.message(message)
        if self._rewards and self._rewards[-1]:
            self._screen.turn(len(self._rewards), self._rewards[-1])
        self._shown[self._player] = len(messages)
        reply = await self._policy.act(messages, tools)
        self._shown[self._player] += 1
        if self._replies:
            self._screen.message(reply.message)
            self._pause()
        return reply


class RewardedSteps(Wrapper):
    def __init__(self, env: Env):
        super().__init__(env)
        self.rewards: list[float] = []

    def step(self, action: Action) -> Any:
        result = self.env.step(action)
        return self._awaited(result) if is_async(self.env, "step") else self._noted(result)

    async def _awaited(self, result: Any) -> Any:
        return self._noted(await result)

    def _noted(self, result: Any) -> Any:
        if isinstance(result, tuple) and len(result) == 5 and isinstance(result[1], int | float):
            self.rewards.append(float(result[1]))
        return result
