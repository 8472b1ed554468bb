"""What rollout benchmarks play: an environment of a few turns, and prompts and answers without a tokenizer."""

from agent_train.rollout.renderer import Rendered
from agentgym import Env
from agentgym.core.messages import user


class Talk(Env):
    """Ends after `turns` answers."""

    def __init__(self, turns: int):
        super().__init__()
        self.turns = turns

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.said = 0
        return list(self.current_task.messages), {}

    def step(self, action):
        self.said += 1
        return self.outcome([user("go on")], 0.0, terminated=self.said == self.turns)


class Conversation:
    """A renderer: one id for each message."""

    stop_token_ids = (0,)

    def prompt(self, messages, tools, previous):
        return Rendered([*previous.ids, *previous.completion, 1] if previous else [1], "")

    def parse(self, ids, turn):
        return {"role": "assistant", "content": "x"}
