"""What a rank saves is all it needs to go on as if nothing had happened, and any number of ranks can read it."""

import dataclasses
import json
import random
import resource
import time
from datetime import timedelta

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from learner_cases import make_config, make_rows, one_rank, write_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from agent_train.data.packing import rank_batches
from agent_train.learner.fsdp import full_tensors
from agent_train.learner.state import StateError, tensors_of
from agent_train.learner.worker import LearnerWorker

TINY_FILE = 512


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_dir(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), tied=request.param)


def update(worker, seed):
    rows = make_rows(seed=seed)
    return worker.update([rank_batches(rows, worker.world, 20)[worker.rank]])


def whole_state(worker):
    """A copy of every tensor of model and optimizer, whole. A collective."""
    tensors = tensors_of(worker.module, worker.optimizer)
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()}


def save(worker, folder):
    """Save and wait until it is written; what failed, "" for nothing."""
    worker.save_state(str(folder))
    return wait(worker)


def wait(worker):
    deadline = time.monotonic() + 300
    while (said := worker.state_saved()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return said


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_save_has_the_state_of_when_it_began_and_a_load_goes_on_from_there(model_dir, tmp_path):
    with one_rank(model_dir) as worker:
        update(worker, 0)
        before = whole_state(worker)
        worker.save_state(str(tmp_path / "state"), str(tmp_path / "export"))
        update(worker, 1)  # while it is written
        after = whole_state(worker)
        assert wait(worker) == ""
        names = [name for name in before if name.startswith("model.")]
        assert not any(torch.equal(before[name], after[name]) for name in names)
        tied = json.loads((model_dir / "config.json").read_text())["tie_word_embeddings"]
        assert any(name.endswith("lm_head.weight") for name in names) != tied
    with one_rank(model_dir) as worker:
        worker.load_state(str(tmp_path / "state"))
        assert_equal(whole_state(worker), before)
        assert worker.steps == 1
        exported = load_file(tmp_path / "export" / "model.safetensors")
        weights = dict(full_tensors(worker.module))
        assert all(torch.equal(exported[name], weights[name]) for name in exported)
        update(worker, 1)
        assert_equal(whole_state(worker), after)
        assert worker.steps == 2


def two_ranks(rank, world, port, model_dir, folder):
    """A rank of two: saves and goes on, goes on from what one rank saved, and saves where there is no room."""
    config = make_config(workers=world)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, deterministic=True))
    worker = LearnerWorker(rank, world, config, "cpu")
    worker.start("127.0.0.1", port, model_dir)
    assert torch.are_deterministic_algorithms_enabled()
    update(worker, 0)
    found = {"two": whole_state(worker)}
    assert save(worker, folder / "two") == ""
    update(worker, 1)
    found["two, and a step"] = whole_state(worker)
    worker.load_state(str(folder / "one"))
    found["one"] = whole_state(worker)
    update(worker, 1)
    found["one, and a step"] = whole_state(worker)

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TINY_FILE, limit[1]))
    said = save(worker, folder / "no room")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    found["said"] = said
    update(worker, 2)
    assert save(worker, folder / "room") == ""
    torch.save(found, folder / f"found-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_any_number_of_ranks_goes_on_from_what_another_number_saved(tmp_path):
    model_dir = write_model(tmp_path / "model")
    with one_rank(model_dir) as worker:
        update(worker, 0)
        one = whole_state(worker)
        assert save(worker, tmp_path / "one") == ""
        update(worker, 1)
        further = whole_state(worker)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    torch.multiprocessing.spawn(two_ranks, (2, store.port, str(model_dir), tmp_path), nprocs=2)
    found, other = (torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1))
    assert_equal(found["one"], one)
    assert_close(found["one, and a step"], further)
    with one_rank(model_dir) as worker:
        worker.load_state(str(tmp_path / "two"))
        assert_equal(whole_state(worker), found["two"])
        update(worker, 1)
        assert_close(whole_state(worker), found["two, and a step"])
    # Every rank knows that the save failed and why; that it could be trained and saved afterwards, the ranks looked at.
    for said in (found["said"], other["said"]):
        assert "File too large" in said
        assert len(said.splitlines()) == 1


def test_random_numbers_go_on_where_they_were(model_dir, tmp_path):
    with one_rank(model_dir) as worker:
        assert save(worker, tmp_path / "state") == ""
        expected = [random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1)]
        worker.load_state(str(tmp_path / "state"))
        assert [random.random(), numpy.random.rand(), torch.rand(1).item(), random.gauss(0, 1)] == expected


def test_a_second_save_before_the_first_has_ended_is_refused(model_dir, tmp_path, monkeypatch):
    with one_rank(model_dir) as worker:
        worker.save_state(str(tmp_path / "state"))
        running = worker.store._running
        monkeypatch.setattr(running, "done", lambda: False)
        with pytest.raises(RuntimeError, match="while the one before was being written"):
            worker.save_state(str(tmp_path / "other"))
        monkeypatch.undo()
        assert wait(worker) == ""


def test_the_state_of_another_model_is_refused_by_name(tmp_path):
    folders = [write_model(tmp_path / name, kv_heads=heads) for name, heads in (("two", 2), ("four", 4))]
    with one_rank(folders[0]) as worker:
        assert save(worker, tmp_path / "state") == ""
    with one_rank(folders[1]) as worker:
        before = whole_state(worker)
        with pytest.raises(StateError, match=r"of another model: .*k_proj\.weight is \(16, 32\), not \(32, 32\)"):
            worker.load_state(str(tmp_path / "state"))
        assert_equal(whole_state(worker), before)
