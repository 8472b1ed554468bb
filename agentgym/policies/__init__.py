"""Policies: an expert, chance, a script, a model behind an endpoint, a person."""

from agentgym.policies.base import (
    EndEpisode,
    EndpointError,
    ExpertPolicy,
    NullPolicy,
    Policy,
    RandomPolicy,
    Reply,
    ScriptedPolicy,
)

__all__ = [
    "EndEpisode",
    "EndpointError",
    "ExpertPolicy",
    "NullPolicy",
    "Policy",
    "RandomPolicy",
    "Reply",
    "ScriptedPolicy",
]
