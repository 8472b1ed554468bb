"""Weights as files: all of them, or what has changed since the folder before.

Both ends of a delta hold a copy of the weights, in host memory: the sender to compare with, the receiver to change.

Legend: N elements of a tensor, C changed ones, B bytes.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agent_train.weights.collective import checksum, size_bytes
from agent_train.weights.sync import TensorInfo, checksum_of_all
from agentgym.storage.files import written_whole

WHOLE, CHANGES = "model.safetensors", "changes.safetensors"
_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_GAP = np.dtype(np.uint32)


class WeightCopy:
    """All weights by their names, with their checksums. Empty at first."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.sums: dict[str, int] = {}

    def write(
        self, manifest: Sequence[TensorInfo], new: Iterable[torch.Tensor], folder: Path, keep: bool
    ) -> dict[str, int]:
        """Write a folder of all weights, which come one by one in the manifest's order; the checksum of each. `keep` holds them."""
        self.tensors, self.sums = {}, {}
        with written_whole(folder) as unfinished, (unfinished / WHOLE).open("wb") as file:
            file.write(_header(manifest))
            for info, tensor in zip(manifest, new, strict=True):
                self.sums[info.name] = checksum(tensor)
                own = tensor.detach().to("cpu", copy=keep)
                file.write(_bits(own).data)
                if keep:
                    self.tensors[info.name] = own
        return dict(self.sums)

    def write_changes(
        self, manifest: Sequence[TensorInfo], new: Iterable[torch.Tensor], folder: Path
    ) -> dict[str, int]:
        """As `write` with `keep`, a folder of how the weights differ from those held.

        It names, by their checksum, the weights that it changes. Tensors without a change are not in it.
        """
        base, changed = checksum_of_all(self.sums), {}
        for info, tensor in zip(manifest, new, strict=True):
            own = self.tensors[info.name]
            if (difference := changes(own, tensor.cpu())).numel():
                changed[info.name] = difference
                own.copy_(tensor)
                self.sums[info.name] = checksum(own)
        with written_whole(folder) as unfinished:
            save_file(changed, unfinished / CHANGES, metadata={"base": str(base)})
        return dict(self.sums)

    def read(self, folder: Path, keep: bool) -> dict[str, int]:
        """Hold the weights of a folder; the checksum of each, or none if the folder changes others than are held.

        A whole folder is read where it lies, whose bytes must stay; with `keep` it is copied. Raises OSError and
        SafetensorError for a folder that cannot be read, zlib.error for changes that are damaged; nothing is held then.
        """
        held, sums = self.tensors, self.sums
        self.tensors, self.sums = {}, {}
        if not (folder / CHANGES).is_file():
            whole = load_file(folder / WHOLE)
            self.tensors = {name: tensor.clone() for name, tensor in whole.items()} if keep else whole
            self.sums = {name: checksum(tensor) for name, tensor in self.tensors.items()}
            return dict(self.sums)
        with safe_open(folder / CHANGES, "pt") as file:
            if file.metadata()["base"] != str(checksum_of_all(sums)):
                return {}
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                apply_changes(held[name], file.get_tensor(name))
                sums[name] = checksum(held[name])
        self.tensors, self.sums = held, sums
        return dict(sums)


def _header(manifest: Sequence[TensorInfo]) -> bytes:
    """The beginning of a safetensors file whose tensors follow each other: the length of a JSON object, and the object."""
    entries, end = {}, 0
    for info in manifest:
        start, end = end, end + size_bytes(info)
        entries[info.name] = {"dtype": _TYPES[info.dtype], "shape": info.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def changes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How a tensor differs bit for bit from an `old` one of its type and shape, compressed (B); empty where it does not.

    Of each changed element it holds the distance to the one before and old XOR new; if that is less than the XOR of all.
    The bytes of one significance lie together, the high ones mostly zeros, and are compressed by runs.
    """
    old_N, new_N = _bits(old), _bits(new)
    differs_N = old_N != new_N
    changed = np.count_nonzero(differs_N)
    if not changed:
        return torch.empty(0, dtype=torch.uint8)
    if changed * (_GAP.itemsize + old_N.itemsize) < old_N.nbytes:
        at_C = np.flatnonzero(differs_N)
        gap_C = np.diff(at_C, prepend=0).astype(_GAP)
        raw_B = np.concatenate([_planes(gap_C), _planes(old_N[at_C] ^ new_N[at_C])])
    else:
        raw_B = _planes(old_N ^ new_N)
    packer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return torch.frombuffer(bytearray(packer.compress(raw_B) + packer.flush()), dtype=torch.uint8)


def apply_changes(tensor: torch.Tensor, difference: torch.Tensor) -> None:
    """Turn the `old` tensor of `changes`, contiguous and on the host, into the new one, in place."""
    own_N = _bits(tensor)
    raw_B = np.frombuffer(zlib.decompress(difference.numpy()), dtype=np.uint8)
    if raw_B.size == own_N.nbytes:
        own_N ^= _from_planes(raw_B, own_N.dtype)
        return
    changed = raw_B.size // (_GAP.itemsize + own_N.itemsize)
    gaps_B, bits_B = np.split(raw_B, [changed * _GAP.itemsize])
    own_N[np.cumsum(_from_planes(gaps_B, _GAP), dtype=np.int64)] ^= _from_planes(bits_B, own_N.dtype)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The elements as integers: a view of a contiguous tensor of the host."""
    bytes_B = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return bytes_B.numpy().view(f"u{tensor.element_size()}")


def _planes(values_N: np.ndarray) -> np.ndarray:
    """The first byte of every value, then the second of every value, and so on."""
    return np.ascontiguousarray(values_N.view(np.uint8).reshape(values_N.size, -1).T).reshape(-1)


def _from_planes(bytes_B: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(bytes_B.reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)
