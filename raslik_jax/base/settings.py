"""Settings that check themselves: of the stages of a run and of the members of its families.

A stage's settings are a `Stage`. A member's own settings are a `Settings` in its record with the
defaults as values. A field of a stage that chooses members names their family. The settings of the
members are below the stage: `config.unlearn["cap_klr"].cap` is `--unlearn.cap_klr.cap`.
"""

import dataclasses
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args, get_origin

from raslik_jax.base.messages import listed_problems, shown


@typing.runtime_checkable
class Member(Protocol):
    """The fields of every record of a family: a title for tables and its settings' defaults."""

    @property
    def title(self) -> str: ...

    @property
    def settings(self) -> "Settings": ...


Family = Mapping[str, Member]
# The names of models on the Hugging Face hub: NAME or OWNER/NAME.
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

# How to name a member that is in no family of the package.
FROM_STUDIES = "for names of the studies run python experiments/studies/raslik.py of the repository"
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
    "0 or at least": lambda value, bound: value == 0 or value >= bound,
}
_Bound = int | float | None
_MOST = 2**31  # places in arrays have 32 bits
_KINDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}


def setting(
    default: Any,
    text: str,
    *,
    low: _Bound = None,
    high: _Bound = None,
    above: _Bound = None,
    below: _Bound = None,
    zero_or: _Bound = None,
    divides: str = "",
    multiple_of: str = "",
    choices: Collection[str] = (),
    family: Family | None = None,
    decides: bool = True,
    is_path: bool = False,
    is_hub: bool = False,
    is_rows: bool = False,
    names: Collection[str] = (),
    parts: Collection[str] = (),
    is_repeated: bool = False,
    auto: str = "",
    bare: float | None = None,
) -> Any:
    """Returns a dataclass field with its default, its help text and its limits.

    Args:
      low, high: least and largest value.
      above, below: bounds that are no values themselves.
      zero_or: least value other than 0.
      divides, multiple_of: field that the value, if not 0, must divide or be a multiple of.
      choices: allowed values of the field or of each item of a list; as a Literal in the type.
      family: the family whose member or members the value names.
      decides: whether results depend on it.
      is_path: whether it names a file or folder; its content then decides results.
      is_rows: whether a path names rows: a file, several files with commas, a pattern, a folder or
        a hub dataset. The content of the files that are read decides results.
      is_hub: whether a path may also be a name on the Hugging Face hub.
      names: values that are never files or folders.
      parts: the files of a folder that decide results; empty for all.
      is_repeated: whether the flag of a list is given once for each item.
      auto: the transformers class of the named model, which is then fetched at the start.
      bare: meaning of the flag of a number without a value; None if it needs one.
    """
    bounds = dict(zip(_HOLDS, (low, above, high, below, zero_or), strict=True))
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    metadata: dict[str, Any] = {"help": text, "limits": limits}
    metadata |= {"divides": divides, "multiple_of": multiple_of, "is_rows": is_rows}
    metadata |= {"choices": choices, "family": family, "decides": decides}
    metadata |= {"is_path": is_path or is_rows, "is_hub": is_hub, "names": names, "parts": parts}
    metadata |= {"is_repeated": is_repeated, "auto": auto, "bare": bare}
    return dataclasses.field(default=default, metadata=metadata)


class SettingsError(ValueError):
    """Settings are refused; each of the problems is a sentence in which `--name` is a setting."""

    def __init__(self, problems: list[str]):
        super().__init__(listed_problems(problems))
        self.problems = problems

    def below(self, prefix: str) -> list[str]:
        """Returns the problems with full flag names, below a stage or member."""
        # A value is quoted: what looks like a flag in it is none.
        return [re.sub(r"(?<![\w'\"-])--(?=[a-z])", f"--{prefix}.", text) for text in self.problems]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks kinds, choices and ranges of its fields and reports all problems in one error."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        found = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            must = _unmet(value, hints[field.name], field.metadata)
            if must and not (isinstance(value, tuple) and value == field.default == ()):
                choices, given = choices_of(hints[field.name], field.metadata), value
                if isinstance(value, tuple):
                    wrong = [item for item in value if choices and item not in choices]
                    given = ",".join(map(str, wrong or value))
                mend = f": correct it, or {FROM_STUDIES}" if field.metadata.get("family") else ""
                found.append(f"--{field.name} must be {must}, got {shown(given)}{mend}")
        found = found or [*self._relation_problems(), *self.problems()]
        if found:
            raise SettingsError(found)

    def problems(self) -> Iterable[str]:
        """Returns the problems of the values in combination, one sentence each."""
        return ()

    def _relation_problems(self) -> Iterator[str]:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole, factor = field.metadata.get("divides"), field.metadata.get("multiple_of")
            if whole and value and getattr(self, whole) % value:
                yield f"--{field.name} must divide --{whole}={getattr(self, whole)}, got {value}"
            if factor and value % (unit := getattr(self, factor)):
                yield f"--{field.name} must be a multiple of --{factor}={unit}, got {value}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Settings):
    """Settings of a stage, with settings of its chosen members that differ from their records.

    Settings of members that a list does not name have no effect and are dropped. If the stage
    chooses a single member, settings of other members are refused.
    """

    members: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        known, chosen, kept, idle = self.members_by_name(), self.chosen(), {}, []
        for name, own in self.members.items():
            before = known[name].settings
            fields = [field.name for field in dataclasses.fields(own)]
            changed = [field for field in fields if getattr(own, field) != getattr(before, field)]
            if changed and name in chosen:
                kept[name] = own
                continue
            # A later, shorter list may leave out a member that a flag file has set.
            idle += [
                f"--{name}.{field} has no effect with --{choice}={value}: leave it out"
                for choice, value, family in self._choices()
                for field in changed
                if isinstance(value, str) and name in family
            ]
        if idle:
            raise SettingsError(idle)
        object.__setattr__(self, "members", kept)

    def __getitem__(self, name: str) -> Any:
        """Returns a member's own settings."""
        return self.members[name] if name in self.members else self.members_by_name()[name].settings

    def _choices(self) -> Iterator[tuple[str, str | tuple[str, ...], Family]]:
        """Yields the name, the value and the family of each field that chooses members."""
        for field in dataclasses.fields(self):
            if field.metadata.get("family") is not None:
                yield field.name, getattr(self, field.name), field.metadata["family"]

    def members_by_name(self) -> dict[str, Member]:
        """Returns the members of all families that the stage chooses from."""
        return {name: member for _, _, family in self._choices() for name, member in family.items()}

    def chosen(self) -> tuple[str, ...]:
        """Returns the chosen members, whose own settings have an effect."""
        values = [(value,) if isinstance(value, str) else value for _, value, _ in self._choices()]
        return tuple(name for names in values for name in names)


def _unmet(value: Any, hint: Any, metadata: Mapping[str, Any]) -> str:
    """Returns the limit that a field's value violates, or an empty text."""
    choices = choices_of(hint, metadata)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if item in (int, float):
            must = [text for number in value if (text := _unmet(number, item, metadata))]
            must += ["different"] if len(set(value)) < len(value) else []
            each = f", each {must[0]}" if must else ""
            return "" if value and not must else f"a list of numbers{each}"
        is_names = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
        if not is_names or not value or not all(value):
            return "a list of names, none of them empty"
        if choices and not set(value) <= set(choices):
            return f"a list of names from {', '.join(choices)}"
        return "" if len(set(value)) == len(value) else "a list without a repeated name"
    if choices:
        return "" if value in choices else f"one of {', '.join(choices)}"
    if hint not in _KINDS:  # settings, which check themselves
        known = not isinstance(hint, type) or isinstance(value, hint)
        return "" if known else f"a {hint.__name__}"
    is_kind = type(value) is hint or (hint is float and type(value) is int)
    if not is_kind or (hint is float and not math.isfinite(value)):
        return _KINDS[hint]
    if hint is int and abs(value) >= _MOST:
        return f"at most {_MOST - 1:,}"
    limits = metadata["limits"]
    if all(_HOLDS[name](value, bound) for name, bound in limits.items()):
        return ""
    return " and ".join(f"{name} {bound:,}" for name, bound in limits.items())


def choices_of(hint: Any, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the values that a field or each item of its list may have; none: any."""
    named = metadata.get("family") or metadata.get("choices")
    if named:
        return tuple(named)
    item = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return get_args(item) if get_origin(item) is Literal else ()


class Leaf(NamedTuple):
    """One setting: its dotted name, value, type, metadata and member's title if any."""

    name: str
    value: Any
    hint: Any
    metadata: Mapping[str, Any]
    member: str = ""


def leaves(settings: Settings, prefix: str = "", *, member: str = "") -> Iterator[Leaf]:
    """Yields every setting, also nested ones and those of all members."""
    hints = typing.get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            yield from leaves(value, f"{prefix}{field.name}.")
        elif field.metadata:
            yield Leaf(prefix + field.name, value, hints[field.name], field.metadata, member)
    if isinstance(settings, Stage):
        for name, record in settings.members_by_name().items():
            yield from leaves(settings[name], f"{prefix}{name}.", member=record.title)


_S = TypeVar("_S", bound=Settings)


def replaced(settings: _S, values: Mapping[str, Any]) -> _S:
    """Returns the settings with other values by dotted name; refuses all problems at once."""
    known = {field.name for field in dataclasses.fields(settings)} - {"members"}
    below: dict[str, Settings] = {name: getattr(settings, name) for name in known}
    below = {name: value for name, value in below.items() if isinstance(value, Settings)}
    own: dict[str, Any] = {}
    if isinstance(settings, Stage):
        below |= {name: settings[name] for name in settings.members_by_name()}
        own["members"] = dict(settings.members)
    parts: dict[str, dict[str, Any]] = {}
    problems = []
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest and head in below:
            parts.setdefault(head, {})[rest] = value
        elif rest or head not in known:
            problems.append(f"--{name} must be a setting of this version, it is not: remove it")
        elif head in below:
            below_it = next(leaves(below[name])).name
            problems.append(f"--{name} is a group: set its parts, such as --{name}.{below_it}")
        else:
            own[name] = tuple(value) if isinstance(value, list) else value
    for head, part in parts.items():
        try:
            (own if head in known else own["members"])[head] = replaced(below[head], part)
        except SettingsError as error:
            problems += error.below(head)
    try:
        result = dataclasses.replace(settings, **own)
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return result


def absolute(leaf: Leaf) -> Any:
    """Returns a setting's value, as an absolute path if it names a file or folder.

    A later command may then run in another directory. A name of the hub is not changed, unless
    there is a folder of this name.
    """
    value, metadata = leaf.value, leaf.metadata
    is_path = value and metadata["is_path"] and value not in metadata["names"]
    if not is_path or value.startswith("hub:") or (metadata["is_rows"] and "://" in value):
        return value
    path = os.path.expanduser(value)
    if metadata["is_hub"] and HUB_NAME.fullmatch(value) and not os.path.exists(path):
        return value
    parts = [path] if os.path.exists(path) else filter(str.strip, path.split(","))
    return ",".join(os.path.abspath(os.path.expanduser(part.strip())) for part in parts)


def as_json(settings: Settings) -> dict[str, Any]:
    """Returns the settings as nested plain values, with those of chosen members only."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            values[field.name] = as_json(value)
        elif field.metadata:
            values[field.name] = list(value) if isinstance(value, tuple) else value
    if isinstance(settings, Stage):
        own = {name: as_json(settings[name]) for name in settings.chosen()}
        values |= {name: part for name, part in own.items() if part}
    return values


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        is_nested = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{name}.") if is_nested else {prefix + name: value}
    return found
