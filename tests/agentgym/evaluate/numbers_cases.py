"""Episodes and cells made by hand, for the tests of statistics, tables, reports and comparisons."""

from agentgym.core.registration import EnvSpec
from agentgym.core.trajectory import Trajectory, Turn
from agentgym.evaluate import results_of
from agentgym.evaluate.plan import AgentSpec, Cell


def trajectory(
    task, sample=0, reward=0.0, error=None, turns=1, usage=None, metrics=None, env="e", said="x", **metadata
):
    """An episode of one-word replies; the reward comes with the last."""
    made = [
        Turn([{"role": "user", "content": "go on"}], {"role": "assistant", "content": said}, usage=dict(usage or {}))
        for _ in range(turns)
    ]
    if made:
        made[-1].reward = reward
    return Trajectory(
        f"{task}/{sample}",
        env,
        task,
        sample,
        turns=made,
        end="error" if error else "terminated",
        error=error,
        metrics=metrics or {},
        metadata=metadata,
        seconds=2.0,
    )


def calls(requests=1, prompt=100, completion=10, waited=0.0, **retries):
    """What an episode asked of an endpoint, as it stands in its metadata."""
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"requests": requests, "retries": retries, "usage": usage, "waited": waited}


def cell(env="e", agent="m", **settings):
    """A cell of a plan."""
    return Cell(EnvSpec(env, "nowhere:Env"), AgentSpec(agent, "python"), **settings)


def result(episodes, env="e", agent="m", **settings):
    """The result of a cell."""
    return results_of(episodes, env=env, agent=agent, **settings)
