"""Plays environments of verifiers through the adapter, and the same replies with a client of verifiers' own making."""

import asyncio

import verifiers
from drive import check_env, played, refusal, report, spec_of
from openai.types.chat import ChatCompletion
from verifiers.clients import OpenAIChatCompletionsClient

import agentgym

CALL = {"id": "7", "type": "function", "function": {"name": "backward", "arguments": '{"word": "apple"}'}}
NO_JSON = {"id": "8", "type": "function", "function": {"name": "backward", "arguments": "{word"}}
NO_TOOL = {"id": "9", "type": "function", "function": {"name": "forward", "arguments": "{}"}}


def calls(*tool_calls):
    return {"role": "assistant", "content": "", "tool_calls": list(tool_calls)}


class Scripted(OpenAIChatCompletionsClient):
    """A client that answers from a list, through verifiers' own reading of OpenAI's answers."""

    def __init__(self, replies):
        super().__init__(object())
        self.replies = list(replies)

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        reply = self.replies.pop(0)
        message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        made = {"id": "1", "created": 1, "model": model, "object": "chat.completion", "choices": [choice]}
        return ChatCompletion.model_validate(made)


def direct(settings, replies):
    env = verifiers.load_environment("vf_letters", **settings)
    row = env.get_dataset()[0]
    out = asyncio.run(env.run_rollout(row, Scripted(replies), "m", {}))
    messages = [
        {key: message[key] for key in ("role", "content") if key in message}
        for message in [*out["prompt"], *out["completion"]]
        if message["role"] != "assistant"
    ]
    return {key: out[key] for key in ("reward", "metrics", "stop_condition")} | {"messages": messages}


def case(replies, **settings):
    env_spec = spec_of("verifiers:vf_letters", settings=settings)
    return {"ours": played(env_spec, env_spec.tasks("train")[0], replies), "direct": direct(settings, replies)}


def cases():
    return {
        "single right": case(["elppa"]),
        "single wrong": case(["apple"]),
        "turns right": case(["hm", "hmm", "so: elppa"], kind="turns"),
        "turns used up": case(["a", "b"], kind="turns", max_turns=2),
        "turns quit": case(["a", "quit"], kind="turns"),
        "tool right": case([calls(CALL), "elppa"], kind="tool"),
        "tool misused": case([calls(NO_JSON, NO_TOOL), calls(CALL), "elppa"], kind="tool", max_turns=5),
    }


def tools():
    env = spec_of("verifiers:vf_letters", settings={"kind": "tool"}).make()
    env.reset(seed=0)
    offered = env.tools
    env.close()
    return offered


def crashed():
    env_spec = spec_of("verifiers:vf_letters", settings={"kind": "turns"})
    return played(env_spec, env_spec.tasks("train")[0], ["crash", "x"])


def judged():
    env_spec = spec_of("verifiers:vf_letters", settings={"kind": "judged"})
    return played(env_spec, env_spec.tasks("train")[0], ["elppa"])


def silent():
    env_spec = spec_of("verifiers:vf_letters", settings={"kind": "turns"})
    return played(env_spec, env_spec.tasks("train")[0], ["", {"role": "assistant", "content": None}, "elppa"])


def tasks():
    found = spec_of("verifiers:vf_letters")
    return {split: [task.to_json() for task in found.tasks(split)] for split in ("train", "test")}


report(
    cases=cases(),
    tools=tools(),
    crashed=crashed(),
    judged=judged(),
    silent=silent(),
    tasks=tasks(),
    checks={
        kind: check_env(spec_of("verifiers:vf_letters", settings={"kind": kind}))
        for kind in ("single", "tool", "turns")
    },
    missing=refusal(lambda: agentgym.make("verifiers:no_such_env").reset(seed=0)),
    no_split=refusal(lambda: spec_of("verifiers:vf_letters", settings={"kind": "tool"}).tasks("test")),
)
