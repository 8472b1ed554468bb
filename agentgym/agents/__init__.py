"""Agents that play whole episodes by themselves: a command or a Python function, in front of a gateway.

An agent asks the model at the gateway by any of its protocols, and acts on the environment by its tools, at the gateway too.
"""

from agentgym.agents.episode import AgentEpisode
from agentgym.agents.play import AgentPolicy, play_agent
from agentgym.agents.programs import Agent, Command, Function, agent_of

__all__ = ["Agent", "AgentEpisode", "AgentPolicy", "Command", "Function", "agent_of", "play_agent"]
