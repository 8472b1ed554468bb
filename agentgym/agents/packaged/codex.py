"""Codex, OpenAI's agent of the command line: the Responses API, and the environment's tools by MCP. It has no shell."""

import os
import sys
from pathlib import Path

place = Path(sys.prefix)
mcp, provider = "mcp_servers.environment", "model_providers.gateway"
settings = {
    "model_provider": "gateway",
    f"{provider}.name": "gateway",
    f"{provider}.base_url": os.environ["OPENAI_BASE_URL"],
    f"{provider}.env_key": "OPENAI_API_KEY",
    f"{provider}.wire_api": "responses",
    f"{mcp}.url": os.environ["AGENTGYM_MCP_URL"],
    f"{mcp}.bearer_token_env_var": "OPENAI_API_KEY",
    f"{mcp}.default_tools_approval_mode": "approve",
    f"{mcp}.tool_timeout_sec": "3600",
    # Its commands would run on this machine, not in the environment.
    "features.shell_tool": "false",
    "web_search": "disabled",
}
words = ["exec", "--skip-git-repo-check", "--ephemeral", "--sandbox", "read-only", "--model"]
words += [os.environ["AGENTGYM_MODEL"], *(word for each in settings.items() for word in ("-c", "=".join(each))), "-"]
os.execv(place / "bin" / "node", ["node", str(place / "node_modules" / ".bin" / "codex"), *words])
