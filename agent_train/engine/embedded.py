"""A transformers model in this process as the engine, for machines without vLLM.

Prompts that wait are answered together: one batch runs from its prompts to its last token in a worker thread. With sessions open a
batch starts when every session waits, so that equal seeds give equal batches and equal numbers, to the last bit.
"""

import asyncio
import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from agent_train.config.schema import EngineConfig
from agent_train.engine.base import Completion, Engine, EngineError, Sampling
from agent_train.engine.decoding import Request, decode
from agent_train.report.timeline import Timeline
from agent_train.weights.collective import WeightGroup, checksum, make_group, receive_buckets
from agent_train.weights.files import WeightCopy
from agent_train.weights.sync import TensorInfo, WeightAddress, WeightTransferError

_LOADING = threading.Lock()  # transformers mixes up two models that load at the same time


@dataclass(eq=False, kw_only=True)
class _Waiting(Request):
    answer: asyncio.Future[Completion]
    begun: asyncio.Event


class EmbeddedEngine(Engine):
    """An engine of one process. On a CPU torch's threads are set to one unless OMP_NUM_THREADS says otherwise.

    Log-probabilities are float32 with any `dtype`. `device` None takes the first GPU if there is one. At most `max_concurrent`
    prompts are in one forward pass. `batch_wait` are the seconds without a new prompt after which a batch starts although a session
    does not wait; None waits for all, so that no clock decides what a batch holds. `request_timeout` leaves that wait out.
    """

    def __init__(
        self,
        model_dir: str | Path,
        max_model_len: int,
        *,
        dtype: str = "float32",
        device: str | None = None,
        max_concurrent: int = 64,
        batch_wait: float | None = 10.0,
        request_timeout: float = 600.0,
    ):
        from transformers import AutoModelForCausalLM

        from agent_train.engine.fast_decoding import attend_grouped

        self.max_model_len = max_model_len
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self._device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        try:
            with _LOADING:
                model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise EngineError(f"the embedded engine cannot load {model_dir}: {error}") from error
        self.model: Any = model.to(self._device).eval().requires_grad_(False)
        attend_grouped(self.model)
        self._max_concurrent = max_concurrent
        self._batch_wait = batch_wait
        self._request_timeout = request_timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-engine")
        self._waiting: list[_Waiting] = []
        self._batch: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._group: WeightGroup | None = None
        self._closed: str | None = None
        self._timeline = Timeline()
        self._beside: list[EmbeddedEngine] = [self]  # those that the same episodes ask
        self._fetched = WeightCopy()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model_dir: str | Path,
        logs: str | Path,
        *,
        dtype: str,
        deterministic: bool,
        timeline: Timeline | None = None,
        **_: object,
    ) -> "EmbeddedEngine":
        """Load the model. In a deterministic run a batch waits for every session. It writes no logs."""
        engine = await asyncio.to_thread(
            cls,
            model_dir,
            config.max_model_len,
            dtype=dtype,
            max_concurrent=config.max_concurrent,
            batch_wait=None if deterministic else config.batch_wait,
            request_timeout=config.request_timeout,
        )
        engine._timeline = timeline or engine._timeline
        return engine

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        """With a seed a completion depends on nothing but weights, prompt and sampling, up to rounding."""
        self.check_request(prompt_ids, sampling)
        self._check_open()
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(prompt_ids=list(prompt_ids), sampling=sampling, answer=answer, begun=asyncio.Event())
        self._waiting.append(waiting)
        self._consider()
        try:
            if self._batch_wait is None:
                await waiting.begun.wait()
            return await asyncio.wait_for(answer, self._request_timeout)
        except TimeoutError as error:
            late = f"generate: the embedded engine did not answer within {self._request_timeout:g} s"
            raise EngineError(late) from error
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def close_session(self, count: int = 1) -> None:
        super().close_session(count)
        if any(each._waiting for each in self._beside):  # the others may now all be waiting
            self._consider()

    def play_beside(self, other: Engine) -> None:
        """Batches of both start when every session waits for one of them: what a batch holds depends on no clock."""
        if isinstance(other, EmbeddedEngine):
            other._beside += self._beside
            self._beside = other._beside

    @property
    def connected(self) -> bool:
        return self._group is not None and self._group.process_group is not None

    async def connect_weights(self, address: WeightAddress) -> None:
        if self._group is not None:
            self._group.close()
        self._group = await self._in_thread(
            lambda: make_group(address, address.rank_offset, self._device), "joins the weight group"
        )

    async def receive_weights(self, manifest: Sequence[TensorInfo], version: int) -> dict[str, int]:
        def load() -> dict[str, int]:
            if self._group is None:
                raise WeightTransferError("the embedded engine is in no weight group: call connect_weights first")
            return self._copy({info.name for info in manifest}, receive_buckets(self._group, manifest), version)

        sums: dict[str, int] = await self._in_thread(load, f"loads version {version}")
        return sums

    async def fetch_weights(self, folder: str | Path) -> list[dict[str, int]]:
        """Read a folder of all weights, to load them next; their checksums."""
        try:
            read = await self._in_thread(lambda: self._fetched.read(Path(folder), keep=False), f"reads {folder}")
        except SafetensorError as error:
            raise EngineError(f"embedded engine: {folder} cannot be read: {error}") from error
        return [read]

    async def load_fetched(self, version: int) -> dict[str, int]:
        fetched, self._fetched = self._fetched.tensors, WeightCopy()
        loads = f"loads version {version}"
        sums: dict[str, int] = await self._in_thread(lambda: self._copy(fetched, fetched.items(), version), loads)
        return sums

    async def live(self) -> None:
        self._check_open()

    async def close(self) -> None:
        """Refuse what waits, finish the batch that runs, free the model. May be called twice."""
        self._closed = self._closed or "it was closed"
        _refuse(self._waiting, "was closed")
        if self._timer is not None:
            self._timer.cancel()
        if self._batch is not None:
            await asyncio.wait([self._batch], timeout=self._request_timeout)
        if self._group is not None:
            self._group.close()
            self._group = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.model = None

    def _consider(self) -> None:
        """Start a batch soon, or after a quiet time; if every session waits, also those of the engines beside this one."""
        all_wait = sum(each.live_sessions - len(each._waiting) for each in self._beside) <= 0
        for each in self._beside if all_wait else [self]:
            each._start_soon(all_wait)

    def _start_soon(self, all_wait: bool) -> None:
        if self._batch is not None or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if all_wait:
            # One pass of the loop lets those who ask at the same time come in too.
            self._timer = loop.call_soon(self._start)
        elif self._batch_wait is not None:
            self._timer = loop.call_later(self._batch_wait, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._batch is None and self._waiting:
            waiting, self._waiting = sorted(self._waiting, key=lambda each: each.order), []
            self._batch = asyncio.ensure_future(self._answer(waiting))

    async def _answer(self, waiting: list[_Waiting]) -> None:
        try:
            for start in range(0, len(waiting), self._max_concurrent):
                part = waiting[start : start + self._max_concurrent]
                for each in part:
                    each.begun.set()
                completions = await self._in_thread(
                    lambda given=part: decode(self.model, given, self.version), f"{len(part)} prompts"
                )
                for each, completion in zip(part, completions, strict=True):
                    if not each.answer.done():
                        each.answer.set_result(completion)
        except Exception as error:
            _refuse(waiting, f"failed: {error!r}")
        finally:
            self._batch = None
            if self._waiting:
                self._consider()

    def _copy(
        self, names: Collection[str], tensors: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> dict[str, int]:
        """Copy tensors of these names into the model; the checksum of each."""
        parameters = dict(self.model.named_parameters())
        if missing := sorted(parameters.keys() - names):
            left_out = f"{len(missing)} parameters of the model, first {missing[0]!r}"
            raise WeightTransferError(f"the sender leaves out {left_out}")
        sums: dict[str, int] = {}
        try:
            with torch.no_grad():
                for name, tensor in tensors:
                    sums[name] = checksum(tensor)
                    if name in parameters:
                        parameters[name].copy_(tensor)
        except BaseException:
            self._closed = "its weights were not loaded whole"
            raise
        self.version = version
        return sums

    async def _in_thread(self, call: Any, what: str) -> Any:
        """Call in the one thread that uses the model, so an answer and a load wait for each other. `what` names it in the timeline."""
        begun = 0.0

        def open_call() -> Any:
            nonlocal begun
            self._check_open()
            begun = time.monotonic()
            return call()

        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, open_call)
        except WeightTransferError as error:
            raise EngineError(f"embedded engine: {error}") from error
        finally:
            if begun:
                self._timeline.add(("engine", 0), what, begun)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"the embedded engine cannot be used: {self._closed}")


def _refuse(waiting: Sequence[_Waiting], why: str) -> None:
    for each in waiting:
        if not each.answer.done():
            each.answer.set_exception(EngineError(f"generate: the embedded engine {why}"))
        each.begun.set()
