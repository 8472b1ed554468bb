"""Weights that travel as files: whole, or as changed bytes."""

import asyncio
import dataclasses
import zlib

import pytest
import torch
from engine_models import manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import make_config, make_rows, one_rank, write_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agent_train.data.packing import rank_batches
from agent_train.learner.fsdp import full_tensors
from agent_train.weights.collective import checksum
from agent_train.weights.files import CHANGES, WHOLE, WeightCopy, apply_changes, changes
from agent_train.weights.sync import KEPT, WeightSyncError, checksum_of_all, sync_files

TYPES = {"bfloat16": torch.int16, "float32": torch.int32, "float64": torch.int64, "uint8": torch.uint8}


def bits(tensor):
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(TYPES)), st.integers(0, 400), st.floats(0, 1), st.integers(0, 1000))
def test_changes_turn_the_old_bytes_into_the_new_whatever_the_type_and_however_many_differ(dtype, size, share, seed):
    """Bytes, not numbers: NaN and -0.0 too."""
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (size * 8,), generator=draw, dtype=torch.uint8).view(getattr(torch, dtype))
    flips = torch.rand(old.numel(), generator=draw) < share
    new = old.view(TYPES[dtype]).clone()
    new[flips] ^= 1
    new = new.view(getattr(torch, dtype))
    difference = changes(old, new)
    assert bool(difference.numel()) == bool(flips.any())
    if difference.numel():
        apply_changes(old, difference)
    assert bits(old) == bits(new)


def test_changes_hold_the_gaps_and_the_flipped_bits_of_the_changed_elements_alone():
    old = torch.zeros(1000, dtype=torch.int16).view(torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[3], new.view(torch.int16)[303] = 0x0102, 0x0003
    raw = zlib.decompress(changes(old, new).numpy())
    gaps, flips = [3, 300 - 256, 0, 1, 0, 0, 0, 0], [2, 3, 1, 0]
    assert list(raw) == gaps + flips


def test_the_changes_of_a_step_at_a_usual_learning_rate_are_a_few_percent_of_the_bytes():
    weights = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)) * 0.02
    stepped = weights - 1e-6 * torch.randn(1 << 18).sign()
    assert changes(weights.bfloat16(), stepped.bfloat16()).numel() < 0.04 * 2 * (1 << 18)
    assert changes(weights, stepped).numel() < 0.5 * 4 * (1 << 18)


def two_versions():
    old = {"a": torch.arange(300.0), "b": torch.ones(4, 5).bfloat16()}
    return old, {"a": old["a"].clone().index_fill_(0, torch.tensor([7, 250]), -1.0), "b": old["b"].clone()}


@pytest.fixture
def both(tmp_path):
    """A sender and a receiver that hold the same weights, and the folder of their changes."""
    old, new = two_versions()
    sender, receiver = WeightCopy(), WeightCopy()
    manifest = manifest_of(old.items())
    sent = sender.write(manifest, old.values(), tmp_path / "0", keep=True)
    assert receiver.read(tmp_path / "0", keep=True) == sent
    sent = sender.write_changes(manifest, new.values(), tmp_path / "1")
    assert sent == {name: checksum(tensor) for name, tensor in new.items()}
    return sender, receiver, tmp_path / "1", sent


def test_a_whole_folder_is_read_as_it_was_written_and_is_held_only_to_keep(tmp_path):
    tensors = {"a": torch.randn(3, 5).half(), "b": torch.randn(()), "c": torch.empty(0, 4).bfloat16()}
    sender = WeightCopy()
    sent = sender.write(manifest_of(tensors.items()), (t.clone() for t in tensors.values()), tmp_path / "0", keep=False)
    assert sender.tensors == {}
    assert WeightCopy().read(tmp_path / "0", keep=False) == sent
    found = load_file(tmp_path / "0" / WHOLE)
    assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_what_killed_ranks_left_of_a_folder_goes_as_it_is_written_again(tmp_path):
    for left in (".10.31666.partial", ".10.31666.old", ".11.31666.partial"):
        (tmp_path / left).mkdir()
    tensors = two_versions()[0]
    WeightCopy().write(manifest_of(tensors.items()), tensors.values(), tmp_path / "10", keep=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".11.31666.partial", "10"]


def test_a_receiver_that_holds_the_base_has_the_new_weights_and_the_file_only_what_changed(both):
    sender, receiver, folder, sent = both
    assert load_file(folder / CHANGES).keys() == {"a"}
    assert receiver.read(folder, keep=True) == sent
    assert all(torch.equal(sender.tensors[name], receiver.tensors[name]) for name in sent)


def test_a_receiver_that_holds_nothing_or_something_else_reads_nothing(both):
    _, receiver, folder, _ = both
    assert WeightCopy().read(folder, keep=True) == {}
    receiver.sums["b"] += 1
    assert receiver.read(folder, keep=True) == {}


def test_damaged_changes_are_an_error_after_which_nothing_is_held(both):
    _, receiver, folder, _ = both
    found = load_file(folder / CHANGES)
    found["a"][len(found["a"]) // 2 :] = 0
    save_file(found, folder / CHANGES, metadata={"base": str(checksum_of_all(receiver.sums))})
    with pytest.raises(zlib.error):
        receiver.read(folder, keep=True)
    assert receiver.read(folder, keep=True) == {} == receiver.tensors


def test_a_torn_folder_is_an_error(tmp_path):
    (tmp_path / "0").mkdir()
    torn = tmp_path / "0" / WHOLE
    save_file(two_versions()[0], torn)
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.raises(SafetensorError):
        WeightCopy().read(tmp_path / "0", keep=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_writes_all_weights_first_and_then_what_an_update_changed(tmp_path, dtype):
    config = make_config(lr=1e-6)
    config = dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, weights="delta"),
        model=dataclasses.replace(config.model, dtype=dtype),
    )
    receiver = WeightCopy()
    with one_rank(write_model(tmp_path / "model"), config) as worker:
        for version, whole in enumerate((False, False, False, True)):
            worker.update([rank_batches(make_rows(seed=version), 1, 10_000)[0]])
            sent = worker.save_weights(str(tmp_path / str(version)), whole)
            assert receiver.read(tmp_path / str(version), keep=True) == sent
            assert (tmp_path / str(version) / CHANGES).is_file() == (version in (1, 2))
            for name, tensor in full_tensors(worker.module, getattr(torch, dtype)):
                assert torch.equal(tensor, receiver.tensors[name])
    assert {info.name for info in worker.manifest()} == sent.keys()
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("2", "3")]
    assert sizes[0] < 0.2 * sizes[1] or dtype == "float32"


class Writing:
    """A double for a learner whose weights are its version."""

    def __init__(self):
        self.whole = []

    async def save_weights(self, folder, whole):
        folder.mkdir()
        self.whole.append(whole)
        return {"a": 1, "b": len(self.whole)}


class Reading:
    """A double for an engine of two workers, of which one misreads the folders that `misread` names."""

    def __init__(self, *misread):
        self.misread, self.held = misread, {}

    async def live(self):
        pass

    async def losses(self):
        return 0

    async def fetch_weights(self, folder):
        self.held = {"a": 1, "b": int(folder.name) + 1}
        return [self.held, {} if int(folder.name) in self.misread else self.held]

    async def load_fetched(self, version):
        return self.held


def test_what_a_worker_cannot_read_is_sent_whole_and_the_newest_folders_stay(tmp_path):
    learner, engine = Writing(), Reading(1)
    for version in range(3):
        assert asyncio.run(sync_files(learner, engine, tmp_path, version)) == checksum_of_all(engine.held)
    assert learner.whole == [False, False, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000003"]
    assert KEPT == 2


def test_what_a_worker_cannot_read_twice_is_an_error_and_is_not_loaded(tmp_path):
    engine = Reading(0, 1)
    engine.load_fetched = None
    with pytest.raises(WeightSyncError, match=r"version 5, .*: 2 of 2 tensors .* first 'a'"):
        asyncio.run(sync_files(Writing(), engine, tmp_path, 5))
