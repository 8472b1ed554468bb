"""What `agentgym check` and `agentgym validate` look at, a file for each kind of check."""
