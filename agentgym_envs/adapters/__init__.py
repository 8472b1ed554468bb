"""Environments of other packages, under ids such as `gymnasium:NAME` or `openenv:URL`."""

from __future__ import annotations


def register_adapters() -> None:
    from agentgym.core.registration import Adapter, register_adapter

    here = "agentgym_envs.adapters"
    register_adapter(
        Adapter(
            "gymnasium",
            f"{here}.gymnasium:GymnasiumEnv",
            install="gymnasium",
            description="Gymnasium environments with text or few numbers to see",
            example="FrozenLake-v1",
        )
    )
    register_adapter(
        Adapter(
            "openenv",
            "agentgym.service.openenv.client:OpenEnvEnv",
            install="aiohttp",  # no OpenEnv package: agentgym implements its wire protocol
            description="environments on OpenEnv servers",
            example="http://127.0.0.1:8000",
        )
    )
    register_adapter(
        Adapter(
            "reasoning_gym",
            f"{here}.reasoning_gym:ReasoningGymEnv",
            install="reasoning-gym",
            description="Reasoning Gym's generated puzzles",
            example="chain_sum",
        )
    )
    register_adapter(
        Adapter(
            "skyrl_gym",
            f"{here}.skyrl_gym:SkyRLGymEnv",
            install="skyrl-gym",
            description="SkyRL-Gym's text environments",
            example="gsm8k",
        )
    )
    register_adapter(
        Adapter(
            "verifiers",
            f"{here}.verifiers:VerifiersEnv",
            install="verifiers>=0.1.14,<0.4",
            description="environments of verifiers that have load_environment",
            example="wordle",
        )
    )
