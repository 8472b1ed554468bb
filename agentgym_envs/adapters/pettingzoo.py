"""PettingZoo's environments as text environments with players. See README.md beside this file."""

import importlib
import inspect
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces

from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action
from agentgym.core.players import PlayersEnv
from agentgym.core.tasks import TaskSet
from agentgym_envs.adapters.foreign import check_name, imported, plain_info, seed_tasks, settings_key
from agentgym_envs.adapters.gymnasium import (
    MOST_NUMBERS,
    InvalidAction,
    action_of,
    check_actions,
    description_of,
    form_of,
    numbers_in,
    opened,
    sampled,
    uncoloured,
    written,
)

_MASK = "action_mask"
_NOT_TOLD = re.compile(
    r"^```\{figure\}(?s:.*?)^```$|^This environment is part of .*$|^# +|^#+ Legal Actions Mask$(?s:.*?)(?=^#|\Z)",
    re.MULTILINE,
)


class PettingZooEnv(PlayersEnv):
    """An environment of PettingZoo, or of a package that registers with it: AEC, or parallel, where all are asked in each round."""

    max_turns = 200

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        instruction: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        zoo = imported("pettingzoo")
        module, _, self.name = name.rpartition(":")
        if module:
            importlib.import_module(module)
        check_name("pettingzoo", self.name, [*zoo.aec_registry, *zoo.parallel_registry])
        settings_key(settings or {})
        super().__init__(tasks or self.default_tasks(name=self.name), max_turns, render_mode)
        self._settings, self._actions, self._instruction = dict(settings or {}), tuple(actions), instruction
        self._inner: Any = None
        self._stray = random.Random()
        self._replaced: set[str] = set()  # whose last reply was no action

    @classmethod
    def default_tasks(cls, split: str = "train", name: str = "") -> TaskSet:
        return seed_tasks("pettingzoo", name, split)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        inner = self._opened()
        super().reset(seed=seed, options=options)
        task_seed = self.task.seed if self.task is not None else None
        inner.reset(seed=seed if task_seed is None else task_seed)
        self._stray = random.Random(f"{task_seed} {seed}")
        self._replaced.clear()
        told = self._instruction
        if told is None:
            told = described(inspect.getdoc(inspect.getmodule(type(inner.unwrapped))) or "")
        for agent in inner.agents:
            form = form_of(inner.action_space(agent), self._actions)
            self.tell(f"{told}\n\nYou are {agent}. Answer with {form}.\n".lstrip(), str(agent))
        shown, info = self.opening(self._asked())
        return shown, {**self._info(), **info}

    def step(self, action: Action) -> Step:
        """Take the action of the player whose turn it is; a reply that is none is replaced as the Gymnasium adapter does it."""
        text, player, inner = self.read(action), self.turn_of, self._opened()
        info: dict[str, Any] = {}
        self._replaced.discard(player)
        try:
            value = action_of(inner.action_space(inner.agent_selection), text, self._actions)
        except InvalidAction as error:
            value, info = self._sampled(self._stray), {"invalid": True}
            self._replaced.add(player)
            self.tell(f"{error}. A random action was taken in its place: {written(value)}.\n", player)
        inner.step(value)
        rewards = {str(agent): float(reward) for agent, reward in inner.rewards.items()}
        # A player may be paid for its action only when others have acted.
        rewards |= {name: min(rewards[name], 0.0) for name in self._replaced & rewards.keys()}
        truncated = not any(inner.terminations.values())
        while inner.agents and self._is_out(inner.agent_selection):
            inner.step(None)
        if inner.agents:
            asked, reward, terminated, out_of_turns, own = self.pass_to(self._asked(), rewards, **info)
            return asked, reward, terminated, out_of_turns, {**self._info(), **own}  # whose keys may be any
        self.tell(f"It is over: {', '.join(f'{name} gets {reward:g}' for name, reward in rewards.items())}.")
        shown, reward, terminated, _, info = self.end(rewards, **info)
        return shown, reward, terminated and not truncated, truncated, info

    def random_action(self, rng: random.Random) -> str:
        value = self._sampled(rng)
        return value if isinstance(value, str) else written(value)

    def close(self) -> None:
        super().close()
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _is_out(self, agent: Any) -> bool:
        return bool(self._inner.terminations[agent] or self._inner.truncations[agent])

    def _asked(self) -> str:
        """Tell the next player what it sees, and return its name."""
        inner, agent = self._inner, self._inner.agent_selection
        observation = inner.observe(agent)
        if isinstance(observation, Mapping) and _MASK in observation:
            observation = {name: value for name, value in observation.items() if name != _MASK}
            observation = observation["observation"] if list(observation) == ["observation"] else observation
        if getattr(inner, "render_mode", None) == "ansi":
            self.tell(uncoloured(str(inner.render())), str(agent))
        else:
            self.tell(f"Observation: {written(observation)}", str(agent))
        if (mask := self._mask()) is not None:
            legal = [n for n, is_legal in enumerate(mask) if is_legal]
            self.tell(
                f"Legal actions: {', '.join(self._actions[n] if self._actions else str(n) for n in legal)}", str(agent)
            )
        return str(agent)

    def _mask(self) -> Any:
        """The mask of the next player's actions, which is in its observation or its info; None without one."""
        observation, info = self._inner.observe(self._inner.agent_selection), self._info_of_next()
        return observation.get(_MASK) if isinstance(observation, Mapping) and _MASK in observation else info.get(_MASK)

    def _info_of_next(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._inner.infos.get(self._inner.agent_selection) or {}
        return found

    def _info(self) -> dict[str, Any]:
        return plain_info({name: value for name, value in self._info_of_next().items() if name != _MASK})

    def _sampled(self, rng: random.Random) -> Any:
        inner = self._opened()
        return sampled(inner.action_space(inner.agent_selection), self._mask(), rng)

    def _opened(self) -> Any:
        if self._inner is None:
            inner = opened(self._made, self._settings)
            for agent in inner.possible_agents:
                check_actions(inner.action_space(agent), f"pettingzoo:{self.name}")
                seen = inner.observation_space(agent)
                seen = seen["observation"] if isinstance(seen, spaces.Dict) and _MASK in seen.spaces else seen
                if numbers_in(seen) > MOST_NUMBERS and getattr(inner, "render_mode", None) != "ansi":
                    raise TypeError(f"pettingzoo:{self.name}: observations of {seen} cannot be shown as text")
            self.players = tuple(map(str, inner.possible_agents))
            self._inner = inner
        return self._inner

    def _made(self, **settings: Any) -> Any:
        zoo = imported("pettingzoo")
        if self.name in zoo.aec_registry:
            return zoo.make("aec", self.name, **settings)
        return imported("pettingzoo", "pettingzoo.utils.conversions").parallel_to_aec(
            zoo.make("parallel", self.name, **settings)
        )


def described(docstring: str) -> str:
    """The parts for a player of what PettingZoo's modules say of their game."""
    begin, *sections = re.split(r"^#{2,3} +", _NOT_TOLD.sub("", docstring), flags=re.MULTILINE)
    text = "\n".join(line for line in begin.splitlines() if not line.startswith("|"))
    return re.sub(r"\n{3,}", "\n\n", description_of("\n## ".join([text, *sections])))
