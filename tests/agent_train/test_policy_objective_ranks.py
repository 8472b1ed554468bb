"""Loss and gradients of a real model on 1, 2 and 4 ranks: every loss and every reduction, with corrections, KL and entropy.

All ranks of both worlds are started once, for all cases.
"""

import dataclasses
import random
from datetime import timedelta
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from learner_cases import assert_same, make_rows, one_rank, write_model
from objective_cases import BIG, OF_BEHAVIOUR, fork_worlds, gradients_by, settings

from agent_train.algorithms.reductions import MODES
from agent_train.config.extensions import losses
from agent_train.config.schema import CorrectionConfig
from agent_train.data.packing import rank_batches
from agent_train.report.trackers import numbers

KL = 0.2
WORLDS = (4, 2)
SIZES = (9, 17, 5, 12, 9, 21, 13)
# A loss that divides by the engine's policy takes no weight, and here those losses are off policy that have none of their own.
DIRECT = (*OF_BEHAVIOUR, "gspo", "gspo_token", "gmpo", "sapo", "cispo")


def case_of(loss, mode, rows):
    """Settings that use all there is, and the rows."""
    direct = loss in DIRECT
    correction = CorrectionConfig(name=None if direct else "seq-mask-tis", cap=1.2, low=0.5, high=2.0, drift=0.3)
    algorithm = settings(
        loss,
        proximal="behaviour" if direct else "recomputed",
        reduction=mode,
        reduction_length=20.0 if mode == "constant" else None,
        correction=correction,
        entropy_coef=0.01,
        # Below the mean square of the drifts, so that some tokens are dropped.
        loss_settings={"budget": 0.01} if loss == "m2po" else {},
    )
    return algorithm, rows


NAMES = [*zip(sorted(losses.shipped), cycle(MODES)), ("ppo", "token-mean"), ("m2po", "prompt-mean")]
# The last two have one row: all ranks but one have nothing, and take part.
SHORT = len(NAMES) - 2


def near(worker, rows, seed=0):
    """The rows, as if an engine and a reference that hardly differ from the trainer had scored them."""
    rng = random.Random(seed)
    share = rank_batches(rows, 1, BIG)[0]
    scored = [one for rows_of_bin in worker.logprobs(share) for one in rows_of_bin]
    made = {}
    for number, (row, exact) in enumerate(zip(share.micro_batches[0], scored, strict=True)):
        made[row.id] = dataclasses.replace(
            row,
            logprobs=[p + rng.uniform(-0.3, 0.3) for p in exact],
            reference=[p + rng.uniform(-0.3, 0.3) for p in exact],
            versions=[rng.randrange(3) if on else -1 for on in row.mask],
            trajectory=f"t{number // 2}",
            group=f"g{number // 4}",
        )
    return [made[row.id] for row in rows]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """For each number of ranks, metrics and gradients of all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    model_dir = write_model(folder / "model")
    with one_rank(model_dir) as worker:
        many, one = near(worker, make_rows(SIZES)), near(worker, make_rows((13,)))
        cases = [case_of(*names, many if i < SHORT else one) for i, names in enumerate(NAMES)]
        alone = [gradients_by(worker, *case, 0, 1, BIG, KL) for case in cases]
    stores = {
        world: dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=300), wait_for_workers=False)
        for world in WORLDS
    }
    ports = {world: store.port for world, store in stores.items()}
    arguments = (ports, str(model_dir), cases, 21, KL, folder)
    torch.multiprocessing.spawn(fork_worlds, arguments)
    loaded = {world: torch.load(folder / f"{world}.pt", weights_only=False) for world in WORLDS}
    return {1: [(vars(metrics), grads) for metrics, grads in alone], **loaded}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "case", range(len(NAMES)), ids=[f"{loss}-{mode}{'-one-row' * (i >= SHORT)}" for i, (loss, mode) in enumerate(NAMES)]
)
def test_ranks_give_the_loss_and_gradients_of_one(found, world, case):
    metrics, grads = found[world][case]
    expected, expected_grads = found[1][case]
    assert_same(grads, expected_grads, atol=2e-6)
    same, alone = (dict(numbers({**one, "seconds": 0.0})) for one in (metrics, expected))
    assert same == pytest.approx(alone, abs=1e-6, rel=1e-5)


def test_the_cases_are_off_policy_and_corrected(found):
    """Else the other test would compare little."""
    for (loss, _), (metrics, grads) in zip(NAMES[:SHORT], found[1], strict=False):
        assert any(grad.any() for grad in grads.values())
        assert (metrics["ratio_max"] > 1.1) == (loss in DIRECT)
        assert metrics["dropped_fraction"] > 0 or metrics["cut_fraction"] > 0 or loss in DIRECT
        assert (metrics["clip_fraction"] > 0) or loss != "m2po"
        assert metrics["kl_reference"] > 0
        assert set(metrics["gap_by_lag"]) == {"0", "1", "2"}
        assert metrics["loss_entropy"] < 0
