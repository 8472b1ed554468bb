"""An environment package as verifiers knows them, of each kind: one turn, several turns, tools."""

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

WORDS = ("apple", "pear")


def load_environment(kind="single", max_turns=3):
    data = Dataset.from_list([row(word) for word in WORDS])
    evals = Dataset.from_list([row("plum")])
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, eval_dataset=evals, system_prompt="Be brief.", rubric=rubric)
    if kind == "judged":  # by a judge that nobody runs
        judge = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
        rubric = vf.JudgeRubric(judge_client=judge, judge_model="m")
        rubric.add_reward_func(approved)
        return vf.SingleTurnEnv(dataset=data, eval_dataset=evals, rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(dataset=data, tools=[backward], max_turns=max_turns, rubric=rubric)
    return hints(dataset=data, eval_dataset=evals, max_turns=max_turns, rubric=rubric)


def row(word):
    return {"question": f"Spell {word} backward.", "answer": word[::-1], "info": {"word": word}}


def right(completion, answer):
    return 1.0 if answer in str(completion[-1].content) else 0.0


async def approved(judge, prompt, completion, answer, state):
    return 1.0 if "yes" in await judge(prompt, completion, answer, state) else 0.0


def short(completion):
    return -0.01 * sum(len(message.content or "") for message in completion if message.role == "assistant")


def backward(word: str) -> str:
    """Spell a word backward.

    Args:
        word: the word.
    """
    return word[::-1]


def hints(**settings):
    class Hints(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["given"] = 0
            return state

        async def env_response(self, messages, state, **kwargs):
            said = str(messages[-1].content)
            state["given"] += 1
            if "quit" in said:
                state["final_env_response"] = [vf.UserMessage(content="bye")]
                return state["final_env_response"]
            if "crash" in said:
                raise RuntimeError("the hint book is gone")
            return [vf.UserMessage(content=f"It begins with {state['answer'][: state['given']]}.")]

        @vf.stop
        async def found(self, state):
            return bool(state["trajectory"]) and state["answer"] in str(
                state["trajectory"][-1]["completion"][-1].content
            )

    return Hints(**settings)
