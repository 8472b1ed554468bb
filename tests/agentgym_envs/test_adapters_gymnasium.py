"""The Gymnasium adapter: episodes equal to Gymnasium's own, spaces as text, and what cannot be text."""

import asyncio
import json
import pickle
import random
import re
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import agentgym
from agentgym.checks.check_env import check_env
from agentgym.core import registration
from agentgym.core.registration import Adapter, EnvSpec, UnknownEnvError, register_adapter, spec
from agentgym.core.tasks import Task, TaskSet
from agentgym.policies.base import RandomPolicy, ScriptedPolicy
from agentgym.rollout.episode import Episode as RunEpisode
from agentgym.rollout.episode import run_episode, run_many
from agentgym_envs.adapters.gymnasium import (
    GymnasiumEnv,
    InvalidAction,
    action_of,
    check_actions,
    description_of,
    form_of,
    uncoloured,
    written,
)

TOY = ("FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "Taxi-v4")


def text(messages):
    return messages[0]["content"]


# ---- episodes


@pytest.mark.parametrize("name", [*TOY, "CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("seed", [0, 7])
def test_an_episode_goes_as_gymnasium_plays_it(name, seed):
    direct = gymnasium.make(name)
    env = agentgym.make(f"gymnasium:{name}", max_turns=500)
    env.init(Task("t", seed=seed))
    rng = random.Random(seed)
    observation, _ = direct.reset(seed=seed)
    said, _ = env.reset(seed=99)
    for _ in range(60):
        assert text(said).endswith(f"Observation: {written(observation)}")
        action = env.random_action(rng)
        observation, reward, terminated, truncated, _ = direct.step(action_of(direct.action_space, action))
        said, ours, ended, cut, _ = env.step(action)
        assert (ours, ended, cut) == (pytest.approx(float(reward)), terminated, truncated)
        if terminated or truncated:
            break
    env.close()
    env.close()


@pytest.mark.parametrize("name", TOY)
def test_the_check_passes(name):
    assert check_env(f"gymnasium:{name}") == []


def test_the_environments_own_time_limit_truncates():
    env = agentgym.make("gymnasium:FrozenLake-v1", settings={"max_episode_steps": 3}, max_turns=50)
    env.reset(seed=0)
    ends = [env.step("0")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    with pytest.raises(RuntimeError, match="no episode is running"):
        env.step("0")


def test_the_default_limit_is_the_environments_own():
    assert agentgym.make("gymnasium:Taxi-v4").max_turns == 200
    assert agentgym.make("gymnasium:Blackjack-v1").max_turns == 100
    assert agentgym.make("gymnasium:Taxi-v4", settings={"max_episode_steps": 999}).max_turns == 999
    assert agentgym.make("gymnasium:Taxi-v4", settings={"max_episode_steps": -1}).max_turns == 100  # none of its own


def test_the_opening_tells_the_rules_the_actions_and_the_state():
    env = agentgym.make("gymnasium:FrozenLake-v1", settings={"is_slippery": False})
    opening = text(env.reset(seed=0)[0])
    for part in ("crossing a frozen lake", "0: Move left", "Reach goal: +1", "Answer with a whole number from 0 to 3."):
        assert part in opening
    assert "import gymnasium" not in opening
    assert "penalised with a reward of -1" in text(agentgym.make("gymnasium:MountainCar-v0").reset(seed=0)[0])
    assert opening.endswith("SFFF\nFHFH\nFFFH\nHFFG\nline 1, column 1: 'S' is on red\n\nObservation: 0")
    assert text(env.step("<think>1 is down</think> <action>2</action>")[0]).endswith("\n\nObservation: 1")


def test_actions_may_have_names_and_the_instruction_another_text():
    names = ["left", "down", "right", "up"]
    env = agentgym.make(
        "gymnasium:FrozenLake-v1", settings={"is_slippery": False}, actions=names, instruction="Cross the lake."
    )
    opening = text(env.reset(seed=0)[0])
    assert opening.startswith("Cross the lake.\n\nAnswer with one of left (0), down (1), right (2), up (3).")
    assert text(env.step("Right")[0]).endswith("Observation: 1")
    assert text(env.step("1")[0]).endswith("Observation: 5")
    with pytest.raises(ValueError, match="3 names for actions of Discrete"):
        agentgym.make("gymnasium:FrozenLake-v1", actions=names[:3]).reset(seed=0)


@pytest.mark.parametrize(
    "reply", ["", "left", "4", "-1", "1.0", "true", "[1]", "1 2", "NaN", "1" * 400, "[" * 5000, "🙂"]
)
def test_what_is_no_action_is_told_and_a_random_one_is_taken(reply):
    env = agentgym.make("gymnasium:FrozenLake-v1", max_turns=2)
    env.reset(seed=0)
    said, reward, terminated, truncated, info = env.step(reply)
    assert "is no action" in text(said)
    assert "a whole number from 0 to 3" in text(said)
    assert "A random action was taken in its place: " in text(said)
    assert text(said).splitlines()[-1].startswith("Observation: ")
    assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, True)
    assert env.step(reply)[3]


def silent_episode(env, task):
    """The told actions and the rewards of an episode without a word."""
    env.init(task)
    env.reset(seed=0)
    taken, rewards, over = [], [], False
    while not over:
        said, reward, ended, cut, _ = env.step("")
        taken.append(re.search(r"taken in its place: (.*)\.\n", text(said))[1])
        rewards.append(reward)
        over = ended or cut
    return taken, rewards


@pytest.mark.parametrize("name", ["CliffWalking-v1", "Taxi-v4", "Blackjack-v1", "Pendulum-v1", "CartPole-v1"])
def test_silence_earns_what_the_actions_taken_in_its_place_cost_and_no_more(name):
    env = agentgym.make(f"gymnasium:{name}")
    for task in TaskSet.load(f"gymnasium:{name}", split="test").take(5):
        taken, rewards = silent_episode(env, task)
        assert (taken, rewards) == silent_episode(env, task)
        direct = gymnasium.make(name)
        direct.reset(seed=task.seed)
        played = [float(direct.step(action_of(direct.action_space, action))[1]) for action in taken]
        assert rewards == pytest.approx([min(reward, 0.0) for reward in played], rel=1e-2)  # as told: six digits


def test_silence_never_beats_good_play_where_every_step_costs():
    env = agentgym.make("gymnasium:CliffWalking-v1")
    task = TaskSet.load("gymnasium:CliffWalking-v1", split="test")[0]
    env.init(task)
    env.reset(seed=0)
    good = sum(env.step(action)[1] for action in ["0", *["1"] * 11, "2"])
    assert good == -13
    assert not env.running
    assert sum(silent_episode(env, task)[1]) < 5 * good
    pendulum = agentgym.make("gymnasium:Pendulum-v1")
    assert sum(silent_episode(pendulum, Task("t", seed=0))[1]) < -200


def test_what_replies_that_are_no_action_reach_by_chance_is_no_success(odd_env):
    env = agentgym.make(odd_env(spaces.Discrete(2), spaces.MultiDiscrete([2, 2])))
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("hm")
    assert (reward, terminated, info["success"], info["invalid"]) == (0.0, True, False, True)


def test_random_actions_in_place_of_none_keep_to_the_mask():
    env = agentgym.make("gymnasium:Taxi-v4")
    _, info = env.reset(seed=0)
    for _ in range(40):
        mask = info["action_mask"]
        said, _, _, _, info = env.step("")
        assert mask[int(re.search(r"in its place: (\d)", text(said))[1])] == 1


def test_random_actions_keep_to_the_mask():
    env = agentgym.make("gymnasium:Taxi-v4")
    _, info = env.reset(seed=0)
    rng = random.Random(0)
    for _ in range(40):
        action = env.random_action(rng)
        assert info["action_mask"][int(action)] == 1
        info = env.step(action)[4]


def test_random_play_and_a_known_path():
    path = ["1", "1", "2", "2", "1", "2"]
    found = spec("gymnasium:FrozenLake-v1")
    env = found.make(settings={"is_slippery": False})
    won = asyncio.run(run_episode(env, ScriptedPolicy(path), found.tasks("test")[0]))
    assert (won.end, won.reward, won.env) == ("terminated", 1.0, "gymnasium:FrozenLake-v1")

    def policy(episode):
        return RandomPolicy(rng=random.Random(episode.task.id))

    episodes = [RunEpisode(task) for task in found.tasks("train").take(60)]
    played = asyncio.run(run_many(found.make, policy, episodes, concurrency=4))
    assert not any(trajectory.failed for trajectory in played)
    assert sum(trajectory.reward for trajectory in played) / 60 < 0.15


def test_a_task_poses_the_same_problem_whatever_the_reset_seed():
    env = agentgym.make("gymnasium:Taxi-v4")
    env.init(Task("t", seed=3))
    assert text(env.reset(seed=1)[0]) == text(env.reset(seed=2)[0])
    env.init(Task("t"))
    assert text(env.reset(seed=1)[0]) != text(env.reset(seed=2)[0])


def test_splits_share_no_seed():
    train, test = (TaskSet.load("gymnasium:Taxi-v4", split) for split in ("train", "test"))
    assert (len(train), len(test)) == (100_000, 1_000)
    assert not {task.seed for task in test} & {task.seed for task in train}
    with pytest.raises(ValueError, match="has no split 'dev'; it has train, test"):
        TaskSet.load("gymnasium:Taxi-v4", "dev")


# ---- ids


def test_the_spec_is_picklable_and_json():
    found = spec("gymnasium:FrozenLake-v1")
    found = replace(found, kwargs={**found.kwargs, "settings": {"map_name": "8x8"}})
    assert pickle.loads(pickle.dumps(found)) == found
    again = EnvSpec.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert "FFFFFFFF" in text(again.make().reset(seed=0)[0])


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("gymnasium:FrozenLake-v9", "no environment 'gymnasium:FrozenLake-v9': .*FrozenLake"),
        ("gymnasium:FrozenLak-v1", "no environment 'gymnasium:FrozenLak-v1': .*Did you mean: `FrozenLake`"),
        ("gymnasium:", "needs a name, for example gymnasium:FrozenLake-v1"),
        ("gymnasum:FrozenLake-v1", "did you mean 'gymnasium:FrozenLake-v1'"),
        ("reasonig_gym:chain_sum", "did you mean 'reasoning_gym:chain_sum'"),
    ],
)
def test_unknown_names_and_prefixes_name_the_nearest(env_id, words):
    with pytest.raises(UnknownEnvError, match=words):
        agentgym.make(env_id)


@pytest.mark.parametrize(
    ("env_id", "install"),
    [
        ("reasoning_gym:chain_sum", "pip install 'reasoning-gym'"),
        ("skyrl_gym:gsm8k", "pip install 'skyrl-gym'"),
        ("verifiers:wordle", "pip install 'verifiers>=0.1.14,<0.4'"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_to_install(env_id, install, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, env_id.partition(":")[0], None)
    with pytest.raises(ImportError, match=install):
        agentgym.make(env_id).reset(seed=0)


def test_a_module_that_registers_is_imported_first(tmp_path, monkeypatch):
    lines = [
        "import gymnasium",
        "from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv",
        "gymnasium.register('TinyLake-v0', FrozenLakeEnv, kwargs={'desc': ['SG'], 'is_slippery': False})",
    ]
    (tmp_path / "tiny_lakes.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    env = agentgym.make("gymnasium:tiny_lakes:TinyLake-v0")
    env.reset(seed=0)
    assert env.step("2")[1:3] == (1.0, True)
    del gymnasium.registry["TinyLake-v0"]
    with pytest.raises(ImportError, match="'gymnasium:no_lakes:X-v0': cannot import module 'no_lakes'"):
        agentgym.make("gymnasium:no_lakes:X-v0")


def test_a_prefix_goes_before_a_module_of_its_name_and_other_modules_stay_reachable(monkeypatch):
    monkeypatch.setattr(registration, "known_adapters", dict(registration.known_adapters))
    assert spec("gymnasium:FrozenLake").kwargs == {"name": "FrozenLake"}
    assert spec("agentgym_envs.adapters.gymnasium:GymnasiumEnv").load() is GymnasiumEnv
    adapter = Adapter("lakes", "agentgym_envs.adapters.gymnasium:GymnasiumEnv", install="lakes")
    assert register_adapter(adapter) is register_adapter(adapter)
    assert agentgym.make("lakes:FrozenLake-v1").name == "FrozenLake-v1"
    with pytest.raises(ValueError, match="already registered"):
        register_adapter(replace(adapter, install="others"))
    with pytest.raises(ValueError, match="bad adapter"):
        register_adapter(replace(adapter, prefix="a:b"))


def test_the_list_mentions_the_prefixes(capsys):
    from agentgym.cli import main

    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for prefix in ("gymnasium:NAME", "reasoning_gym:NAME", "skyrl_gym:NAME", "verifiers:NAME"):
        assert prefix in out


def test_the_command_line_evaluates_them(tmp_path, capsys):
    from agentgym.cli import main

    words = ["eval", "gymnasium:Blackjack-v1", "--policy", "random", "-n", "5", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    assert [cell["episodes"] for cell in json.loads(capsys.readouterr().out)["cells"]] == [5]


# ---- what cannot be text


@pytest.fixture
def odd_env():
    """Registers an environment with these spaces, by a class of its own."""
    made = []

    def register(observations, actions):
        class Odd(gymnasium.Env):
            metadata = {"render_modes": []}  # noqa: RUF012
            observation_space, action_space = observations, actions

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return self.observation_space.sample(), {"where": np.array([1, 2]), "success": np.True_}

            def step(self, action):
                info = {"took": action, "success": 1, "reward": 7}
                return self.observation_space.sample(), np.float32(0.5), True, True, info

        name = f"Odd{len(made)}-v0"
        gymnasium.register(name, Odd)
        made.append(name)
        return f"gymnasium:{name}"

    yield register
    for name in made:
        del gymnasium.registry[name]


PIXELS = spaces.Box(0, 255, (64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("observations", "actions", "words"),
    [
        (PIXELS, spaces.Discrete(2), "observations of 12288 numbers .* cannot be shown as text"),
        (spaces.Discrete(2), PIXELS, "actions of 12288 numbers .* cannot be read from text"),
        (spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)), "actions of Sequence.* cannot be read"),
        (spaces.Dict(a=spaces.Tuple([PIXELS])), spaces.Discrete(2), "observations of 12288 numbers"),
    ],
)
def test_spaces_that_are_no_text_are_refused(odd_env, observations, actions, words):
    with pytest.raises(TypeError, match=words):
        agentgym.make(odd_env(observations, actions)).reset(seed=0)


def test_info_becomes_plain_json(odd_env):
    env = agentgym.make(odd_env(spaces.Discrete(2), spaces.MultiDiscrete([2, 2])))
    assert env.reset(seed=0)[1] == {"where": [1, 2], "success": True}
    _, reward, terminated, truncated, info = env.step("[0, 1]")
    assert (reward, terminated, truncated) == (0.5, True, False)
    assert info == {"took": [0, 1], "success": True, "reward": 7}


def test_settings_that_are_no_json_are_refused():
    with pytest.raises(TypeError, match="plain JSON"):
        agentgym.make("gymnasium:FrozenLake-v1", settings={"desc": object()})


# ---- spaces

SPACES = [
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(4),
    spaces.Box(-1.0, 1.0, (3,)),
    spaces.Box(-np.inf, np.inf, (2,)),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Text(8),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,), np.float64)]),
    spaces.Dict(go=spaces.Discrete(2), say=spaces.Text(3, min_length=1)),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_written_is_read_again(space):
    check_actions(space, "test")
    assert form_of(space)
    space.seed(0)
    for _ in range(20):
        value = space.sample()
        said = value if isinstance(space, spaces.Text) else written(value)
        if isinstance(space, spaces.Text) and value != value.strip():
            continue
        read = action_of(space, said)
        assert space.contains(read)
        assert written(read) == written(value)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (SPACES[1], "2"),
        (SPACES[2], "[0, 0]"),
        (SPACES[2], "[0, 0, 4]"),
        (SPACES[2], "[0.0, 0, 0]"),
        (SPACES[3], "[[0, 0], [0]]"),
        (SPACES[4], "[0, 1, 2, 0]"),
        (SPACES[4], "[true, false, true, false]"),
        (SPACES[5], "[0, 0, 1.0001]"),
        (SPACES[5], "0"),
        (SPACES[5], '["0", "0", "0"]'),
        (SPACES[6], "[Infinity, 0]"),
        (SPACES[6], "[1e999, 0]"),
        (SPACES[6], "[1e39, 0]"),  # beyond float32
        (SPACES[7], "[[0, 0], [0, 256]]"),
        (SPACES[7], "[[0, 0], [0, -1]]"),
        (SPACES[7], "[[0, 0], [0, 0.5]]"),
        (SPACES[8], "123456789"),
        (SPACES[8], "two words"),
        (SPACES[9], "[1]"),
        (SPACES[9], "[1, [0.5, 2]]"),
        (SPACES[10], '{"go": 1}'),
        (SPACES[10], '{"go": 1, "say": "hi", "more": 1}'),
        (SPACES[10], '{"go": 1, "say": ""}'),
    ],
)
def test_values_that_are_not_in_the_space_are_refused(space, said):
    with pytest.raises(InvalidAction, match="answer with"):
        action_of(space, said)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SPACES),
    st.one_of(st.text(max_size=40), st.recursive(st.integers() | st.floats(), st.lists, max_leaves=6).map(str)),
)
def test_any_reply_is_an_action_or_is_refused(space, said):
    try:
        value = action_of(space, said)
    except InvalidAction:
        return
    assert space.contains(value)


def test_colours_become_words():
    assert uncoloured("\nA\x1b[34;1mB\x1b[0m\n\x1b[43mC\x1b[0m D\n") == (
        "AB\nC D\nline 1, column 2: 'B' is blue\nline 2, column 1: 'C' is on yellow"
    )
    assert uncoloured("plain") == "plain"
    assert uncoloured("\x1b[;31mA\x1b[0m") == "\x1b[;31mA\x1b[0m"  # no colour that is known


def test_a_docstring_without_sections_is_told_whole():
    assert description_of("Walk.\n\n  Far.") == "Walk.\n\nFar."
    assert description_of("") == ""
    assert description_of("A\n## Rewards\nmuch\n## Arguments\nnone") == "A\n\nRewards:\nmuch"
