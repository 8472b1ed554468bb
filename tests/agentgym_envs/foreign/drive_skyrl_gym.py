"""Plays environments of SkyRL-Gym through the adapter, and the same texts with `skyrl_gym.make` alone."""

import json
import sqlite3
import sys
from pathlib import Path

import skyrl_gym
from drive import check_env, played, refusal, report, spec_of
from omegaconf import OmegaConf

import agentgym
from agentgym.core.tasks import Task

FOLDER = Path(sys.argv[1])
ASK = {"role": "user", "content": "How many users are there?"}


def direct(name, prompt, replies, extras, config=None):
    """What the environment gives when nothing of agentgym is in between."""
    env = skyrl_gym.make(name, env_config=OmegaConf.create(config or {}), extras=extras)
    shown, _ = env.init([dict(message) for message in prompt])
    out = {"rewards": [], "observations": [shown], "done": False}
    for reply in replies:
        answer = env.step(reply)
        out["rewards"].append(float(answer["reward"]))
        out["observations"].append(answer["observations"])
        if answer["done"]:
            out["done"] = True
            break
    out["metrics"] = env.get_metrics()
    env.close()
    return out


def case(name, replies, extras, settings=None, **kwargs):
    task = Task("t", (ASK,), metadata={"extras": extras})
    env_spec = spec_of(f"skyrl_gym:{name}", **({"settings": settings} if settings else {}), **kwargs)
    turns = {"max_turns": kwargs["max_turns"]} if "max_turns" in kwargs else {}
    return {
        "ours": played(env_spec, task, replies),
        "direct": direct(name, [ASK], replies, {**turns, **extras}, settings),
    }


def database():
    folder = FOLDER / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as db:
        db.execute("create table users (name text)")
        db.executemany("insert into users values (?)", [("a",), ("b",), ("c",)])
    return str(FOLDER)


def cases():
    gold = {"reward_spec": {"method": "rule", "ground_truth": "42"}, "extra_info": {}}
    sql = {
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"ground_truth": "select count(*) from users"},
        "max_turns": 4,
    }
    look = "<think>look</think><sql>select * from users limit 1</sql>"
    right = "<think>count</think><solution>select count(name) from users</solution>"
    wrong = "<think>count</think><solution>select 7</solution>"
    where = {"db_path": database()}
    search = {"search_url": "http://127.0.0.1:9/retrieve", "topk": 3, "timeout": 1, "log_requests": False}
    paris = {"reward_spec": {"ground_truth": {"target": ["Paris"]}}}
    return {
        "gsm8k right": case("gsm8k", ["so #### 42"], gold),
        "gsm8k wrong": case("gsm8k", ["so #### 41"], gold),
        "gsm8k nothing": case("gsm8k", [""], gold),
        "turns": case("gsm8k_multi_turn", ["hm", "#### 41", "#### 42"], gold),
        "turns used up": case("gsm8k_multi_turn", ["hm", "#### 41", "#### 42"], gold, max_turns=2),
        "aime": case("aime", ["Answer: 42"], {"reward_model": {"ground_truth": "42"}}),
        "sql right": case("text2sql", [look, right], sql, where),
        "sql wrong": case("text2sql", [look, wrong], sql, where),
        "search": case("search", ["<answer>Paris</answer>"], paris, search),
    }


def from_file():
    path = FOLDER / "rows.jsonl"
    row = {
        "prompt": [ASK],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "3"},
        "data_source": "x",
    }
    path.write_text(json.dumps(row) + "\n")
    env_spec = spec_of("skyrl_gym:gsm8k", data=str(path))
    [task] = env_spec.tasks("train")
    return {"task": task.to_json(), "reward": played(env_spec, task, ["#### 3"])["rewards"]}


def golds():
    env_spec = spec_of("skyrl_gym:gsm8k")
    env = env_spec.make()
    rewards = []
    for split in ("train", "test"):
        for task in env_spec.tasks(split):
            env.init(task)
            env.reset()
            rewards.append(env.step(env.expert_action())[1])
    return rewards


report(
    cases=cases(),
    file=from_file(),
    golds=golds(),
    checks={name: check_env(f"skyrl_gym:{name}") for name in ("gsm8k", "gsm8k_multi_turn")},
    unknown=refusal(lambda: agentgym.make("skyrl_gym:gsm9k")),
    no_split=refusal(lambda: spec_of("skyrl_gym:aime", data="aime-{split}.jsonl").tasks("test")),
    no_tasks=refusal(lambda: agentgym.make("skyrl_gym:aime").reset(seed=0)),
    refused=played(spec_of("skyrl_gym:text2sql"), Task("t", (ASK,), "1"), ["x"]),
)
