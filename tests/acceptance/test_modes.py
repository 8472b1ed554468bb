"""`agent-train mode=sft|dpo|rm` as its user types it: a file in, a model folder that others load out."""

import json

import pytest
import torch
from equal_runs import leave_as_killed_after, without_times
from training_process import training
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SMALL = (
    "model.tiny.hidden=64",
    "model.tiny.heads=2",
    "model.tiny.layers=1",
    "model.tiny.intermediate=96",
    "learner.workers=1",
)
COUNT = 60


def spoken(number):
    """A question that one word of it decides."""
    return f"cell {number} is {('ice', 'hole')[number % 2]}: safe?", ("yes", "no")[number % 2]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind to learn from, and one of other questions that is held out."""
    folder = tmp_path_factory.mktemp("data")
    wrong = {"yes": "no", "no": "yes"}
    for name, numbers in (("train", range(100, 100 + COUNT)), ("test", range(200, 220))):
        talks = [spoken(number) for number in numbers]
        both = {
            "sft": [{"messages": _talk(q, a)} for q, a in talks],
            "pairs": [{"prompt": q, "chosen": a, "rejected": wrong[a]} for q, a in talks],
        }
        for kind, records in both.items():
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{kind}-{name}.jsonl").write_text(lines)
    return folder


def _talk(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def settings(files, mode, kind, epochs):
    return (
        f"mode={mode}",
        f"data.train={files / f'{kind}-train.jsonl'}",
        f"data.test={files / f'{kind}-test.jsonl'}",
        f"data.epochs={epochs}",
        *SMALL,
    )


def finished(run):
    """The held-out records of a run that ended well, first and last."""
    assert run.wait() == 0, run.told()
    assert run.err == ""
    assert '"kind": "held_out"' in (run.folder / "report.html").read_text()
    held_out = run.of_kind("held_out")
    return held_out[0], held_out[-1]


def test_sft_that_was_cut_off_goes_on_as_if_it_had_not_been(files, in_shared_ray, forks, tmp_path):
    given = (
        *settings(files, "sft", "sft", epochs=5),
        "learner.lr=5e-3",
        "data.batch_rows=10",
        "trainer.deterministic=true",
        "trainer.save_every=10",
        "trainer.eval_every=10",
    )
    with training(tmp_path, *given, env=in_shared_ray, forks=forks, name="whole") as whole:
        before, after = finished(whole)
    assert after["loss"] < before["loss"] / 4
    leave_as_killed_after(20, whole, tmp_path / "cut")
    with training(tmp_path, *given, env=in_shared_ray, forks=forks, name="cut") as cut:
        finished(cut)
        assert "going on with cut from step 20" in cut.out
    assert [without_times(r) for r in cut.metrics] == [without_times(r) for r in whole.metrics]
    steps = cut.of_kind("sft")
    assert [step["step"] for step in steps] == list(range(1, 31))
    ours, theirs = (AutoModelForCausalLM.from_pretrained(run.checkpoint).state_dict() for run in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(cut.checkpoint),
        AutoModelForCausalLM.from_pretrained(cut.checkpoint),
    )
    question, answer = spoken(211)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == answer + "<|end|>"


def test_dpo_prefers_what_was_chosen_in_pairs_that_it_never_saw(files, in_shared_ray, forks, tmp_path):
    given = (*settings(files, "dpo", "pairs", epochs=6), "learner.lr=3e-3", "data.batch_rows=20")
    with training(tmp_path, *given, env=in_shared_ray, forks=forks) as run:
        before, after = finished(run)
    assert before["margin"] == pytest.approx(0.0, abs=1e-4)
    assert after["accuracy"] > 0.95
    assert after["loss"] < before["loss"]
    assert [step["kind"] for step in run.metrics].count("preference") == 18
    AutoModelForCausalLM.from_pretrained(run.checkpoint)


def test_rm_is_a_classifier_that_others_load(files, in_shared_ray, forks, tmp_path):
    given = (*settings(files, "rm", "pairs", epochs=8), "learner.lr=3e-3", "data.batch_rows=20")
    with training(tmp_path, *given, env=in_shared_ray, forks=forks) as run:
        _, after = finished(run)
    assert after["accuracy"] > 0.95
    assert len(run.of_kind("reward_model")) == 24
    model = AutoModelForSequenceClassification.from_pretrained(run.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint)
    question, answer = spoken(212)
    texts = [tokenizer.apply_chat_template(_talk(question, said), tokenize=False) for said in (answer, "no")]
    scores = [model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item() for text in texts]
    assert answer == "yes"
    assert scores[0] > scores[1]
