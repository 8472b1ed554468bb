"""An endpoint in front of a model, which records all that it samples for unmodified agents.

It speaks OpenAI's chat completions, completions and Responses, and Anthropic's messages. An episode's key says whose calls they are;
each call is recorded with its exact tokens before its answer leaves.
"""

from agentgym.gateway.calls import Backend, ModelAnswer, ModelCall, Refused, Settings
from agentgym.gateway.episodes import Episode, Limits
from agentgym.gateway.server import Gateway
from agentgym.gateway.tree import Call
from agentgym.gateway.upstream import Passed, Upstream

__all__ = [
    "Backend",
    "Call",
    "Episode",
    "Gateway",
    "Limits",
    "ModelAnswer",
    "ModelCall",
    "Passed",
    "Refused",
    "Settings",
    "Upstream",
]
