"""Trackers for `trainer.trackers`: each takes a run folder and returns a function that is called with every record of `metrics.jsonl`.

Their packages are optional, and read their own environment variables: where a server is, its key, the name of a project.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from agentgym.storage.files import write_text

Record = dict[str, Any]
Track = Callable[[Record], None]
PARTS = ("rollout", "score", "learn", "sync")  # of a step, in their order


def numbers(record: Record, prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record, those of its parts too, by names as `update/entropy`; without `step`."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", float(value)


def tensorboard(folder: Path) -> Track:
    """Into `runs/NAME/tensorboard/`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def track(record: Record) -> None:
        for name, value in numbers(record):
            writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])
        writer.flush()

    return track


def wandb(folder: Path) -> Track:
    """To Weights & Biases, as a run of the folder's name, which a resumed run continues; into the folder if WANDB_MODE=offline."""
    import wandb

    kept = folder / "wandb-id"  # a project's other runs, of other machines or `runs_dir`s, may have the same name
    id = kept.read_text(encoding="utf-8") if kept.exists() else None
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    project = os.environ.get("WANDB_PROJECT", "agentgym")
    run = wandb.init(project=project, name=folder.name, id=id, resume="allow", dir=folder, config=settings)
    write_text(kept, run.id)
    run.define_metric("*", step_metric="step")

    def track(record: Record) -> None:
        run.log({"step": record["step"], **{f"{record['kind']}/{name}": value for name, value in numbers(record)}})

    return track


def mlflow(folder: Path) -> Track:
    """To MLFLOW_TRACKING_URI, as a run of the folder's name."""
    import mlflow

    os.environ.setdefault("MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE", "1")  # several threads lose batches in a file store
    mlflow.start_run(run_name=folder.name)
    mlflow.log_artifact(str(folder / "config.yaml"))

    def track(record: Record) -> None:
        # MLflow refuses all of a record for a name with other characters, which an environment's number may have.
        found = {re.sub(r"[^\w .:/-]", "_", f"{record['kind']}/{name}"): value for name, value in numbers(record)}
        mlflow.log_metrics(found, step=record["step"], synchronous=False)

    return track


def opentelemetry(folder: Path) -> Track:
    """A span for each record, with its numbers, and in a step one for each part: by OTLP over HTTP, as OTEL_EXPORTER_OTLP_* say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import set_span_in_context

    os.environ.setdefault("OTEL_SERVICE_NAME", "agent-train")
    provider = TracerProvider(resource=Resource.create({"run": folder.name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("agent_train")

    def track(record: Record) -> None:
        ended, seconds = time.time_ns(), record.get("step_seconds") or record.get("seconds") or 0.0
        at = ended - int(seconds * 1e9)
        attributes = {"step": record["step"], **dict(numbers(record))}
        whole = tracer.start_span(record["kind"], start_time=at, attributes=attributes)
        for part in PARTS:
            if taken := record.get(f"{part}_seconds"):
                span = tracer.start_span(part, set_span_in_context(whole), start_time=at)
                at += int(taken * 1e9)
                span.end(at)
        whole.end(ended)

    return track
