"""The teacher behind an endpoint: its numbers by exact ids, and an error with its name for every way in which it can lie or die.

The endpoints here are doubles for faults; that a real vLLM server and a teacher agree is in `test_engines`.
"""

import asyncio
import dataclasses
import math
import time

import pytest
from aiohttp import web
from sample_tokenizers import tiny

from agent_train.config.schema import Config
from agent_train.data.samples import TrainingSample
from agent_train.engine.teacher import Teacher, TeacherError
from agent_train.learner.tiny import train_tokenizer

ROWS = [
    TrainingSample([3, 4, 5, 6], [False, True, False, True], [0.0, -1.0, 0.0, -1.0], trajectory="one"),
    TrainingSample([7, 8], [False, True], [0.0, -1.0], trajectory="two", temperature=0.5),
]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    tiny().save_pretrained(str(folder))
    return folder


def entries(ids):
    """What vLLM says of a prompt: nothing of its first token, and -id / 100 of each other."""
    return [None, *({str(i): {"logprob": -i / 100, "rank": 1, "decoded_token": "x"}} for i in ids[1:])]


def answer_to(ids, **changed):
    return {"choices": [{"text": "x", "prompt_logprobs": entries(ids), "prompt_token_ids": ids, **changed}]}


def saying(answer):
    """An endpoint that answers `answer(ids)`."""

    async def handler(request):
        return web.json_response(answer((await request.json())["prompt"]))

    return handler


scores = saying(answer_to)


async def spells(request):
    return web.json_response({"prompt": tiny().decode((await request.json())["tokens"])})


def with_endpoint(policy_dir, call, completions=scores, detokenize=spells, **engine):
    """Run `call(teacher)` against an endpoint made for the test."""

    async def run():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        app.router.add_post("/detokenize", detokenize)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        config = Config()
        config.teacher.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config.teacher.model = "wise"
        config.engine = dataclasses.replace(config.engine, **engine)
        try:
            teacher = await Teacher.connect(config, policy_dir)
            try:
                return await call(teacher)
            finally:
                await teacher.close()
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), 60))


def ask(teacher):
    return teacher.logprobs(ROWS)


def test_each_sampled_token_gets_the_teachers_number_and_the_others_0(policy_dir):
    assert with_endpoint(policy_dir, ask) == [[0.0, -0.04, 0.0, -0.06], [0.0, -0.08]]


def test_the_exact_ids_are_sent_to_the_named_model_and_nothing_is_asked_of_a_row_without_sampled_tokens(policy_dir):
    asked = []

    async def remembers(request):
        asked.append(await request.json())
        return web.json_response(answer_to(asked[-1]["prompt"]))

    silent = TrainingSample([3, 4], [False, False], [0.0, 0.0])
    found = with_endpoint(policy_dir, lambda teacher: teacher.logprobs([*ROWS, silent]), remembers)
    assert found[-1] == [0.0, 0.0]
    assert sorted(body["prompt"] for body in asked) == sorted(row.ids for row in ROWS)
    assert all(body["model"] == "wise" and body["prompt_logprobs"] == 0 and body["max_tokens"] == 1 for body in asked)


def test_a_token_that_the_teacher_rules_out_is_minus_infinity(policy_dir):
    never = saying(
        lambda ids: answer_to(ids, prompt_logprobs=[None, *({str(i): {"logprob": -9999.0}} for i in ids[1:])])
    )
    assert with_endpoint(policy_dir, ask, never)[1] == [0.0, -math.inf]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda ids: answer_to(ids, prompt_logprobs=entries(ids)[:-1]), "it scored [13] tokens"),
        (lambda ids: answer_to(ids, prompt_token_ids=[1, 2]), "it scored other ids than it was sent"),
        (
            lambda ids: answer_to(ids, prompt_logprobs=[None, {"1": {"logprob": -1.0}}, *entries(ids)[2:]]),
            "says nothing of id [48] at position 1",
        ),
        (
            lambda ids: answer_to(ids, prompt_logprobs=[None, None, *entries(ids)[2:]]),
            "says nothing of id [48] at position 1",
        ),
        (lambda ids: answer_to(ids, prompt_logprobs=None), r"cannot be read \(TypeError"),
        (lambda ids: {"choices": [{}]}, r"cannot be read \(KeyError"),
        (lambda ids: {"choices": []}, r"cannot be read \(IndexError"),
        (lambda ids: ["not", "it"], r"cannot be read \(TypeError"),
    ],
    ids=["too few", "other ids", "other token", "no entry", "no list", "no field", "no choice", "no object"],
)
def test_an_answer_that_is_not_about_the_row_is_refused_with_the_endpoint_and_the_reason(policy_dir, answer, said):
    with pytest.raises(TeacherError, match=rf"teacher: http://127.0.0.1:\d+: the answer to .*{said}"):
        with_endpoint(policy_dir, ask, saying(answer))


@pytest.mark.parametrize("number", [0.5, math.nan])
def test_a_number_that_is_no_log_probability_is_refused(policy_dir, number):
    lies = saying(lambda ids: answer_to(ids, prompt_logprobs=[None, *({str(i): {"logprob": number}} for i in ids[1:])]))
    with pytest.raises(TeacherError, match="is no log-probability"):
        with_endpoint(policy_dir, ask, lies)


async def text(request):
    return web.Response(text="hello")


async def broken_json(request):
    return web.Response(text='{"choices": [', content_type="application/json")


async def refuses(request):
    return web.json_response({"error": "the model `wise` does not exist"}, status=404)


async def fails(request):
    return web.Response(status=500, text="out of memory")


async def dies(request):
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (text, "the answer to .* cannot be read"),
        (broken_json, "what it answers to /v1/completions is not JSON"),
        (refuses, "404: .*does not exist"),
        (fails, "500: out of memory"),
        (dies, "Disconnected"),
    ],
)
def test_an_endpoint_that_fails_is_named(policy_dir, handler, said):
    with pytest.raises(TeacherError, match=rf"teacher: http://127.0.0.1:\d+.*{said}"):
        with_endpoint(policy_dir, ask, handler)


def test_a_slow_endpoint_is_an_error_in_time_and_no_request_stays_behind(policy_dir):
    async def slow(request):
        await asyncio.sleep(60)
        return web.json_response({})

    async def asks(teacher):
        begun = time.monotonic()
        with pytest.raises(TeacherError, match=r"did not answer within 0\.3 s"):
            await teacher.logprobs(ROWS * 8)
        assert time.monotonic() - begun < 30
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "_score" in repr(task)]

    with_endpoint(policy_dir, asks, slow, request_timeout=0.3, max_concurrent=4)


def test_no_more_requests_than_the_settings_say_go_out_at_once(policy_dir):
    busy, most = [], []

    async def counts(request):
        busy.append(1)
        most.append(len(busy))
        await asyncio.sleep(0.02)
        busy.pop()
        return await scores(request)

    found = with_endpoint(policy_dir, lambda teacher: teacher.logprobs(ROWS * 10), counts, max_concurrent=3)
    assert len(found) == 20
    assert max(most) <= 3


def test_a_teacher_with_another_vocabulary_is_refused_before_anything_is_asked(policy_dir):
    other = train_tokenizer(["quite other words " * 9] * 4, 400, 1024)

    async def spells_otherwise(request):
        ids = [i for i in (await request.json())["tokens"] if i < len(other)]
        return web.json_response({"prompt": other.decode(ids)})

    with pytest.raises(
        TeacherError, match=r"another vocabulary than the policy's: it spells the ids 0 to \d+ differently"
    ):
        with_endpoint(policy_dir, ask, detokenize=spells_otherwise)


@pytest.mark.parametrize(
    ("handler", "said"), [(refuses, "404"), (text, "does not say which text ids stand for"), (fails, "500")]
)
def test_an_endpoint_that_cannot_spell_is_refused(policy_dir, handler, said):
    with pytest.raises(TeacherError, match=said):
        with_endpoint(policy_dir, ask, detokenize=handler)


def test_an_endpoint_that_is_not_there_is_named(policy_dir):
    config = Config()
    config.teacher.url = "http://127.0.0.1:9"
    with pytest.raises(TeacherError, match=r"teacher: http://127\.0\.0\.1:9/detokenize"):
        asyncio.run(Teacher.connect(config, policy_dir))
