"""One learner rank: a shard of the model and of its optimizer. A Ray actor in a run, a plain object in a test.

Every method that touches the weights is a collective: all ranks call it with their own share of the same step.

Legend: T packed tokens, R ranks, K numbers that are measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from agent_train.algorithms.losses import weighted_sum
from agent_train.algorithms.policy_loss import LossInputs, policy_loss
from agent_train.config import Config
from agent_train.learner.fsdp import DTYPES, full_tensors, load_policy, save_model, shard
from agent_train.learner.measures import MAXIMA, SUMS, SftMetrics, StepResult, UpdateMetrics, policy_sums, summarise
from agent_train.packing import MicroBatch, Share, batch_of
from agent_train.weights.collective import WeightGroup, broadcast_buckets, make_group
from agent_train.weights.manifest import TensorInfo, WeightAddress

# For micro-batch i: its log-probabilities and entropies -> the loss to differentiate, sums and maxima to report.
Contribute = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class LearnerWorker:
    """Rank `rank` of `world`. `start` comes first; `open_store` before it on rank 0.

    Args:
        rank: 0 is the one that writes files and sends weights.
        world: number of ranks.
        config: of the run; read, never written.
        device: "cpu" (gloo, one thread) or "cuda" (NCCL, the process's first GPU).
    """

    def __init__(self, rank: int, world: int, config: Config, device: str):
        self.rank = rank
        self.world = world
        self.config = config
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._store: dist.TCPStore | None = None
        self._weights: WeightGroup | None = None
        # What the optimizer's running averages are of, and how many steps they have seen.
        self._phase = ""
        self._steps = 0

    def open_store(self, host: str) -> int:
        """Serve the store through which the ranks find each other, on a port that is free; returns the port."""
        self._store = dist.TCPStore(
            host, 0, self.world, is_master=True, timeout=self._timeout(), wait_for_workers=False
        )
        return int(self._store.port)

    def start(self, host: str, port: int, model_dir: str) -> list[TensorInfo]:
        """Join the other ranks, load and shard the model. Returns the manifest of the weights that `send_weights` sends.

        Raises:
            FileNotFoundError: no model folder there.
            ValueError: an architecture that the packed forward pass cannot compute.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            # Two threads on cores that the other rank and the engine use are many times slower than one.
            torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        if self._store is None:
            self._store = dist.TCPStore(host, port, self.world, is_master=False, timeout=self._timeout())
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=self._store, rank=self.rank, world_size=self.world, timeout=self._timeout()
        )
        settings = self.config.learner
        self._model_dir = Path(model_dir)
        policy = load_policy(model_dir, settings.head_chunk, settings.gradient_checkpointing)
        mesh = init_device_mesh(self.device.type, (self.world,))
        self.policy = shard(policy, mesh, self.config.model.dtype)
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        return self.manifest()

    def update(self, steps: Sequence[Share], lr_scale: float = 1.0) -> UpdateMetrics:
        """PPO-clip updates, one optimizer step for each share; the same metrics on every rank.

        The proximal policy is the one at the start. In the first step it is the trained policy itself, so its
        log-probabilities are those of the same forward pass and the ratio is exactly 1; for the later steps it is
        computed first, over the same micro-batches.

        Args:
            steps: this rank's shares.
            lr_scale: factor of the configured learning rate, on top of the warm-up.
        """
        started = time.monotonic()
        batches = [self._batches(share) for share in steps]
        proximal = [None, *(self._score(later) for later in batches[1:])]
        results = [self._policy_step(*step, lr_scale) for step in zip(batches, proximal, strict=True)]
        return summarise(results, sum(share.packed_tokens for share in steps), time.monotonic() - started)

    def sft(self, share: Share, lr: float) -> SftMetrics:
        """One optimizer step on the mean negative log-likelihood of the masked tokens."""
        started = time.monotonic()
        batches = self._batches(share)

        def contribute(index: int, logprobs_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            batch = batches[index]
            loss = weighted_sum(-logprobs_T, batch.weights_T, batch.mask_T)
            nothing = torch.zeros(1, dtype=torch.float64, device=self.device)
            return loss, loss.detach().double()[None], nothing

        self._begin("sft")
        (loss,), _, grad_norm, applied = self._optimizer_step(batches, contribute, lr)
        return SftMetrics(loss, grad_norm, share.n_tokens, lr, not applied, time.monotonic() - started)

    def logprobs(self, share: Share) -> list[list[list[float]]]:
        """The policy's log-probability of each masked token of each row of each micro-batch, 0.0 elsewhere. A collective."""
        scored = self._score(self._batches(share))
        sizes = [[len(row.ids) for row in rows] for rows in share.micro_batches]
        return [
            [part.tolist() for part in logprobs_T[: sum(lengths)].split(lengths)] if lengths else []
            for logprobs_T, lengths in zip(scored, sizes, strict=True)
        ]

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder that transformers and vLLM load, whole or not at all."""
        save_model(self.policy, folder, self._model_dir, self.rank, self.config.model.dtype)

    def connect_weights(self, address: WeightAddress) -> None:
        """Join the weight group as its sender, on rank 0; the receivers must join at the same time."""
        if self.rank == 0:
            if self._weights is not None:
                self._weights.close()
            timeout = self.config.learner.timeout
            self._weights = make_group(address, 0, self.device, connect_seconds=timeout, transfer_seconds=timeout)

    def manifest(self) -> list[TensorInfo]:
        """Names, shapes and type of what `send_weights` sends, in its order. Tied weights are named once."""
        return [
            TensorInfo(name, tuple(p.shape), self.config.model.dtype)
            for name, p in self.policy.model.named_parameters()
        ]

    def send_weights(self) -> dict[str, int]:
        """Send every weight to the receivers. Returns the checksum of each on rank 0, nothing on the others.

        Raises:
            RuntimeError: `connect_weights` was not called.
            WeightTransferError: a receiver failed or is late.
        """
        tensors = (whole for _, whole in full_tensors(self.policy, DTYPES[self.config.model.dtype]))
        if self.rank == 0:
            if self._weights is None:
                raise RuntimeError("send_weights: the learner is in no weight group; call connect_weights first")
            return broadcast_buckets(self._weights, self.manifest(), tensors)
        for _ in tensors:
            pass
        return {}

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.config.learner.timeout)

    def _batches(self, share: Share) -> list[MicroBatch]:
        return [batch_of(rows).to(self.device) for rows in share.micro_batches]

    @torch.no_grad()
    def _score(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self.policy(batch)[0] for batch in batches]

    def _begin(self, phase: str) -> None:
        """Forget the optimizer's averages when the objective changes: those of another loss have another scale."""
        if phase != self._phase:
            self._optimizer.state.clear()
            self._phase, self._steps = phase, 0
        self._steps += 1

    def _policy_step(
        self, batches: Sequence[MicroBatch], proximal: Sequence[Tensor] | None, lr_scale: float
    ) -> StepResult:
        algorithm, settings = self.config.algorithm, self.config.learner
        objective = policy_loss(algorithm.loss, algorithm.loss_settings)

        def contribute(index: int, logprobs_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            batch = batches[index]
            old_T = logprobs_T.detach() if proximal is None else proximal[index]
            inputs = LossInputs(
                logprobs_T=logprobs_T,
                advantages_T=batch.advantages_T,
                mask_T=batch.mask_T,
                old_T=old_T,
                behaviour_T=batch.behaviour_logprobs_T,
                entropy_T=entropy_T,
                segment_T=batch.segment_T,
                n_segments=batch.n_segments,
            )
            loss = weighted_sum(objective(inputs), batch.weights_T, batch.mask_T)
            held_T = objective.held(inputs)
            return loss, *policy_sums(batch, loss.detach(), logprobs_T.detach(), old_T, entropy_T.detach(), held_T)

        self._begin("policy")
        lr = settings.lr * lr_scale * min(1.0, self._steps / max(settings.warmup_steps, 1))
        sums, maxima, grad_norm, applied = self._optimizer_step(batches, contribute, lr)
        return StepResult(
            dict(zip(SUMS, sums, strict=True)), dict(zip(MAXIMA, maxima, strict=True)), grad_norm, applied, lr
        )

    def _optimizer_step(
        self, batches: Sequence[MicroBatch], contribute: Contribute, lr: float
    ) -> tuple[list[float], list[float], float, bool]:
        """Forward and backward over all micro-batches, then one step; none if the loss or the gradient is not finite.

        Returns the reduced sums and maxima, the gradient's norm before clipping, and whether the weights were changed.
        """
        measured = []
        for index, batch in enumerate(batches):
            loss, sums_K, maxima_K = contribute(index, *self.policy(batch))
            # FSDP averages gradients over the ranks; the weights 1 / N already count all of them.
            (loss * self.world).backward()
            measured.append((sums_K, maxima_K))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.learner.max_grad_norm)
        sums, maxima, grad_norm = self._reduce(measured, norm.full_tensor() if isinstance(norm, DTensor) else norm)
        # The loss is the first sum. All ranks see the same numbers, so all step or none does.
        applied = math.isfinite(sums[0]) and math.isfinite(grad_norm)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums, maxima, grad_norm, applied

    def _reduce(
        self, measured: Sequence[tuple[Tensor, Tensor]], norm: Tensor
    ) -> tuple[list[float], list[float], float]:
        """Sums and maxima over micro-batches and ranks: one collective, and the step's only wait for the device."""
        sums_K = torch.stack([sums for sums, _ in measured]).sum(0)
        maxima_K = torch.stack([maxima for _, maxima in measured]).amax(0)
        local_K = torch.cat([sums_K, maxima_K])
        everyone = [torch.empty_like(local_K) for _ in range(self.world)]
        dist.all_gather(everyone, local_K)
        all_RK = torch.stack(everyone)
        split = len(sums_K)
        values = torch.cat([all_RK[:, :split].sum(0), all_RK[:, split:].amax(0), norm.double()[None]]).tolist()
        return values[:split], values[split:-1], values[-1]
