"""The contract: environments, tasks, messages, trajectories, and the registry. Import the names from `agentgym`."""
