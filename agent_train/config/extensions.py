"""The extension points of training. A setting names an implementation; docs/algorithms.md and docs/training.md say what each takes.

Nothing here imports torch: settings are checked before it is imported.
"""

from __future__ import annotations

from agentgym.core.extensions import ExtensionPoint

_ALGORITHMS = "agent_train.algorithms"

losses = ExtensionPoint(
    "policy loss",
    "agentgym.losses",
    {
        "ppo": f"{_ALGORITHMS}.policy_losses:ppo_clip",
        "reinforce": f"{_ALGORITHMS}.policy_losses:reinforce",
        "gspo": f"{_ALGORITHMS}.policy_losses:gspo",
        "gspo_token": f"{_ALGORITHMS}.policy_losses:gspo_token",
        "gmpo": f"{_ALGORITHMS}.policy_losses:gmpo",
        "cispo": f"{_ALGORITHMS}.policy_losses:cispo",
        "sapo": f"{_ALGORITHMS}.policy_losses:sapo",
        "topr": f"{_ALGORITHMS}.policy_losses:topr",
        "topr_sequence": f"{_ALGORITHMS}.policy_losses:topr_sequence",
        "raft_pp": f"{_ALGORITHMS}.policy_losses:raft_pp",
        "kimi": f"{_ALGORITHMS}.policy_losses:kimi",
        "dppo": f"{_ALGORITHMS}.policy_losses:dppo",
        "aipo": f"{_ALGORITHMS}.policy_losses:aipo",
        "m2po": f"{_ALGORITHMS}.policy_losses:m2po",
    },
)
# One ratio for all tokens of a sample, times one advantage: credit that differs within a sample would be averaged away.
WHOLE_SAMPLE_LOSSES = frozenset({"gspo", "gmpo"})

advantages = ExtensionPoint(
    "advantage",
    "agentgym.advantages",
    {
        name: f"{_ALGORITHMS}.step_advantages:{name}_advantage"
        for name in (
            *("group", "rloo", "opo", "maxrl", "remax", "best_of", "reinforce_pp", "reinforce_pp_baseline"),
            *("gae", "bilevel_gae", "turn", "gigpo", "prime", "distill", "constant"),
        )
    },
)
filters = ExtensionPoint(
    "filter",
    "agentgym.filters",
    {
        "none": f"{_ALGORITHMS}.filters:all_groups",
        "spread": f"{_ALGORITHMS}.filters:with_spread",
        "uncertain": f"{_ALGORITHMS}.filters:uncertain",
        "top_p": f"{_ALGORITHMS}.filters:nucleus",
    },
)
corrections = ExtensionPoint(
    "correction",
    "agentgym.corrections",
    {
        name: f"{_ALGORITHMS}.corrections:{name.replace('-', '_')}"
        for name in (
            *("tis", "icepop", "seq-mask-tis", "sequence-is", "geometric-is"),
            *("sequence-mask", "geometric-mask"),
        )
    },
)
reward_shaping = ExtensionPoint("reward shaping", "agentgym.reward_shaping", {})
rollouts = ExtensionPoint("rollout", "agentgym.rollouts", {"episode": "agentgym.rollout.episode:run_episode"})
engines = ExtensionPoint(
    "engine",
    "agentgym.engines",
    {"vllm": "agent_train.engine.start:start_vllm", "embedded": "agent_train.engine.start:start_embedded"},
)
trackers = ExtensionPoint("tracker", "agentgym.trackers", {})

POINTS: dict[str, ExtensionPoint] = {
    "losses": losses,
    "advantages": advantages,
    "filters": filters,
    "corrections": corrections,
    "reward_shaping": reward_shaping,
    "rollouts": rollouts,
    "engines": engines,
    "trackers": trackers,
}
