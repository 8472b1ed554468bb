"""Code that runs in the sandbox: standard library only, sent as text; see `agentgym_envs.code.grading`."""
