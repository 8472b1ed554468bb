"""Multi-hop questions: search passages, read them, search again, and answer. See README.md beside this file."""

import random
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, Observation, assistant, instructed, text_of
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import answer_in, call_text
from agentgym.tools.toolset import ToolError, ToolSet
from agentgym_envs.search.corpora import DATA, golds_of, load_questions, queries_of, require_bm25s
from agentgym_envs.search.retrievers import Retriever, check_kind, open_retriever
from agentgym_envs.settings import check_choice, check_number

LONGEST_QUERY = 1_000  # characters
MOST_SEARCHES = 5  # in one reply
INSTRUCTION = """Find the answer in a collection of passages. To search it, reply with a call such as
<tool_call>{"name": "search", "arguments": {"query": "capital of Norway"}}</tool_call>
and wait for the passages. What they say may be what to search for next. When you know the answer, give it, in as few words as \
possible, between <answer> and </answer>."""
HINT = "I found neither a search nor an answer. Call the search, or give the answer in the form <answer>Oslo</answer>."
NOTHING = "No passage has a word of this query. Search with other words: names, and what you want to know about them."
_VERDICTS = frozenset(("yes", "no", "noanswer"))  # answers without partial credit
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Search(Env):
    """A question that takes one or more searches to answer."""

    max_turns = 6

    def __init__(
        self,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
        *,
        data: str = "auto",
        retriever: str = "bm25",
        corpus: str | None = None,
        topk: int = 3,
        passage_chars: int = 1_000,
        reward: Literal["em", "f1"] = "em",
        timeout: float = 10.0,
        sandbox: str | None = None,
    ):
        super().__init__(tasks, max_turns, render_mode)
        check_choice("data", data, DATA)
        check_choice("reward", reward, ("em", "f1"))
        check_kind(retriever)
        if retriever == "bm25":
            require_bm25s()
        check_number("search: topk", topk, 1, 1_000_000, whole=True)
        check_number("search: passage_chars", passage_chars, 1, 1_000_000_000, whole=True)
        check_number("search: timeout", timeout, 0.001, 1_000_000)
        self._kind, self._corpus, self._timeout, self._backend = retriever, corpus, timeout, sandbox
        self._topk, self._passage_chars, self._reward = topk, passage_chars, reward
        self.sandbox_image = "search" if retriever == "sandbox" else None
        self._toolset = ToolSet([self.search])
        self.tools = self._toolset.schemas  # type: ignore[misc]
        self._retriever: Retriever | None = None
        self._opened: str | None = None  # the corpus of the retriever
        self._golds: list[str] = []
        self._searches = self._searches_before = 0  # in all replies, and in the earlier ones

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "auto") -> TaskSet:
        return load_questions(split, data)

    def init(self, task: Task) -> None:
        self._golds = golds_of(task)
        named = task.metadata.get("corpus")
        corpus = self._corpus or (named if isinstance(named, str) else None)
        if self._retriever is None or corpus != self._opened:
            self._leave()
            self._retriever = open_retriever(self._kind, corpus, self._timeout, self._backend)
            self._opened = corpus
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._searches = self._searches_before = 0
        return instructed(self.current_task.messages, INSTRUCTION), {}

    def step(self, action: Action) -> Step:
        """Search, or judge the answer.

        `info`: `success`, `searches`, `em` and `f1` (0 before the answer); after it also `answer` and `expected`.
        """
        text = self.read(action)
        self._searches_before = self._searches
        results = self._toolset.answer(assistant(action))
        if results:
            return self._goes_on(results)
        stated = answer_in(text)
        if stated is None or stated.problem:
            return self._goes_on(f"Error: {stated.problem}" if stated else HINT)
        answer = stated.text
        em, overlap = exact_match(answer, self._golds), f1(answer, self._golds)
        info: dict[str, Any] = {"success": bool(em), "em": em, "f1": overlap, "searches": self._searches}
        info |= {"answer": answer, "expected": self._golds[0]}
        earned = em if self._reward == "em" else overlap
        return self.outcome("Correct." if em else "Wrong.", earned, terminated=True, **info)

    def close(self) -> None:
        self._leave()
        super().close()

    def expert_action(self) -> str:
        queries = queries_of(self.current_task)[: self.max_turns - 1]
        if self.turn >= len(queries):
            return f"<answer>{self._golds[0]}</answer>"
        return call_text("search", query=queries[self.turn])

    def random_action(self, rng: random.Random) -> str:
        words = text_of(self.current_task.messages[-1]).split() or ["nothing"]
        if rng.random() < 0.5:
            return f"<answer>{rng.choice(words)}</answer>"
        return call_text("search", query=f"{rng.choice(words)} {rng.choice(words)}")

    def _goes_on(self, observation: str | Observation) -> Step:
        return self.outcome(observation, success=False, em=0.0, f1=0.0, searches=self._searches)

    def search(self, query: str) -> str:
        """Search the passages for words. Gives the best ones, each with its title and id.

        Args:
            query: names and other words that the passage should contain.
        """
        if not query.strip():
            raise ToolError("search: the query is empty: write what the passage should contain")
        if len(query) > LONGEST_QUERY:
            raise ToolError(f"search: the query has {len(query)} characters; {LONGEST_QUERY} is the limit")
        if self._searches - self._searches_before >= MOST_SEARCHES:
            raise ToolError(f"search: {MOST_SEARCHES} searches in one reply is the limit: search again in the next")
        if self._retriever is None:
            raise RuntimeError("Search: no task is bound; call reset() first")
        self._searches += 1
        shown = []
        for place, passage in enumerate(self._retriever.search(query, self._topk), 1):
            text = passage["text"]
            if len(text) > self._passage_chars:
                text = f"{text[: self._passage_chars].rstrip()} [...]"
            shown.append(f"[{place}] {passage['title']} ({passage['id']})\n{text}")
        return "\n\n".join(shown) or NOTHING

    def _leave(self) -> None:
        retriever, self._retriever = self._retriever, None
        if retriever is not None:
            retriever.close()


def normalised(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an, the, and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    return float(normalised(answer) in map(normalised, golds))


def f1(answer: str, golds: Sequence[str]) -> float:
    """The best word F1 of the answer with a gold answer, 0.0 to 1.0; 0.0 without gold answers.

    If the answer or a gold answer is yes or no, the score is 0 or 1, as in HotpotQA.
    """
    words = normalised(answer).split()

    def score(gold: list[str]) -> float:
        """2 * precision * recall / (precision + recall) of two bags of words; two empty bags are equal."""
        if not words or not gold or not _VERDICTS.isdisjoint((" ".join(words), " ".join(gold))):
            return float(words == gold)
        return 2 * (Counter(words) & Counter(gold)).total() / (len(words) + len(gold))

    return max((score(normalised(gold).split()) for gold in golds), default=0.0)
