"""Agents of other projects, installed for a test."""

import re

import pytest

from agentgym.agents.programs import agent_of


def installed(name):
    """An agent of another project; the test is skipped where no package index can be reached."""
    try:
        return agent_of(name)
    except ValueError as error:
        if re.search(
            r"NewConnectionError|NameResolution|unreachable|ConnectTimeout|ENOTFOUND|ECONNREFUSED", str(error)
        ):
            pytest.skip(str(error))
        raise
