"""`python -m agentgym.cli`: the command `agentgym` if it is not on the PATH."""

from agentgym.cli import main

raise SystemExit(main())
