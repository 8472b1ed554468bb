"""Engines that others run: servers at `engine.urls` that sample by token ids, and read new weights from a folder that they see.

`OpenAIEngine` speaks vLLM's completions, `SglangEngine` SGLang's own API. A server gets requests once it has the run's weights, and
none while weights are loaded. Each load of weights has a label that no other load has; what was sampled under another is not used.
"""

import asyncio
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from agent_train.config.schema import EngineConfig, first_line
from agent_train.engine.base import Completion, Engine, EngineError, EngineLostError, Sampling
from agent_train.engine.http import Refused, ServerFailed, healthy, open_client, post
from agent_train.engine.servers import HEALTH_SECONDS, Progress, Router
from agent_train.engine.vllm import LOAD_SECONDS, sampling_params
from agent_train.report.timeline import Timeline
from agent_train.weights.files import WeightCopy
from agentgym.storage.files import read_object

KEY_VARIABLE = "ENGINE_API_KEY"
NO_WEIGHTS = "it has no weights of this run yet"
KEY_REFUSED = (401, 403)
# Settings that a server would otherwise take from the model's generation_config.json: a cut distribution has other log-probabilities.
_WHOLE_DISTRIBUTION = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
_WHOLE_DISTRIBUTION |= {"frequency_penalty": 0.0}
_CHECK_SECONDS = 30.0
IDLE_HEALTH_SECONDS = 5.0
_REST_SECONDS = 0.5

log = logging.getLogger(__name__)


class OtherWeightsError(EngineError):
    """A server has other weights than the run gave it: it was restarted, or somebody else loads weights into it."""


@dataclass
class Remote:
    """A server that others run. `unfit` is why it gets no requests, "" while it has the present weights.

    Attributes:
        model: the name by which it serves the model.
        tells_versions: its answers tell by which weights each token was sampled.
    """

    url: str
    model: str = ""
    unfit: str = NO_WEIGHTS
    tells_versions: bool = False


class ExternalEngine(Engine):
    """Servers that others run, with the same weights. A server that fails gets no requests until weights are loaded next.

    A kind of server has `_check`, `_sample` and `_load`. Make one with its `start`.
    """

    how_to_start: str  # a server of this kind

    def __init__(self, config: EngineConfig, model_dir: str | Path, key: str = "", timeline: Timeline | None = None):
        self.max_model_len = config.max_model_len
        self.servers = [Remote(url.rstrip("/").removesuffix("/v1")) for url in config.urls]
        self._config, self._model_dir = config, Path(model_dir)
        self._client: aiohttp.ClientSession = open_client(key)
        self._timeline = timeline or Timeline()
        self._router = Router(len(self.servers), len(self.servers) * config.max_concurrent, self._timeline)
        self._run = secrets.token_hex(4)
        self._folder, self._sums = Path(), dict[str, int]()  # of the weights to load next
        self._losses = 0
        self._looks: dict[str, asyncio.Task[None]] = {}  # at servers whose requests were given up, by their URLs
        self._serving = asyncio.Event()  # cleared while weights are loaded
        self._serving.set()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        model_dir: str | Path,
        logs: str | Path,
        *,
        dtype: str,
        on_progress: Progress | None = None,
        timeline: Timeline | None = None,
        **_: object,
    ) -> Self:
        """Wait until all servers answer, and look at how each was started; their key is in `ENGINE_API_KEY`. It writes no logs.

        EngineError if one does not answer within `engine.start_timeout`, or cannot do what the run needs; it says how to start it.
        """
        engine = cls(config, model_dir, os.environ.get(KEY_VARIABLE, ""), timeline)
        try:
            await asyncio.gather(*(engine._reach(server, dtype, on_progress) for server in engine.servers))
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _reach(self, server: Remote, dtype: str, on_progress: Progress | None) -> None:
        begun = time.monotonic()
        while True:
            try:
                await self._ask(server, "/health")
                problem = await self._check(server, dtype)
                break
            except EngineError as error:
                seconds, limit = time.monotonic() - begun, self._config.start_timeout
                problem = f"{error}; no answer within {limit:g} s (engine.start_timeout)"
                if seconds > limit:
                    break
                if on_progress:
                    on_progress(first_line(error), seconds)
                await asyncio.sleep(_REST_SECONDS)
            except Refused as error:
                problem = f"{error}; its key goes into {KEY_VARIABLE}" if error.status in KEY_REFUSED else str(error)
                break
            except (KeyError, IndexError, TypeError, ValueError) as error:
                problem = f"what it tells cannot be read: {error!r}"
                break
        if problem:
            raise EngineError(f"{server.url}: {problem}; start it with: {self.how_to_start}")

    async def _check(self, server: Remote, dtype: str) -> str:
        """Why the run cannot use the server as it was started; "" if it can."""
        raise NotImplementedError

    async def _sample(self, server: Remote, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample by the present weights. OtherWeightsError if the server has others."""
        raise NotImplementedError

    async def _load(self, server: Remote, label: str) -> None:
        """Load the weights of `_folder`, which get the label, and drop keys and values of others."""
        raise NotImplementedError

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, episode: str | None = None) -> Completion:
        self.check_request(prompt_ids, sampling)
        while True:
            await self._serving.wait()
            with self._router.request(self._fit(), episode) as number:
                server = self.servers[number]
                try:
                    return await self._sample(server, prompt_ids, sampling)
                except (EngineError, Refused) as error:
                    failure = error
                except asyncio.CancelledError:  # the time of a turn is over, say: the server may hang
                    if (looking := self._looks.get(server.url)) is None or looking.done():
                        self._looks[server.url] = asyncio.create_task(self._look(server))
                    raise
            await self._leave_out(server, failure)

    def _fit(self) -> list[int]:
        """The servers with the present weights. EngineLostError without any."""
        if not self.servers:
            raise EngineError("the engine is closed")
        if found := [number for number, server in enumerate(self.servers) if not server.unfit]:
            return found
        states = "; ".join(f"{server.url}: {server.unfit}" for server in self.servers)
        remedy = f"start them again with: {self.how_to_start}; a run that goes on gives them its weights"
        raise EngineLostError(f"no server of engine.urls can be used: {states}; {remedy}")

    async def _leave_out(self, server: Remote, failure: EngineError | Refused) -> None:
        """Give a server no more requests, if it is to blame: it is dead, or refuses the key, or has other weights. Else raise the failure."""
        blamed = isinstance(failure, OtherWeightsError) or getattr(failure, "status", 0) in KEY_REFUSED
        if not blamed and (isinstance(failure, Refused) or await healthy(self._client, server.url, HEALTH_SECONDS)):
            raise failure
        self._lose(server, failure)

    async def _look(self, server: Remote) -> None:
        if not await healthy(self._client, server.url, HEALTH_SECONDS):
            self._lose(server, EngineError(f"it did not answer /health within {HEALTH_SECONDS:g} s"))

    def _lose(self, server: Remote, failure: Exception) -> None:
        if not server.unfit:
            self._losses += 1
            log.warning("%s gets no requests until weights are loaded next: %s", server.url, first_line(failure))
        server.unfit = first_line(failure)

    async def fetch_weights(self, folder: str | Path) -> list[dict[str, int]]:
        """Make a model folder of one of `save_weights`, to load next; the checksum of each tensor, as it is read here."""
        self._folder = Path(folder)
        self._sums = await asyncio.to_thread(_complete, self._folder, self._model_dir)
        return [self._sums]

    async def load_fetched(self, version: int) -> dict[str, int]:
        """Load them into all servers that answer, when requests in flight have ended; the same checksums.

        Servers tell no checksums: each says that it has loaded the folder. EngineError if none has, EngineLostError if none is there.
        """
        begun = time.monotonic()
        # One that hangs would hold up the others until the limit of a load.
        answers = await asyncio.gather(*map(self._answers, self.servers))
        self._serving.clear()
        try:
            await self._router.until_idle(self._config.request_timeout)
            given = [self._give(server, version, there) for server, there in zip(self.servers, answers, strict=True)]
            ended = await asyncio.gather(*given)
            failures = [failure for failure in ended if failure is not None]
            if len(failures) == len(self.servers):
                gone = all(isinstance(each, ServerFailed) and not each.status for each in failures)
                seen = "the servers must see the run folder (trainer.runs_dir) at the same path"
                told = f"no server has loaded version {version}: {'; '.join(map(str, failures))}"
                raise EngineLostError(told) if gone else EngineError(f"{told}; {seen}")
            self.version = version
        finally:
            self._serving.set()
            for number in range(len(self.servers)):
                self._timeline.add(("engine", number), f"loads version {version}", begun)
        return self._sums

    async def _answers(self, server: Remote) -> bool:
        """False if a server that gets no requests does not answer either when it is asked for its health."""
        return not server.unfit or await healthy(self._client, server.url, IDLE_HEALTH_SECONDS)

    async def _give(self, server: Remote, version: int, there: bool) -> EngineError | Refused | None:
        """Load a version into a server that is there, which is fit then; why it could not be done."""
        failure: EngineError | Refused
        try:
            if not there:
                raise ServerFailed(f"{server.url} did not answer /health within {IDLE_HEALTH_SECONDS:g} s")
            await self._load(server, self._label(version))
        except (EngineError, Refused) as error:
            failure = error
        except (KeyError, TypeError, ValueError) as error:
            failure = EngineError(f"{server.url}: what it says of its weights cannot be read: {error!r}")
        else:
            server.unfit = ""
            return None
        self._lose(server, failure)
        return failure

    def _label(self, version: int) -> str:
        return f"{version}-{self._run}"

    def _check_label(self, server: Remote, label: Any) -> None:
        if label != (own := self._label(self.version)):
            restarted = "it was started again, or somebody else loads weights into it"
            raise OtherWeightsError(f"{server.url} has weights {label!r}, not {own!r}: {restarted}")

    async def losses(self) -> int:
        return self._losses

    async def live(self) -> None:
        self._fit()

    async def close(self) -> None:
        self.servers = []
        for looking in self._looks.values():
            looking.cancel()
        await self._client.close()

    async def _ask(self, server: Remote, path: str) -> Any:
        told = "looking at a server"
        return await post(self._client, server.url, path, None, _CHECK_SECONDS, told, method="GET")

    async def _post(self, server: Remote, path: str, body: dict[str, Any] | None, seconds: float, what: str) -> Any:
        return await post(self._client, server.url, path, body, seconds, what)

    def _too_short(self, longest: int) -> str:
        """Why a server that reads so many tokens cannot be used; "" if it can."""
        wanted = self.max_model_len
        less = f"it takes {longest} tokens, less than engine.max_model_len={wanted}: lower that, or let it take more"
        return less if longest < wanted else ""


class OpenAIEngine(ExternalEngine):
    """vLLM's server. With --enable-scale-out ids go to `/inference/v1/generate`, whose answers tell the label of each token's weights.

    Without it they go to `/v1/completions`, and the label is asked for after each answer: since no weights are loaded while a
    request is in flight, the answer is of these weights. The paths of vLLM's development mode load weights and name them.
    """

    how_to_start = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --dtype DTYPE"
    )

    ids_path = "/inference/v1/generate"

    async def _check(self, server: Remote, dtype: str) -> str:
        served = (await self._ask(server, "/v1/models"))["data"][0]  # adapters come after it
        server.model = served["id"]
        settings = (await self._ask(server, "/server_info?config_format=json"))["vllm_config"]
        mode, kind = (settings["model_config"][name].removeprefix("torch.") for name in ("logprobs_mode", "dtype"))
        if problem := self._too_short(served["max_model_len"]):
            return problem
        if mode != "processed_logprobs":
            return f"with --logprobs-mode {mode} its log-probabilities are not of what it samples from"
        if kind != dtype:
            return f"its --dtype is {kind}, and model.dtype={dtype}"
        tied = read_object(self._model_dir / "config.json").get("tie_word_embeddings")
        if tied and settings["device_config"]["device"] == "cpu":
            stays = "on a CPU vLLM keeps its copy of tied output weights when it loads others"
            return f"{stays}: take engine=vllm, or a model without tied weights, or a GPU"
        try:
            answer = await self._ask_ids(server, [0], Sampling(1))
            server.tells_versions = answer["choices"][0]["weight_versions"] is not None
        except (Refused, KeyError):  # it is not enabled, or too old
            server.tells_versions = False
        return ""

    async def _sample(self, server: Remote, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        ask = self._ask_ids if server.tells_versions else self._ask_completion
        answer = await ask(server, prompt_ids, sampling)
        try:
            (choice,) = answer["choices"]
            if server.tells_versions:
                told = [
                    span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])
                ]
                if len(told) != len(choice["token_ids"]):
                    raise ValueError(f"it tells the weights of {len(told)} tokens of {len(choice['token_ids'])}")
                for label in set(told):
                    self._check_label(server, label)
                logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            else:
                self._check_label(server, (await self._ask(server, "/weight_info"))["weight_version"])
                logprobs = choice["logprobs"]["token_logprobs"]
            return _completion(choice["token_ids"], logprobs, choice["finish_reason"], sampling, self.version)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"generate: what {server.url} answers cannot be used: {error!r}") from error

    async def _ask_ids(self, server: Remote, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        params = _WHOLE_DISTRIBUTION | sampling_params(sampling) | {"top_k": 0, "detokenize": False}
        body = {"model": server.model, "token_ids": list(prompt_ids), "sampling_params": params}
        return await self._asked(server, self.ids_path, body)

    async def _ask_completion(self, server: Remote, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        body = {"model": server.model, "prompt": list(prompt_ids), "return_token_ids": True, "top_k": 0}
        return await self._asked(server, "/v1/completions", body | _WHOLE_DISTRIBUTION | sampling_params(sampling))

    async def _asked(self, server: Remote, path: str, body: dict[str, Any]) -> Any:
        body["cache_salt"] = self._label(self.version)
        return await self._post(server, path, body, self._config.request_timeout, "generate")

    async def _load(self, server: Remote, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        await self._post(server, "/collective_rpc", body, LOAD_SECONDS, "loading weights")
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not (await self._post(server, path, None, _CHECK_SECONDS, "clearing the prefix cache"))["success"]:
            raise EngineError(f"{server.url} did not clear its prefix cache: old weights would answer")
        await self._post(server, "/update_weight_version", {"new_version": label}, _CHECK_SECONDS, "naming the weights")


class SglangEngine(ExternalEngine):
    """SGLang's own API: ids go to `/generate`, whose answers tell the label that `/update_weights_from_disk` gave the weights.

    A seed has no effect on it.
    """

    how_to_start = "python -m sglang.launch_server --model-path MODEL --dtype DTYPE"

    async def _check(self, server: Remote, dtype: str) -> str:
        try:
            told = await self._ask(server, "/server_info")
        except Refused as error:
            if error.status != 404:
                raise
            told = await self._ask(server, "/get_server_info")  # as older ones call it
        if "weight_version" not in told:
            return "this SGLang does not tell which weights it has: install a newer one"
        if told["dtype"] not in (dtype, "auto"):
            return f"its --dtype is {told['dtype']}, and model.dtype={dtype}"
        return self._too_short(told["max_req_input_len"])  # some less than its context, and what its memory holds

    async def _sample(self, server: Remote, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        params = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),  # with ignore_eos it would look at none of them
            "top_k": -1,
            **_WHOLE_DISTRIBUTION,
        }
        body = {"input_ids": list(prompt_ids), "sampling_params": params, "return_logprob": True}
        answer = await self._post(server, "/generate", body, self._config.request_timeout, "generate")
        try:
            told = answer["meta_info"]
            self._check_label(server, told["weight_version"])
            sampled = told["output_token_logprobs"]
            ids, logprobs = [token for _, token, *_ in sampled], [logprob for logprob, *_ in sampled]
            return _completion(ids, logprobs, told["finish_reason"]["type"], sampling, self.version)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"generate: what {server.url} answers cannot be used: {error!r}") from error

    async def _load(self, server: Remote, label: str) -> None:
        body = {
            "model_path": str(self._folder),
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        told = await self._post(server, "/update_weights_from_disk", body, LOAD_SECONDS, "loading weights")
        if not told["success"]:
            raise EngineError(f"{server.url} did not load {self._folder}: {told['message']}")


def _completion(ids: list[int], logprobs: list[float], reason: str, sampling: Sampling, version: int) -> Completion:
    """The completion of an answer; ValueError if it is none."""
    if reason not in ("stop", "length"):
        raise ValueError(f"it ended with finish_reason {reason!r}")
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} ids and {len(logprobs)} log-probabilities")
    stopped = ids[-1] in sampling.stop_token_ids
    if reason == "stop" and not stopped:
        known = "generation_config.json of the model must name it as eos_token_id"
        raise ValueError(f"it stopped at id {ids[-1]}, which the run does not stop at: {known}")
    numbers = [float(logprob) for logprob in logprobs]
    return Completion(list(ids), numbers, [version] * len(ids), "stop" if stopped else "length")


def _complete(folder: Path, model_dir: Path) -> dict[str, int]:
    """Add the model's config to a folder of its weights; their checksums."""
    shutil.copyfile(model_dir / "config.json", folder / "config.json")
    return WeightCopy().read(folder, keep=False)
