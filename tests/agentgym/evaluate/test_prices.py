"""What tokens cost, by a table that the user gives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.evaluate.budget import Price, Prices

TABLE = {
    "small": {"input": 1.0, "output": 4.0},
    "cached": {"input": 2, "output": 8, "cached_input": 0.5},
    "maker/*": {"input": 10, "output": 10},
    "maker/large-*": {"input": 20, "output": 20},
}
PRICES = Prices.from_json(TABLE)


@pytest.mark.parametrize(
    ("model", "usage", "dollars"),
    [
        ("small", {"prompt_tokens": 1_000_000, "completion_tokens": 500_000}, 3.0),
        ("small", {"prompt_tokens": 1_000_000, "cached_tokens": 400_000}, 1.0),
        ("cached", {"prompt_tokens": 1_000_000, "cached_tokens": 400_000}, 1.4),
        ("cached", {"completion_tokens": 1_000_000, "reasoning_tokens": 900_000}, 8.0),
        ("cached", {"prompt_tokens": 1_000_000, "cached_tokens": 9_000_000}, 0.5),
        ("maker/large-3", {"prompt_tokens": 1_000_000}, 20.0),
        ("maker/other", {"prompt_tokens": 1_000_000}, 10.0),
        ("small", {}, 0.0),
        ("unknown", {"prompt_tokens": 1}, None),
    ],
)
def test_cost(model, usage, dollars):
    assert (
        PRICES.cost(model, usage) == pytest.approx(dollars)
        if dollars is not None
        else PRICES.cost(model, usage) is None
    )


tokens = st.integers(0, 10**9)


@given(tokens, tokens, tokens)
def test_a_cache_that_is_cheaper_never_makes_it_dearer(prompt, cached, completion):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    whole, less = PRICES.cost("cached", usage), PRICES.cost("cached", {**usage, "cached_tokens": cached})
    assert 0 <= less <= whole


def test_tables_are_yaml_or_json_and_go_through_json(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(TABLE))
    (tmp_path / "p.yaml").write_text(
        '# dollars\nsmall: {input: 1.0, output: 4.0}\n"maker/*": {input: 10, output: 10}\n'
    )
    assert Prices.load(tmp_path / "p.json") == PRICES
    assert Prices.load(str(tmp_path / "p.yaml")).of("maker/x") == Price(10.0, 10.0)
    assert Prices.from_json(PRICES.to_json()) == PRICES


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.yaml", "m: {input: 1, ouput: 2}", r"p\.yaml: m: no field 'ouput': did you mean output\?"),
        ("p.yaml", "m: {input: 1}", "m: output is missing"),
        ("p.yaml", "m: {input: -1, output: 1}", "m: input must be US dollars per million tokens, 0 or more, not -1"),
        ("p.yaml", "m: {input: .nan, output: 1}", "m: input must be US dollars"),
        ("p.yaml", "m: {input: $1, output: 1}", r"m: input must be US dollars .* not '\$1'"),
        ("p.yaml", "m: {input: true, output: 1}", "m: input must be US dollars"),
        ("p.yaml", "m: 3", r"m: \{input: \$, output: \$\} is needed"),
        ("p.yaml", "- m", "a table of prices is"),
        ("p.yaml", "", "a table of prices is"),
        ("p.yaml", "m: {input: 1", r"p\.yaml:\d: expected"),
        ("p.json", "{", r"p\.json: not valid JSON"),
        ("p.txt", b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_a_table_that_is_wrong_is_named_with_model_and_field(tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=words) as wrong:
        Prices.load(tmp_path / name)
    assert "\n" not in str(wrong.value)


def test_a_table_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml: No such file"):
        Prices.load(tmp_path / "none.yaml")
