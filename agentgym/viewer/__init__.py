"""The page that shows runs: `agentgym view runs/`. A local server (`server.py`) over what runs leave behind, and static files.

What the page asks for, all JSON, all under the page's own address. The static export answers the same questions from data
inside the file.

GET api/runs                       {"runs": [RUN]}, newest first
GET api/runs/ID                    RUN with its details: {"cells": [...], "results": {...} | null, "config": text | null,
                                   "versions": {...} | null, "steps": [...]}
GET api/runs/ID/metrics?after=N    {"records": [...], "next": M}: lines of metrics.jsonl from the N-th on
GET api/runs/ID/episodes?...       {"total": all, "matching": found, "rows": [ROW], "next": OFFSET | null}; parameters below
GET api/runs/ID/episodes/KEY       {"episode": trajectory as JSON, "row": ROW, "tokens": {"ID": "text"} | null}
GET api/compare?a=ID&b=ID          what `agentgym compare --json` prints
GET api/events?run=ID              server-sent events while a run grows: {"run": ID, "episodes": count, "metrics": count, "live": bool}

RUN  {"id", "name", "path", "kind": "evaluation" | "training", "created", "updated" (unix seconds), "live": bool, "episodes",
      "errors", "headline": {"label", "value", "low", "high"} | null, "envs": [...], "agents": [...]}
ROW  {"key", "cell" (or the file's name in a training run: "eval-000010"), "env", "agent", "task", "sample", "reward", "success",
      "end", "error" (its first 200 characters) | null, "turns", "tokens", "seconds", "cost" | null, "tags", "difficulty",
      "step" | null}
Parameters of episodes, all optional: cell, outcome (success | failure | error), end, reward_min, reward_max, turns_min, turns_max,
tokens_min, tokens_max, tag, text (in any message, without case), sort (stored | reward | turns | tokens | seconds | task), order
(asc | desc), offset, limit (default 200, at most 1,000).
Errors are {"error": text} with status 400 or 404.
"""
