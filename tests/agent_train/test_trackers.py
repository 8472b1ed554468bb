"""The shipped trackers, with the real packages where they are installed."""

import http.server
import importlib.util
import threading
from dataclasses import replace

import pytest
from run_cases import clock, group, learned, new_run

from agent_train.config.extensions import TRACKER_PACKAGES, trackers
from agent_train.config.schema import Config, TrainerConfig
from agent_train.config.validation import _installed, _wrong_machine
from agent_train.report.metrics import step_metrics
from agent_train.report.trackers import numbers
from agent_train.report.tracking import Tracker


def track(tmp_path, name):
    """A run of two steps, tracked."""
    run = new_run(Config(trainer=TrainerConfig(name="one", runs_dir=str(tmp_path / "runs"))))
    with Tracker(run, 2, also=[trackers.load(name)(run.path)]) as tracker:
        for step in (1, 2):
            told = learned(entropy=step / 2)
            metrics = step_metrics(step, [group("a", [1.0, 0.0])], clock(), step, **told)
            tracker.train_step(replace(metrics, env={"read (%)": 50.0}))
    return run


def test_the_numbers_of_a_record_are_those_of_its_parts_too():
    record = {
        "kind": "train",
        "step": 3,
        "reward": 0.5,
        "critic": None,
        "update": {"lr": 1e-3, "loss": None},
        "episodes": 8,
    }
    assert dict(numbers(record)) == {"reward": 0.5, "update/lr": 1e-3, "episodes": 8.0}


def test_opentelemetry_gets_a_span_of_each_step_with_its_parts(tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans, enough = [], threading.Event()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            names = {each.key: each.value.string_value for each in sent.resource_spans[0].resource.attributes}
            assert (names["service.name"], names["run"]) == ("agent-train", "one")
            spans.extend(span for part in sent.resource_spans[0].scope_spans for span in part.spans)
            self.send_response(200)
            self.end_headers()
            if len(spans) == 8:
                enough.set()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
        track(tmp_path, "opentelemetry")
        assert enough.wait(20)
        server.shutdown()
    for step, whole in enumerate((span for span in spans if span.name == "train"), start=1):
        parts = sorted((s for s in spans if s.parent_span_id == whole.span_id), key=lambda s: s.start_time_unix_nano)
        assert [part.name for part in parts] == ["rollout", "learn", "sync"]
        seconds = [round((part.end_time_unix_nano - part.start_time_unix_nano) / 1e9, 6) for part in parts]
        assert seconds == [2.0, 1.0, 0.5]
        assert parts[0].start_time_unix_nano == whole.start_time_unix_nano
        assert parts[-1].end_time_unix_nano == whole.end_time_unix_nano
        numbers = {each.key: each.value for each in whole.attributes}
        assert numbers["step"].int_value == step
        assert numbers["update/entropy"].double_value == step / 2


def test_mlflow_gets_every_number_and_the_settings(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.chdir(tmp_path)
    track(tmp_path, "mlflow")
    mlflow.flush_async_logging()
    mlflow.end_run()
    (found,) = mlflow.search_runs(output_format="list")
    assert found.info.run_name == "one"
    assert found.data.metrics["train/update/entropy"] == 1.0
    assert found.data.metrics["train/env/read ___"] == 50.0, "a name that MLflow refuses costs no number"
    entropies = mlflow.MlflowClient().get_metric_history(found.info.run_id, "train/update/entropy")
    assert sorted((each.step, each.value) for each in entropies) == [(1, 0.5), (2, 1.0)]


def test_wandb_keeps_an_offline_run_in_the_folder(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = track(tmp_path, "wandb")
    summary = wandb.run.summary
    assert (summary["step"], summary["train/update/entropy"], summary["train/reward"]) == (2, 1.0, 0.5)
    assert wandb.run.config["trainer"]["name"] == "one"
    wandb.finish()
    (id,) = (path.stem for path in run.path.glob("wandb/offline-run-*/run-*.wandb"))
    assert id != "run-one", "the project may have another run of this name"
    trackers.load("wandb")(run.path)
    assert f"run-{wandb.run.id}" == id, "a resumed run goes on as the same"
    assert wandb.run.name == "one"
    wandb.finish()


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(track(tmp_path, "tensorboard").path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("train/update/entropy")] == [(1, 0.5), (2, 1.0)]


@pytest.mark.parametrize("name", trackers.shipped)
def test_a_tracker_whose_package_is_missing_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    find = importlib.util.find_spec
    package, wanted = TRACKER_PACKAGES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == package else find(module))
    assert not _installed(package)
    told = list(_wrong_machine(Config(trainer=TrainerConfig(trackers=[name]))))
    assert f"trainer.trackers={name}: {package} is not installed: pip install {wanted}" in told
    assert not _installed("no.such.package")
