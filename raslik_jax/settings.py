"""Settings that check themselves: of the stages of a run, and of the members of its families.

A stage's settings are a `Stage`, a member's own settings are a `Settings` in its record, whose
values there are the defaults. A field of a stage that chooses members names their family, and the
settings of the members lie below the stage: `config.unlearn["npo"].beta` is `--unlearn.npo.beta`.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import (
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    runtime_checkable,
)
from typing import get_type_hints as type_hints

from raslik_jax.messages import listed_problems, shown


@runtime_checkable
class Member(Protocol):
    """What every record of a family has.

    Attributes:
      title: name in tables and figures.
      settings: its own settings, with the defaults; `Settings()` where it has none.
    """

    @property
    def title(self) -> str: ...

    @property
    def settings(self) -> "Settings": ...


Family = Mapping[str, Member]


def setting(
    default: Any,
    text: str,
    *,
    low: int | float | None = None,
    high: int | float | None = None,
    above: int | float | None = None,
    below: int | float | None = None,
    family: Family | None = None,
    decides: bool = True,
    is_path: bool = False,
) -> Any:
    """Returns a dataclass field with its default, its help text and what it may be.

    Args:
      default: of the field and of its flag.
      text: help.
      low: least value; above: bound that is not a value itself.
      high: largest value; below: likewise.
      family: of which the value names a member, or several.
      decides: whether results depend on it.
      is_path: whether it names a file or folder, which counts by its content where it is one.
    """
    bounds = {"at least": low, "above": above, "at most": high, "below": below}
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    metadata = {
        "help": text,
        "limits": limits,
        "family": family,
        "decides": decides,
        "is_path": is_path,
    }
    return dataclasses.field(default=default, metadata=metadata)


class SettingsError(ValueError):
    """Settings are refused.

    Attributes:
      problems: a sentence each, in which `--name` is a setting.
    """

    def __init__(self, problems: list[str]):
        super().__init__(listed_problems(problems))
        self.problems = problems

    def below(self, prefix: str) -> list[str]:
        """Returns the problems with the flags named in full, below a stage or member."""
        # A value is quoted: what looks like a flag in it is none.
        return [re.sub(r"(?<![\w'\"-])--(?=[a-z])", f"--{prefix}.", text) for text in self.problems]


_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}
_KINDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks kinds, choices and ranges of its fields; all problems come in one error."""

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        found = [
            f"--{field.name} must be {must}, got {shown(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if not (getattr(self, field.name) == field.default == ())
            for must in _unmet(getattr(self, field.name), hints[field.name], field.metadata)
        ]
        found = found or self.problems()
        if found:
            raise SettingsError(found)

    def problems(self) -> list[str]:
        """Returns what is wrong with the values together, one sentence each."""
        return []

    def length_problems(self, name: str) -> list[str]:
        """Returns a sentence where a length that 0 leaves open is too short for an example."""
        value = getattr(self, name)
        return (
            [] if value == 0 or value >= 8 else [f"--{name} must be 0 or at least 8, got {value}"]
        )

    def micro_batch_problems(self, micro: str, whole: str) -> list[str]:
        """Returns a sentence where micro-batches do not make up the batch."""
        part, batch = getattr(self, micro), getattr(self, whole)
        if part and batch % part:
            return [f"--{micro} must divide --{whole}={batch}, got {part}"]
        return []

    def multiple_problems(self, name: str, factor: str) -> list[str]:
        """Returns a sentence where a size is no multiple of another."""
        value, other = getattr(self, name), getattr(self, factor)
        if value % other:
            return [f"--{name} must be a multiple of --{factor}={other}, got {value}"]
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage(Settings):
    """Settings of a stage, with those of the members that it may choose.

    Attributes:
      members: own settings of chosen members, by name, where they are not the record's. Those of
        a member that a list leaves out have no effect and are dropped; those of another member
        than the one chosen are refused.
    """

    members: Mapping[str, Settings] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        known, chosen = self.members_by_name(), self.chosen()
        unknown = self.members.keys() - known.keys()
        if unknown:
            raise SettingsError([f"members must be known, got {', '.join(sorted(unknown))}"])
        changed = {name: own for name, own in self.members.items() if own != known[name].settings}
        # A list is often shortened after a flag file told its members; another member is not.
        choices = self._single_choices()
        idle = [
            f"--{name}.{field.name} has no effect with --{choice}={member}: leave it out"
            for choice, (member, family) in choices.items()
            for name in sorted(changed.keys() & family.keys() - {member})
            for field in dataclasses.fields(changed[name])
            if getattr(changed[name], field.name) != getattr(known[name].settings, field.name)
        ]
        if idle:
            raise SettingsError(idle)
        kept = {name: own for name, own in changed.items() if name in chosen}
        object.__setattr__(self, "members", kept)

    def __getitem__(self, name: str) -> Any:
        """Returns a member's own settings."""
        return self.members[name] if name in self.members else self.members_by_name()[name].settings

    @classmethod
    def members_by_name(cls) -> dict[str, Member]:
        """Returns the members of all families that the stage chooses from."""
        families = [field.metadata.get("family") for field in dataclasses.fields(cls)]
        return {name: member for family in families for name, member in (family or {}).items()}

    def chosen(self) -> tuple[str, ...]:
        """Returns the members that the settings choose, whose own settings have an effect."""
        return tuple(name for names in self._chosen_by_field().values() for name in names)

    def _chosen_by_field(self) -> dict[str, tuple[str, ...]]:
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata.get("family") is not None
        }
        return {name: (v,) if isinstance(v, str) else v for name, v in values.items()}

    def _single_choices(self) -> dict[str, tuple[str, Family]]:
        """Returns the member and its family by the fields that choose just one."""
        return {
            field.name: (getattr(self, field.name), field.metadata["family"])
            for field in dataclasses.fields(self)
            if field.metadata.get("family") is not None
            and isinstance(getattr(self, field.name), str)
        }


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _unmet(value: Any, hint: Any, metadata: Mapping[str, Any]) -> list[str]:
    """Returns what a field's value must be and is not."""
    choices = choices_of(hint, metadata)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        if item in (int, float):
            must = ["different"] if len(set(value)) < len(value) else []
            must += [text for number in value for text in _unmet(number, item, metadata)]
            if not value:
                return ["a list of numbers"]
            return [f"a list of numbers, each {must[0]}"] if must else []
        if not isinstance(value, tuple) or not value or not all(map(_is_name, value)):
            return ["a list of names, none of them empty"]
        if choices and not set(value) <= set(choices):
            return [f"a list of {', '.join(choices)}"]
        return [] if len(set(value)) == len(value) else ["a list that names each once"]
    if choices:
        return [] if value in choices else [f"one of {', '.join(choices)}"]
    if hint not in _KINDS:  # settings, which check themselves
        return []
    is_kind = type(value) is hint or (hint is float and type(value) is int)
    if not is_kind or (hint is float and not math.isfinite(value)):
        return [_KINDS[hint]]
    limits = metadata["limits"]
    if all(_HOLDS[name](value, bound) for name, bound in limits.items()):
        return []
    return [" and ".join(f"{name} {bound:,}" for name, bound in limits.items())]


def choices_of(hint: Any, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the values that a field, or each item of its list, may have; none: any."""
    if metadata.get("family") is not None:
        return tuple(metadata["family"])
    item = get_args(hint)[0] if get_origin(hint) is tuple else hint
    return get_args(item) if get_origin(item) is Literal else ()


class Leaf(NamedTuple):
    """One setting.

    Attributes:
      name: dotted, as in its flag.
      value: of the settings that were asked.
      hint: its type.
      metadata: of its field, see `setting`.
      member: title of the member that it belongs to, if any.
    """

    name: str
    value: Any
    hint: Any
    metadata: Mapping[str, Any]
    member: str = ""


def leaves(settings: Settings, prefix: str = "", *, member: str = "") -> Iterator[Leaf]:
    """Yields every setting, those below others and those of all members included."""
    hints = type_hints(type(settings))
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
    """Returns the settings with other values.

    Args:
      settings: of a run, a stage or a member.
      values: by dotted name.

    Raises:
      SettingsError: unknown names, or values that are refused; all problems at once.
    """
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            parts.setdefault(head, {})[rest] = value
        else:
            own[head] = tuple(value) if isinstance(value, list) else value
    fields = {field.name for field in dataclasses.fields(settings) if field.name != "members"}
    members = settings.members_by_name() if isinstance(settings, Stage) else {}
    problems = [f"--{name} is unknown to this version" for name in sorted(own.keys() - fields)]
    problems += [
        f"--{name} must be an object of settings, got {shown(own.pop(name))}"
        for name in sorted(own.keys() & fields)
        if isinstance(getattr(settings, name), Settings)
    ]
    changed: dict[str, Settings] = {}
    for head, part in parts.items():
        below = getattr(settings, head, None) if head in fields else None
        if head in members and isinstance(settings, Stage):
            below = settings[head]
        if not isinstance(below, Settings):
            problems.append(f"--{head}.{next(iter(part))} is unknown to this version")
            continue
        try:
            changed[head] = replaced(below, part)
        except SettingsError as error:
            problems += error.below(head)
    own = {name: value for name, value in own.items() if name in fields}
    own |= {name: part for name, part in changed.items() if name in fields}
    if isinstance(settings, Stage):
        own["members"] = {**settings.members, **{n: p for n, p in changed.items() if n in members}}
    try:
        result = dataclasses.replace(settings, **own)
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return result


def as_json(settings: Settings) -> dict[str, Any]:
    """Returns the settings as nested plain values; of members those that are chosen."""
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
        found |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {prefix + name: value}
        )
    return found
