"""Programs around agents of other projects. `agentgym.agents.named` installs and starts them; nothing imports them."""
