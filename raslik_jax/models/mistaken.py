"""Says what a folder holds that is not the checkpoint or the adapter it was given as."""

import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from raslik_jax.base.messages import shown, some_of
from raslik_jax.models import storage

# How deep is looked for what was meant, and in how many folders of a level.
_DEPTH, _MOST = 3, 1000


def base_name(folder: pathlib.Path) -> str:
    """Returns what an adapter calls the model that it was trained on, "" where it does not say."""
    path = folder / storage.ADAPTER_CONFIG
    named = storage.read_json(path, {"base_model_name_or_path?": (str, None)})
    return named.get("base_model_name_or_path") or ""


def no_checkpoint(folder: pathlib.Path, lacking: str) -> ValueError:
    """Returns why a folder without config.json or weights is no checkpoint, and what it is."""
    origin = shown(str(folder), 120)
    if (folder / storage.ADAPTER_CONFIG).is_file():
        base = base_name(folder)
        named = f"its base {shown(base, 80)}" if base else "the model that it was trained on"
        mend = f"give it as --adapter, and {named} as --checkpoint"
        return ValueError(f"--checkpoint must be a whole model, {origin} is an adapter: {mend}")
    must = f"the checkpoint {origin} must hold config.json and weights, it lacks {lacking}"
    if any(folder.glob("*.gguf")):
        return ValueError(f"{must} and has GGUF: give the checkpoint that this was made from")
    return ValueError(f"{must}: {_below(folder, 'config.json', '--checkpoint')}")


def no_adapter(folder: pathlib.Path, lacking: Sequence[str]) -> ValueError:
    """Returns why a folder that lacks files is no adapter, and what it is."""
    origin = shown(str(folder), 120)
    if (folder / "config.json").is_file() and storage.has_weights(folder):
        mend = "give it as --checkpoint, and leave --adapter out"
        return ValueError(f"--adapter must be an adapter, {origin} is a whole model: {mend}")
    must = f"must hold {storage.ADAPTER_CONFIG} and {storage.ADAPTER_WEIGHTS}, as peft saves them"
    lacks = f"it lacks {' and '.join(lacking)}"
    mend = _below(folder, storage.ADAPTER_CONFIG, "--adapter")
    return ValueError(f"the adapter {origin} {must}, {lacks}: {mend}")


def _below(folder: pathlib.Path, name: str, flag: str) -> str:
    """Returns which folder below holds the file; of checkpoint-N the newest comes first."""
    found, level = set[pathlib.Path](), [folder]
    for _ in range(_DEPTH):
        level = list(
            itertools.islice(itertools.chain.from_iterable(map(_folders_in, level)), _MOST)
        )
        found |= {path for path in level if (path / name).is_file()}
    if not found:
        return "name another folder"

    def rank(path: pathlib.Path) -> tuple[int, int, str]:
        steps = re.findall(r"(?:^|/)checkpoint-(\d+)", path.as_posix())
        return (-int(steps[-1]) if steps else -1, len(path.parts), path.as_posix())

    first, *others = sorted(found, key=rank)
    is_newest = len(found) > 1 and rank(first)[0] < -1
    named = f"give {flag}={first}" + (", the newest" if is_newest else "")
    return named + (f", or {some_of(others, 2, quoted=False)}" if others else "")


def _folders_in(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders in a folder but hidden ones; none where it may not be read."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(one.name for one in entries if one.is_dir(follow_symlinks=False))
    except OSError:
        return
    yield from (folder / name for name in names if not name.startswith("."))
