"""Trajectories with exact tokens, whose turns share one sample or have one each, and the advantages that a step gives them."""

from dataclasses import replace

from agent_train.algorithms.advantage_inputs import AdvantageInputs
from agent_train.algorithms.selection import choose, participants, turn_rewards
from agent_train.algorithms.step_advantages import with_advantages
from agent_train.config.schema import AdvantageConfig, AlgorithmConfig, FilterConfig, KlConfig, OverlongConfig
from agent_train.data.samples import samples_of
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def episode(task, sample, turns, *, samples="one", end="terminated", states=None, finish="stop"):
    """An episode whose turns are `(sampled tokens, reward)`.

    `samples` "one": each prompt extends what was said; "many": each begins anew, so every turn is a sample.
    """
    made, context = [], []
    for number, (size, reward) in enumerate(turns):
        shown = [100 + 10 * sample, 7]
        prompt = [*context, *shown] if samples == "one" else [50 + number, *shown]
        ids = list(range(1, size + 1))
        last = number == len(turns) - 1
        tokens = Tokens(prompt, ids, [-0.5] * size, [0] * size, finish if last else "stop") if size else None
        state = states[number] if states else f"{task} {sample} {number}"
        made.append(Turn([user(state)], assistant("x"), reward, tokens=tokens))
        context = prompt + ids
    error = "broke" if end == "error" else None
    return Trajectory(f"{task}/{sample}", "e", task, sample, turns=made, end=end, error=error)


def group(task, episodes):
    return Group(task, [episode(task, sample, turns) for sample, turns in enumerate(episodes)])


# The common example: two groups; rewards 1, 0, 0, 1 with lengths 2, 4, 3, 1, and 3, 1 with lengths 2, 2.
def example():
    a = group("a", [[(2, 1.0)], [(4, 0.0)], [(3, 0.0)], [(1, 1.0)]])
    return [a, group("b", [[(2, 3.0)], [(2, 1.0)]])]


def algorithm(name="group", *, kl=None, overlong=None, chosen=None, **settings):
    return AlgorithmConfig(
        advantage=AdvantageConfig(name=name, **settings),
        kl=KlConfig(**(kl or {})),
        overlong=OverlongConfig(**(overlong or {})),
        filter=FilterConfig(**(chosen or {})),
    )


def samples_for(groups, settings, **lists):
    """The groups that a step keeps and their samples; `lists` names numbers for the sampled tokens of all samples, in order."""
    kept, _ = choose(groups, settings, len(groups))
    samples = [
        sample
        for each in kept
        for trajectory, in_loss in participants(each, settings.overlong)
        for sample in samples_of(trajectory, 1.0, turn_rewards(trajectory, settings), in_loss)
    ]
    for name, numbers in lists.items():
        rest = iter(numbers)
        samples = [
            replace(sample, **{name: [next(rest) if on else float("nan") for on in sample.mask]}) for sample in samples
        ]
    return kept, samples


def advantages(groups, settings, scores=None, kl_coef=0.0, **lists):
    """The advantages of the sampled tokens of each trajectory, by its id, and the samples.

    `scores` names what else `AdvantageInputs` takes.
    """
    kept, samples = samples_for(groups, settings, **lists)
    samples = with_advantages(AdvantageInputs(settings, kept, samples, kl_coef=kl_coef, **(scores or {})), samples)
    found = {}
    for sample in samples:
        pairs = list(zip(sample.advantages, sample.mask, strict=True))
        found.setdefault(sample.trajectory, []).extend(a for a, on in pairs if on)
        assert all(a == 0.0 for a, on in pairs if not on)
    return found, samples


def firsts(found):
    """The advantage of each trajectory, the same on all of its tokens."""
    assert all(len(set(tokens)) == 1 for tokens in found.values())
    return [tokens[0] for tokens in found.values()]
