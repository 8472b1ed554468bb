"""`python -m agentgym.cli`: the command `agentgym` where it is not on the PATH."""

from agentgym.cli import main

raise SystemExit(main())
