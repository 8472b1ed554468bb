"""`python -m agentgym.cli`, for where the command `agentgym` is not on the path."""

from agentgym.cli import main

raise SystemExit(main())
