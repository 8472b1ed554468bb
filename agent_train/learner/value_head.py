"""A model that gives one number for each position: the critic, and reward models.

Its folder is what transformers loads as `AutoModelForSequenceClassification` with one label, the form of the hub's
reward models: the number is `score.weight` times the hidden state, without a bias.

Legend: T packed tokens, M of them in the loss mask, S samples (segments), D hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agent_train.data.packing import MicroBatch
from agent_train.learner.attention import hidden_states, register
from agent_train.learner.fsdp import plain
from agent_train.learner.loading import build_empty, weight_files

HEAD = "score.weight"


class PackedValue(nn.Module):
    """A sequence classifier of one label, loaded with the packed attention: micro-batch in, values or scores out.

    With `of_samples` it scores each whole sample, as a reward model does, in place of each token, as a critic does.
    """

    def __init__(self, model: Any, of_samples: bool = False):
        super().__init__()
        score = getattr(model, "score", None)
        if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
            raise ValueError(f"{type(model).__name__} cannot give values: it has no linear `score` of one number")
        self.model = model
        self.of_samples = of_samples

    def forward(self, batch: MicroBatch) -> Tensor:
        """values_T, before each token that the policy sampled: from the state that predicts it; 0 outside the mask. fp32.

        With `of_samples` scores_S: from the state at the last sampled token of each sample, that token read; at the
        last token of a sample without.
        """
        hidden_TD = hidden_states(self.model, batch)
        if self.of_samples:
            return self._numbers(hidden_TD[last_sampled(batch)])
        index_M = batch.mask_T.nonzero()[:, 0]
        zeros_T = torch.zeros(len(batch.ids_T), dtype=torch.float32, device=hidden_TD.device)
        return zeros_T.index_copy(0, index_M, self._numbers(hidden_TD[batch.previous_T[index_M]]))

    def _numbers(self, hidden_MD: Tensor) -> Tensor:
        return hidden_MD.float() @ self.model.score.weight[0].float()


def last_sampled(batch: MicroBatch) -> Tensor:
    """positions_S: of the last sampled token of each sample, of its last token where none was sampled."""
    ends_S = batch.cu_seqlens[1:].long() - 1
    here_T = torch.arange(len(batch.ids_T), device=ends_S.device)
    found_S = torch.full_like(ends_S, -1).scatter_reduce(
        0, batch.segment_T, torch.where(batch.mask_T, here_T, -1), "amax"
    )
    return torch.where(found_S >= 0, found_S, ends_S)


def load_value(
    model_dir: str | Path, gradient_checkpointing: bool = False, *, of_samples: bool = False, seed: int = 0
) -> PackedValue:
    """A Hugging Face folder as a model of values, on the host, with fp32 weights and without dropout.

    Where the folder's files allow it, the parameters but the head have no memory yet: `fsdp.shard` reads each rank's
    own. A language model gets a new head, drawn from `seed`, whose first values are small. Raises FileNotFoundError or
    ValueError for another folder.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if not (Path(model_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{model_dir} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(str(model_dir))
    if any("SequenceClassification" in name for name in config.architectures or ()) and config.num_labels != 1:
        raise ValueError(f"{model_dir} gives {config.num_labels} numbers, and a value or a score is one")
    model = build_empty(AutoModelForSequenceClassification, model_dir, register(), HEAD, num_labels=1)
    missing = set() if model is None or HEAD in weight_files(model_dir) else {HEAD}
    if model is None:
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            str(model_dir), num_labels=1, dtype=torch.float32, attn_implementation=register(), output_loading_info=True
        )
        missing = set(loaded["missing_keys"])
    if missing - {HEAD}:
        raise ValueError(f"{model_dir}: the weights lack {', '.join(sorted(missing - {HEAD})[:3])}")
    value = PackedValue(plain(model, gradient_checkpointing), of_samples)
    if missing:
        score = value.model.score
        drawn_1D = torch.randn((1, score.in_features), generator=torch.Generator().manual_seed(seed))
        score.weight = nn.Parameter(drawn_1D / (score.in_features + 1))
    return value
