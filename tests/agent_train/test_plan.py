"""`agent-train plan`: its formulas against measured small cases and numbers by hand, and the command."""

import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from docs_pages import ROOT
from learner_cases import make_config, make_rows, one_rank
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agent_train.cli import main
from agent_train.config.compose import config_folder
from agent_train.config.model_folder import ModelShape, shape_of
from agent_train.data.packing import rank_batches
from agent_train.learner.lora import add_adapters
from agent_train.plan import formulas
from agent_train.plan.formulas import Assumptions

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
CASES = {
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**GROUPED, attention_bias=True),
    "mistral with a head size": MistralConfig(**GROUPED, head_dim=32),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3, every head its own": Qwen3Config(
        **{**SMALL, "num_key_value_heads": 4}, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3 with biases": Qwen3Config(**GROUPED, head_dim=32, attention_bias=True),
    "qwen3 of experts": Qwen3MoeConfig(
        **GROUPED, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2
    ),
}
HAND = ModelShape(
    "llama", hidden=10, layers=1, heads=1, kv_heads=1, head_size=10, intermediate=10, vocab=100, tied=True
)


def counted(config):
    """The parameters of the real model, without their memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_counted_exactly_from_the_config(name, tmp_path):
    CASES[name].save_pretrained(tmp_path)
    assert shape_of(tmp_path).parameters == counted(CASES[name])


@pytest.mark.parametrize(
    ("size", "parameters"), [("0.6B", 596_049_920), ("4B", 4_022_468_096), ("30B", 30_532_122_624)]
)
def test_the_models_known_by_size_are_qwen3s(size, parameters):
    folder = config_folder() / "shapes" / size
    assert shape_of(folder).parameters == counted(AutoConfig.from_pretrained(folder)) == parameters


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """The plan is of GPUs: what the learner does for half precision on CPUs is left out."""
    for module in ("attention", "fsdp"):
        monkeypatch.setattr(f"agent_train.learner.{module}.on_cpu_in_half", lambda *_: False)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_rank_takes_at_most_the_memory_of_the_plan_and_not_much_less(tmp_path):
    AutoModelForCausalLM.from_config(Qwen3Config(**GROUPED, head_dim=32)).save_pretrained(tmp_path)
    config = make_config(gradient_checkpointing=True, head_chunk=64, microbatch_tokens=400)
    config.model.dtype = "bfloat16"
    batch = rank_batches(make_rows(sizes=(100,) * 4), 1, 400)[0]
    with one_rank(tmp_path, config) as worker:
        worker.update([batch])
        tracker = MemTracker()
        tracker.track_external(worker.module, worker.optimizer)
        with tracker:
            worker.update([batch])
    (measured,) = (sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())
    planned = sum(formulas.rank_bytes(shape_of(tmp_path), config, 1).values())
    assert measured <= planned <= 1.3 * measured


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [0, 8])
def test_a_block_keeps_the_activations_of_the_plan(dtype, lora, tmp_path):
    from agent_train.learner.head import PackedPolicy

    settings = make_config()
    settings.model.dtype, settings.lora.rank = dtype, lora

    def kept(layers):
        config = Qwen3Config(**{**GROUPED, "num_hidden_layers": layers}, head_dim=32)
        how = {"dtype": getattr(torch, dtype), "attn_implementation": "agentgym_packed"}
        policy = PackedPolicy(AutoModelForCausalLM.from_config(config, **how), 64)
        if lora:
            add_adapters(policy.model, settings.lora)
            policy.model.to_empty(device="cpu")
            policy.model.to(how["dtype"])
        batch = rank_batches(make_rows(sizes=(50, 50)), 1, 400)[0].batches()[0]
        weights, sizes = {p.untyped_storage().data_ptr() for p in policy.parameters()}, {}

        def keep(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy(batch)
        config.save_pretrained(tmp_path)
        return sum(tensor.untyped_storage().nbytes() for place, tensor in sizes.items() if place not in weights)

    a_block = kept(3) - kept(2)
    shape, e = shape_of(tmp_path), formulas.ELEMENT[dtype]
    planned = 100 * (formulas.activation_bytes(shape, e) + e * lora * 7)
    assert a_block == planned if not lora else a_block <= planned <= 1.3 * a_block


def test_flops_are_those_that_torch_counts(tmp_path):
    CASES["qwen2"].save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(CASES["qwen2"], attn_implementation="eager")
    ids = torch.zeros((1, 20), dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        logits = model(ids).logits
    # Eager attention computes the masked half, too, and all logits.
    planned = formulas.forward_flops(shape_of(tmp_path), 20, 20, 20)
    assert forward.get_total_flops() == planned
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == 2 * planned


def test_flops_by_hand():
    # The matrices are 400 + 300; attention reads 50 tokens of 10 numbers twice; logits are 100 numbers.
    assert (
        formulas.forward_flops(HAND, tokens=100, context=50, answered=30)
        == 100 * (2 * 700 + 4 * 50 * 10) + 2 * 30 * 1000
    )


def test_keys_and_values_are_those_that_vllm_makes_room_for():
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    shape = shape_of(config_folder() / "shapes" / "4B")
    layer = interface.FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    assert formulas.kv_bytes(shape, 2, 1) == 36 * layer.page_size_bytes / 16 == 147_456


SYNC = """
import sys, threading, torch
from pathlib import Path
from agent_train.weights.collective import broadcast_buckets, make_group, receive_buckets
from agent_train.weights.sync import TensorInfo, WeightAddress, free_port
host, shapes = "127.0.0.1", [tuple(map(int, word.split("x"))) for word in sys.argv[1:]]
manifest = [TensorInfo(str(number), shape, "bfloat16") for number, shape in enumerate(shapes)]
address = WeightAddress(host, free_port(host), 2, 1)
def receive():
    for _ in receive_buckets(make_group(address, 1, "cpu"), manifest):
        pass
def sent():
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])
other = threading.Thread(target=receive)
other.start()
group = make_group(address, 0, "cpu")
before = sent()
broadcast_buckets(group, manifest, (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
other.join(60)
print(sent() - before)
"""


def test_the_kernel_counts_the_bytes_of_a_weight_sync():
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a loopback with no other traffic takes a network namespace, and so root")
    config = LlamaConfig(**{**GROUPED, "vocab_size": 20_000, "hidden_size": 256, "intermediate_size": 768})
    with torch.device("meta"):
        tensors = list(AutoModelForCausalLM.from_config(config).parameters())
    words = ["x".join(map(str, tensor.shape)) for tensor in tensors]
    start = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-c", SYNC, *words]
    done = subprocess.run(start, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    planned = 2 * sum(tensor.numel() for tensor in tensors)
    assert planned <= int(done.stdout) <= 1.02 * planned


def test_time_and_traffic_by_hand():
    config = make_config(microbatch_tokens=100, gradient_checkpointing=True)
    config.trainer.groups_per_step, config.algorithm.group_size = 4, 5
    given = Assumptions(
        read=30, sampled=20, tflops=1e-6, compute_use=0.5, node=1, link=1e-6
    )  # 5e5 FLOP/s, 1,000 bytes/s
    # Ten episodes of 50 tokens on each of two ranks: five micro-batches. P = 700 + 2 * 10 + 1,010 = 1,730.
    found = formulas.learner_time(HAND, config, given, 2)
    forward = 500 * (1400 + 4 * 25 * 10) + 2 * 200 * 1000
    assert (found.micro_batches, found.compute) == (5, pytest.approx(4 * forward / 5e5))
    assert found.traffic == 5 * (4 * 1730 + 4 * 720 + 4 * 1730) / 2
    assert found.seconds == found.link == found.traffic / 1000
    # A server has 10 episodes and plays 5 at a time; a token moves 1,700 weights and keys and values of 40 tokens of 80 bytes.
    slow = Assumptions(read=30, sampled=20, bandwidth=1e-6, bandwidth_use=1, tflops=1e30, overhead=500)
    step = (4 * 1700 + 5 * 80 * 40) / 1000 + 0.5
    assert formulas.rollout_seconds(HAND, config, slow, 2, 5) == pytest.approx(2 * 20 * step)
    # fp32 weights are gathered from the other rank, and then sent once.
    assert formulas.sync_seconds(HAND, config, given, 2, 3) == pytest.approx(4 * 1730 / 2 / 1000 + 4 * 1730 / 1000)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3 with biases"])
def test_adapters_are_counted_exactly(name, tmp_path):
    CASES[name].save_pretrained(tmp_path)
    config = make_config()
    config.lora.rank = 5
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CASES[name])
    add_adapters(model, config.lora)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert 3 * formulas.adapter_parameters(shape_of(tmp_path), config) == counted


def test_adapters_by_hand():
    config = make_config(microbatch_tokens=100, gradient_checkpointing=True)
    config.trainer.groups_per_step, config.algorithm.group_size = 4, 5
    config.model.dtype, config.lora.rank, config.sft.episodes, config.algorithm.kl.coef = "bfloat16", 3, 0, 0.1
    given = Assumptions(read=30, sampled=20, tflops=1e-6, compute_use=0.5, node=1, link=1e-6)
    # Seven targets of 3 * (10 + 10) weights. The base has 1,730 parameters of 2 bytes; it is the reference, too.
    assert formulas.rank_bytes(HAND, config, 2)["states"] == (2 * 1730 + 16 * 420) / 2
    found = formulas.learner_time(HAND, config, given, 2)
    forward = 500 * (1400 + 4 * 25 * 10) + 2 * 200 * 1000
    assert found.compute == pytest.approx((3 + 1) * forward / 5e5)
    learned, scored = 2 * (1730 + 420) + 2 * (720 + 420) + 4 * 420, 2 * 1730
    assert found.traffic == 5 * (learned + scored) / 2
    assert formulas.sync_bytes(HAND, config) == 2 * 1730
    config.lora.merge = False
    assert formulas.sync_bytes(HAND, config) == 2 * 420


def test_every_table_of_the_page_is_what_its_command_prints(capsys):
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    parts = ["--model" + part for part in page.split("\n    agent-train plan --model")[1:]]
    assert len(parts) == 3
    for part in parts:
        command, _, rest = part.partition("\n")
        assert main(["plan", *command.split()]) == 0
        printed = textwrap.indent(capsys.readouterr().out, "    ")
        assert rest.lstrip("\n").startswith(printed), printed


def test_a_server_of_several_gpus_does_not_share_one_with_a_rank(capsys):
    words = ["+env=frozen_lake", "lora.rank=32", "engine.tensor_parallel=2"]
    assert main(["plan", "--model", "4B", "--gpus", "1,4", *words]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learner.workers")]
    assert row.split()[1:-1] == ["does", "not", "fit", "2"]


def test_every_gpu_of_a_server_has_a_head_of_keys_and_values():
    """vLLM repeats them where there are fewer."""
    shape = replace(HAND, heads=8, kv_heads=4)
    assert [formulas.kv_bytes(shape, 2, gpus) for gpus in (1, 2, 4, 8)] == [160, 160, 160, 320]


def test_every_role_takes_its_memory_and_its_passes():
    config, given = make_config(gradient_checkpointing=True), Assumptions()
    states, seconds = (
        formulas.rank_bytes(HAND, config, 2)["states"],
        formulas.learner_time(HAND, config, given, 2).compute,
    )
    config.algorithm.advantage.name, config.algorithm.kl.coef = "gae", 0.01
    # Policy and critic learn, 16 bytes a parameter each, and the reference has those of float32; it and the critic are asked once.
    assert states == 16 * 1730 / 2
    assert formulas.rank_bytes(HAND, config, 2)["states"] == (2 * 16 + 4) * 1730 / 2
    assert formulas.learner_time(HAND, config, given, 2).compute == pytest.approx(seconds * (2 * 4 + 2) / 4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "8,x"], "'x' is not a positive whole number"),
        (["--gpus", "0"], "'0' is not a positive whole number"),
        (["--link", "-1"], "--link: '-1' is not a positive number"),
        (["--model", "7B"], "invalid choice: '7B'"),
        (
            ["--model", "30B", "lora.rank=8"],
            "lora.targets: a plan knows adapters of q_proj, k_proj, v_proj, o_proj, not of down_proj, gate_proj, up_proj",
        ),
        (["--model", "4B", "--read", "99999"], "do not fit engine.max_model_len=8192"),
        (["--model", "4B", "engine.tensor_parallel=3"], "engine.tensor_parallel=3: must divide the 32 attention heads"),
        (["--model", "4B", "trainer.groups_per_step=0"], "trainer.groups_per_step=0: must be positive"),
        (["model.path=/nowhere"], "model.path=/nowhere: a plan needs the config.json of one of llama"),
        ([], "or --model SIZE"),
    ],
)
def test_bad_input_is_exit_code_2_and_names_it(words, said, capsys):
    try:
        code = main(["plan", "+env=frozen_lake", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_plan_imports_no_torch(tmp_path):
    code = "import sys\nfrom agent_train.cli import main\nmain(['plan', '+env=frozen_lake', '--model', '4B'])\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert list(Path(tmp_path).iterdir()) == []
