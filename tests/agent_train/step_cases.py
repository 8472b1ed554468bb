"""Trajectories with exact tokens, whose turns share one row or have a row each, and the advantages that a step gives them."""

from agent_train.algorithms.selection import choose
from agent_train.algorithms.step_advantages import Scores, set_advantages
from agent_train.config.schema import AdvantageConfig, AlgorithmConfig, FilterConfig, KlConfig, OverlongConfig
from agent_train.data.samples import rows_of
from agentgym.core.messages import assistant, user
from agentgym.core.trajectory import Group, Tokens, Trajectory, Turn


def episode(task, sample, turns, *, rows="one", end="terminated", states=None, finish="stop"):
    """An episode whose turns are `(sampled tokens, reward)`.

    `rows` "one": each prompt extends what was said; "many": each begins anew, so every turn is a row of its own.
    """
    made, context = [], []
    for number, (size, reward) in enumerate(turns):
        shown = [100 + 10 * sample, 7]
        prompt = [*context, *shown] if rows == "one" else [50 + number, *shown]
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


def rows_for(groups, settings, **lists):
    """The rows of a step and what it chose; `lists` names numbers to lay on the sampled tokens of all rows, in order."""
    picked = choose(groups, settings, len(groups))
    rows = [
        row
        for g in picked.groups
        for t in g.trajectories
        if picked.outcomes[t.id].rewards is not None
        for row in rows_of(t)
    ]
    for name, numbers in lists.items():
        rest = iter(numbers)
        for row in rows:
            setattr(row, name, [next(rest) if sampled else float("nan") for sampled in row.mask])
    return picked, rows


def advantages(groups, settings, scores=None, kl_coef=0.0, order=None, **lists):
    """The advantages of the sampled tokens of each trajectory, by its id, and the rows."""
    picked, rows = rows_for(groups, settings, **lists)
    given = [rows[i] for i in order] if order else rows
    set_advantages(settings, picked.groups, given, picked.outcomes, scores or Scores(), kl_coef)
    found = {}
    for row in rows:
        found.setdefault(row.trajectory, []).extend(a for a, on in zip(row.advantages, row.mask, strict=True) if on)
        assert all(a == 0.0 for a, on in zip(row.advantages, row.mask, strict=True) if not on)
    return found, rows


def firsts(found):
    """The advantage of each trajectory, the same on all of its tokens."""
    assert all(len(set(tokens)) == 1 for tokens in found.values())
    return [tokens[0] for tokens in found.values()]
