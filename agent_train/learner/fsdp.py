"""Loading a model, sharding it with FSDP2, and getting whole tensors back out."""

import inspect
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from agent_train.config.schema import Config
from agent_train.learner.attention import MULTIPLE, PACKED, on_cpu_in_half
from agent_train.learner.head import PackedPolicy, PackedValue
from agent_train.learner.loading import build_empty, file_name, fill, weight_files
from agent_train.learner.lora import adapter_tensors, initial_adapter, merged, write_adapter
from agent_train.learner.parallel import ParallelDims, check_model, split_layers
from agent_train.learner.sequence_parallel import spread_over, ulysses_attention
from agentgym.storage.files import written_whole

UNCOMPILED = f"{PACKED}_uncompiled"
HEAD = "score.weight"
SEPARABLE = {"full_attention", "sliding_attention"}  # kinds of layers that packed attention computes for each sample
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Packed = TypeVar("Packed", bound=PackedPolicy | PackedValue)


def load_policy(
    model_dir: str | Path, head_chunk: int, gradient_checkpointing: bool = False, vocab_chunk: int = 0
) -> PackedPolicy:
    """A Hugging Face folder as a policy to train, on the host, with fp32 weights and without dropout. Raises FileNotFoundError.

    Where the files allow it, the parameters have no memory until `shard` reads them.
    """
    model, _ = _load(AutoModelForCausalLM, model_dir, gradient_checkpointing)
    return PackedPolicy(model, head_chunk, vocab_chunk)


def load_value(
    model_dir: str | Path, gradient_checkpointing: bool = False, *, of_samples: bool = False, seed: int = 0
) -> PackedValue:
    """As `load_policy`, what transformers loads as a sequence classifier with one label. Raises ValueError for another folder.

    A language model gets a new head, drawn from `seed`, whose first values are small.
    """
    model, missing = _load(AutoModelForSequenceClassification, model_dir, gradient_checkpointing, HEAD, num_labels=1)
    if missing - {HEAD}:
        raise ValueError(f"{model_dir}: the weights lack {', '.join(sorted(missing - {HEAD})[:3])}")
    value = PackedValue(model, of_samples)
    if missing:
        score = model.score
        drawn_1D = torch.randn((1, score.in_features), generator=torch.Generator().manual_seed(seed))
        score.weight = nn.Parameter(drawn_1D / (score.in_features + 1))
    return value


def _load(
    auto_class: Any, model_dir: str | Path, gradient_checkpointing: bool, new: str | None = None, **settings: Any
) -> tuple[Any, set[str]]:
    """A model with packed attention and without dropout, and the names of the parameters that no file holds."""
    if not (Path(model_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{model_dir} is not a model folder: it has no config.json")
    config = AutoConfig.from_pretrained(str(model_dir))
    of_labels = any("SequenceClassification" in name for name in config.architectures or ())
    if of_labels and config.num_labels != settings.get("num_labels", config.num_labels):
        raise ValueError(f"{model_dir} gives {config.num_labels} numbers, and a value or a score is one")
    model = build_empty(auto_class, model_dir, PACKED, new, **settings)
    missing = set() if new is None else {new} - weight_files(model_dir).keys()
    if model is None:
        settings |= {"dtype": torch.float32, "attn_implementation": PACKED, "output_loading_info": True}
        model, loaded = auto_class.from_pretrained(str(model_dir), **settings)
        missing = set(loaded["missing_keys"])
    check_layers(model)
    return plain(model, gradient_checkpointing), missing


def check_layers(model: Any) -> None:
    """Raises ValueError where anything but attention joins tokens: it would join those of samples that are packed together.

    So it does where only a mask would hold tokens to a sliding window, since packed attention gets none, and where weights are
    quantised: sharding would take them for numbers and leave out their scales. Without a GPU transformers dequantises them.
    """
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - SEPARABLE
    if others or model._is_stateful or not model._supports_attention_backend:
        kinds = ", ".join(sorted(others)) or "recurrent or without transformers' attention interface"
        raise ValueError(
            f"{type(model).__name__} cannot be trained here: it has layers ({kinds}) that would join the tokens of packed samples: "
            "take a model whose layers all are attention"
        )
    if kept := {str(p.dtype) for p in model.parameters()} - set(map(str, DTYPES.values())):
        raise ValueError(
            f"{type(model).__name__} cannot be used here: its weights are quantised ({', '.join(sorted(kept))}): take the model "
            "whose weights are not"
        )
    # Attention that is told of its window is called with it, in every module of transformers.
    if has_window(config) and "sliding_window=" not in inspect.getsource(sys.modules[type(model).__module__]):
        raise ValueError(
            f"{type(model).__name__} cannot be trained here: its attention has a sliding window of {config.sliding_window} tokens "
            "in a mask alone, which packed samples do not have: take a model without a sliding window"
        )


def has_window(config: Any) -> bool:
    """True if a sliding window hides tokens of samples that the model can read."""
    window, longest = (
        getattr(config, name, None) or math.inf for name in ("sliding_window", "max_position_embeddings")
    )
    return window < longest and "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def plain(model: Any, gradient_checkpointing: bool) -> Any:
    """The model without dropout and other noise of training."""
    model.eval()
    for module in model.modules():
        # Modules that checkpoint their activations ask for it.
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(policy: Packed, dims: ParallelDims, config: Config, model_dir: str | Path, device: torch.device) -> Packed:
    """Shard each transformer block and then the rest over the ranks, in place.

    Layers compute in `model.dtype`. Frozen weights are kept in it; trained ones and sums of gradients stay fp32. Parameters
    without memory are read from the files of `model_dir`.
    """
    model, settings, dtype = policy.model, config.learner, DTYPES[config.model.dtype]
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    blocks = blocks_of(model)
    if dims.spread is not None:
        check_model(model, settings)
    if dims.tensor_mesh is not None:
        split_layers(model, blocks, dims.tensor_mesh)
    if settings.compile:
        compile_blocks(model, blocks)
    # A cast of inputs would reach into a micro-batch, round its temperatures, and give each block a copy of its `Segments`.
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mp_policy": mixed}
    if settings.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks:
        fully_shard(block, mesh=dims.fsdp, **options)
    fully_shard(policy, mesh=dims.world, **options)
    adapter = partial(initial_adapter, seed=config.trainer.seed)
    fill(policy, model, model_dir, torch.device("cpu") if settings.offload else device, adapter)
    if dims.spread is not None:
        spread_over(policy, dims.spread)
    if on_cpu_in_half(device, dtype):
        policy.multiple = MULTIPLE
    return policy


def compile_blocks(model: Any, blocks: Sequence[nn.Module]) -> None:
    """Compile each block in place; attention over packed samples, whose lengths change with each batch, stays as it is."""
    AttentionInterface.register(UNCOMPILED, torch.compiler.disable(ulysses_attention))
    model.config._attn_implementation = UNCOMPILED
    for block in blocks:
        block.compile()


def blocks_of(model: Any) -> list[nn.Module]:
    """The model's transformer blocks, by the class names that the architecture says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def full_tensors(policy: Packed, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each parameter whole, with its adapter added, by its Hugging Face name, one at a time; tied weights once. Each step is a collective."""
    for name, whole in merged(policy.model):
        yield name, whole if dtype is None else whole.to(dtype)


def shapes_of(policy: Packed) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of `full_tensors`, in its order."""
    named = policy.model.named_parameters()
    return [(file_name(name), tuple(p.shape)) for name, p in named if ".lora_" not in name]


def whole_on_host(policy: Packed, rank: int, dtype: str, merge: bool = False) -> dict[str, Tensor]:
    """A copy of `full_tensors` in `dtype`, in the memory of rank 0; of the adapters alone, if any, unless they are to `merge`. A collective."""
    weights = {}
    adapters = any(".lora_" in name for name, _ in policy.named_parameters())
    named = adapter_tensors(policy.model) if adapters and not merge else full_tensors(policy)
    for name, whole in named:
        if rank == 0:
            weights[name] = whole.to("cpu", DTYPES[dtype], copy=True)
    return weights


def write_model(
    policy: Packed, weights: dict[str, Tensor], folder: str | Path, model_dir: str | Path, dtype: str
) -> None:
    """Write a Hugging Face folder: weights, config, and the tokenizer's files of `model_dir`; adapters alone in PEFT's format.

    It is written whole or not at all; one that was there is replaced.
    """
    model_dir = Path(model_dir)
    adapter = any(".lora_" in name for name in weights)
    with written_whole(Path(folder)) as unfinished:
        if adapter:
            write_adapter(unfinished, policy.model, weights, model_dir)
        else:
            policy.model.save_pretrained(str(unfinished), state_dict=weights)
            # transformers writes the type of the model in memory, which is fp32.
            config = json.loads((unfinished / "config.json").read_text(encoding="utf-8"))
            text = json.dumps({**config, "dtype": dtype}, indent=2) + "\n"
            (unfinished / "config.json").write_text(text, encoding="utf-8")
        for source in filter(Path.is_file, sorted(model_dir.iterdir())):
            # Tokenizer and generation files; not the old weights in any form, nor their index.
            kept = source.suffix in (".json", ".jinja", ".txt", ".model") and not source.name.endswith(".index.json")
            if kept and not (unfinished / source.name).exists() and not (adapter and source.name == "config.json"):
                shutil.copy2(source, unfinished / source.name)
