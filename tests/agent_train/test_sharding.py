"""However the model lies on the ranks, it is the same model: same weights, loss, gradients, files as on one rank."""

import dataclasses

import pytest
import torch
from learner_cases import one_rank, write_model
from safetensors.torch import load_file
from sharding_cases import Case, measure, run_cases
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_train.config.model_folder import shape_of
from agent_train.learner.fsdp import full_tensors
from agent_train.learner.parallel import replica_size
from agent_train.plan.formulas import ELEMENT, FULL, TRAINED, adapter_parameters, micro_batch_traffic

# Sums of float32 in another order, which also the processor decides; an error of a mask or a factor is 100 times as large.
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
FSDP4, LORA2 = Case("fsdp 4", 4), Case("lora fsdp 2", 2, lora=4)
CASES = [
    FSDP4,
    Case("offload", 2, learner={"offload": True}),
    Case("tensor 2", 2, learner={"tensor_parallel": 2}),
    Case(
        "biased tensor 2, offload, checkpointing",
        2,
        "biased",
        {"tensor_parallel": 2, "offload": True, "gradient_checkpointing": True},
    ),
    Case("untied fsdp 2 x tensor 2, clipped", 4, "untied", {"tensor_parallel": 2, "max_grad_norm": 0.5}, state=True),
    Case("sequence 2, prompts computed once", 2, learner={"sequence_parallel": 2, "shared_prefix": True}),
    Case(
        "sequence 4, more ranks than key/value heads",
        4,
        learner={"sequence_parallel": 4, "gradient_checkpointing": True},
    ),
    Case("untied fsdp 2 x sequence 2", 4, "untied", {"sequence_parallel": 2}),
    Case("sequence 2 x tensor 2", 4, "many_heads", {"sequence_parallel": 2, "tensor_parallel": 2}, state=True),
    Case(
        "critic sequence 2 x tensor 2", 4, "many_heads", {"sequence_parallel": 2, "tensor_parallel": 2}, role="critic"
    ),
    LORA2,
    Case("lora tensor 2", 2, "untied", {"tensor_parallel": 2}, lora=4),
    Case("lora fsdp 2 x sequence 2, offload", 4, learner={"sequence_parallel": 2, "offload": True}, lora=4, state=True),
]
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def write_biased(folder):
    """Qwen2: biases in the attention's inputs, and no norms of heads."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    for name in ("tied", "untied", "many_heads", "biased"):
        (folder / name).mkdir()
    write_model(folder / "tied")
    write_model(folder / "untied", tied=False)
    write_model(folder / "many_heads", kv_heads=4)
    write_biased(folder / "biased")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return run_cases(CASES, folder)


@pytest.fixture(scope="module")
def on_one_rank(folder, tmp_path_factory):
    """case -> the same on one rank, made once for each model."""
    made = {}

    def of(case):
        plain = dataclasses.replace(
            case, learner={"max_grad_norm": case.learner.get("max_grad_norm", 1e9)}, state=False
        )
        key = (case.model, case.lora, case.role, plain.learner["max_grad_norm"])
        if key not in made:
            config = plain.config()
            config.learner.workers = 1
            saved = tmp_path_factory.mktemp("one")
            with one_rank(folder / case.model, config, case.role) as worker:
                made[key] = measure(worker, plain, config, saved) | {"saved": saved / case.name}
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        from sharding_cases import spread_adapter

        patch.setattr("agent_train.learner.fsdp.initial_adapter", spread_adapter)
        yield of


@named
def test_the_weights_are_those_of_the_files_bit_for_bit(case, found, on_one_rank):
    for rank in found[case.name]:
        assert rank["weights"].keys() == on_one_rank(case)["weights"].keys()
        for name, weight in rank["weights"].items():
            close = {"atol": 1e-6, "rtol": 0} if case.lora else {"atol": 0, "rtol": 0}  # merged by a matrix product
            torch.testing.assert_close(weight, on_one_rank(case)["weights"][name], **close)


def test_a_rank_holds_and_sends_what_agent_train_plan_says(found, folder):
    shape = shape_of(folder / FSDP4.model)
    optimizer_counters = 4 * 24  # a number of steps for each tensor
    for rank in found[FSDP4.name]:
        gradients = rank["held"] * FULL
        assert rank["states"] + gradients - optimizer_counters == TRAINED * shape.parameters / 4
        assert rank["sent"] == micro_batch_traffic(shape, ELEMENT["float32"], True) * 3 / 4
    adapters = shape.layers * adapter_parameters(shape, LORA2.config())
    for rank in found[LORA2.name]:
        assert rank["sent"] == micro_batch_traffic(shape, ELEMENT["float32"], True, adapters) / 2


@named
def test_gradients_are_those_of_one_rank(case, found, on_one_rank):
    expected = on_one_rank(case)["gradients"]
    for rank in found[case.name]:
        assert rank["gradients"].keys() == expected.keys()
        for name, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@named
def test_loss_and_metrics_are_those_of_one_rank_on_every_rank(case, found, on_one_rank):
    expected = on_one_rank(case)["metrics"]
    for rank in found[case.name]:
        assert rank["metrics"] == pytest.approx(expected, abs=CLOSE["atol"], rel=CLOSE["rtol"])


@named
def test_what_is_said_of_each_row_is_the_same_on_every_rank_of_a_replica(case, found, on_one_rank):
    config = case.config()
    size = replica_size(config.learner)
    by_rank = [rank["said"] for rank in found[case.name]]
    assert all(by_rank[rank] == by_rank[rank - rank % size] for rank in range(case.world))
    told = sorted(number for said in by_rank[::size] for packed in said for row in packed for number in row)
    expected = sorted(n for packed in on_one_rank(case)["said"] for row in packed for n in row)
    assert told == pytest.approx(expected, abs=2e-5)


@named
def test_a_saved_folder_holds_the_same_tensors(case, found, on_one_rank, folder):
    file = "adapter_model.safetensors" if case.lora else "model.safetensors"
    saved = load_file(folder / "saved" / case.name / file)
    expected = load_file(on_one_rank(case)["saved"] / file)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in saved.items())


@named
def test_an_optimizer_step_leads_to_the_same_policy(case, found, on_one_rank):
    if case.role != "policy":
        pytest.skip("a policy's log-probabilities")
    # Adam divides by the size of the gradient: what is nearly nothing is rounded in another way.
    told, expected = (
        sorted(n for said in answers for packed in said for row in packed for n in row)
        for answers in (
            [rank["after"] for rank in found[case.name]][:: replica_size(case.config().learner)],
            [on_one_rank(case)["after"]],
        )
    )
    assert told == pytest.approx(expected, abs=1e-3)
    assert told != pytest.approx(
        sorted(n for packed in on_one_rank(case)["said"] for row in packed for n in row), abs=1e-2
    )


@named
def test_weight_decay_is_of_the_same_matrices_on_every_rank(case, found, on_one_rank):
    expected = on_one_rank(case)["decays"]
    assert all(rank["decays"] == expected for rank in found[case.name])
    assert expected
    assert all("lora_" in name if case.lora else "norm" not in name and "bias" not in name for name in expected)


@named
def test_no_rank_holds_more_than_its_share(case, found, on_one_rank):
    """Within the rounding of uneven rows: norms of 32 and 8 numbers are cut by tensors' rows too."""
    whole = on_one_rank(case)["held"]
    held = [rank["held"] for rank in found[case.name]]
    assert sum(held) >= whole
    assert max(held) <= whole / case.world * 1.15 + 300


@named
def test_the_manifest_names_what_is_sent(case, found):
    for rank in found[case.name]:
        assert [(info.name, info.shape) for info in rank["manifest"]] == [
            (name, tuple(weight.shape)) for name, weight in rank["weights"].items()
        ]


@pytest.mark.parametrize("case", [case for case in CASES if case.state], ids=lambda case: case.name)
def test_a_saved_state_is_taken_up_by_one_rank(case, found, folder):
    config = dataclasses.replace(case, learner={}).config()
    config.learner.workers = 1
    with one_rank(folder / case.model, config) as worker:
        worker.load_state(str(folder / "saved" / f"{case.name} state"))
        taken = {name: whole.clone() for name, whole in full_tensors(worker.module)}
    exact = {"atol": 1e-6 if case.lora else 0, "rtol": 0}
    for name, weight in found[case.name][0]["later"].items():
        torch.testing.assert_close(taken[name], weight, **exact)
        assert case.lora or not torch.equal(weight, found[case.name][0]["weights"][name]) or "embed" in name
