"""The page that shows runs: `agentgym view runs/`. A local server (`server.py`) over run folders, and static files.

The API of the page: JSON, under the page's own address. The static export answers the same requests from data
inside the file.

GET api/runs                       {"runs": [RUN]}, newest first
GET api/runs/ID                    RUN with its details: {"cells": [CELL], "results": {...} | null, "config": text | null,
                                   "versions": {...} | null, "steps": [STEP], "problems": [text]}
GET api/runs/ID/metrics?after=N    {"records": [...], "next": M, "rewritten": times that metrics.jsonl was written anew}:
                                   lines of metrics.jsonl from the N-th on, of M
GET api/runs/ID/episodes?...       {"total": all, "matching": found, "rows": [ROW], "next": OFFSET | null,
                                   "indexing": share, "searching": share}; parameters below
GET api/runs/ID/episodes/KEY       {"episode": trajectory as JSON, "row": ROW, "tokens": {"ID": "text"} | null}
GET api/compare?a=ID&b=ID          what `agentgym compare --json` prints
GET api/events?run=ID              server-sent events while a run grows: {"run": ID, "episodes": count, "metrics": count,
                                      "rewritten": times that metrics.jsonl was written anew, "live": bool}

RUN  {"id", "name", "path", "kind": "evaluation" | "training", "created", "updated" (unix seconds), "live": bool, "episodes",
      "errors", "headline": {"label", "value", "low", "high"} | null, "envs": [...], "agents": [...], "problem": text | null
      (why its files cannot be read), "indexing": share}
ROW  {"key", "cell" (or the file's name in a training run: "eval-000010"), "env", "agent", "task", "sample", "reward", "success",
      "end", "error" (its first 200 characters) | null, "cause" (of the error, as results count it) | null, "turns",
      "tokens" (that the agent wrote) | null, "seconds", "cost" | null, "tags", "difficulty",
      "finishes" (finish reasons of its answers, each once; "context": a request was too long),
      "expected", "given" (answers, the first 200 characters) | null, "step" | null, "superseded": bool}
CELL {"name", "env", "agent", "split", "planned" (episodes) | null, "episodes", "errors", "reward", "success", "low", "high",
      "turns", "result"}: numbers of the episodes so far, null without any. `result` is the cell's entry in `results.json` as
      of now, without counts of endpoints. Of evaluations; `steps` are those of training runs
STEP {"cell": "eval-000010", "step": 10, "kind": "eval" | "train"}: a file of trajectories of a training run
A share is a number from 0 to 1, and below 1 the answer covers the part read so far: ask again later. An episode's
`turns[i].tokens` is as stored: a turn's prompt is the first `shared` ids of the call before (its prompt and completion), or
of the call number `of`, and then `new_prompt_ids`; `completion_ids`, which alone are trained on, have `logprobs` and `versions`. A turn that is
not trained on says why in `unusable`. A call is a turn or one of the `summaries`, each of which lies before the turn with the index `turn`.

Parameters of episodes, all optional: cell, outcome (success | failure | error), end, cause, reward_min, reward_max, turns_min,
turns_max, tokens_min, tokens_max, tag, finish (a finish reason of an answer), text (in any message, without case), sort (stored | reward | turns | tokens | seconds | task), order
(asc | desc), offset, limit (default 200, at most 1,000), task (exactly), task_has (a part of the task's id, without case), sample, superseded (1: also episodes that failed and
were played again).
Errors are {"error": text} with status 400 or 404.

The static files lie flat in `static/` and are served beside the page. Every address in them is relative,
since the page may lie under a path. Scripts are classic ones (no import, no export), each in a function of its own that puts
what others need on `window.agentgym`; `index.html` names them in order, `<script src="NAME.js" defer></script>`, and its
styles, `<link rel="stylesheet" href="NAME.css">`. The export puts them into the file as they are, the scripts at the end of
the body, after `<script type="application/json" id="agentgym-data">` with

{"exported": unix seconds, "version": text, "note": text | null (what was left out),
 "runs": [RUN], "details": {ID: what api/runs/ID answers}, "metrics": {ID: [record]}, "rows": {ID: [ROW], as stored},
 "episodes": {ID: {KEY: what api/runs/ID/episodes/KEY answers}}, "compare": {"ID ID": what api/compare answers}}

The page filters and sorts these rows itself. A row whose key is not in `episodes` was left out.
"""
