"""One learner rank: a shard of the model and of its optimizer. A Ray actor in a run, a plain object in a test.

Every method that touches the weights is a collective: all ranks call it with their own batches of the same step.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from agent_train.algorithms.losses import weighted_sum
from agent_train.cluster.network import take_interface
from agent_train.config.schema import Config
from agent_train.data.packing import MicroBatch, RankBatch
from agent_train.learner import critic_objective, fsdp, measures
from agent_train.learner.determinism import make_deterministic
from agent_train.learner.head import PackedPolicy, PackedValue
from agent_train.learner.lora import adapters_off, add_adapters
from agent_train.learner.parallel import clip_gradients, parallel_dims
from agent_train.learner.policy_objective import PolicyObjective, policy_objective
from agent_train.learner.roles import VALUED, learning_rate, learns, sends_adapters
from agent_train.learner.state import StateStore, make_optimizer, set_lr
from agent_train.weights.collective import WeightGroup, broadcast_buckets, checksum, make_group
from agent_train.weights.files import WeightCopy
from agent_train.weights.sync import TensorInfo, WeightAddress, WeightTransferError


class LearnerWorker:
    """Rank `rank` of `world`, of one role. `start` comes first; `open_store` before it on rank 0.

    Rank 0 writes files and sends weights. The device is "cpu" (gloo, one thread) or "cuda" (NCCL, the first GPU).
    """

    def __init__(self, rank: int, world: int, config: Config, device: str, role: str = "policy"):
        self.rank = rank
        self.world = world
        self.config = config
        self.role = role
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._timeout = timedelta(seconds=config.learner.timeout)
        self._store: dist.TCPStore | None = None
        self._weights: WeightGroup | None = None
        self._written = WeightCopy()  # the policy as the engine has it, with `engine.weights=delta`
        self.objective: PolicyObjective | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        # The objective of the optimizer's running averages, and their number of steps.
        self._phase = ""
        self.steps = 0
        self.store = StateStore(rank, config.learner.timeout)

    def open_store(self, host: str) -> int:
        """Serve the store through which the ranks find each other, on a port that is free; returns the port."""
        self._store = dist.TCPStore(host, 0, self.world, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return int(self._store.port)

    def start(self, host: str, port: int, model_dir: str) -> list[TensorInfo]:
        """Join the other ranks, load and shard the model. Returns the manifest of the weights that `send_weights` sends."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            # Two threads on cores that the other rank and the engine use are many times slower than one.
            torch.set_num_threads(1)
        if self.config.trainer.deterministic:
            make_deterministic(self.config.trainer.seed)
        transformers.utils.logging.disable_progress_bar()
        if self._store is None:
            self._store = dist.TCPStore(host, port, self.world, is_master=False, timeout=self._timeout)
        take_interface(host, port)
        # Tensors on the host go by gloo if parameters are offloaded.
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.world, timeout=self._timeout
        )
        self.dims = parallel_dims(self.config.learner, self.rank, self.world, self.device.type)
        return self.load(model_dir)

    def load(self, model_dir: str) -> list[TensorInfo]:
        """Load and shard a model in place of the one before, with a new optimizer if it learns."""
        self._model_dir = Path(model_dir)
        self.module = fsdp.shard(self._load_module(model_dir), self.dims, self.config, model_dir, self.device)
        self._phase, self.steps = "", 0
        self.optimizer = None
        if learns(self.config, self.role):
            self.optimizer = make_optimizer(self.module.named_parameters(), self.config.learner)
        return self.manifest()

    def update(
        self, steps: Sequence[RankBatch], lr_scale: float = 1.0, kl_coef: float = 0.0, version: int | None = None
    ) -> measures.UpdateMetrics:
        """One optimizer step for each of this rank's batches; the same metrics on every rank. `version` is as the engine counts."""
        started = time.monotonic()
        objective = self.objective = self.objective or policy_objective(self.config.algorithm)
        objective.check([sample for step in steps for sample in step.samples], kl_coef, version)
        batches = [self._batches(step) for step in steps]
        if objective.needs_start:
            batches[1:] = [
                [replace(batch, start_T=start_T) for batch, start_T in zip(later, self.score(later), strict=True)]
                for later in batches[1:]
            ]
        results = []
        staleness = self.config.trainer.staleness
        lags = staleness + 1 if staleness else 0
        for number, (step, own) in enumerate(zip(steps, batches, strict=True)):
            limit = None
            if objective.needs_drift_limit:
                limit = objective.drift_limit(own, self.score(own), step.n_tokens, self.dims.data_group)
            given: dict[str, Any] = {"number": number, "steps": len(steps), "kl_coef": kl_coef, "version": version}
            loss = partial(objective.contribute, drift_limit=limit, lags=lags, **given)
            results.append(self._optimizer_step("policy", step, own, loss, lr_scale=lr_scale))
        packed_tokens = sum(step.packed_tokens for step in steps)
        return measures.summarise(results, packed_tokens, time.monotonic() - started, kl_coef, lags)

    def on_batches(
        self,
        method: str,
        numbers: Sequence[Mapping[str, Mapping[str, Any]]],
        arguments: Sequence[Any],
        *batches: RankBatch,
    ) -> Any:
        """Call a method on shipped batches, one for each optimizer step, with the present numbers of their samples, by id."""
        given = [batch.with_numbers(own) for batch, own in zip(batches, numbers, strict=True)]
        return getattr(self, method)(given if method in ("update", "update_critic") else given[0], *arguments)

    def sft(self, step: RankBatch, lr: float) -> measures.OptimizerStep:
        def contribute(
            batch: MicroBatch, output: tuple[Tensor, Tensor]
        ) -> tuple[Tensor, measures.Numbers, measures.Numbers]:
            return measures.loss_alone(weighted_sum(-output[0], batch.weights_T, batch.mask_T))

        return self._optimizer_step("sft", step, self._batches(step), contribute, lr)

    def logprobs_without_adapters(self, step: RankBatch) -> list[list[list[float]]]:
        """As `logprobs`, of the model that the adapters were added to."""
        with adapters_off(self.module.model):
            return self.logprobs(step)

    def logprobs(self, step: RankBatch) -> list[list[list[float]]]:
        """The policy's log-probability of each masked token of each sample of each micro-batch, 0.0 elsewhere."""
        return step.by_sample(self.score(self._batches(step)))

    def update_critic(self, steps: Sequence[RankBatch], lr_scale: float = 1.0) -> critic_objective.CriticMetrics:
        """Updates of the critic towards the samples' targets, one optimizer step for each batch; the same metrics on every rank."""
        started = time.monotonic()
        loss = partial(critic_objective.critic_contribute, clip=self.config.critic.clip)
        results = [self._optimizer_step("critic", own, self._batches(own), loss, lr_scale=lr_scale) for own in steps]
        return critic_objective.summarise_critic(results, time.monotonic() - started)

    def update_prm(self, step: RankBatch, lr_scale: float = 1.0) -> measures.OptimizerStep:
        return self._optimizer_step(
            "prm", step, self._batches(step), critic_objective.prm_contribute, lr_scale=lr_scale
        )

    def apply_loss_gradients(self, step: RankBatch, lr: float) -> measures.OptimizerStep:
        """One optimizer step on a loss whose derivatives lie in the samples' `advantages`; see `preference_objective`."""
        along: measures.MicroBatchLoss = (
            critic_objective.along_scores if self.role in VALUED else critic_objective.along_logprobs
        )
        return self._optimizer_step("preference", step, self._batches(step), along, lr)

    def values(self, step: RankBatch) -> list[list[list[float]]]:
        return step.by_sample(self._outputs(self._batches(step)))

    def scores(self, step: RankBatch) -> list[list[float]]:
        scored = self._outputs(self._batches(step))
        return [scores_S[: len(own)].tolist() for scores_S, own in zip(scored, step.micro_batches, strict=True)]

    def save(self, folder: str) -> None:
        self._write(folder, merge=True)

    def save_adapter(self, folder: str) -> dict[str, int]:
        """Write the adapters in PEFT's format, whole or not at all. The checksum of each tensor on rank 0."""
        return {name: checksum(weight) for name, weight in self._write(folder, merge=False).items()}

    def save_weights(self, folder: str, whole: bool) -> dict[str, int]:
        """Write the weights alone for an engine to read: all, or with `engine.weights=delta` what changed since the last time.

        Returns the checksum of each on rank 0, nothing on the others. With `whole`, and the first time, all are written.
        """
        tensors = self._tensors()
        if self.rank:
            for _ in tensors:
                pass
            return {}
        if self._written.tensors and not whole:
            return self._written.write_changes(self.manifest(), tensors, Path(folder))
        keep = self.config.engine.weights == "delta"
        return self._written.write(self.manifest(), tensors, Path(folder), keep)

    def save_state(self, folder: str, export: str | None = None) -> None:
        """Copy model, optimizer, counters and random numbers, and write them into a new folder beside what follows; see `StateStore`."""
        last = None
        if export is not None:
            dtype = self.config.model.dtype
            weights = fsdp.whole_on_host(self.module, self.rank, dtype)
            if self.rank == 0:
                last = partial(fsdp.write_model, self.module, weights, export, self._model_dir, dtype)
        counters: dict[str, int | str] = {"phase": self._phase, "steps": self.steps}
        self.store.begin(self.module, self.optimizer, counters, folder, last)

    def state_saved(self) -> str | None:
        return self.store.saved()

    def load_state(self, folder: str) -> None:
        """Go on from what `save_state` wrote, on any number of ranks. Raises StateError where it is of another model."""
        counters = self.store.load(self.module, self.optimizer, folder)
        self._phase, self.steps = counters["phase"], counters["steps"]

    def connect_weights(self, address: WeightAddress) -> str:
        """Join the weight group, on rank 0; "" where it went well, else why not. The rank survives it."""
        if self.rank == 0:
            if self._weights is not None:
                self._weights.close()
            seconds = self.config.learner.timeout / 2  # so that a receiver that hangs is not taken for this rank
            try:
                self._weights = make_group(address, 0, self.device, connect_seconds=seconds, transfer_seconds=seconds)
            except WeightTransferError as error:
                return str(error)
        return ""

    def manifest(self) -> list[TensorInfo]:
        return [TensorInfo(name, shape, self.config.model.dtype) for name, shape in fsdp.shapes_of(self.module)]

    def send_weights(self) -> dict[str, int] | str:
        """Send every weight to the receivers. Returns the checksum of each on rank 0, or why it failed, nothing on the others."""
        failure = ""
        tensors = self._tensors()
        if self.rank == 0:
            if self._weights is None:
                raise RuntimeError("send_weights: the learner is in no weight group; call connect_weights first")
            try:
                return broadcast_buckets(self._weights, self.manifest(), tensors)
            except WeightTransferError as error:
                failure = str(error)  # the others still gather what is left of the tensors, and need this rank
        for _ in tensors:
            pass
        return failure or {}

    def checksums(self) -> dict[str, int]:
        """The checksum of each tensor that an engine would be given, by name: on rank 0 as of `send_weights` or `save_adapter`."""
        if sends_adapters(self.config):
            adapters = fsdp.whole_on_host(self.module, self.rank, self.config.model.dtype)
            return {name: checksum(whole) for name, whole in adapters.items()}
        return {info.name: checksum(whole) for info, whole in zip(self.manifest(), self._tensors(), strict=True)}

    def _tensors(self) -> Iterator[Tensor]:
        """The weights of the manifest, in its order. Each step is a collective."""
        return (whole for _, whole in fsdp.full_tensors(self.module, fsdp.DTYPES[self.config.model.dtype]))

    def _batches(self, step: RankBatch) -> list[MicroBatch]:
        return [batch.to(self.device) for batch in step.batches()]

    def score(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [output[0] for output in self._outputs(batches)]

    @torch.no_grad()
    def _outputs(self, batches: Sequence[MicroBatch]) -> list[Any]:
        outputs = [self.module(batch) for batch in batches]
        # FSDP keeps what the last forward pass gathered for a backward pass, which does not come.
        self.module.reshard()
        self._empty_cache()
        return outputs

    def _empty_cache(self) -> None:
        """Give the memory of activations back with `learner.offload`: a colocated engine or another role needs it."""
        if self.config.learner.offload and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load_module(self, model_dir: str) -> PackedPolicy | PackedValue:
        settings = self.config.learner
        if self.role in VALUED:
            of_samples, seed = self.role == "reward_model", self.config.trainer.seed
            module: PackedPolicy | PackedValue = fsdp.load_value(
                model_dir, settings.gradient_checkpointing, of_samples=of_samples, seed=seed
            )
        else:
            module = fsdp.load_policy(
                model_dir, settings.head_chunk, settings.gradient_checkpointing, settings.vocab_chunk
            )
            if self.config.lora.rank and self.role == "policy":
                add_adapters(module.model, self.config.lora)
        return module if learns(self.config, self.role) else module.requires_grad_(False)

    def _write(self, folder: str, merge: bool) -> dict[str, Tensor]:
        dtype = self.config.model.dtype
        weights = fsdp.whole_on_host(self.module, self.rank, dtype, merge)
        if self.rank == 0:
            fsdp.write_model(self.module, weights, folder, self._model_dir, dtype)
        return weights

    def _optimizer_step(
        self,
        phase: str,
        step: RankBatch,
        batches: Sequence[MicroBatch],
        contribute: measures.MicroBatchLoss,
        lr: float | None = None,
        lr_scale: float = 1.0,
    ) -> measures.OptimizerStep:
        """Forward and backward over all micro-batches, as many on every rank, then one step; none if loss or gradient is not finite.

        `lr` None is the role's own rate after its warm-up, times `lr_scale`.
        """
        if (optimizer := self.optimizer) is None:
            raise RuntimeError(f"the {self.role} is frozen: it has no optimizer")
        if phase != self._phase:
            # The averages of another loss have another scale.
            optimizer.state.clear()
            self._phase, self.steps = phase, 0
        self.steps += 1
        if lr is None:
            full_lr, warmup_steps = learning_rate(self.config, self.role)
            lr = full_lr * lr_scale * min(1.0, self.steps / max(warmup_steps, 1))
        measured = []
        for batch in batches:
            loss, *numbers = contribute(batch, self.module(batch))
            # FSDP averages gradients over the ranks; the weights 1 / N already count all of them.
            (loss * self.dims.fsdp.size()).backward()
            measured.append(numbers)
        norm = clip_gradients(self.module, self.config.learner.max_grad_norm, self.dims, self.device)
        sums, maxima, grad_norm = measures.reduced(measured, norm, self.dims.data_group)
        # All ranks see the same numbers, so all step or none does.
        applied = math.isfinite(sums["loss"]) and math.isfinite(grad_norm)
        if applied:
            set_lr(optimizer, lr)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._empty_cache()
        return measures.OptimizerStep(sums, maxima, grad_norm, lr, not applied, step.n_tokens)
