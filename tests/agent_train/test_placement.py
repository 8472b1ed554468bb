"""Which part of a device each rank takes: GPUs are halved only where there is one, and roles share them where they are to."""

import pytest

from agent_train.cluster.placement import Room, gpu_share, gpus_needed, learner_devices, own_ray_cpus, rank_room
from agent_train.config.schema import Config


def test_no_gpu_is_asked_for_where_there_is_none():
    assert gpu_share(0, "vllm") == gpu_share(0, "embedded") == 0


def test_an_only_gpu_is_halved_between_learner_and_vllm_and_several_are_not():
    assert gpu_share(1, "vllm") == 0.5
    assert gpu_share(1, "embedded") == gpu_share(2, "vllm") == gpu_share(8, "vllm") == 1.0


def test_ranks_and_servers_add_up():
    config = Config()
    config.learner.workers, config.engine.replicas, config.engine.tensor_parallel = 4, 2, 2
    assert gpus_needed(config) == 8
    config.engine.name = "embedded"
    assert gpus_needed(config) == 4


def three_roles(placement="shared", engine="vllm", workers=2):
    """Policy, reference and critic."""
    config = Config()
    config.algorithm.kl.coef, config.algorithm.advantage.name = 0.1, "gae"
    config.learner.placement, config.learner.workers, config.engine.name = placement, workers, engine
    return config


def test_a_policy_alone_has_each_device_to_itself():
    config = Config()
    for placement in ("shared", "own"):
        config.learner.placement = placement
        assert rank_room(config, 0) == Room(0.0, 1.0)
        assert rank_room(config, 1) == Room(0.5, 1.0)
        assert rank_room(config, 4) == Room(1.0, 1.0)


def test_roles_that_share_take_a_part_of_one_bundle_each_and_never_more_than_all_of_it():
    assert rank_room(three_roles(), 4) == Room(0.3333, 0.3333, {"GPU": 1.0, "CPU": 1.0})
    # The vLLM server has the other half of an only GPU.
    assert rank_room(three_roles(), 1) == Room(0.1666, 0.3333, {"GPU": 0.5, "CPU": 1.0})
    assert rank_room(three_roles(engine="embedded"), 1) == Room(0.3333, 0.3333, {"GPU": 1.0, "CPU": 1.0})
    for gpus in (1, 4):
        room = rank_room(three_roles(), gpus)
        assert 3 * room.gpus <= room.bundle["GPU"]
        assert 3 * room.cpus <= room.bundle["CPU"]


def test_without_a_gpu_roles_that_share_take_a_cpu_for_each_rank_together():
    assert rank_room(three_roles(), 0) == Room(0.0, 0.3333)
    assert learner_devices(three_roles()) == 2


def test_roles_of_their_own_take_as_many_devices_each():
    assert rank_room(three_roles("own"), 8) == Room(1.0, 1.0)
    assert rank_room(three_roles("own"), 0) == Room(0.0, 1.0)
    assert learner_devices(three_roles("own")) == 6
    assert gpus_needed(three_roles("own", "embedded")) == 6
    assert gpus_needed(three_roles("own")) == 7


@pytest.mark.parametrize(("placement", "cpus"), [("shared", 41), ("own", 121)])
def test_a_ray_of_ones_own_has_cpus_for_all_ranks(placement, cpus):
    assert own_ray_cpus(three_roles(placement, workers=40)) == cpus
