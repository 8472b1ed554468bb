"""Episodes of a training run as HTML, for its report."""

from __future__ import annotations

from html import escape
from pathlib import Path

from agent_train.trainer.run_folder import RunFolder
from agentgym.core.trajectory import read_jsonl
from agentgym.viewer.page_episodes import Decode, episodes_html, examples


def trajectories_html(run: RunFolder) -> str:
    """Episodes of the first and the last step: held-out ones where there are any, else of training."""
    files = sorted(run.trajectories.glob("eval-*.jsonl")) or sorted(run.trajectories.glob("train-*.jsonl"))
    if not files:
        return ""
    decode = token_decoder(run)
    parts = [_file_html(path, decode) for path in dict.fromkeys((files[0], files[-1]))]
    shading = '<p class="note">The darker a token, the less likely the policy was to say it.</p>' if decode else ""
    return f"<section><h2>Episodes</h2>{shading}{''.join(parts)}</section>"


def token_decoder(run: RunFolder) -> Decode | None:
    """From a token id to its text, by the tokenizer of the latest checkpoint; None where there is none to read."""
    checkpoint = run.latest_checkpoint()
    path = checkpoint / "tokenizer.json" if checkpoint else None
    if path is None or not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


def _file_html(path: Path, decode: Decode | None) -> str:
    kind, _, step = path.stem.partition("-")
    where = "held-out tasks" if kind == "eval" else "training"
    when = (
        "before training"
        if kind == "eval" and int(step) == 0
        else f"after step {int(step)}"
        if kind == "eval"
        else f"step {int(step)}"
    )
    try:
        shown = episodes_html(examples(read_jsonl(path)), decode)
    except ValueError as error:  # a crash has left half of a line
        shown = f'<p class="note">{escape(str(error))}</p>'
    return f"<h3>{where}, {when}</h3>{shown}"
