"""SkyRL-Gym's text environments. See README.md beside this file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym_envs.adapters.foreign import check_name, imported, plain, plain_info, settings_key

GSM8K_NAMES = ("gsm8k", "gsm8k_multi_turn")
GSM8K_ASK = 'Let\'s think step by step and output the final answer after "####".'


class SkyRLGymEnv(Env):
    """An environment of SkyRL-Gym: each episode calls `skyrl_gym.make`, then `init` and `step`."""

    max_turns = 100

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any] | None = None,
        data: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        check_name("skyrl_gym", name, imported("skyrl_gym").registry)
        settings_key(settings or {})
        super().__init__(tasks, max_turns, render_mode)
        self.name = name
        self._settings = dict(settings or {})
        self._asked_turns = max_turns
        self._data = data
        self._inner: Any = None

    @classmethod
    def default_tasks(cls, split: str = "train", name: str = "", data: str | None = None) -> TaskSet:
        """The tasks of `data`; for gsm8k, agentgym's word problems in SkyRL's form."""
        if data is not None:
            path = Path(data.replace("{split}", split))
            if path == Path(data) and split != "train":
                raise ValueError(
                    f"skyrl_gym:{name}: data={data!r} has the train split only: put {{split}} into the path"
                )
            if not path.is_file():
                raise ValueError(f"skyrl_gym:{name} has no split {split!r}: there is no file {path}")
            load = TaskSet.from_parquet if path.suffix == ".parquet" else TaskSet.from_jsonl
            named = f"{name}-{split}"
            return load(path, parse=lambda row, at: task_of_row(row, f"{named}-{at}"), name=f"{name}/{split}")
        if name not in GSM8K_NAMES:
            raise ValueError(f"skyrl_gym:{name} comes with no tasks: give data=FILE in SkyRL's form, or tasks=")
        from agentgym_envs.math.word_problems import load_word_problems

        problems = load_word_problems(split)

        def asked(place: int) -> Task:
            problem = problems[place]
            question = f"{text_of(problem.messages[0])} {GSM8K_ASK}"
            return Task(problem.id, (user(question),), str(problem.answer).replace(",", ""))

        return TaskSet(asked, name=f"{name}/{split}", source=problems.source, size=len(problems))

    @property
    def tasks(self) -> TaskSet:
        if self._tasks is None:
            self._tasks = self.default_tasks("train", self.name, self._data)
        return self._tasks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._shut()
        task = self.current_task
        config = imported("skyrl_gym", "omegaconf").OmegaConf.create(self._settings)
        spec = {"method": "rule", "ground_truth": task.answer}
        extras = dict(task.metadata.get("extras", {"reward_spec": spec, "reward_model": spec, "extra_info": {}}))
        if self._asked_turns is not None:
            extras.setdefault("max_turns", self._asked_turns)
        try:
            self._inner = imported("skyrl_gym").make(self.name, env_config=config, extras=extras)
        except (AssertionError, AttributeError, KeyError) as error:
            raise ValueError(f"skyrl_gym:{self.name} refuses task {task.id!r}: {error}") from error
        prompt, info = self._inner.init([dict(message) for message in task.messages])
        return [dict(message) for message in prompt], plain_info(info or {})

    def step(self, action: Action) -> Step:
        text = self.read(action)
        answer = self._inner.step(text)
        info = plain_info(answer.get("metadata") or {})
        if (shortened := answer.get("postprocessed_action")) is not None:
            info["postprocessed_action"] = shortened
        done = bool(answer["done"])
        if done:
            info |= plain_info(self._inner.get_metrics())
        said = [dict(message) for message in answer["observations"]]
        return (*self.outcome(said, float(answer["reward"]), terminated=done)[:4], info)

    def expert_action(self) -> str:
        if self.name not in GSM8K_NAMES or self.task is None:
            raise NotImplementedError(f"skyrl_gym:{self.name} has no expert")
        return f"#### {self.task.answer}"

    def close(self) -> None:
        super().close()
        self._shut()

    def _shut(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()


def task_of_row(row: Mapping[str, Any], id: str) -> Task:
    prompt = row.get("prompt")
    messages = (user(prompt),) if isinstance(prompt, str) else tuple(dict(m) for m in prompt or ())
    if not messages:
        raise ValueError("a row needs a prompt: a text or a list of messages")
    extras = {
        key: plain(value) for key, value in row.items() if key not in ("prompt", "env_class") and value is not None
    }
    spec = extras.get("reward_spec") or extras.get("reward_model") or {}
    answer = spec.get("ground_truth") if isinstance(spec, dict) else None
    return Task(id, messages, plain(answer), metadata={"extras": extras})
