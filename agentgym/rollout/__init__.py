"""Rollouts: the agent loop, and stored episodes played again."""

from agentgym.rollout.episode import Episode, Limits, run_episode, run_many

__all__ = ["Episode", "Limits", "run_episode", "run_many"]
