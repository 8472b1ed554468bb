"""Plays every data set of Reasoning Gym through the adapter, and scores the same answers with the data set itself."""

import random
from dataclasses import replace

import reasoning_gym
from drive import check_env, refusal, report, spec_of
from reasoning_gym.factory import DATASETS

import agentgym
from agentgym.core.tasks import TaskSet
from agentgym_envs.adapters.reasoning_gym import answer_of

SIZE, SEED, INDEX = 12, 42, 5
SETTINGS = {"composite": {"datasets": [{"name": "leg_counting", "weight": 1.0, "config": {}}]}}


def compared(name):
    settings = SETTINGS.get(name, {})
    given = {"settings": settings, "seed": SEED, "size": SIZE}
    env = agentgym.make(f"reasoning_gym:{name}", **given)
    direct = reasoning_gym.create_dataset(name, seed=SEED, size=SIZE, **direct_settings(settings))
    task, entry = env.tasks[INDEX], direct[INDEX]
    env.init(task)
    env.reset()
    expert = refusal(env.expert_action)
    replies = [
        f"<answer>{entry['answer']}</answer>" if expert else env.expert_action(),
        env.random_action(random.Random(1)),
        "<think>no</think> It is so.",
    ]
    rewards = []
    for reply in replies:
        env.reset()
        rewards.append(env.step(reply)[1])
    return {
        "question": task.messages[0]["content"],
        "direct question": str(entry["question"]),
        "expert": expert or "plays",
        "rewards": rewards,
        "direct rewards": [scored(direct, entry, answer_of(reply)) for reply in replies],
    }


def direct_settings(settings):
    if "datasets" not in settings:
        return settings
    from reasoning_gym.composite import DatasetSpec

    return {"datasets": [DatasetSpec(**each) for each in settings["datasets"]]}


def scored(data, entry, answer):
    try:
        return float(data.score_answer(answer, entry))
    except Exception as error:
        return f"{type(error).__name__}"


def endless():
    env = agentgym.make("reasoning_gym:countdown", score_timeout=1.0, size=3)
    env.reset(seed=0)
    return env.step("<answer>9**9**9**9</answer>")


def scores_of(name, *answers):
    """The rewards of answers to the first puzzle, in one process."""
    env = agentgym.make(f"reasoning_gym:{name}", size=3)
    env.init(env.tasks[0])
    rewards = []
    for answer in answers:
        env.reset()
        rewards.append(env.step(f"<answer>{answer}</answer>")[1])
    return rewards


PATCH = 'setattr(__import__("sympy"),"parse_expr",__import__("unittest.mock").mock.MagicMock(return_value=7))'
ANY = '__import__("unittest.mock").mock.ANY'
# Without texts and attributes.
CHARS = "eval(" + "+".join(f"chr({ord(c)})" for c in ANY) + ")"
EXIT = '__import__("os")._exit(1)'


def altered():
    """A task whose puzzle is not the one that this process makes, as with another version or hash seed."""
    env = agentgym.make("reasoning_gym:ransom_note", size=3)
    env.init(replace(env.tasks[0], messages=env.tasks[1].messages))


def splits():
    train, test = (TaskSet.load("reasoning_gym:chain_sum", split) for split in ("train", "test"))
    questions = [{task.messages[0]["content"] for task in tasks} for tasks in (train.take(200), test.take(200))]
    return len(questions[0]), len(questions[0] & questions[1])


report(
    datasets={name: compared(name) for name in sorted(DATASETS) if name != "composite"},
    check=check_env(spec_of("reasoning_gym:chain_sum", settings={"min_terms": 2, "max_terms": 2}, size=50)),
    endless=endless(),
    programs={
        name: scores_of(name, ANY, CHARS, PATCH, EXIT, "x+1") for name in ("polynomial_multiplication", "n_queens")
    },
    formulas=scores_of("countdown", "exit()", "1+1"),
    overpaid={
        "coin_flip": scores_of("coin_flip", "0", "0."),
        "complex_arithmetic": scores_of("complex_arithmetic", "nan", "NaN + 1i"),
        "game_of_life_halting": scores_of("game_of_life_halting", "banana", "0"),
    },
    splits=splits(),
    unknown=refusal(lambda: agentgym.make("reasoning_gym:chain_sun")),
    settings=refusal(lambda: agentgym.make("reasoning_gym:chain_sum", settings={"terms": 2})),
    no_table=refusal(lambda: agentgym.make("reasoning_gym:chain_sum", settings="terms=2")),
    altered=refusal(altered),
    foreign_task=refusal(lambda: agentgym.make("reasoning_gym:chain_sum").init(agentgym.Task("x"))),
)
