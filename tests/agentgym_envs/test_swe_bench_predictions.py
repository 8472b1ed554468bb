"""swe_bench: an evaluation leaves predictions that SWE-bench's own harness reads, with the patches that were graded."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from swe_bench_cases import LITE, agreement_benchmark, swebench

from agentgym.core.registration import spec
from agentgym.evaluate import evaluate
from agentgym.policies import ExpertPolicy
from agentgym_envs.swe_bench.grading import grade
from agentgym_envs.swe_bench.images import build
from agentgym_envs.swe_bench.instances import read_instances

ID = "pallets__flask-4992"


@pytest.mark.skipif(not LITE.is_file(), reason="needs AGENTGYM_DATA with swe_bench/lite_from_sdist.jsonl")
@pytest.mark.data
@pytest.mark.bubblewrap
@pytest.mark.slow
def test_the_expert_s_patch_is_the_prediction_that_swe_bench_reads_and_reports_as_resolved(tmp_path: Path):
    read = swebench("harness.utils", 5).get_predictions_from_file
    file = tmp_path / "one.jsonl"
    file.write_text(next(line for line in LITE.read_text().splitlines() if json.loads(line)["instance_id"] == ID))
    [image] = build(read_instances(file), docker=False)
    assert image.built, image.error
    env = replace(spec("swe_bench"), kwargs={"data": str(file), "sandbox": "bubblewrap"})
    found = asyncio.run(evaluate(env, lambda episode: ExpertPolicy(), split="all", out=tmp_path / "run"))
    assert (found.success, found.errors) == (1.0, 0)
    [prediction] = read(str(tmp_path / "run" / "preds.json"), "unused", "test")
    assert prediction["instance_id"] == ID
    patch = prediction["model_patch"]
    assert "+++ b/src/flask/config.py" in patch
    [instance] = read_instances(file)
    log = grade(instance, patch, sandbox="bubblewrap").log
    assert agreement_benchmark().their_verdict(swebench("harness.grading", 5), instance, patch, log)["resolved"] is True
