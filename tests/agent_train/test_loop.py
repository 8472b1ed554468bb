"""What the loop itself computes: rates, rows and what it refuses."""

import pytest

from agent_train.config import AlgorithmConfig, Config
from agent_train.loop import NothingPlayed, lr_scale, training_rows
from agentgym.trajectory import Group, Tokens, Trajectory, Turn


def played(sample, reward, end="terminated"):
    turn = Turn([], {"role": "assistant", "content": "x"}, reward, tokens=Tokens([1, 2], [3, 4], [-0.5, -0.1], [0, 0]))
    return Trajectory(f"t/{sample}", "e", "t", sample, turns=[turn], end=end, error="broke" if end == "error" else None)


def test_a_linear_schedule_falls_from_one_to_almost_nothing():
    config = Config()
    assert [lr_scale(config, step) for step in (1, 50)] == [1.0, 1.0]
    config.learner.schedule, config.trainer.steps = "linear", 4
    assert [lr_scale(config, step) for step in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_rows_carry_their_trajectorys_advantage_and_failed_ones_are_in_no_baseline():
    group = Group("t", [played(0, 1.0), played(1, 0.0), played(2, 100.0, end="error")])
    rows = training_rows([group], AlgorithmConfig(std="none"), 0.7)
    assert [(row.trajectory, max(row.advantages, key=abs), row.temperature) for row in rows] == [("t/0", 0.5, 0.7), ("t/1", -0.5, 0.7)]


def test_a_step_without_a_played_episode_says_what_failed_first():
    with pytest.raises(NothingPlayed, match=r"not one of the 1 episodes of this training step.*broke"):
        training_rows([Group("t", [played(0, 1.0, end="error")])], AlgorithmConfig(), 1.0)
