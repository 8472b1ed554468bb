"""mini-swe-agent: its default agent, by chat completions. Its commands go to the environment's tool `bash`, by MCP."""

import json
import os
import platform
import sys
import urllib.request
from typing import Any

# Its output is the agent's final answer, and it asks no server for prices.
os.environ.update(MSWEA_SILENT_STARTUP="1", LITELLM_LOCAL_MODEL_COST_MAP="True")

import litellm
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.exceptions import Submitted
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def asked(method: str, params: dict[str, Any]) -> Any:
    """The answer of the environment's MCP server."""
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(os.environ["AGENTGYM_MCP_URL"], body, headers)) as answer:
        return json.load(answer)["result"]


class Shell:
    """The environment that the agent works in: the shell of agentgym's."""

    config = None

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        told = asked("tools/call", {"name": "bash", "arguments": {"command": action.get("command", "")}})
        output = told["content"][0]["text"]
        over = output.endswith("The episode is over.")
        if output.lstrip().startswith(DONE) or over:
            if "submit" in TOOLS and not over:
                asked("tools/call", {"name": "submit", "arguments": {}})
            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted", "submission": ""}})
        return {"output": output, "returncode": 0, "exception_info": ""}  # the output says how a command failed

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return {**platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        return {}


TOOLS = {tool["name"] for tool in asked("tools/list", {})["tools"]}
if "bash" not in TOOLS:
    sys.exit(f"mini-swe-agent works by commands of a shell, and this environment has no tool bash: {sorted(TOOLS)}")
settings = yaml.safe_load(get_config_path("default").read_text())
model = LitellmTextbasedModel(
    model_name=f"openai/{os.environ['AGENTGYM_MODEL']}", cost_tracking="ignore_errors", **settings["model"]
)
# Those without a class of their own, such as 403 at a limit of the episode: it would ask again for minutes.
model.abort_exceptions = [*model.abort_exceptions, litellm.exceptions.APIError]
agent = DefaultAgent(model, Shell(), **{**settings["agent"], "cost_limit": 0.0})
agent.run(sys.stdin.read())
