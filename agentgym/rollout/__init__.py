"""Rollouts: the agent loop, and replays of stored episodes."""

from agentgym.rollout.episode import Episode, Limits, run_episode, run_many

__all__ = ["Episode", "Limits", "run_episode", "run_many"]
