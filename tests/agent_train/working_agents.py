"""A piece of work for agents with a shell, and small models that do it now and then."""

import copy
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

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
    begun: ClassVar[defaultdict[str | None, Iterator[int]]] = defaultdict(itertools.count)  # in training, by `update`

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
        number = next(self.begun[self.update]) if self.current_task.id.startswith("train") else -1
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


def in_calls(prefix=""):
    """What the model of an agent says that calls the environment's tools, by names that begin so."""
    calls = [("bash", {"command": command}) for command in COMMANDS]
    named = [{"name": f"{prefix}{name}", "arguments": given} for name, given in (*calls, ("submit", {}))]
    return [["<tool_call>", json.dumps(call), "</tool_call>"] for call in named]


ANSWERS = {
    "codex": in_calls("mcp__environment__"),
    "langgraph": in_calls(),
    "mini-swe-agent": in_blocks(),
    "openai-agents": in_calls(),
    "smolagents": in_calls(),
}


def build_working(folder, max_len, steps=120):
    """A model for each agent, that gives one of its answers, whatever it was asked: each is a sequence of the vocabulary.

    All have the same shape, so one server can serve them in turn. They learn their answers without attention, so that a prompt of
    any length does not matter; in training all of a model learns.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    texts = [file.read_text() for file in sorted(DOCS.glob("*.md"))]
    build_tiny(folder, texts, TinyConfig(64, 1, 2, 128, 2048), max_len, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([piece for answers in ANSWERS.values() for answer in answers for piece in answer])
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = len(tokenizer)
    config.tie_word_embeddings = False  # vLLM on a CPU keeps its copy of tied ones
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untied = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.zeros_(untied.model.layers[0].self_attn.o_proj.weight).requires_grad_(False)
    for name, answers in ANSWERS.items():
        model = copy.deepcopy(untied)
        _teach(model, tokenizer, answers, steps)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in ANSWERS}


def _teach(model, tokenizer, answers, steps):
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    rows = tokenizer([f"<|assistant|>{''.join(answer)}<|end|>" for answer in answers], return_tensors="pt").input_ids
    assert rows.shape[1] == len(answers[0]) + 2, "each piece is a token"
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        optimizer.step()
