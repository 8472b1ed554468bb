"""The extension points of training; docs/algorithms.md says what each takes. Nothing here imports torch."""

from agentgym.core.extensions import ExtensionPoint

_ALGORITHMS = "agent_train.algorithms"


def _functions(module: str, names: str, ending: str = "") -> dict[str, str]:
    return {name: f"{_ALGORITHMS}.{module}:{name.replace('-', '_')}{ending}" for name in names.split()}


losses = ExtensionPoint(
    "policy loss",
    "agentgym.losses",
    {
        "ppo": f"{_ALGORITHMS}.policy_losses:ppo_clip",
        **_functions(
            "policy_losses", "reinforce gspo gspo_token gmpo cispo sapo topr topr_sequence raft_pp kimi dppo aipo m2po"
        ),
    },
)
# One ratio for all tokens of a sample, times one advantage: credit that differs within a sample would be averaged away.
WHOLE_SAMPLE_LOSSES = frozenset({"gspo", "gmpo"})

advantages = ExtensionPoint(
    "advantage",
    "agentgym.advantages",
    _functions(
        "step_advantages",
        "group rloo opo maxrl remax best_of reinforce_pp reinforce_pp_baseline gae bilevel_gae turn gigpo prime distill constant",
        "_advantage",
    ),
)
filters = ExtensionPoint(
    "filter",
    "agentgym.filters",
    {
        "none": f"{_ALGORITHMS}.selection:all_groups",
        "spread": f"{_ALGORITHMS}.selection:with_spread",
        "uncertain": f"{_ALGORITHMS}.selection:uncertain",
        "top_p": f"{_ALGORITHMS}.selection:nucleus",
    },
)
corrections = ExtensionPoint(
    "correction",
    "agentgym.corrections",
    _functions("corrections", "tis icepop seq-mask-tis sequence-is geometric-is sequence-mask geometric-mask"),
)
reward_shaping = ExtensionPoint("reward shaping", "agentgym.reward_shaping", {})
rollouts = ExtensionPoint("rollout", "agentgym.rollouts", {"episode": "agentgym.rollout.episode:run_episode"})
# Called as `await start(config.engine, model_dir, logs, dtype=, seed=, adapter_rank=, deterministic=, timeline=, on_progress=)`.
engines = ExtensionPoint(
    "engine",
    "agentgym.engines",
    {
        "vllm": "agent_train.engine.vllm:VllmEngine.start",
        "embedded": "agent_train.engine.embedded:EmbeddedEngine.start",
        "openai": "agent_train.engine.external:OpenAIEngine.start",
        "sglang": "agent_train.engine.external:SglangEngine.start",
    },
)
# Each called as `track = start(run_folder)`, and then `track(record)`.
trackers = ExtensionPoint(
    "tracker",
    "agentgym.trackers",
    {name: f"agent_train.report.trackers:{name}" for name in ("tensorboard", "wandb", "mlflow", "opentelemetry")},
)
TRACKER_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "opentelemetry": (
        "opentelemetry.exporter.otlp.proto.http",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    ),
}

POINTS = {
    point.group.removeprefix("agentgym."): point
    for point in (losses, advantages, filters, corrections, reward_shaping, rollouts, engines, trackers)
}
