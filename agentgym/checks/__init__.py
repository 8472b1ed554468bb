"""The checks of `agentgym check` and `agentgym validate`, one file for each kind."""
