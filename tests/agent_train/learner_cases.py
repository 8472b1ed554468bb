"""A model of a few thousand weights and rows to train it on, for the tests of the learner."""

import contextlib
import dataclasses
import random

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_train.config.schema import Config, CriticConfig
from agent_train.data.samples import TrainingSample
from agent_train.learner.actor_group import Learner, shipping
from agent_train.learner.worker import LearnerWorker

VOCAB = 40


def write_model(folder, seed=0, tied=True, kv_heads=2, head_dim=8, vocab=VOCAB):
    """A Qwen3 folder with grouped-query attention; its weights are spread widely enough that a mistake shows."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def numbers_of(metrics):
    """The numbers of an update's metrics by name, also those of each lag, without its time."""
    record = {**dataclasses.asdict(metrics), "seconds": 0.0}
    panels = record.pop("gap_by_lag", {})
    return record | {(lag, name): number for lag, panel in panels.items() for name, number in panel.items()}


def make_rows(sizes=(9, 17, 5, 12, 9, 21), seed=0, advantage=None, **fields):
    """Rows of several turns: stretches of unmasked and masked tokens, each row with an advantage of its own or the given one."""
    rng = random.Random(seed)
    rows = []
    for number, size in enumerate(sizes):
        mask = [position > 1 and position % 4 < 2 for position in range(size)]
        gain = rng.gauss(0, 1) if advantage is None else advantage
        row = TrainingSample(
            ids=[rng.randrange(VOCAB) for _ in range(size)],
            mask=mask,
            logprobs=[rng.uniform(-5, -1) if sampled else 0.0 for sampled in mask],
            id=f"t{number}#0",
            trajectory=f"t{number}",
            advantages=[gain if sampled else 0.0 for sampled in mask],
        )
        rows.append(dataclasses.replace(row, **fields))
    return rows


def advantage_of(row):
    """The one advantage of all of a row's sampled tokens."""
    return row.advantages[row.mask.index(True)]


def make_config(**learner):
    """Settings without weight decay, warm-up or clipping, so that an update is what its gradient says."""
    config = Config(critic=CriticConfig(lr=1e-3))
    plain = {"lr": 1e-3, "workers": 1, "warmup_steps": 0, "max_grad_norm": 1e9, "timeout": 60.0, "head_chunk": 7}
    plain["gradient_checkpointing"] = False
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **{**plain, **learner}))


@contextlib.contextmanager
def one_rank(model_dir, config=None, role="policy", device="cpu"):
    """A learner of one rank in this process, through FSDP like any other."""
    worker = LearnerWorker(0, 1, config or make_config(), device, role)
    port = worker.open_store("127.0.0.1")
    try:
        worker.start("127.0.0.1", port, str(model_dir))
        yield worker
    finally:
        dist.destroy_process_group()


def gradients_of(worker, share, **given):
    """The metrics and the whole gradients of one update, whose optimizer step is left out."""
    return recorded(worker, lambda: worker.update([share], **given))


def recorded(worker, update):
    """What an update returns and the whole gradients that it made; its optimizer step is left out."""
    found = {}

    def record():
        found.update({name: p.grad.full_tensor().clone() for name, p in worker.module.model.named_parameters()})

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, worker.optimizer, "step", worker.optimizer.step)
        worker.optimizer.step = record
        answer = update()
    return answer, found


def assert_same(grads, expected, atol):
    """Equal gradients, weight by weight."""
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, expected[name], atol=atol, rtol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


class InProcess(Learner):
    """The driver's handle on one rank in this process: all of `Learner` but Ray."""

    def __init__(self, worker, config):
        super().__init__([worker], config, worker.role, shipping(config, put=lambda batch: batch))
        worker.config, worker.objective = config, None

    async def _call(self, method, arguments, what=""):
        return [getattr(self.actors[0], method)(*arguments[0])]


def in_process(first, role, model_dir, config):
    """A rank of another role beside one that has started in this process."""
    worker = LearnerWorker(0, 1, config, "cpu", role)
    worker.dims = first.dims
    worker.load(str(model_dir))
    return worker
