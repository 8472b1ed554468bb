"""Which part of a device each rank takes: GPUs are halved only where there is one, and roles share them where they are to."""

from dataclasses import replace

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from agent_train.cluster.placement import (
    COLOCATED_SHARE,
    Room,
    gpu_share,
    gpus_needed,
    learner_devices,
    own_ray_cpus,
    parts_that_fit,
    rank_room,
)
from agent_train.config.schema import Config, EngineConfig
from agent_train.engine.vllm import server_options, server_room
from agent_train.trainer.start_parts import shares_gpu


def test_no_gpu_is_asked_for_where_there_is_none():
    assert gpu_share(0, "vllm") == gpu_share(0, "embedded") == 0


def test_an_only_gpu_is_halved_between_learner_and_vllm_and_several_are_not():
    assert gpu_share(1, "vllm") == 0.5
    assert gpu_share(1, "sglang") == gpu_share(1, "embedded") == gpu_share(2, "vllm") == gpu_share(8, "vllm") == 1.0


def test_ranks_and_servers_add_up():
    config = Config()
    config.learner.workers, config.engine.replicas, config.engine.tensor_parallel = 4, 2, 2
    assert gpus_needed(config) == 8
    config.engine.name = "embedded"
    assert gpus_needed(config) == 4
    config.engine.name, config.engine.urls = "sglang", ["http://h:1"]  # others run it
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


def config_of(**sections):
    """Settings with these values in their sections."""
    config = Config()
    return replace(config, **{name: replace(getattr(config, name), **own) for name, own in sections.items()})


def a_node(cpus, gpus=0):
    return {"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)}


@pytest.mark.parametrize(
    ("nodes", "learner", "engine", "fitting"),
    [
        ([a_node(3)], {"workers": 2}, {"replicas": 2}, (2, 2)),  # without GPUs servers hold nothing
        ([a_node(2), a_node(1)], {"workers": 8}, {}, (3, 1)),
        ([a_node(3)], {"workers": 8, "sequence_parallel": 2}, {}, (2, 1)),
        ([a_node(64, 8)], {"workers": 8}, {"replicas": 8}, (4, 4)),  # one of two nodes is left
        ([a_node(64, 8)], {"workers": 12}, {"replicas": 4}, (6, 2)),
        ([a_node(64, 8)], {"workers": 8, "tensor_parallel": 4}, {"replicas": 8}, (4, 4)),
        ([a_node(64, 8)], {"workers": 2}, {"replicas": 2, "tensor_parallel": 4}, (2, 1)),
        ([a_node(64, 3), a_node(64, 6)], {"workers": 3}, {"replicas": 2, "tensor_parallel": 4}, (3, 1)),
        ([a_node(2, 8)], {"workers": 8}, {"replicas": 8}, (2, 6)),  # a rank holds a CPU too
        ([a_node(64, 2)], {"workers": 8}, {"replicas": 8}, (1, 1)),
        ([a_node(64, 1)], {"workers": 1}, {}, (1, 1)),  # an only GPU is shared
        ([a_node(64, 4)], {"workers": 8}, {"replicas": 8, "placement": "colocated"}, (4, 4)),
        ([a_node(64, 4)], {"workers": 8}, {"name": "embedded"}, (4, 1)),
    ],
)
def test_ranks_and_servers_shrink_together_to_what_the_nodes_have_room_for(nodes, learner, engine, fitting):
    found = parts_that_fit(config_of(learner=learner, engine=engine), nodes)
    assert (found.ranks, found.servers) == fitting


@pytest.mark.parametrize(
    ("nodes", "sections"),
    [
        ([a_node(1)], {"learner": {"workers": 8, "tensor_parallel": 2}}),  # not one whole replica
        ([a_node(64, 4)], {"engine": {"tensor_parallel": 8}}),
        ([a_node(64, 2)], {"learner": {"workers": 2, "sequence_parallel": 2}}),  # and no server
        ([a_node(1)], {"env": {"placement": "ray"}}),
        ([a_node(1), a_node(1)], {"env": {"placement": "ray", "cpus": 2.0}}),  # on no one node
    ],
)
def test_without_room_for_one_of_each_nothing_fits(nodes, sections):
    assert parts_that_fit(config_of(**sections), nodes) is None


def test_environment_workers_are_left_room_and_shrink_too():
    def fitting(there, ranks, **env):
        config = config_of(learner={"workers": ranks}, env={"placement": "ray", **env})
        return parts_that_fit(config, [a_node(there)])

    assert fitting(4, 4) == (3, 1, 0)  # 0: as many as fit, at least one
    assert fitting(8, 4, workers=4) == (4, 1, 4)
    assert fitting(4, 4, workers=4) == (2, 1, 2)
    assert fitting(4, 2, workers=8, cpus=0.5) == (2, 1, 4)
    assert fitting(4, 4, workers=4).of(fitting(8, 4, workers=4)) == "learner.workers=2 of 4, env.workers=2 of 4"


def test_roles_on_devices_of_their_own_count():
    assert parts_that_fit(three_roles("own", workers=4), [a_node(7)]).ranks == 2


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_colocated_server_takes_a_part_of_each_bundle(gpus):
    config = Config()
    config.engine.placement = "colocated"
    assert rank_room(config, gpus) == Room(0.9, 1.0, {"GPU": 1.0, "CPU": 1.0})
    config = three_roles()
    config.engine.placement = "colocated"
    assert rank_room(config, gpus) == Room(0.3, 0.3333, {"GPU": 1.0, "CPU": 1.0})
    assert 3 * 0.3 + COLOCATED_SHARE <= 1.0
    assert rank_room(config, 0) == Room(0.0, 0.3333)  # nothing to share without a GPU


def test_colocated_servers_need_no_gpus_beside_the_learners():
    config = Config()
    config.learner.workers = config.engine.replicas = 4
    assert gpus_needed(config) == 8
    config.engine.placement = "colocated"
    assert gpus_needed(config) == 4
    assert gpu_share(1, "vllm", "colocated") == 1.0


def test_a_colocated_server_is_placed_in_the_bundle_of_its_rank():
    """The group is a double: nothing is placed here."""
    bundles = PlacementGroup.empty()
    room = server_room(EngineConfig(placement="colocated"), 1.0, 3, bundles)
    assert room["num_gpus"] == COLOCATED_SHARE
    assert room["scheduling_strategy"].placement_group is bundles
    assert room["scheduling_strategy"].placement_group_bundle_index == 3
    assert server_room(EngineConfig(tensor_parallel=2), 1.0, 3)["num_gpus"] == 2.0
    assert server_room(EngineConfig(), 0.0, 3)["scheduling_strategy"] == "SPREAD"


def test_only_a_colocated_server_on_a_gpu_starts_with_memory_that_it_can_give_back(tmp_path):
    def flags(placement, share):
        config = EngineConfig(placement=placement)
        return server_options(tmp_path, tmp_path, config, gpu_share=share).arguments

    assert "--enable-sleep-mode" in flags("colocated", 1.0)
    assert "--enable-sleep-mode" not in flags("own", 1.0)
    assert "--enable-sleep-mode" not in flags("colocated", 0.0)


@pytest.mark.parametrize(
    ("gpus", "settings", "shared"),
    [
        (1, {"name": "vllm"}, True),
        (2, {"name": "vllm"}, False),
        (0, {"name": "vllm"}, False),
        (1, {"name": "embedded"}, False),
        (1, {"name": "vllm", "placement": "colocated"}, False),
    ],
)
def test_a_rank_waits_for_the_server_with_which_it_shares_the_only_gpu(gpus, settings, shared, monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    assert shares_gpu(EngineConfig(**settings)) == shared
