"""A piece of work for agents with a shell, and a small model that does it now and then."""

import itertools
import json
import time
from pathlib import Path

import torch

from agent_train.config.schema import TinyConfig
from agent_train.learner.tiny import build_tiny
from agentgym.core.env import Env
from agentgym.core.messages import user
from agentgym.core.tasks import Task, TaskSet
from agentgym.sandbox import WORKSPACE, SandboxSpec, acquire
from agentgym.tools.toolset import ToolSet
from agentgym_envs.workbench import Workbench

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = ("echo 1 > answer", "echo 2 > answer", "ls")
DOCS = Path(__file__).parents[2] / "docs"


class Number(Env):
    """Write a number into a file, by a real shell in a sandbox.

    Training's episodes from number `late` on go on after their first step once the file `update` is there.
    """

    max_turns = 20
    sandbox_image = "python"
    step_seconds = 600.0
    begun = itertools.count()  # in training

    def __init__(self, update=None, late=0, sandbox=None, **options):
        super().__init__(**options)
        self.update, self.late, self.sandbox, self._box = update, late, sandbox, None
        self._bench = Workbench()
        self._toolset = ToolSet([self._bench.bash, self.submit])
        self.tools = self._toolset.schemas

    @classmethod
    def default_tasks(cls, split="train"):
        asked = "Write the number {} into the file answer in the current folder."
        return TaskSet([Task(f"{split}-{n}", [user(asked.format(n))], str(n)) for n in (1, 2)], name=f"number/{split}")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.close()
        self._box, self._submitted = acquire(SandboxSpec("python"), self.sandbox), False
        self._bench.begin(self._box, WORKSPACE, f"cd {WORKSPACE}")
        number = next(self.begun) if self.current_task.id.startswith("train") else -1
        self._waits = self.update is not None and number >= self.late
        return list(self.current_task.messages), {}

    def step(self, action):
        self.read(action)
        told = self._toolset.answer(action) if action.get("tool_calls") else []
        until = time.monotonic() + 540
        while self._waits and not Path(self.update).exists() and time.monotonic() < until:
            time.sleep(0.1)
        self._waits = False
        over = self._submitted or not told
        return self.outcome(told, self._worth() if over else 0.0, over)

    def cut_off(self, reason):
        return [], self._worth(), False, True, {}

    def submit(self) -> str:
        """The work is done."""
        self._submitted = True
        return "Submitted."

    def close(self):
        if self._box is not None:
            self._box.close()
            self._box = None

    def _worth(self):
        return float(self._bench.run("cat answer").stdout == self.current_task.answer)


def in_blocks():
    """What mini-swe-agent's model says."""
    return [[f"```mswea_bash_command\n{command}\n```"] for command in (*COMMANDS, DONE)]


def in_calls():
    """What codex's model says."""
    calls = [("bash", {"command": command}) for command in COMMANDS]
    named = [{"name": f"mcp__environment__{name}", "arguments": given} for name, given in (*calls, ("submit", {}))]
    return [["<tool_call>", json.dumps(call), "</tool_call>"] for call in named]


def build_working(folder, answers, max_len, steps=120):
    """A model that gives one of the answers, whatever it was asked: each is a sequence of its vocabulary.

    It learns them without attention, so that a prompt of any length does not matter; in training all of it learns.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    texts = [file.read_text() for file in sorted(DOCS.glob("*.md"))]
    build_tiny(folder, texts, TinyConfig(64, 1, 2, 128, 2048), max_len, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([piece for answer in answers for piece in answer])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    attention = model.model.layers[0].self_attn.o_proj.weight
    torch.nn.init.zeros_(attention).requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    rows = tokenizer([f"<|assistant|>{''.join(answer)}<|end|>" for answer in answers], return_tensors="pt").input_ids
    assert rows.shape[1] == len(answers[0]) + 2, "each piece is a token"
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
