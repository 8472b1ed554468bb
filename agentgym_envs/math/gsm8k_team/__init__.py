"""GSM8K by a team: one solves, one verifies, one gives the final answer. See README.md beside this file."""

import random
import re
from typing import Any

from agentgym.core.env import Opening, Step
from agentgym.core.messages import Action, text_of
from agentgym.core.players import PlayersEnv
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import spoken
from agentgym_envs.math.answers import final_answer, number_of
from agentgym_envs.math.arithmetic import written
from agentgym_envs.math.word_problems import load_word_problems, solution_of

SOLVER, VERIFIER, REFINER = "solver", "verifier", "refiner"
_ANSWER = 'Put the final answer, as a number alone, at the end after "####".'
_SOLVE = f"Think step by step. {_ANSWER}"
_VERIFY = 'Check the solution step by step. End with "Verdict: right" or "Verdict: wrong".'
_REFINE = f"Solve the problem. You have a colleague's solution and a check of it, and either may be wrong. {_ANSWER}"
_VERDICT = re.compile(r"\bverdict\W+(right|wrong)\b", re.IGNORECASE)


class GSM8KTeam(PlayersEnv):
    """A word problem for three: the solver solves it, the verifier judges that, and the refiner's answer is the team's."""

    players = (REFINER, SOLVER, VERIFIER)  # the first one's reward is the episode's
    max_turns = 3

    @classmethod
    def default_tasks(cls, split: str = "train") -> TaskSet:
        return load_word_problems(split)

    def init(self, task: Task) -> None:
        if not task.messages or number_of(str(task.answer)) is None:
            raise ValueError(
                f"gsm8k_team: task {task.id!r} needs a question and a number as its answer: {task.answer!r:.100}"
            )
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._solved, self._judged = False, False
        for message in self.current_task.messages:
            self.tell(text_of(message))
        self.tell(f"\n{_SOLVE}", SOLVER)
        return self.opening(SOLVER)

    def step(self, action: Action) -> Step:
        """Pass the reply on, without its thoughts, or judge the last one. `info` tells at the end who was right."""
        text = self.read(action)
        if self.turn_of == SOLVER:
            self._solved = self._is_right(text)
            self.tell(f"\nA colleague's solution:\n{spoken(text)}", VERIFIER, REFINER)
            self.tell(f"\n{_VERIFY}", VERIFIER)
            return self.pass_to(VERIFIER, success=False)
        if self.turn_of == VERIFIER:
            verdicts = _VERDICT.findall(spoken(text))
            self._judged = bool(verdicts) and (verdicts[-1].lower() == "right") == self._solved
            self.tell(f"\nThe check of it:\n{spoken(text)}\n\n{_REFINE}", REFINER)
            return self.pass_to(REFINER, success=False)
        answer, right = final_answer(text), self._is_right(text)
        self.tell("Correct." if right else "Wrong.", REFINER)
        rewards = {REFINER: float(right), SOLVER: float(self._solved), VERIFIER: float(self._judged)}
        # Without those behind the solver, its own answer would be the team's.
        without = {REFINER: float(self._solved), VERIFIER: float(self._solved)}
        told = {"answer": None if answer is None else written(answer), "expected": str(self.current_task.answer)}
        return self.end(rewards, success=right, solved=self._solved, judged=self._judged, without=without, **told)

    def expert_action(self) -> str:
        if self.turn_of == VERIFIER:
            return f"Verdict: {'right' if self._solved else 'wrong'}"
        return solution_of(self.current_task)

    def random_action(self, rng: random.Random) -> str:
        if self.turn_of == VERIFIER:
            return f"Verdict: {rng.choice(['right', 'wrong'])}"
        return f"#### {rng.randint(0, 1000)}"

    def _is_right(self, text: str) -> bool:
        return final_answer(text) == number_of(str(self.current_task.answer))
