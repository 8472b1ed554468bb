"""The commands of `agentgym`, one module each: `add(commands)` gives the command line its parser."""
