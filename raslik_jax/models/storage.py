"""Files of checkpoints: finding or fetching a directory, safetensors in and out, atomically.

Knows nothing of models: keys and arrays only.
"""

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
_MAX_NAMED = 20
_HUB_SECONDS = 5.0


# where checkpoints are --------------------------------------------------------------------------


def resolve_folder(name: str | os.PathLike[str], *, revision: str | None = None) -> pathlib.Path:
    """Returns the local directory of a checkpoint, fetched from the Hugging Face hub if need be.

    A directory of that name comes first, then the local hub cache, then the network. Without a
    network the answer is an error at once, not a series of retries.

    Args:
      name: A directory, or "owner/model" on the hub.
      revision: Branch, tag or commit of a hub model; refused for a directory, which has none.

    Raises:
      ValueError: No such directory or hub model, or it cannot be reached from here.
    """
    folder = pathlib.Path(name)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(
                f"a revision belongs to a model on the hub, got {revision=} for the directory"
                f" {folder}; leave it out"
            )
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        raise ValueError(f"a checkpoint directory was wanted, {folder} is none; correct the path")
    import huggingface_hub
    import huggingface_hub.errors

    fetch = functools.partial(
        huggingface_hub.snapshot_download,
        str(name),
        allow_patterns=["*.json", "*.safetensors", "1_Pooling/*", "merges.txt", "vocab.txt"],
    )
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        cached = pathlib.Path(fetch(revision=revision, local_files_only=True))
        # A tokenizer fetched earlier leaves a snapshot without weights.
        if _find_weights(cached):
            return cached
    try:
        # Asked first because it takes a time limit; a download waits for a silent hub for minutes.
        info = huggingface_hub.HfApi().model_info(
            str(name), revision=revision, timeout=_HUB_SECONDS
        )
        return pathlib.Path(fetch(revision=info.sha))
    except Exception as error:  # the hub's client raises its own, its transport's and OS errors
        at = f" at revision {revision!r}" if revision else ""
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model {str(name)!r}{at} is neither a directory nor in the local hub cache, and the"
            f" hub did not give it ({reason}); name a directory, or fetch it where there is a"
            " network"
        ) from error


def _find_weights(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the weight file, the index of a sharded one, or candidates of another name."""
    for name in (WEIGHTS, INDEX):
        if (folder / name).is_file():
            return [folder / name]
    # "model.fp16.safetensors" and the like: the file of a variant.
    return sorted(folder.glob("model.*.safetensors"))


# reading tensors --------------------------------------------------------------------------------


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; a ValueError names a file that is absent or has none."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{path} was wanted, there is no such file; point to a whole checkpoint"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a JSON object was wanted, got a {type(fields).__name__}")
    return fields


class Tensors:
    """The named tensors of one or more safetensors files, read one at a time.

    `rename` turns a key of the file into the key of the plan; errors show the file's.
    """

    def __init__(
        self,
        files: Iterable[pathlib.Path],
        stack: contextlib.ExitStack,
        rename: Callable[[str], str] = str,
    ):
        self._entries: dict[str, tuple[Any, str]] = {}
        self.files: dict[str, pathlib.Path] = {}
        for path in files:
            try:
                handle = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(
                    f"{path} is truncated, corrupt or no safetensors file ({error}); fetch the file"
                    " again"
                ) from error
            for stored in handle.keys():
                key = rename(stored)
                if key in self._entries:
                    raise ValueError(
                        f"{path} holds {stored!r}, which {self.files[key]} holds too; fetch the"
                        " checkpoint again"
                    )
                self._entries[key], self.files[key] = (handle, stored), path

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> set[str]:
        """Returns the keys of all tensors."""
        return set(self._entries)

    def label(self, key: str) -> str:
        """Returns the key as it stands in its file, and the file, for errors."""
        return f"{self._entries[key][1]} in {self.files[key].name}"

    def shape(self, key: str) -> tuple[int, ...]:
        """Returns the shape from the header."""
        handle, stored = self._entries[key]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, key: str) -> str:
        """Returns the dtype as the header spells it, such as "BF16"."""
        handle, stored = self._entries[key]
        return str(handle.get_slice(stored).get_dtype())

    def read(self, key: str) -> np.ndarray:
        """Returns a copy of one tensor."""
        handle, stored = self._entries[key]
        return handle.get_tensor(stored)


_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def open_tensors(
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
    *,
    auto: str,
    rename: Callable[[str], str] = str,
) -> Tensors:
    """Returns the tensors of a checkpoint directory.

    Args:
      folder: The directory.
      stack: Closes the files.
      auto: The transformers class that converts a pickled checkpoint of this kind.
      rename: As in Tensors.
    """
    found = _find_weights(folder)
    if not found and any((folder / name).is_file() for name in _PICKLES):
        raise ValueError(
            f"{folder} holds pickled weights only, which can run code when they are read; convert"
            f' them with: python -c "from transformers import {auto} as M;'
            f" M.from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')\""
        )
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{folder}: {WEIGHTS} or {INDEX} was wanted, found {names}; point to a whole"
            " checkpoint, converted to safetensors if it has pickled weights only"
        )
    if found[0].name != INDEX:
        return Tensors(found, stack, rename)
    weight_map = read_json(found[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{found[0]} has no weight_map; fetch the file again")
    shards = sorted({folder / str(name) for name in weight_map.values()})
    if any(shard.parent != folder for shard in shards):
        raise ValueError(f"{found[0]} names files outside {folder}; fetch the file again")
    absent = [shard for shard in shards if not shard.is_file()]
    if absent:
        lost = [key for key, name in weight_map.items() if folder / str(name) in absent]
        raise ValueError(
            f"{found[0]} names {some([shard.name for shard in absent])}, which are not there"
            f" and hold {some(lost)}; fetch the missing shards"
        )
    tensors = Tensors(shards, stack, rename)
    moved = sorted(
        key
        for key, name in weight_map.items()
        if tensors.files.get(rename(key)) != folder / str(name)
    )
    if moved:
        raise ValueError(
            f"{found[0]} promises {some(moved)}, which the named shards do not hold; fetch the"
            " checkpoint again"
        )
    return tensors


def some(items: Sequence[str]) -> str:
    """Returns the items as one phrase, the first twenty by name and the others by number."""
    rest = len(items) - _MAX_NAMED
    shown = ", ".join(map(str, items[:_MAX_NAMED]))
    return f"{shown} and {rest} more" if rest > 0 else shown


# writing ----------------------------------------------------------------------------------------


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object as JSON that a person can read, keys sorted."""
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a working directory that takes the wanted name when all went well."""
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"a new or empty directory was wanted, {folder} holds something; choose another or"
            " remove it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
