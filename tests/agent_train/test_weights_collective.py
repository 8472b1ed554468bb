import os
import threading
import time

import pytest
import torch
from engine_models import manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_train.weights import collective
from agent_train.weights.collective import broadcast_buckets, checksum, make_group, pick_backend, receive_buckets
from agent_train.weights.sync import (
    TensorInfo,
    WeightAddress,
    WeightTransferError,
    free_port,
    manifest_from_json,
    manifest_to_json,
)

WRAP = 1 << 64


def by_hand(data: bytes) -> int:
    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % WRAP
    return total - WRAP if total >= WRAP // 2 else total


@given(st.binary(max_size=200))
def test_checksum_is_the_documented_sum(data: bytes) -> None:
    assert checksum(torch.tensor(list(data), dtype=torch.uint8)) == by_hand(data)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=30), st.data())
def test_checksum_sees_two_words_change_places(words: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    same = checksum(torch.tensor(words, dtype=torch.int32)) == checksum(torch.tensor(swapped, dtype=torch.int32))
    assert same == (swapped == words)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=30), st.data())
def test_checksum_sees_one_word_change(words: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words) - 1))
    changed = [*words[:place], data.draw(st.integers(-(2**31), 2**31 - 1)), *words[place + 1 :]]
    same = checksum(torch.tensor(words, dtype=torch.int32)) == checksum(torch.tensor(changed, dtype=torch.int32))
    assert same == (changed == words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_checksum_speaks_of_bytes_whatever_the_type_the_place_or_the_strides(dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, 5) * 10).to(dtype)
    data = tensor.contiguous().view(-1).view(torch.uint8)
    assert checksum(tensor) == by_hand(bytes(data.tolist()))
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    odd_place = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert checksum(odd_place) == checksum(tensor)


def test_checksum_goes_over_block_borders() -> None:
    words = torch.randint(-(2**31), 2**31, (70_001,), dtype=torch.int64)
    expected = int((words * (2 * torch.arange(70_001) + 1)).sum())
    assert checksum(words.to(torch.int32)) == expected


def test_checksum_of_nothing_is_zero() -> None:
    assert checksum(torch.empty(0, 4)) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checksum_is_the_same_on_a_gpu() -> None:
    tensor = torch.randn(300_003)
    assert checksum(tensor.cuda()) == checksum(tensor)


def transfer(manifest, tensors, receivers=1, bucket_bytes=1 << 20, receiver_manifest=None, connect_seconds=20.0):
    """Send over a real group; returns the sender's checksums and each receiver's tensors, or the errors."""
    address = WeightAddress("127.0.0.1", free_port("127.0.0.1"), 1 + receivers)
    results: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            group = make_group(address, rank, "cpu", connect_seconds=connect_seconds, transfer_seconds=10)
            assert group.backend == "gloo"
            if rank == 0:
                results[rank] = broadcast_buckets(group, manifest, tensors, bucket_bytes)
            else:
                results[rank] = dict(receive_buckets(group, receiver_manifest or manifest, bucket_bytes))
        except (WeightTransferError, ValueError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1 + receivers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(1 + receivers)]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from(["float32", "bfloat16", "int64", "uint8", "float64"]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 600),
)
def test_what_arrives_is_what_was_sent_for_any_shapes_and_bucket_size(shapes, bucket_bytes: int) -> None:
    tensors = [(torch.randn(shape) * 50).to(getattr(torch, dtype)) for shape, dtype in shapes]
    manifest = manifest_of((f"t{i}", tensor) for i, tensor in enumerate(tensors))
    sums, arrived = transfer(manifest, tensors, bucket_bytes=bucket_bytes)
    assert list(arrived) == [info.name for info in manifest]
    for info, tensor in zip(manifest, tensors, strict=True):
        assert arrived[info.name].dtype == tensor.dtype
        assert torch.equal(arrived[info.name], tensor)
        assert sums[info.name] == checksum(arrived[info.name])


def test_several_receivers_get_the_same_and_tensors_are_asked_for_one_by_one() -> None:
    asked = []

    def gathered():
        for i in range(3):
            asked.append(i)
            yield torch.full((4,), float(i))

    manifest = [TensorInfo(f"t{i}", (4,), "float32") for i in range(3)]
    sums, *arrived = transfer(manifest, gathered(), receivers=3, bucket_bytes=16)
    assert asked == [0, 1, 2]
    assert all({name: checksum(t) for name, t in each.items()} == sums for each in arrived)


def test_manifests_that_differ_are_an_error_on_every_rank() -> None:
    manifest = [TensorInfo("w", (4,), "float32")]
    other = [TensorInfo("w", (2, 2), "float32")]
    begun = time.monotonic()
    for error in transfer(manifest, [torch.zeros(4)], receivers=2, receiver_manifest=other):
        assert isinstance(error, WeightTransferError)
        assert "manifest" in str(error)
    assert time.monotonic() - begun < 60


def test_a_tensor_that_is_not_what_the_manifest_says_is_named() -> None:
    begun = time.monotonic()
    sent, received = transfer([TensorInfo("model.w", (4,), "float32")], [torch.zeros(4, dtype=torch.float64)])
    assert time.monotonic() - begun < 60, "the receiver waited although the sender had failed"
    assert isinstance(sent, ValueError)
    assert "model.w" in str(sent)
    assert isinstance(received, WeightTransferError)


def test_a_receiver_that_gives_up_halfway_fails_the_sender_at_once() -> None:
    address = WeightAddress("127.0.0.1", free_port("127.0.0.1"), 2)
    manifest = [TensorInfo(f"t{i}", (1 << 20,), "float32") for i in range(8)]

    def receive_one() -> None:
        arriving = receive_buckets(make_group(address, 1, "cpu"), manifest, 1 << 22)
        next(arriving)
        arriving.close()

    receiver = threading.Thread(target=receive_one, daemon=True)
    receiver.start()
    group = make_group(address, 0, "cpu")
    begun = time.monotonic()
    with pytest.raises(WeightTransferError, match="rank 0 of 2 failed at the bucket"):
        broadcast_buckets(group, manifest, (torch.zeros(1 << 20) for _ in manifest), 1 << 22)
    assert time.monotonic() - begun < 60
    receiver.join(60)


def test_a_rank_that_never_joins_is_a_named_timeout() -> None:
    begun = time.monotonic()
    address = WeightAddress("127.0.0.1", free_port("127.0.0.1"), 2)
    with pytest.raises(WeightTransferError, match=r"ranks \[1\] did not come to rank 0 of 2 .* within 1 s") as late:
        make_group(address, 0, "cpu", connect_seconds=1)
    assert late.value.missing == [1]
    assert time.monotonic() - begun < 60


def test_nccl_only_where_every_rank_has_its_own_gpu() -> None:
    assert pick_backend(["gpu-a", "gpu-b"]) == "nccl"
    assert pick_backend(["gpu-a", "gpu-a"]) == "gloo"
    assert pick_backend(["gpu-a", "cpu"]) == "gloo"
    assert pick_backend(["cpu", "cpu"]) == "gloo"


def test_a_manifest_travels_as_text() -> None:
    manifest = [TensorInfo("a.b", (2, 3), "bfloat16"), TensorInfo("s", (), "float32")]
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_a_lost_peer_is_an_error_of_nccl_and_not_the_end_of_the_process(monkeypatch):
    """A double of NCCL, which reads this variable as it is made: with it a wait fails, else its watchdog ends the process."""
    seen = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *_):
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr(collective.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    collective._process_group("nccl", torch.distributed.HashStore(), WeightAddress("127.0.0.1", 1, 2), 0, 5.0)
    assert seen == ["1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
