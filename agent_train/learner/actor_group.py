"""The driver's handle on the learner ranks."""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_train.cluster.files import RunFiles
from agent_train.cluster.lost import LostError
from agent_train.cluster.network import node_address
from agent_train.cluster.placement import learner_devices, rank_room
from agent_train.config.schema import Config
from agent_train.data.balance import TOKENS, Cost, model_cost
from agent_train.data.packing import RankBatch, check_sample, split_steps, weighted
from agent_train.data.samples import TrainingSample
from agent_train.learner.critic_objective import PRM_REDUCTION, CriticMetrics, PrmMetrics, check_targets, prm_targets
from agent_train.learner.measures import OptimizerStep, UpdateMetrics
from agent_train.learner.parallel import deal_to_ranks, replica_size
from agent_train.learner.worker import LearnerWorker
from agent_train.report.timeline import Timeline
from agent_train.weights.sync import TensorInfo, WeightAddress, WeightTransferError, free_port

# A rank that dies breaks the others' collectives, and their errors may come first. This long the cause is waited for.
CAUSE_SECONDS = 15.0
STATE_POLL_SECONDS = 0.1
UNAVAILABLE_SECONDS = 1.0  # until a rank is asked again

# The batch of each rank, and references into the object store that give it to an actor.
Shipped = tuple[list[RankBatch], list[Any]]
Ship = Callable[[Sequence[TrainingSample], Cost], Shipped]


class LearnerError(RuntimeError):
    """A role of the learner failed: a rank died, raised, or did not answer in time. Names the role, the call and the rank."""


class RankLostError(LearnerError, LostError):
    """A rank died or did not answer in time, and with it the role."""


def shipping(config: Config, put: Callable[[RankBatch], Any] = ray.put) -> Ship:
    """Packs samples and puts them into Ray's object store once a step, for every model of the same cost that shares the function.

    Weights and other numbers of tokens differ from call to call and are sent with each. Raises ValueError if a sample
    is malformed, two have the same id, or none has a sampled token.
    """
    # Those of a step: one to score all samples, one for each optimizer step; twice, since a critic may have another cost.
    known = deque[tuple[list[TrainingSample], Cost, Shipped]](maxlen=2 * (1 + config.algorithm.updates_per_step))
    sent_later: dict[str, Any] = {
        name: [] for name in ("rewards", "advantages", "reference", "values", "targets", "prm", "teacher")
    }

    def ship(samples: Sequence[TrainingSample], cost: Cost) -> Shipped:
        for sample in samples:
            check_sample(sample)
        if twice := [name for name, count in Counter(sample.id for sample in samples).items() if count > 1]:
            raise ValueError(f"two samples have the id {twice[0]!r}; ids must be unique within a step")
        bare = [replace(sample, temperature=1.0, weight=0.0, in_loss=True, **sent_later) for sample in samples]
        for earlier, its_cost, shipped in known:
            if its_cost == cost and earlier == bare:
                return shipped
        batches = deal_to_ranks(bare, config.learner, cost)
        replica = replica_size(config.learner)  # neighbouring ranks, which have the same batch
        references = [reference for batch in batches[::replica] for reference in [put(batch)] * replica]
        known.append((bare, cost, (batches, references)))
        return known[-1][-1]

    return ship


class _Actor(LearnerWorker):
    @ray.method(concurrency_group="beside")
    def wait(self) -> None:
        """Never return: a caller that waits learns when this process ends, also while no other call is made."""
        threading.Event().wait()

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def open_store_here(self) -> tuple[str, int]:
        host = str(ray.util.get_node_ip_address())
        return host, self.open_store(host)

    def weight_rendezvous(self) -> tuple[str, int]:
        return node_address(), free_port()


class Learner:
    """The N ranks of one role as Ray actors, on GPUs where the cluster has any, else on CPUs. Make one with `await Learner.start(...)`.

    Each call waits at most `config.learner.timeout` seconds. If a rank fails, the call raises LearnerError, the ranks
    are killed and every further call raises. Malformed samples raise ValueError, and no rank is killed.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        config: Config,
        role: str = "policy",
        ship: Ship | None = None,
        player: str | None = None,
    ):
        self.role = role
        self.name = role if player is None else f"players/{player}"  # unlike the role no other of the run has it
        self.timeline = Timeline()  # gets the calls of each rank, by this process's clock
        self._name = "learner" if self.name == "policy" else f"learner: {self.name}"
        self.actors = list(actors)
        self.config = config
        self._manifest: list[TensorInfo] = []
        self._cost = TOKENS
        self._ship = ship or shipping(config)
        self.files = RunFiles()  # knows which nodes lack the run folder, in which all is written
        self._nodes: list[str] = []  # of each rank
        self._saving: list[str] = []
        self._ended = ""
        self._failure: type[LearnerError] = LearnerError  # of each call after the end

    @classmethod
    async def start(
        cls,
        model_dir: str | Path,
        config: Config,
        role: str = "policy",
        bundles: PlacementGroup | None = None,
        ship: Ship | None = None,
        player: str | None = None,
    ) -> "Learner":
        """Start the ranks and load the model from a folder that every node can read. Ray must be running.

        `bundles` come from `shared_devices`. Models that share `ship` send samples once. `player` is who has the policy
        for itself. Raises LearnerError if Ray is
        not running, there are too few GPUs, or a rank did not start.
        """
        if not ray.is_initialized():
            raise LearnerError("the learner runs as Ray actors and Ray is not running: call ray.init() first")
        world = config.learner.workers
        gpus = _gpus(config)
        room = rank_room(config, gpus)
        held = {"num_gpus": room.gpus, "num_cpus": room.cpus}
        make = ray.remote(max_restarts=0, concurrency_groups={"beside": 1}, **held)(_Actor)
        arguments = (world, config, "cuda" if gpus else "cpu", role)
        places: list[dict[str, Any]] = [{} for _ in range(world)]
        if bundles is not None:
            places = [{"scheduling_strategy": PlacementGroupSchedulingStrategy(bundles, rank)} for rank in range(world)]
        actors = [make.options(**place).remote(rank, *arguments) for rank, place in enumerate(places)]
        learner = cls(actors, config, role, ship, player)
        try:
            ((host, port),) = await learner._call("open_store_here", [()], "open the store of rank 0")
            learner._cost = model_cost(model_dir)
            learner._manifest = await learner._on_all("start", host, port, _absolute(model_dir))
            learner._nodes = await learner._call("node", [()] * world)
        except BaseException:
            learner.close()
            raise
        return learner

    async def update(
        self,
        samples: Sequence[TrainingSample],
        *,
        lr_scale: float = 1.0,
        kl_coef: float = 0.0,
        version: int | None = None,
    ) -> UpdateMetrics:
        """`algorithm.updates_per_step` optimizer steps, each on its part of the samples, which have advantages.

        Above a `kl_coef` of 0 they need their `reference`. `version` is of the policy's weights as they are.
        """
        fields = ("weight", "advantages", "reference")
        return (await self._on_samples("update", self._steps(samples), fields, lr_scale, kl_coef, version))[0]

    async def sft(self, samples: Sequence[TrainingSample], lr: float) -> OptimizerStep:
        """One supervised step on the masked tokens of the samples, at this learning rate."""
        return (await self._on_samples("sft", [weighted(samples)], ("weight",), lr))[0]

    async def update_critic(self, samples: Sequence[TrainingSample], *, lr_scale: float = 1.0) -> CriticMetrics:
        """One training step of the critic: as many optimizer steps as the policy's. Samples need `targets`; for `critic.clip`, `values`."""
        check_targets(samples, self.config.critic.clip)
        fields = ("weight", "targets", "values")
        return (await self._on_samples("update_critic", self._steps(samples), fields, lr_scale))[0]

    async def update_prm(
        self, samples: Sequence[TrainingSample], outcomes: Mapping[str, float], *, lr_scale: float = 1.0
    ) -> PrmMetrics:
        """One optimizer step of PRIME's reward model, on all samples of each trajectory.

        They need `prm` (its own present log-probabilities) and `reference` (those of the model that it started from).
        `outcomes` by the trajectory's id are from 0 (wrong) to 1 (right).
        """
        started = time.monotonic()
        taught, measures = prm_targets(samples, outcomes, self.config.algorithm.advantage.prime_beta)
        steps, fields = [weighted(taught, PRM_REDUCTION)], ("weight", "advantages")
        step: OptimizerStep = (await self._on_samples("update_prm", steps, fields, lr_scale))[0]
        seconds = time.monotonic() - started
        return PrmMetrics(**measures, grad_norm=step.grad_norm, lr=step.lr, skipped=step.skipped, seconds=seconds)

    async def logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """The log-probability of each sampled token of each sample, 0.0 elsewhere: at the sample's temperature, a teacher's at 1."""
        if self.role == "teacher":
            samples = [replace(sample, temperature=1.0) for sample in samples]
        return await self._of_samples("logprobs", samples)

    async def reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """As `logprobs`, of the policy as the run began: the model without its adapters (`lora.rank` above 0)."""
        return await self._of_samples("logprobs_without_adapters", samples)

    async def values(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        """The critic's value before each sampled token of each sample, 0.0 elsewhere."""
        return await self._of_samples("values", samples)

    async def scores(self, samples: Sequence[TrainingSample]) -> list[float]:
        """The reward model's score of each sample at its last sampled token. That of a trajectory is the score of its last sample."""
        return await self._of_samples("scores", samples)

    async def apply_loss_gradients(
        self, samples: Sequence[TrainingSample], derivatives: Sequence[Sequence[float]], lr: float
    ) -> OptimizerStep:
        """One optimizer step, given the loss's derivative by each token's log-probability, or by the score at the last sampled token."""
        along = [replace(sample, advantages=list(own)) for sample, own in zip(samples, derivatives, strict=True)]
        fields = ("weight", "advantages")
        return (await self._on_samples("apply_loss_gradients", [weighted(along)], fields, lr))[0]

    async def load(self, model_dir: str | Path) -> None:
        """Take the model of another folder, as if the ranks had just started with it."""
        self._manifest = await self._on_all("load", _absolute(model_dir))

    async def _of_samples(self, method: str, samples: Sequence[TrainingSample]) -> list[Any]:
        answers = await self._on_samples(method, [samples], ())
        found = {
            sample.id: answer
            for batch, of_rank in zip(self._ship(samples, self._cost)[0], answers, strict=True)
            for sample, answer in zip(batch.samples, chain.from_iterable(of_rank), strict=True)
        }
        return [found[sample.id] for sample in samples]

    async def _on_samples(
        self, method: str, steps: Sequence[Sequence[TrainingSample]], fields: Sequence[str], *arguments: Any
    ) -> list[Any]:
        """The answers of ranks 0, 1, ... on their batches of each optimizer step. `fields` of each sample are sent with the call."""
        shipped = [self._ship(samples, self._cost) for samples in steps]
        numbers = {s.id: {name: getattr(s, name) for name in ("temperature", *fields)} for own in steps for s in own}
        calls = []
        for rank in range(len(shipped[0][0])):
            sent = [{sample.id: numbers[sample.id] for sample in batches[rank].samples} for batches, _ in shipped]
            calls.append((method, sent, arguments, *(references[rank] for _, references in shipped)))
        return await self._call("on_batches", calls, method)

    def _steps(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        algorithm = self.config.algorithm
        whole = algorithm.reduction == "prompt-mean" or self.config.learner.shared_prefix
        parts = split_steps(samples, algorithm.updates_per_step, self._cost, whole)
        return [weighted(part, algorithm.reduction, algorithm.reduction_length) for part in parts]

    async def weight_address(self, receivers: int) -> WeightAddress:
        """A rendezvous at rank 0, of its weight group with so many receivers. Connect soon: nothing reserves the port."""
        ((host, port),) = await self._call("weight_rendezvous", [()], "find an address of rank 0")
        return WeightAddress(host, port, 1 + receivers)

    async def connect_weights(self, address: WeightAddress) -> None:
        """Rank 0 joins the weight group as sender; returns when the receivers have joined too, or raises WeightTransferError."""
        if failure := await self._on_all("connect_weights", address):
            raise WeightTransferError(failure)

    def manifest(self) -> list[TensorInfo]:
        return list(self._manifest)

    async def send_weights(self) -> dict[str, int]:
        """Send all weights to the receivers; the checksum of each by name. Raises WeightTransferError, which the ranks survive."""
        sums = await self._on_all("send_weights")
        if isinstance(sums, str):
            raise WeightTransferError(sums)
        return sums

    async def checksums(self) -> dict[str, int]:
        """The checksum of each tensor that an engine would be given, by name."""
        sums: dict[str, int] = await self._on_all("checksums")
        return sums

    async def save(self, folder: str | Path) -> None:
        """Write the weights, adapters added to them, as a Hugging Face folder, whole or not at all; one that is there is replaced."""
        await self._write("save", folder)

    async def save_adapter(self, folder: str | Path) -> dict[str, int]:
        """Write the adapters alone in PEFT's format, whole or not at all; the checksum of each tensor by name."""
        return await self._write("save_adapter", folder)

    async def save_weights(self, folder: str | Path, whole: bool) -> dict[str, int]:
        """Write the weights, or how they changed, for an engine to read; the checksum of each by name. See the worker's."""
        return await self._write("save_weights", folder, whole)

    async def _write(self, method: str, folder: str | Path, *arguments: Any) -> Any:
        """Call a method with which rank 0 writes a folder, send the folder to all nodes, and return its answer."""
        answer = await self._on_all(method, _absolute(folder), *arguments)
        await self.files.share(_absolute(folder), self._nodes[:1])
        return answer

    async def save_state(self, folder: str | Path, export: str | Path | None = None) -> None:
        """Have the ranks copy all that a resumed run needs and write it; returns with the copies made, see `state_saved`.

        A Hugging Face folder of the same weights is written to `export`.
        """
        folders = _absolute(folder), None if export is None else _absolute(export)
        self._saving = [each for each in folders if each is not None]
        await self._on_all("save_state", *folders)

    async def state_saved(self) -> str:
        """Wait until what `save_state` began is written: "" where it went well, else what failed. Never raises for that."""
        while True:
            if self._ended:
                return f"the learner ended before: {self._ended}"
            refs = [actor.state_saved.remote() for actor in self.actors]
            said = await asyncio.gather(*(asyncio.wrap_future(r.future()) for r in refs), return_exceptions=True)
            failures = sorted((answer for answer in said if answer), key=lambda each: isinstance(each, BaseException))
            if failures:
                return str(failures[0]).split("\n")[0]
            if None not in said:
                return await self._bring_state()
            await asyncio.sleep(STATE_POLL_SECONDS)

    async def _bring_state(self) -> str:
        """Move here what ranks wrote elsewhere; "" where it went well, else why not."""
        try:
            for folder in self._saving:
                await self.files.bring(folder, set(self._nodes))
        except (OSError, RuntimeError) as error:
            return str(error)
        return ""

    async def load_state(self, folder: str | Path) -> None:
        """Go on from what `save_state` wrote, on any number of ranks. Raises LearnerError if the folder is of another model."""
        await self.files.give(_absolute(folder))
        await self._on_all("load_state", _absolute(folder))
        await self.files.forget(_absolute(folder))

    async def watch(self) -> None:
        """Raise RankLostError when a rank dies, until cancelled: a rollout may call none for long."""
        ends = [asyncio.create_task(_end_of(actor)) for actor in self.actors]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended:  # else a call has noticed
                raise self._failed("watch", ends)
        finally:
            for end in ends:
                end.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks it as seen
                end.cancel()

    def close(self) -> None:
        """Kill the ranks. May be called twice."""
        self._ended = self._ended or "it was closed"
        # After ray.shutdown() the actors are gone, and a call would start Ray again.
        for actor in self.actors if ray.is_initialized() else []:
            ray.kill(actor, no_restart=True)
        self.actors = []

    async def _on_all(self, method: str, *arguments: Any) -> Any:
        return (await self._call(method, [arguments] * len(self.actors)))[0]

    async def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], what: str = "") -> list[Any]:
        """Call a method of ranks 0, 1, ... with their arguments; their answers in that order. Errors call it `what`."""
        what = what or method
        if self._ended:
            raise self._failure(f"{self._name}: cannot {what}: {self._ended}")
        refs = [getattr(self.actors[rank], method).remote(*own) for rank, own in enumerate(arguments)]
        answers, begun = [asyncio.wrap_future(ref.future()) for ref in refs], time.monotonic()
        for rank, answer in enumerate(answers):  # marks the exception of an abandoned one as seen
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            row = (f"{self.name} rank", rank)
            answer.add_done_callback(lambda _, row=row: self.timeline.add(row, what, begun))  # type: ignore[misc]
        timeout = self.config.learner.timeout
        await asyncio.wait(answers, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.done() and answer.exception() for answer in answers):
            await asyncio.wait(answers, timeout=CAUSE_SECONDS, return_when=asyncio.ALL_COMPLETED)
            raise self._failed(what, answers)
        late = [str(rank) for rank, answer in enumerate(answers) if not answer.done()]
        if late:
            self._ended, self._failure = f"{what} took longer than {timeout:g} s", RankLostError
            self.close()
            raise RankLostError(
                f"{self._name}: {what}: rank {', '.join(late)} did not answer within learner.timeout={timeout:g} s"
            )
        return [answer.result() for answer in answers]

    def _failed(self, what: str, answers: Sequence[asyncio.Future[Any]]) -> LearnerError:
        """The error to raise: a rank's death goes before the errors that it causes in others."""
        ended = [(rank, answer.exception()) for rank, answer in enumerate(answers) if answer.done()]
        errors = [(rank, error) for rank, error in ended if error is not None]
        died = [(rank, error) for rank, error in errors if isinstance(error, RayActorError)]
        rank, error = (died or errors)[0]
        self._ended = f"rank {rank} failed in {what}"
        made = "in its creation task" not in str(error)  # else its constructor raised
        self._failure = RankLostError if died and made else LearnerError
        self.close()
        failure = self._failure(f"{self._name}: {what}: rank {rank} {'died' if died else 'failed'}: {_reason(error)}")
        failure.__cause__ = error
        return failure


async def _end_of(actor: Any) -> None:
    """Raise RayActorError when an actor is dead for good, and not merely out of reach."""
    while True:
        try:
            await asyncio.wrap_future(actor.wait.remote().future())
        except ActorUnavailableError:
            await asyncio.sleep(UNAVAILABLE_SECONDS)


def _reason(error: BaseException) -> str:
    """In one line. Of a rank that could not be made, Ray's text ends with the exception that its constructor raised."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [""]
    if "in its creation task" in lines[0]:
        return lines[-1]
    kind = type(cause).__name__
    cure = "; lower learner.microbatch_tokens (docs/troubleshooting.md, Out of memory)"
    return f"{kind}: {lines[0]}{cure if kind == 'OutOfMemoryError' else ''}"


async def shared_devices(config: Config) -> PlacementGroup | None:
    """One bundle for rank i of all roles, where roles share devices; None where each rank is placed for itself."""
    bundle = rank_room(config, _gpus(config)).bundle
    if bundle is None:
        return None
    bundles = placement_group([dict(bundle)] * config.learner.workers, strategy="PACK")
    try:
        await asyncio.wait_for(asyncio.wrap_future(bundles.ready().future()), config.learner.timeout)
    except TimeoutError:
        remove_placement_group(bundles)
        raise LearnerError(
            f"learner: Ray did not give {config.learner.workers} devices of {bundle} in learner.timeout={config.learner.timeout:g} s"
        ) from None
    return bundles


def _gpus(config: Config) -> int:
    """The number of GPUs in the cluster. Raises LearnerError if there are fewer than the roles need."""
    gpus, needed = int(ray.cluster_resources().get("GPU", 0)), learner_devices(config)
    if 0 < gpus < needed:
        less = " or share them: learner.placement=shared" if needed > config.learner.workers else ""
        raise LearnerError(
            f"learner.workers={config.learner.workers} need {needed} GPUs and the cluster has {gpus}: lower learner.workers{less}"
        )
    return gpus


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).absolute())
