"""Prompts extend the sampled ids exactly; messages are what the template writes again; what cannot work is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from sample_tokenizers import MISTRAL, TOKENIZERS, forgetful, ordinary_ids, renderer, tiny

from agent_train.learner.tiny import train_tokenizer
from agent_train.rollout.renderer import Rendered, Renderer, RendererError
from agentgym.core.messages import Message, assistant, system, tool_result, user
from agentgym.tools import ToolSet

CALC = {"type": "function", "function": {"name": "calc", "description": "adds", "parameters": {"type": "object"}}}
SLOW_OK = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def answer(render: Renderer, conversation: list[Message], completion: list[int], *then: Message, tools=()):
    """One turn: the prompt, the answer, the prompt after it."""
    prompt = render.prompt(conversation, tools)
    reply = render.parse(completion)
    after = render.prompt([*conversation, reply, *then], tools, prompt.answered(completion))
    return prompt, reply, after


def said(render: Renderer, text: str) -> list[int]:
    return [*render.encode(text), render.stop_token_ids[-1]]


@pytest.mark.parametrize("name", TOKENIZERS)
@SLOW_OK
@given(data=st.data())
def test_prompts_extend_whatever_ids_were_sampled(name, data):
    """Any unicode from the env, any ids from the engine, cut or stopped: the next prompt begins with exactly those ids."""
    render = renderer(name)
    conversation: list[Message] = [user(data.draw(st.text(max_size=20)))]
    previous: Rendered | None = None
    for _ in range(data.draw(st.integers(2, 4))):
        prompt = render.prompt(conversation, (), previous)
        if previous is None:
            assert prompt.ids == render.encode(render.text(conversation))
        else:
            known = previous.ids + previous.completion
            assert prompt.ids[: len(known)] == known
            assert len(prompt.ids) > len(known)
        completion = data.draw(st.lists(st.sampled_from(ordinary_ids(name)), min_size=1, max_size=8))
        if name == "sentencepiece":  # its template writes a space before every answer
            completion.insert(0, render.tokenizer.convert_tokens_to_ids("▁"))
        if data.draw(st.booleans()):
            completion.append(render.stop_token_ids[-1])
        previous = prompt.answered(completion)
        conversation += [render.parse(completion), user(data.draw(st.text(max_size=20)))]


@pytest.mark.parametrize("name", TOKENIZERS)
@SLOW_OK
@given(text=st.text(max_size=40))
def test_a_message_is_the_text_that_was_sampled(name, text):
    render = renderer(name)
    ids = render.encode(text)
    message = render.parse([*ids, render.stop_token_ids[0]])
    if (
        name == "sentencepiece"
    ):  # it puts a space before what it encodes, except a lone one; its template one before an answer
        assume(render.decode(ids) == (" " + text if text else ""))
    assert message == assistant(text)


def test_ids_that_encode_would_never_give_are_kept():
    render = renderer("many_encodings")
    one = render.encode("a")[0]
    sampled = [one] * 8 + [render.stop_token_ids[0]]
    prompt, reply, after = answer(render, [user("aaa")], sampled, user("aa"))
    assert render.encode(render.decode(sampled)) != sampled
    assert reply == assistant("a" * 8)
    assert after.ids[len(prompt.ids) : len(prompt.ids) + len(sampled)] == sampled


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_bridge_supplies_the_end_that_a_cut_completion_lacks(name):
    render = renderer(name)
    cut = render.encode("right")
    prompt, _, after = answer(render, [user("go")], cut, user("on"))
    assert after.ids[: len(prompt.ids) + len(cut)] == prompt.ids + cut
    assert after.ids[len(prompt.ids) + len(cut)] in render.stop_token_ids


def test_bytes_that_are_no_unicode_are_kept():
    render = renderer("tiny")
    cut = render.encode("漢")[:2]
    prompt, reply, after = answer(render, [user("go")], cut, user("on"))
    assert reply["content"] == "\ufffd"
    assert after.ids[: len(prompt.ids) + 2] == prompt.ids + cut


def test_a_template_that_forgets_thoughts_starts_from_scratch():
    render = renderer("forgetful")
    completion = said(render, "<think>hole ahead</think>right")
    prompt, reply, after = answer(render, [user("go")], completion, user("on"))
    assert reply == {"role": "assistant", "content": "right", "reasoning_content": "hole ahead"}
    assert after.ids == render.encode("<|user|>go<|end|><|assistant|>right<|end|><|user|>on<|end|><|assistant|>")
    assert after.ids[: len(prompt.ids) + len(completion)] != prompt.ids + completion


def test_a_real_template_that_moves_the_system_message_starts_from_scratch():
    render = renderer("tekken")
    completion = said(render, "right")
    prompt, _, after = answer(render, [system("Be brief."), user("go")], completion, user("on"))
    assert after.ids == render.encode("<s>[INST]go[/INST]right</s>[INST]Be brief.\n\non[/INST]")
    assert after.ids[: len(prompt.ids)] != prompt.ids


@pytest.mark.parametrize(
    "text",
    ["<think>a hole</think>right", "<think>\n\na\n</think>\n right", "x</think>y", "<think>cut", "a<think>b</think>c"],
)
def test_thoughts_are_split_off_only_where_they_are_written_again(text):
    keeps, trims = renderer("tiny"), Renderer(train_tokenizer(["x"], 300, 64))
    trims.tokenizer.chat_template = trims.tokenizer.chat_template.replace(
        "<think>{{ message.reasoning_content }}</think>", ""
    )
    for render in (keeps, trims):
        completion = said(render, text)
        prompt, _, after = answer(render, [user("go")], completion, user("on"))
        assert after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion
    assert "reasoning_content" not in trims.parse(said(trims, text))
    assert ("reasoning_content" in keeps.parse(said(keeps, text))) == text.startswith(("<think>a", "<think>\n"))


@pytest.mark.parametrize("arguments", ['{"x": "1 + 1"}', '{"x":1,\n  "y": [2.50]}', "{}"])
def test_a_tool_call_keeps_its_arguments_to_the_letter(arguments):
    render = renderer("tiny")
    completion = said(render, f'Let me.<tool_call>{{"name": "calc", "arguments": {arguments}}}</tool_call>')
    prompt, reply, after = answer(render, [user("1 + 1?")], completion, tool_result("t0000c000", "2"), tools=[CALC])
    assert reply["content"] == "Let me."
    assert reply["tool_calls"] == [
        {"id": "t0000c000", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    ]
    assert after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion


def test_mistrals_calls_are_read_and_written_again_by_its_template():
    """The form is checked against Mistral's own package, which writes each tokenizer's. Later ones name the call before its arguments."""
    render = renderer("tekken")
    x, y = '{"x": "1 + [ARGS] 1"}', '{"x":1}'
    (first, second) = (
        {"id": id, "function": {"name": "calc", "arguments": arguments}, "type": "function"}
        for id, arguments in (("aBc123456", x), ("aBc123457", y))
    )
    asked = UserMessage(content="1 + 1?")
    request = ChatCompletionRequest(
        messages=[
            asked,
            AssistantMessage(content=None, tool_calls=[first, second]),
            ToolMessage(content="2", tool_call_id=first["id"]),
            ToolMessage(content="2", tool_call_id=second["id"]),
        ]
    )
    for file in ("tekken_240718.json", "mistral_instruct_tokenizer_240323.model.v3"):
        text = (
            MistralTokenizer.from_file(str(MISTRAL / file)).encode_chat_completion(request).text.replace("\u2581", " ")
        )
        sampled = text.partition("[/INST]")[2].partition("</s>")[0]
        reply = render.parse(said(render, sampled))
        assert reply["content"] == ""
        assert [call["id"] for call in reply["tool_calls"]] == [first["id"], second["id"]]
        assert [json.loads(call["function"]["arguments"]) for call in reply["tool_calls"]] == [
            json.loads(x),
            json.loads(y),
        ]
    sampled = f'[TOOL_CALLS][{{"name": "calc", "arguments": {x}, "id": "aBc123456"}}, {{"name": "calc", "arguments": {y}, "id": "aBc123457"}}]'
    completion = said(render, sampled)
    results = [tool_result("aBc123456", "2"), tool_result("aBc123457", "1")]
    prompt, reply, after = answer(render, [user("1 + 1?")], completion, *results, tools=[CALC])
    assert reply["tool_calls"] == [first, second]
    assert after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion
    named = render.parse(said(render, f"[TOOL_CALLS]calc[ARGS]{x}[TOOL_CALLS]calc[CALL_ID]aBc123456[ARGS]{y}"))
    assert [call["function"] for call in named["tool_calls"]] == [first["function"], second["function"]]


def test_calls_have_ids_of_their_own_in_each_turn():
    render = renderer("tiny")
    twice = said(render, '<tool_call>{"name": "calc", "arguments": {}}</tool_call>' * 2)
    ids = [call["id"] for turn in (0, 1) for call in render.parse(twice, turn)["tool_calls"]]
    assert len(set(ids)) == 4
    same = '[TOOL_CALLS][{"name": "calc", "arguments": {}, "id": "abcdefghi"}, {"name": "calc", "arguments": {}, "id": "abcdefghi"}]'
    assert [call["id"] for call in render.parse(said(render, same))["tool_calls"]] == ["t0000c000", "t0000c001"]


def test_a_template_that_reads_arguments_as_an_object_gets_one():
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "called.arguments if called.arguments is string else ", ""
    )
    render = Renderer(tokenizer)
    for arguments, extends in (('{"x": "1"}', True), ('{"x":"1"}', False)):
        completion = said(render, f'<tool_call>{{"name": "calc", "arguments": {arguments}}}</tool_call>')
        prompt, reply, after = answer(render, [user("?")], completion, tool_result("t0000c000", "2"), tools=[CALC])
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"]) == {"x": "1"}
        assert (after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion) == extends


@pytest.mark.parametrize("block", ["{oops", '"calc"', '{"arguments": {}}', '{"name": 3}'])
def test_a_block_that_is_no_call_stays_text(block):
    render = renderer("tiny")
    text = f"<tool_call>{block}</tool_call>"
    assert render.parse(said(render, text)) == assistant(text)


def called(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>Maybe {called('rm')}? No.</think>It is 4.", []),
        (f"<think>Maybe {called('rm')}? No.</think>{called('ls')}", ["ls"]),
        (f"Maybe {called('rm')}? No.</think>{called('ls')}", ["ls"]),
        (f"<think>Maybe {called('rm')}? No, cut o", []),
    ],
)
def test_a_thought_holds_no_calls(text, calls):
    render = renderer("tiny")
    reply = render.parse(said(render, text))
    assert [call["function"]["name"] for call in reply.get("tool_calls", [])] == calls
    if not calls:
        assert "rm" in reply.get("reasoning_content", "") + reply["content"], "and nothing of it is lost"
        assert reply["content"].endswith(("It is 4.", "cut o"))


def test_neither_does_one_that_the_prompt_begins_and_that_was_cut_off():
    template = tiny().chat_template
    begun = "<|assistant|>{% endif"
    assert begun in template
    render = with_template(template.replace(begun, "<|assistant|><think>\n{% endif"))
    text = f"Maybe {called('rm')}? No, cut o"
    assert render.parse(said(render, text)) == assistant(text)


def with_template(template: str) -> Renderer:
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.chat_template = template
    return Renderer(tokenizer)


# As of most chat models that know no tools; of Gemma, which refuses what is neither the user nor the model; and of Llama 3.
TEMPLATES_WITHOUT_CALLS = {
    "leaves them out": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
    "takes no results": """\
{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('roles must alternate') }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}{{ call.function }}{% endfor %}<|end|>{% endfor %}""",
    "takes one": """\
{% for m in messages %}{% if m.tool_calls|length > 1 %}{{ raise_exception('single tool-calls only') }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}{{ call.function }}{% endfor %}<|end|>{% endfor %}""",
}


@pytest.mark.parametrize("template", TEMPLATES_WITHOUT_CALLS.values(), ids=TEMPLATES_WITHOUT_CALLS)
def test_calls_that_the_template_does_not_write_stay_in_the_text_and_are_answered(template):
    """Else the next prompt would lack what the model has called, or be refused."""
    render = with_template(template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")

    def double(x: int) -> int:
        """Doubles."""
        return 2 * x

    tools = ToolSet([double])
    calls = "".join(f'<tool_call>{{"name": "double", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2))
    completion = said(render, f"Let me.{calls}")
    prompt, reply, _ = answer(render, [user("?")], completion)
    assert reply == assistant(f"Let me.{calls}")
    told = tools.answer(reply)
    assert [message["role"] for message in told] == ["user"]
    _, _, after = answer(render, [user("?")], completion, *told, tools=tools.schemas)
    assert after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion


def test_arguments_that_the_template_cannot_write_stay_in_the_text():
    """As Qwen3-Coder's, which writes the items of an object: else the model's mistake would make the next prompt impossible."""
    render = with_template("""\
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls -%}
<tool_call>{{ call.function.name }}{% for k, v in call.function.arguments|items %} {{ k }}={{ v }}{% endfor %}</tool_call>
{%- endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""")
    right, wrong = (f'<tool_call>{{"name": "calc", "arguments": {given}}}</tool_call>' for given in ('{"x": 1}', '"x"'))
    assert render.parse(said(render, right))["tool_calls"]
    assert render.parse(said(render, wrong)) == assistant(wrong)


def test_a_template_that_asks_for_the_date_is_told_the_same_on_every_day():
    """As Llama 3.2's and gpt-oss's: else the turns of a run that goes on after midnight would belong to other prompts."""
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    render = with_template(template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    assert render.text([user("go")]).startswith("26 Jul 2024<|user|>go")


def test_a_template_that_leaves_its_own_tokens_before_an_answer_to_the_model_is_refused():
    """As gpt-oss's, whose answers go through channels: what they say could not be told from the channels' names."""
    template = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}final<|tool|>{% endif -%}"
    template += "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    with pytest.raises(RendererError, match=r"leaves 'final<\|tool\|>' before an answer to the model.*take a model"):
        with_template(template)


@pytest.mark.parametrize("text", ["<think></think>right", "\n</think>\n\nright"])
def test_an_empty_thought_that_the_template_cuts_is_no_part_of_the_answer(text):
    """As DeepSeek-R1's, which begins the thought itself."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    render = with_template(template + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}")
    assert render.parse(said(render, text)) == {"role": "assistant", "content": "right", "reasoning_content": ""}


def test_stop_tokens_are_the_end_of_text_and_the_end_of_turn():
    tokenizer = train_tokenizer(["x"], 300, 64)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert Renderer(tokenizer).stop_token_ids == (end,)
    tokenizer.eos_token = "<|pad|>"
    assert Renderer(tokenizer).stop_token_ids == (tokenizer.convert_tokens_to_ids("<|pad|>"), end)


def test_a_line_break_before_the_end_of_a_turn_hides_it_not():
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.eos_token = "<|pad|>"
    tokenizer.chat_template = """\
{% for m in messages %}<|{{ m.role }}|>{{ m.content|trim }}{{ '\n' }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
    render = Renderer(tokenizer)
    assert render.end_of_turn == tokenizer.convert_tokens_to_ids("<|end|>")
    completion = said(render, "right\n")
    prompt, _, after = answer(render, [user("go")], completion, user("on"))
    assert after.ids[: len(prompt.ids) + len(completion)] == prompt.ids + completion


def test_what_the_generation_config_says_stops_an_answer_too(tmp_path):
    """As Qwen3's, whose template ends a turn with one token, and whose generation config also has that of the end of text."""
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.save_pretrained(tmp_path)
    end, text_end = tokenizer.convert_tokens_to_ids(["<|end|>", "<|pad|>"])
    for eos, stops in ((None, (end,)), (text_end, (end, text_end)), ([end, text_end], (end, text_end))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        render = Renderer.of_folder(tmp_path)
        assert (render.stop_token_ids, render.end_of_turn) == (stops, end)
    assert render.parse([*render.encode("up"), text_end]) == assistant("up")


@pytest.mark.parametrize("text", ['{"eos_token_id": "<|end|>"}', "{", "[]"])
def test_a_generation_config_that_is_none_is_named(tmp_path, text):
    train_tokenizer(["x"], 300, 64).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(RendererError, match=r"generation_config\.json"):
        Renderer.of_folder(tmp_path)


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.chat_template = None
    with pytest.raises(RendererError, match="no chat template"):
        Renderer(tokenizer)


def test_a_tokenizer_that_nothing_would_stop_is_refused():
    tokenizer = train_tokenizer(["x"], 300, 64)
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(RendererError, match="nothing would stop"):
        Renderer(tokenizer)


def test_what_a_template_refuses_is_told_with_its_roles():
    render = renderer("tekken")
    with pytest.raises(RendererError, match=r"\[assistant\].*start with a user message"):
        render.prompt([assistant("hi")])


def test_content_parts_are_joined():
    render = Renderer(tiny())
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render.text([parts]) == "<|user|>ab<|end|><|assistant|>"
    assert forgetful().chat_template != tiny().chat_template


@pytest.mark.parametrize("name", TOKENIZERS)
def test_half_of_a_surrogate_pair_and_deep_nesting_are_no_error(name):
    render = renderer(name)
    call = '{"name": "say", "arguments": {"text": "\\ud83d"}}'
    for block in (call, "[" * 100_000):
        completion = said(render, f"<tool_call>\n{block}\n</tool_call>")
        conversation = [user("cut \ud83d"), render.parse(completion), user("go on")]
        assert render.prompt(conversation, [CALC]).ids
