"""Agents of other projects, installed for a test."""

import re

import pytest

from agentgym.agents.programs import agent_of


def installed(name):
    """An agent of another project; the test is skipped where no package index can be reached."""
    try:
        return agent_of(name)
    except ValueError as error:
        words = r"NewConnectionError|NameResolution|unreachable|ConnectTimeout|ENOTFOUND|ECONNREFUSED|Failed to fetch"
        if re.search(words, str(error)):
            pytest.skip(str(error))
        raise
