"""The driver's handle on the learner ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from agent_train.config import Config
from agent_train.learner.measures import SftMetrics, UpdateMetrics
from agent_train.learner.worker import LearnerWorker
from agent_train.packing import shares, split_ranks
from agent_train.placement import gpu_share
from agent_train.rows import Row
from agent_train.weights.manifest import TensorInfo, WeightAddress

# A rank that dies breaks the others' collectives, and their errors may come first. This long the cause is waited for.
CAUSE_SECONDS = 5.0


class LearnerError(RuntimeError):
    """The learner failed: a rank died, raised, or did not answer in time. Names the rank and the call."""


class _Actor(LearnerWorker):
    def node_ip(self) -> str:
        """Address of the node that this rank runs on."""
        return str(ray.util.get_node_ip_address())


class Learner:
    """N ranks as Ray actors, each with a GPU where the cluster has any, else a CPU. Make one with `await Learner.start(...)`.

    Each call goes to all ranks and waits at most `config.learner.timeout` seconds. After a failure the ranks are killed
    and every further call raises.
    """

    def __init__(self, actors: Sequence[Any], config: Config):
        self._actors = list(actors)
        self._config = config
        self._manifest: list[TensorInfo] = []
        self._ended = ""

    @classmethod
    async def start(cls, model_dir: str | Path, config: Config) -> Learner:
        """Start the ranks, let them find each other, load the model. Ray must be running.

        Args:
            model_dir: a Hugging Face folder that every node can read.
            config: of the run.

        Raises:
            LearnerError: Ray is not running, there are too few GPUs, or a rank did not start.
        """
        if not ray.is_initialized():
            raise LearnerError("the learner runs as Ray actors and Ray is not running: call ray.init() first")
        world = config.learner.workers
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if 0 < gpus < world:
            raise LearnerError(
                f"learner.workers={world} need a GPU each and the cluster has {gpus}: lower learner.workers"
            )
        options = {"num_gpus": gpu_share(gpus, config.engine.name), "num_cpus": 1}
        device = "cuda" if gpus else "cpu"
        actor = ray.remote(max_restarts=0, **options)(_Actor)
        learner = cls([actor.remote(rank, world, config, device) for rank in range(world)], config)
        try:
            host = (await learner._call("find the node of rank 0", "node_ip", [()]))[0]
            port = (await learner._call("open the store of rank 0", "open_store", [(host,)]))[0]
            where = (host, port, _absolute(model_dir))
            learner._manifest = (await learner._call("start", "start", [where] * world))[0]
        except BaseException:
            learner.close()
            raise
        return learner

    async def update(self, rows: Sequence[Row], *, lr_scale: float = 1.0) -> UpdateMetrics:
        """One training step: `algorithm.updates_per_step` optimizer steps, each on its part of the rows.

        Args:
            rows: with their advantages.
            lr_scale: factor of the learning rate.

        Raises:
            ValueError: a row is malformed, or no row holds a sampled token.
            LearnerError: a rank failed.
        """
        settings, algorithm = self._config.learner, self._config.algorithm
        parts = [part for part in split_ranks(rows, algorithm.updates_per_step) if any(any(r.mask) for r in part)]
        reduction = (algorithm.reduction, algorithm.reduction_length)
        steps = [
            shares(part, settings.workers, settings.microbatch_tokens, *reduction) for part in parts or [list(rows)]
        ]
        return (await self._call("update", "update", [(list(own), lr_scale) for own in zip(*steps, strict=True)]))[0]

    async def sft(self, rows: Sequence[Row], lr: float) -> SftMetrics:
        """One supervised step on the masked tokens of the rows, at this learning rate. Raises as `update`."""
        dealt = shares(rows, self._config.learner.workers, self._config.learner.microbatch_tokens)
        return (await self._call("sft", "sft", [(share, lr) for share in dealt]))[0]

    async def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """The policy's log-probability of each sampled token of each row, at the row's temperature, 0.0 elsewhere."""
        dealt = shares(rows, self._config.learner.workers, self._config.learner.microbatch_tokens)
        answers = await self._call("logprobs", "logprobs", [(share,) for share in dealt])
        found = {
            id(row): scored
            for share, of_rank in zip(dealt, answers, strict=True)
            for packed, of_bin in zip(share.micro_batches, of_rank, strict=True)
            for row, scored in zip(packed, of_bin, strict=True)
        }
        return [found[id(row)] for row in rows]

    async def connect_weights(self, address: WeightAddress) -> None:
        """Rank 0 joins the weight group as sender; returns when the receivers have joined too."""
        await self._call("connect_weights", "connect_weights", self._each(address))

    def manifest(self) -> list[TensorInfo]:
        """Names, shapes and type of the weights, in the order in which `send_weights` sends them."""
        return list(self._manifest)

    async def send_weights(self) -> dict[str, int]:
        """Send all weights to the receivers; the checksum of each by name."""
        return (await self._call("send_weights", "send_weights", self._each()))[0]

    async def save(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder, whole or not at all; one that is there is replaced."""
        await self._call("save", "save", self._each(_absolute(folder)))

    def close(self) -> None:
        """Kill the ranks. May be called twice."""
        self._ended = self._ended or "it was closed"
        # After ray.shutdown() the actors are gone, and a call would start Ray again.
        for actor in self._actors if ray.is_initialized() else []:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _each(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [arguments] * len(self._actors)

    async def _call(self, what: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of ranks 0, 1, ... with their arguments; their answers in that order."""
        if self._ended:
            raise LearnerError(f"learner: cannot {what}: {self._ended}")
        refs = [getattr(self._actors[rank], method).remote(*own) for rank, own in enumerate(arguments)]
        answers = [asyncio.wrap_future(ref.future()) for ref in refs]
        for answer in answers:
            answer.add_done_callback(_look_at)
        timeout = self._config.learner.timeout
        await asyncio.wait(answers, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for answer in answers):
            await asyncio.wait(answers, timeout=CAUSE_SECONDS, return_when=asyncio.ALL_COMPLETED)
            raise self._failed(what, answers)
        late = [str(rank) for rank, answer in enumerate(answers) if not answer.done()]
        if late:
            self._ended = f"{what} took longer than {timeout:g} s"
            self.close()
            raise LearnerError(
                f"learner: {what}: rank {', '.join(late)} did not answer within learner.timeout={timeout:g} s"
            )
        return [answer.result() for answer in answers]

    def _failed(self, what: str, answers: Sequence[asyncio.Future[Any]]) -> LearnerError:
        """The error to raise; a rank that died is its own cause, before what it made the others raise."""
        errors = [
            (rank, answer.exception()) for rank, answer in enumerate(answers) if answer.done() and answer.exception()
        ]
        died = [(rank, error) for rank, error in errors if isinstance(error, RayActorError)]
        rank, error = (died or errors)[0]
        self._ended = f"rank {rank} failed in {what}"
        self.close()
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]
        failure = LearnerError(
            f"learner: {what}: rank {rank} {'died' if died else 'failed'}: {type(cause).__name__}: {lines[0]}"
        )
        failure.__cause__ = error
        return failure


def _absolute(folder: str | Path) -> str:
    """The path as a rank sees it, whose working directory may be another."""
    return str(Path(folder).absolute())


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Mark the exception of an answer that nobody waits for any more as seen."""
    if not answer.cancelled():
        answer.exception()
