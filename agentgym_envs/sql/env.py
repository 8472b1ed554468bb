"""Questions about a database: the agent explores it with a tool, then answers with a query. See README.md."""

import random
import re
from typing import Any

from agentgym.core.env import Env, Opening, Step
from agentgym.core.messages import Action, assistant, text_of, user
from agentgym.core.tasks import Task, TaskSet
from agentgym.tools.text_forms import call_text, spoken
from agentgym.tools.toolset import ToolSet
from agentgym_envs.settings import check_choice, check_number
from agentgym_envs.sql.database import load_database
from agentgym_envs.sql.gold import golds_of, judge
from agentgym_envs.sql.observation import observation_text
from agentgym_envs.sql.queries import QueryLimits, QueryRunner
from agentgym_envs.sql.query_program import NOW
from agentgym_envs.sql.tasks import SOURCES, load_questions

REPLY_BYTES = 2 << 20
OPENING = """{question}

{heading}
{schema}

Today is {today}. Look at the SQLite database with the tool sql, which can only read, for example
<tool_call>{{"name": "sql", "arguments": {{"query": "SELECT * FROM {table} LIMIT 3"}}}}</tool_call>
Then give the query whose rows are the answer, with the tool answer in the same way, or as
Answer:
```sql
SELECT ...
```
Its rows count: in any order unless the question asks for one, columns in any order and by any name. The answer ends the \
episode. You have {replies} in all."""
HINT = """I found neither a tool call nor an answer. Call sql to look at the database, or end with
Answer:
```sql
SELECT ...
```"""
OVER = "Error: the answer is given, the episode is over"
_STATED = re.compile(r"answer:[*_\s]*```(?:sql(?:ite)?)?[ \t]*\n(.*?)```", re.IGNORECASE | re.DOTALL)


class SQL(Env):
    """Text to SQL over a real SQLite database, with a tool to explore it and a final query."""

    max_turns = 8
    sandbox_image = "sql"

    def __init__(
        self,
        data: str = "auto",
        schema: str = "full",
        rows: int = 20,
        cell: int = 200,
        seconds: float = 5.0,
        sandbox: str | None = None,
        tasks: TaskSet | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ):
        super().__init__(tasks=tasks, max_turns=max_turns, render_mode=render_mode)
        check_choice("sql: data", data, SOURCES)
        check_choice("sql: schema", schema, ("full", "names"))
        for name, value, least in (("rows", rows, 1), ("cell", cell, 1), ("seconds", seconds, 0.001)):
            check_number(f"sql: {name}", value, least, 10_000)
        self.schema = schema
        self.limits = QueryLimits(rows=int(rows), bytes=REPLY_BYTES, cell=int(cell), seconds=float(seconds))
        self.sandbox = sandbox
        self._toolset = ToolSet([self.sql, self.answer], seconds=4 * self.limits.seconds)
        # A message's calls, of which the last may begin just in time; a minute for sandboxes and gold queries.
        self.step_seconds = 5 * self.limits.seconds + 60.0
        self.tools = self._toolset.schemas  # type: ignore[misc]
        self._verdict: dict[str, Any] | None = None

    @classmethod
    def default_tasks(cls, split: str = "train", data: str = "auto") -> TaskSet:
        return load_questions(split, data)

    def init(self, task: Task) -> None:
        if not task.messages:
            raise ValueError(f"task {task.id!r} has no messages: the question is missing")
        golds_of(task)
        name = task.metadata.get("database")
        if not isinstance(name, str):
            raise ValueError(f'task {task.id!r} names no database: give metadata={{"database": "..."}}')
        database = load_database(name)
        if not database.tables:
            raise ValueError(f"task {task.id!r}: database {name!r} has no tables")
        self._release()
        self._database, self._queries = database, QueryRunner(database, self.sandbox)
        super().init(task)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Opening:
        super().reset(seed=seed, options=options)
        self._release()
        database = self._database
        *before, last = self.current_task.messages
        question = OPENING.format(
            question=text_of(last),
            heading="Tables:" if self.schema == "names" else "Tables and columns:",
            schema=database.schema(self.schema),
            today=NOW.partition(" ")[0],
            table=database.tables[0].name,
            replies="1 reply" if self.max_turns == 1 else f"{self.max_turns} replies",
        )
        return [*(dict(message) for message in before), {**last, "content": question}], {}

    def step(self, action: Action) -> Step:
        """Answer calls, or judge the final query.

        `info`: `success`; after an answer also the queries `answer` and `expected` (the first gold one), and `error` if
        the answer could not be run.
        """
        text = self.read(action)
        self._verdict = None
        results = self._toolset.answer(assistant(action))
        if not results:
            stated = _STATED.findall(spoken(text))
            results = [user(self.answer(stated[-1].strip()) if stated else HINT)]
        verdict = self._verdict or {"success": False}
        step = self.outcome(results, float(verdict["success"]), terminated=self._verdict is not None, **verdict)
        if not self.running:
            self._release()
        return step

    def close(self) -> None:
        super().close()
        self._release()

    def expert_action(self) -> str:
        gold = golds_of(self.current_task)[0]
        if self.turn == 0 and self.max_turns > 1:
            tables = [table.name for table in self._database.tables]
            used = (name for name in tables if re.search(rf"\b{re.escape(name)}\b", gold, re.IGNORECASE))
            return call_text("sql", query=f'SELECT * FROM "{next(used, tables[0])}" LIMIT 3')
        return call_text("answer", query=gold)

    def random_action(self, rng: random.Random) -> str:
        table = rng.choice(self._database.tables)
        column = rng.choice(table.columns)
        query = f'SELECT "{column.name}" FROM "{table.name}" LIMIT {rng.randint(1, 20)}'
        return call_text(rng.choice(("sql", "answer")), query=query)

    def sql(self, query: str) -> str:
        """Run one read-only SQLite query and see its rows.

        Args:
            query: a SELECT, or a PRAGMA that describes a table.
        """
        if self._verdict is not None:
            return OVER
        return observation_text(self._queries.ask(query, self.limits), query, self._database, self.limits.seconds)

    def answer(self, query: str) -> str:
        """Give the final query, whose rows answer the question. Ends the episode.

        Args:
            query: a SELECT.
        """
        if self._verdict is not None:
            return OVER
        right, error = judge(self.current_task, query, self._queries, self.limits.seconds)
        query = query.encode("utf-8", "replace").decode("utf-8")
        self._verdict = {"success": right, "answer": query, "expected": golds_of(self.current_task)[0]}
        if error:
            self._verdict["error"] = error
            return f"Wrong: {error}"
        return "Correct." if right else "Wrong: these are not the rows that were asked for."

    def _release(self) -> None:
        if self.task is not None:
            self._queries.close()
