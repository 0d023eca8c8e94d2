"""Writes the reference pages that follow from the code: `make reference`.

Whole pages are docs/reference/commands.md and settings.md. In docs/api/index.md, models.md and
extending_objective.md of docs/guides the part between two comments is written. tests/docs_test.py
compares them.
"""

import functools
import importlib
import inspect
import itertools
import pathlib
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

import raslik_jax
from raslik_jax.base import settings
from raslik_jax.base.settings import Leaf
from raslik_jax.cli import main
from raslik_jax.config import Config
from raslik_jax.incident.configuring import PRESET
from raslik_jax.models.decoder import ARCHITECTURES
from raslik_jax.train.losses import Rows
from raslik_jax.train.objectives import OBJECTIVES, Objective

_DOCS = pathlib.Path(__file__).resolve().parent
_MADE = "<!-- This page is written by `make reference`. -->\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else ""


def _flags(leaves: Iterable[Leaf], preset: Mapping[str, Any]) -> str:
    """Returns a table of flags; those of a preset with its default too."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for leaf in leaves:
        choices = settings.choices_of(leaf.hint, leaf.metadata)
        text = _cell(leaf.metadata["help"])
        if choices and get_origin(leaf.hint) is not tuple:
            text += f" One of {', '.join(f'`{one}`' for one in choices if one)}."
        default = _value(leaf.value)
        if leaf.name in preset and preset[leaf.name] != leaf.value:
            default += f" (trace: {_value(preset[leaf.name])})"
        lines.append(f"| `--{leaf.name}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def _commands() -> str:
    parts = [
        f"{_MADE}# Commands\n\n`raslik help COMMAND` prints the same. Commands that run stages "
        "also take all [settings](settings.md) as flags,\nand `--mesh.data` and `--mesh.base`. "
        "`--train-file` is the same as `--train_file`. A meaning that begins with a flag and a "
        "colon\nholds for use with that flag.\n"
    ]
    for name in main.COMMANDS:
        module = importlib.import_module(f"raslik_jax.cli.{name}")
        first, *texts = inspect.cleandoc(module.__doc__ or "").split("\n\n")
        usage = next((text for text in texts if text.startswith("  raslik")), f"  raslik {name}")
        more = () if hasattr(module, "GROUP") else getattr(module, "FLAGS", ())
        leaves = [x for x in settings.leaves(module.Options()) if not x.name.startswith("mesh.")]
        leaves += [x for x in more if "." not in x.name]
        block = f"```\n{textwrap.dedent(usage)}\n```\n"
        title = f"## raslik {name}\n\n{' '.join(first.split())}\n"
        parts.append(f"{title}\n{block}\n{_flags(leaves, {})}")
    return "\n".join(parts)


def _settings() -> str:
    parts = [
        f"{_MADE}# Settings\n\nA setting is a flag of a command and a key of `settings={{...}}` in "
        'Python. `raslik trace` starts from other\ndefaults than `raslik run`, marked "trace".\n'
        "A meaning that begins with a flag or a value and a colon holds for this flag or value "
        "only.\n"
    ]
    again = {f"unlearn.{name}.": one.repeats for name, one in OBJECTIVES.items() if one.repeats}
    leaves = [x for x in settings.leaves(Config()) if not x.name.startswith(tuple(again))]
    for stage, group in itertools.groupby(leaves, lambda x: "." in x.name and x.name.split(".")[0]):
        parts.append(f"## {stage or 'The run'}\n\n{_flags(group, PRESET)}")
        if stage == "unlearn":
            parts += [
                f"`--{name}*` repeats `--unlearn.{first}.*` with another seed.\n"
                for name, first in again.items()
            ]
    return "\n".join(parts)


def _models() -> str:
    lines = ["| architecture | `model_type` | layers that get LoRA by default |", "|---|---|---|"]
    for name, record in ARCHITECTURES.items():
        lines.append(f"| {record.config.hf_name} | `{name}` | `{','.join(record.lora_targets)}` |")
    return "\n".join(lines) + "\n"


def _fields(record: type) -> str:
    """Returns a table of all public fields, properties and methods of a class."""
    text = (inspect.getdoc(record) or "").partition("\nAttributes:\n")[2]
    told = dict(re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.MULTILINE))
    lines = ["| field | content |", "|---|---|"]
    for name in inspect.get_annotations(record):
        lines.append(f"| `{name}` | {_cell(told[name])} |")
    for name, thing in vars(record).items():
        if isinstance(thing, functools.cached_property) or inspect.isfunction(thing):
            taken = [*inspect.signature(thing).parameters][1:] if inspect.isfunction(thing) else []
            shown = f"{name}({', '.join(taken)})" if taken else name
            if not name.startswith("_"):
                lines.append(f"| `{shown}` | {_cell(inspect.getdoc(thing) or '')} |")
    return "\n".join(lines) + "\n"


def _names() -> str:
    lines = ["| name | what it is |", "|---|---|"]
    for name in raslik_jax.__all__[1:]:
        thing = getattr(raslik_jax, name)
        module = raslik_jax._HOME[name]
        if isinstance(thing, dict):
            link, text = f"`{name}`", f"a family, in `raslik_jax.{module}`"
        else:
            link = f"[`{name}`][raslik_jax.{module}.{name}]"
            text, _, _ = (inspect.getdoc(thing) or "").partition("\n\n")
        lines.append(f"| {link} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _between(page: str, **texts: str) -> str:
    """Returns a page with other texts between the comments of their names."""
    whole = (_DOCS / page).read_text("utf-8")
    for name, text in texts.items():
        pattern = re.compile(rf"(<!-- {name}: .*?-->\n).*?(<!-- end -->)", re.DOTALL)
        whole = pattern.sub(lambda found, text=text: found[1] + text + found[2], whole)
    return whole


def pages() -> dict[str, str]:
    """Returns the text of every page that is written, by its path below docs."""
    return {
        "reference/commands.md": _commands(),
        "reference/settings.md": _settings(),
        "guides/models.md": _between("guides/models.md", architectures=_models()),
        "guides/extending_objective.md": _between(
            "guides/extending_objective.md", rows=_fields(Rows), objective=_fields(Objective)
        ),
        "api/index.md": _between("api/index.md", names=_names()),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (_DOCS / path).write_text(text, encoding="utf-8")
