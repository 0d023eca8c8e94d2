"""Files of checkpoints: finding or fetching a directory, safetensors in and out, atomically.

It knows nothing of models: keys and arrays only.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from raslik_jax.base import files, machine
from raslik_jax.base.messages import one_line, printable, shown, some_of
from raslik_jax.base.settings import HUB_NAME
from raslik_jax.data.words import refused
from raslik_jax.parallel import processes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
# Files that make up a tokenizer, and how a model is to be decoded, in the folder of a checkpoint.
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = (
    *"""tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    chat_template.jinja chat_template.json vocab.txt merges.txt tokenizer.model""".split(),
    TOOL_TEMPLATE,
)
# It counts before what the other files say.
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
# Files of a PEFT adapter.
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The dtypes of weights, as a safetensors header spells them.
FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_NAMES = {header: name for name, header in FLOATS.items()}
# Tensors that are read or written at the same time; each is in memory.
THREADS = min(8, machine.usable_cpus())
# Of a tensor that is read in blocks; a row may have more.
_BLOCK_VALUES = 1 << 24
_CACHED_VALUES = 1 << 18
_HUB_SECONDS = 5.0
_MEND = "point to a whole checkpoint, or fetch it again"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Before a tensor's name in a header: the checksum of its bytes.
_CHECKSUM = "crc32 "


def resolve_folder(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    auto: str = "AutoModelForCausalLM",
    weights: str = "",
) -> pathlib.Path:
    """Returns the local directory of a checkpoint, fetched from the Hugging Face hub if need be.

    A directory of that name comes first, then the local hub cache, then the network. Without a
    network it fails at once and does not retry.

    Args:
      name: A directory, or "owner/model" on the hub.
      revision: Branch, tag or commit of a hub model; refused for a directory, which has none.
      auto: The transformers class that converts pickled weights of this kind, which are refused.
      weights: The file that a copy in the cache must have; empty: those of a model.
    """
    folder, name = pathlib.Path(name), str(name)
    if folder.is_dir():
        if revision is not None:
            got = (
                f"which has no revisions, got {shown(revision)}: leave out the flag of its revision"
            )
            raise ValueError(f"{shown(name, 120)} is a folder, {got}")
        return folder
    if not HUB_NAME.fullmatch(name):
        what = "an adapter" if weights else "a checkpoint"
        got = "is not there: correct the path"
        if folder.exists():
            got = "is a file: give the folder that holds it"
        raise ValueError(f"{what} must be a folder, {shown(name, 160)} {got}")
    import huggingface_hub
    import huggingface_hub.errors

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        name,
        allow_patterns=["*.json", "*.safetensors", "1_Pooling/*", *TOKENIZER_FILES],
    )
    names: set[str] = set()
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        cached = pathlib.Path(fetch(revision=revision, local_files_only=True))
        # A tokenizer fetched earlier leaves a snapshot without weights, a download that was killed
        # one without some of them.
        if (cached / weights).is_file() if weights else _is_whole(cached):
            if revision != cached.name:  # a branch moves
                _tell_cached(name, cached.name)
            if not weights and not (cached / "tokenizer.json").is_file():
                fetch_tokenizer(name, cached)
            return cached
        names = {path.name for path in cached.iterdir()}
    reason: BaseException | None = None
    try:
        # Asked first because it takes a time limit; a download waits for a silent hub for minutes.
        info = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
        names = {file.rfilename for file in info.siblings or ()}
        if not _is_pickled(names):
            return pathlib.Path(fetch(revision=info.sha))
    except Exception as error:  # the hub's client raises its own, its transport's and OS errors
        reason = error
    if _is_pickled(names):
        options = f", revision='{revision}'" if revision else ""
        raise ValueError(_pickled(name, auto, "FOLDER", options) + " and name FOLDER") from reason
    at = f" at revision {revision!r}" if revision else ""
    said = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    raise refused("hub_model", name=name, at=at, said=said) from reason


@functools.cache
def _tell_cached(name: str, commit: str) -> None:
    """Prints once which commit is read where the hub is not asked for a newer one."""
    line = f"    {name}: commit {commit[:12]} of the local cache, which may be older than the hub's"
    print(f"{line}: give a commit to choose", file=sys.stderr)


@functools.cache
def fetch_tokenizer(name: str, folder: pathlib.Path) -> None:
    """Fetches the tokenizer files that an earlier download of a hub's folder left out.

    It prints a line if the hub does not answer.

    Args:
      name: "owner/model" on the hub.
      folder: Its copy in the local cache, a folder with the name of the commit.
    """
    import huggingface_hub

    try:
        hub, commit = huggingface_hub.HfApi(), folder.name
        info = hub.model_info(name, revision=commit, timeout=_HUB_SECONDS)
        absent = {file.rfilename for file in info.siblings or ()} & {*TOKENIZER_FILES}
        if absent:
            huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=sorted(absent))
    except Exception as error:  # as in resolve_folder
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"the hub did not answer ({one_line(said, 80)})"
        line = f"{name} may have a tokenizer of its own that is not in the local cache: {reason}"
        print(f"    {line}", file=sys.stderr)


def _is_pickled(names: Collection[str]) -> bool:
    """Returns whether a model with files of these names has pickled weights and no others."""
    return any(name in _PICKLES for name in names) and not any(".safetensors" in n for n in names)


def _pickled(name: str, auto: str, folder: str, options: str = "") -> str:
    """Returns how to convert a checkpoint whose weights may run code when they are read."""
    return (
        f"{name} must have safetensors, got pickled weights only, which can run code: convert them"
        f' with python -c "from transformers import {auto} as M;'
        f" M.from_pretrained('{name}', dtype='auto'{options}).save_pretrained('{folder}')\""
    )


def _find_weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the weight file, the index of a sharded one, or candidates of another name."""
    for name in (WEIGHTS, INDEX):
        if (folder / name).is_file():
            return [folder / name]
    # "model.fp16.safetensors" and the like: the file of a variant.
    return sorted(folder.glob("model.*.safetensors"))


def has_weights(folder: pathlib.Path) -> bool:
    """Returns whether a folder has weights of a model, pickled ones included."""
    return bool(_find_weights(folder)) or any((folder / name).is_file() for name in _PICKLES)


def _is_whole(folder: pathlib.Path) -> bool:
    """Returns whether a folder has weights; sharded ones need every shard."""
    found = _find_weights(folder)
    files_of = _shards(found[0]) if found and found[0].name == INDEX else found
    return bool(files_of) and all(file.is_file() for file in files_of)


def _shards(index: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that the index of sharded weights names."""
    weight_map = read_json(index, {"weight_map": {str: str}})["weight_map"]
    shards = sorted({index.parent / name for name in weight_map.values()})
    if not shards or any(shard.parent != index.parent for shard in shards):
        raise ValueError(f"{index} names no file, or one outside its folder: fetch it again")
    return shards


def read_json(path: pathlib.Path, shape: files.Shape = dict) -> Any:
    """Returns the object in a JSON file of a checkpoint or adapter; see `files.read_json`."""
    return files.read_json(path, shape, mend=_MEND)


class Tensors:
    """The named tensors of one or more safetensors files, read one at a time or in parts.

    `rename` turns a key of the file into the key of the other methods. Errors show the key of the
    file. `files` has the file of each key, and `metadata` has the metadata of the headers.
    """

    def __init__(self, paths: Iterable[pathlib.Path], rename: Callable[[str], str] = str):
        self._stored: dict[str, str] = {}
        self._headers: dict[str, tuple[tuple[int, ...], str]] = {}
        self._checksums: dict[str, int] = {}
        self.files: dict[str, pathlib.Path] = {}
        self.metadata: dict[str, str] = {}
        for path in paths:
            origin = shown(str(path), 160)
            if not path.is_file():  # or a pipe, which would be waited for
                raise ValueError(f"no file {origin}: {_MEND}")
            with _open(path) as handle:
                self.metadata |= handle.metadata() or {}
                for stored in handle.keys():
                    key = rename(stored)
                    if key in self._stored:
                        twice = f"{shown(stored)}, which {self.files[key].name} holds too"
                        raise ValueError(f"{origin} holds {twice}: fetch the checkpoint again")
                    self._stored[key], self.files[key] = stored, path
                    found = handle.get_slice(stored)
                    self._headers[key] = tuple(found.get_shape()), str(found.get_dtype())

    def label(self, key: str) -> str:
        """Returns the key in its file and the file, for errors."""
        return f"{self._stored[key]} in {self.files[key].name}"

    def header(self, key: str) -> tuple[tuple[int, ...], str]:
        """Returns the shape and the dtype in the header's spelling, such as "BF16"."""
        return self._headers[key]

    def read(self, key: str) -> np.ndarray:
        """Returns a copy of one tensor; refuses bytes that `write_tensors` did not write."""
        tensor = self.read_part(key, ())
        self._checksums[key] = _checksum(tensor)
        self._check([key])
        return tensor

    def read_part(self, key: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a copy of a part of a tensor without a check; no other bytes are read."""
        # Opened for each, since what a handle has read stays in the memory of the process.
        with _open(self.files[key]) as handle:
            if not index:
                whole: np.ndarray = handle.get_tensor(self._stored[key])
                return whole
            part: np.ndarray = handle.get_slice(self._stored[key])[index]
            return part

    def is_same(self, one: str, another: str, *, other: "Tensors | None" = None) -> bool:
        """Returns whether a tensor equals another, rounded to its dtype; reads blocks of rows.

        `other` are the tensors that have `another`; None for these.
        """
        other = other or self
        if self._headers[one][0] != other._headers[another][0]:
            return False
        pairs = zip(self._blocks(one), other._blocks(another), strict=True)
        with np.errstate(over="ignore"):
            return all(np.array_equal(mine, its.astype(mine.dtype)) for mine, its in pairs)

    def check_shared(self) -> None:
        """Raises a ValueError unless all processes read the same files, by headers and samples."""
        sample = hashlib.sha256()
        for key in sorted(self.files):
            sample.update(f"{key} {self._headers[key]} ".encode())
            row = (slice(0, 1),) if self._headers[key][0] else ()
            sample.update(_bytes(self.read_part(key, row)))
        first = processes.from_first(sample.hexdigest)
        if first != sample.hexdigest():
            folder = shown(str(next(iter(self.files.values())).parent), 160)
            must = "must hold the same weights for all processes, this one finds others"
            raise ValueError(f"{folder} {must}: give all of them one copy")

    def identity(self, keys: Iterable[str], *, is_shared: bool = False) -> str:
        """Returns 32 hex digits of the content of these tensors.

        The digits cover all bytes. Bytes that `read` has not read are read here in blocks. If all
        processes read the same files, each reads a part, and they exchange their checksums.
        """
        keys = sorted(keys)
        if is_shared and processes.count() > 1:
            found = np.zeros(len(keys), np.uint32)
            for place in self._own_share(keys):
                found[place] = self._checksum_of(keys[place])
            found = processes.sum_processes(found)
            self._checksums |= dict(zip(keys, found.tolist(), strict=True))
            self._check(keys)
        with ThreadPoolExecutor(THREADS) as pool:
            entries = [*pool.map(self._entry, keys)]
        lines = "".join(f"{key} {entry}\n" for key, entry in zip(keys, entries, strict=True))
        return hashlib.sha256(lines.encode()).hexdigest()[:32]

    def _own_share(self, keys: Sequence[str]) -> list[int]:
        """Returns the places of the keys whose bytes this process reads, about equal for all."""
        sizes = np.array([math.prod(self._headers[key][0]) for key in keys], float)
        middle = np.cumsum(sizes) - sizes / 2
        owners = middle * processes.count() // max(sizes.sum(), 1)
        return [place for place, owner in enumerate(owners) if owner == processes.number()]

    def _blocks(self, key: str) -> Iterator[np.ndarray]:
        """Yields a tensor in blocks of whole rows."""
        shape, _ = self._headers[key]
        rows = max(1, _BLOCK_VALUES // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], rows) if shape else ():
            yield self.read_part(key, (slice(start, min(start + rows, shape[0])),))
        if not shape:
            yield self.read_part(key, ())

    def _checksum_of(self, key: str) -> int:
        if key not in self._checksums:
            self._checksums[key] = functools.reduce(
                lambda before, block: _checksum(block, before), self._blocks(key), 0
            )
        return self._checksums[key]

    def _entry(self, key: str) -> str:
        """Returns the entry of a tensor in an identity and in our own headers."""
        shape, dtype = self._headers[key]
        return _entry(_NAMES[dtype], shape, self._checksum_of(key))

    def _check(self, keys: Iterable[str]) -> None:
        """Refuses tensors whose bytes `write_tensors` did not write."""
        for key in keys:
            written = self.metadata.get(_CHECKSUM + self._stored[key])
            if written is not None and written != self._entry(key):
                damaged = f"{shown(str(self.files[key]), 160)} is damaged: "
                damaged += printable(self._stored[key])
                raise ValueError(f"{damaged} is not what was written; restore it or make it again")


def _open(path: pathlib.Path) -> Any:
    """Opens a safetensors file or says why it cannot."""
    with files.open_regular(path, mend=_MEND):
        pass  # the library calls a file that may not be read a missing one
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        what = f"is truncated, corrupt or no safetensors file ({one_line(str(error), 80)})"
        raise ValueError(f"{shown(str(path), 160)} {what}: fetch the file again") from error


def _bytes(tensor: np.ndarray) -> memoryview:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _checksum(tensor: np.ndarray, before: int = 0) -> int:
    """Returns the CRC-32 of a tensor, for accidents: seven times as fast as SHA-256."""
    return zlib.crc32(_bytes(tensor), before)


def _entry(dtype: str, shape: tuple[int, ...], checksum: int) -> str:
    return f"{dtype} {shape} {checksum:08x}"


def is_finite(tensor: np.ndarray) -> bool:
    """Returns whether a tensor of floating point numbers has no NaN and no infinity."""
    flat = tensor.reshape(-1, order="A")  # no copy, transposed or not
    # In blocks that stay in the processor's cache.
    return all(
        _is_finite(flat[start : start + _CACHED_VALUES])
        for start in range(0, flat.size, _CACHED_VALUES)
    )


def _is_finite(block: np.ndarray) -> bool:
    if block.dtype == ml_dtypes.bfloat16:
        # An exponent of all ones is infinity or NaN; ml_dtypes' own test is an order slower.
        return not ((block.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(block).all())


def open_tensors(folder: pathlib.Path, *, auto: str, rename: Callable[[str], str] = str) -> Tensors:
    """Returns the tensors of a checkpoint directory; `auto` is as in `resolve_folder`."""
    found = _find_weights(folder)
    if not found and any((folder / name).is_file() for name in _PICKLES):
        raise ValueError(_pickled(str(folder), auto, str(folder)))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}, got {names}: {_MEND}")
    return Tensors(_shards(found[0]) if found[0].name == INDEX else found, rename)


def write_tensors(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file whose header has a checksum of every tensor.

    The same tensors give the same bytes. The format's own writer does not guarantee this for a
    header of several entries. NaN and infinity are refused.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        is_sound = dict(zip(tensors, pool.map(is_finite, tensors.values()), strict=True))
        if broken := sorted(name for name in tensors if not is_sound[name]):
            raise refused("saved_finite", names=some_of(broken, 3, quoted=False))
        if not processes.is_first():  # what the others write is thrown away
            return
        found = dict(zip(tensors, pool.map(_checksum, tensors.values()), strict=True))
    checksums = {
        _CHECKSUM + name: _entry(tensor.dtype.name, tensor.shape, found[name])
        for name, tensor in tensors.items()
    }
    noted = {"format": "pt", **(metadata or {}), **checksums}
    header: dict[str, Any] = {"__metadata__": dict(sorted(noted.items()))}
    # Wide dtypes first keeps every tensor aligned, as the format's own writer does.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": FLOATS[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes(tensors[name]))


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields a working directory that takes the folder's name durably after success."""
    files.check_new_folder(folder)
    folder = pathlib.Path(os.path.abspath(folder))
    with files.writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.beside(folder) as partial:
            partial.mkdir()
            yield partial
            files.sync(*(path for path in partial.rglob("*") if path.is_file()))
            os.replace(partial, folder)
            files.sync(folder.parent)
