"""What `agentgym check` looks at, a file for each kind of check; `agentgym.checker` runs them."""
