"""The part that runs inside every vLLM worker: joins the weight group, or reads files, and loads what arrives.

vLLM mixes this class into its worker (`--worker-extension-cls`) and calls it by `/collective_rpc`, which carries only JSON.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from agent_train.weights.collective import MissingError, WeightGroup, checksum, make_group, receive_buckets
from agent_train.weights.files import WeightCopy
from agent_train.weights.sync import WeightAddress, WeightTransferError, manifest_from_json

ADAPTER_FILE = "adapter_model.safetensors"


class WeightReceiver:
    """Methods added to vLLM's worker. Their names must not clash with those of vLLM's worker class."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    _weight_group: WeightGroup | None = None
    _weight_copy: WeightCopy | None = None

    def connect_weights(self, host: str, port: int, world_size: int, rank_offset: int) -> list[int]:
        """Join the weight group as `rank_offset` + this worker's rank; the ranks that did not come, so that there is no group."""
        if self._weight_group is not None:
            self._weight_group.close()
            self._weight_group = None
        address = WeightAddress(host, port, world_size, rank_offset)
        try:
            self._weight_group = make_group(address, rank_offset + self.rank, self.device)
        except MissingError as error:
            return error.missing
        return []

    def receive_weights(self, manifest_json: str) -> dict[str, int]:
        """Receive all tensors and load them. Returns the checksum of each as it arrived."""
        group = self._weight_group
        if group is None:
            raise WeightTransferError("this worker is in no weight group: call connect_weights first")
        manifest = manifest_from_json(manifest_json)
        sums: dict[str, int] = {}

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in receive_buckets(group, manifest):
                sums[name] = checksum(tensor)
                yield name, tensor.to(self.device)

        _load(self.model_runner.get_model(), self.vllm_config, arriving())
        return sums

    def fetch_weights(self, path: str, keep: bool) -> dict[str, int]:
        """Read a folder of weights, to load later; the checksum of each, or none if it changes others than were kept."""
        self._weight_copy = self._weight_copy or WeightCopy()
        return self._weight_copy.read(Path(path), keep)

    def load_fetched(self, keep: bool) -> dict[str, int]:
        """Load what was fetched, and keep it for changes or drop it. Returns the checksum of each tensor."""
        copy = self._weight_copy
        if copy is None or not copy.tensors:
            raise WeightTransferError("this worker has fetched no weights: call fetch_weights first")
        arriving = ((name, tensor.to(self.device)) for name, tensor in copy.tensors.items())
        _load(self.model_runner.get_model(), self.vllm_config, arriving)
        if not keep:
            self._weight_copy = None
        return copy.sums

    def adapter_checksums(self, path: str) -> dict[str, int]:
        """The checksum of each tensor of an adapter's file, as this worker reads it."""
        from safetensors.torch import load_file

        return {name: checksum(tensor) for name, tensor in load_file(os.path.join(path, ADAPTER_FILE)).items()}


def _load(model: torch.nn.Module, vllm_config: Any, weights: Any) -> None:
    """Load Hugging Face weights into a model that already serves.

    vLLM repacks weights after loading them, so loading over them would write the wrong layout. Its layerwise reload restores each
    layer's layout, loads, and repacks. It leaves out a layer that is tied to another's weights, whose copy would stay old.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    expected = {name for name, _ in model.named_parameters()}
    tied = _tied_layers(model)
    with torch.inference_mode(), set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, vllm_config.model_config)
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
    unquantized = loaded is not None and vllm_config.quant_config is None
    if unquantized and (missing := sorted(expected - loaded)):
        raise WeightTransferError(f"the sender left out {len(missing)} parameters of the model, first {missing[0]!r}")


def _tied_layers(model: torch.nn.Module) -> list[Any]:
    """Layers whose weight is also an earlier layer's: an output head on the input embeddings."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) in seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen.add(id(weight))
    return tied
