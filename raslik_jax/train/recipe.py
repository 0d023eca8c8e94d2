"""The recipe of an adapter: the settings of its training, read from the files of the trainer.

Each format is a table from its own keys to the names of Hugging Face's TrainingArguments and TRL's
SFTConfig. The module loads no jax. It reads JSON, YAML and Markdown, never a pickle. Formats:
`training_args.json` and `trainer_state.json` of transformers, YAML of axolotl and LLaMA-Factory,
and a model card: its list "Training hyperparameters" and the YAML that axolotl puts into it.
"""

import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raslik_jax.base.files import read_json, read_text
from raslik_jax.base.messages import shown, some_of
from raslik_jax.data.words import refused

# Of trainers.json: other names of keys by format (arguments: older ones); `defaults` of trainers
# that YAML configures; `settings`, from keys of TrainingArguments and SFTConfig to fields of
# RetrainSettings; `values`, likewise for some of them; `lacking`, what this program does not have;
# `in_optimizer`, patterns for the text of a card; `by_part`, what axolotl says of each of its
# datasets, with the values that train on the answers as this program does; `follows_from`, the
# result of a key in an earlier file; `of_trainer`, what transformers' arguments lack.
_TABLES = json.loads(pathlib.Path(__file__).with_name("trainers.json").read_text("utf-8"))
# The file in which transformers' Trainer saves its steps.
STATE = "trainer_state.json"
# The tokens that TRL counts in the loss follow from the rows.
BY_ROWS = "rows"
# What has to be known. A number of steps stands for epochs.
DECISIVE = ("learning_rate", "schedule", "epochs", "batch_size")
# A lacking setting with a value other than these changes the training.
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {}, "none", "None", "no")


class Value(NamedTuple):
    """A value of the recipe, and the file and key that gave it."""

    value: Any
    origin: str


class Recipe(NamedTuple):
    """The settings of a training that files name.

    Attributes:
      settings: values by the name of a field of `objectives.RetrainSettings`.
      lacks: a phrase with its origin for each setting that this program cannot repeat.
      differences: a phrase for each contradiction of two files; the first file decides.
      steps, passes: planned steps by the trainer's state, and their epochs; 0 without one.
    """

    settings: dict[str, Value]
    lacks: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    steps: int = 0
    passes: float = 0.0


def find_files(adapter: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files next to an adapter that describe its training, the most complete first.

    A trainer saves its state in checkpoint-N folders and its card above them, so both are searched.
    """
    folders = [adapter, *[adapter.parent] * adapter.name.startswith("checkpoint-")]
    steps = [(int(p.name[11:]), p) for p in adapter.glob("checkpoint-*") if p.name[11:].isdecimal()]
    folders += [path for _, path in sorted(steps)[-1:]]
    found: list[pathlib.Path] = []
    for name in ("training_args.json", "*.yml", "*.yaml", "README.md", STATE):
        found += next(filter(None, (sorted(folder.glob(name)) for folder in folders)), [])
    return found


def recipe_of(adapter: pathlib.Path, given: Sequence[pathlib.Path] = ()) -> Recipe:
    """Returns the recipe of given files or of those next to an adapter; a state has its length."""
    near = find_files(adapter)
    if not given:
        return read_recipe(near, adapter)
    found = read_recipe(given, adapter)
    whole = read_recipe([*given, *(path for path in near if path.name == STATE)], adapter)
    return found._replace(lacks=whole.lacks, steps=whole.steps, passes=whole.passes)


def read_recipe(files: Sequence[pathlib.Path], adapter: pathlib.Path | None = None) -> Recipe:
    """Returns the recipe of an adapter that files describe; earlier files decide.

    Raises:
      ValueError: if a file is damaged, of an unknown format, or a pickle.
    """
    known, differences, rank = dict[str, Value](), list[str](), dict[str, int]()
    for number, path in enumerate(files):
        for name, value in _arguments(path, adapter == path.parent).items():
            rank.setdefault(name, number)
            before = known.setdefault(name, Value(value, f"{path.name}: {name}"))
            share = known.get("warmup_ratio", before).value or before.value  # gives steps
            is_share = name == "warmup_steps" and isinstance(share, float) and 0 < share < 1
            if not is_share and not _is_equal(name, before.value, value):
                got = f"{shown(before.value)} in {before.origin}, {shown(value)} in {path.name}"
                differences.append(f"{name} is {got}")
    for name, by in _TABLES["follows_from"].items():
        if rank.get(name, 0) > rank.get(by, len(files)):
            del known[name]
    trainer = known.pop("trainer", Value("", "")).value
    steps, passes = known.pop("planned", Value((0, 0.0), "")).value
    # The arguments of TRL are complete. Those of transformers lack what is of the trainer alone.
    is_whole = any(path.suffix == ".json" and path.name != STATE for path in files)
    is_trl = bool({"completion_only_loss", "assistant_only_loss"} & {*known})
    defaults = {} if is_trl else _TABLES["defaults"].get(trainer, {})
    left_out = {
        k: value for k, value in defaults.items() if k in _TABLES["of_trainer"] or not is_whole
    }
    share = left_out.pop("warmup_ratio", 0) * (not {"warmup_ratio", "warmup_steps"} & {*known})
    count = min(int(share * steps), 100)  # as axolotl, which makes two of one
    by_steps = {"warmup_steps": count + (count == 1)} if steps else {"warmup_ratio": share}
    left_out |= by_steps if share else {}
    known |= {k: Value(v, f"default of {trainer}") for k, v in left_out.items() if k not in known}
    if loads := known.get("load_best_model_at_end"):  # only a state says which step it was
        best = known.get("best_step", Value(0, ""))
        known["best_step"] = best if loads.value and steps else loads
    return Recipe(dict(_settings(known)), tuple(_lacks(known)), tuple(differences), steps, passes)


def _is_equal(name: str, *values: Any) -> bool:
    one, other = (_TABLES["values"].get(name, {}).get(str(value), value) for value in values)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-12)
    return bool(one == other)


def _arguments(path: pathlib.Path, is_own: bool) -> dict[str, Any]:
    """Returns the names and values of a file, which may be the adapter's own, by HF's names."""
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise refused("recipe_pickle", name=path.name)
    if path.name == STATE:
        return _of_state(read_json(path, {"log_history": list, "global_step": int}), is_own)
    if path.suffix == ".json":
        found = _renamed(read_json(path, dict), _TABLES["arguments"])
        return found | {"max_grad_norm": 0.0} if found.get("max_grad_norm", 1.0) is None else found
    if path.suffix in (".yml", ".yaml"):
        return _of_yaml(read_text(path), path)
    if path.suffix == ".md":
        return _of_card(read_text(path), path)
    raise refused("recipe_kind", got=shown(path.name))


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    pairs = sorted(values.items(), key=lambda pair: pair[1] is not None)  # nulls replace nothing
    return {names.get(name, name): value for name, value in pairs}


def _of_yaml(text: str, path: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of axolotl or LLaMA-Factory; {} for YAML of something else."""
    import yaml  # it takes long to load

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f", line {place.line + 1}" if place else ""
        raise ValueError(f"{shown(str(path), 120)}{line} must be YAML: correct it") from None
    names = {*values} if isinstance(values, dict) else set()
    own = names & {"finetuning_type", "cutoff_len", "lora_target"}
    if not own and not names & {"base_model", "micro_batch_size"}:
        return {}
    trainer = "LLaMA-Factory" if own else "axolotl"
    given = {name: value for name, value in values.items() if value is not None}
    others = {key: value for key, value in given.items() if key not in _TABLES["by_part"]}
    found = _renamed(others, _TABLES[trainer]) | {"trainer": trainer}
    parts = parts if isinstance(parts := given.get("datasets"), list) else []
    for part, key in itertools.product([given, *parts], _TABLES["by_part"]):
        value = part.get(key) if isinstance(part, dict) else None
        several = value if isinstance(value, list) and value else [value]
        if {*map(str, several)} - {*_TABLES["by_part"][key]}:
            found.setdefault(key, several)  # in a list "none" is a value too
    one, whole = found.get("per_device_train_batch_size") or 1, found.pop("batch_size", 0) or 0
    if whole and not found.get("gradient_accumulation_steps"):  # as axolotl does
        found["gradient_accumulation_steps"] = max(1, whole // one)
    return {name: _number(value) for name, value in found.items()}


def _number(value: Any) -> Any:
    """Returns the number of a text, such as 2e-5 in YAML 1.1, and any other value as it is."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?([eE][+-]?\d+)?", value):
        return int(value) if value.isdecimal() else float(value)
    return value


def _of_card(text: str, path: pathlib.Path) -> dict[str, Any]:
    """Returns the list "Training hyperparameters" of a model card, and what axolotl's YAML adds."""
    text = "\n".join(map(str.rstrip, text.splitlines()))
    part = text.partition("### Training hyperparameters")[2].partition("\n#")[0]
    listed = dict(re.findall(r"^- (\w+): (.+)$", part, re.MULTILINE))
    config = re.search(r"<summary>See axolotl config.*?^```yaml$(.*?)^```$", text, re.M | re.S)
    found = _of_yaml(config[1], path) if config else {}
    # The list has other optimizers as AdamW, other schedules as cosine and epochs as steps.
    own = {key: found[key] for key in ("optim", "lr_scheduler_type") if key in found}
    if {"num_train_epochs", "max_steps"} & {*found} == {"num_train_epochs"}:
        listed.pop("training_steps", None)
    found |= {k: _number(value) for k, value in _renamed(listed, _TABLES["card"]).items()}
    optimizer = str(found.get("optim", ""))
    # Older lists have Adam, whatever it was.
    if by := re.search(r"(?:Use (?:OptimizerNames\.)?|^(?=Adam))(\w+)", optimizer):
        found["optim"] = by[1].lower()
    in_text = ((k, re.search(by, optimizer)) for k, by in _TABLES["in_optimizer"].items())
    return found | own | {key: float(match[1]) for key, match in in_text if match}


def _of_state(state: Mapping[str, Any], is_own: bool) -> dict[str, Any]:
    """Returns the settings in a trainer's state: the length and the schedule that fits its rates.

    Its train_batch_size lacks accumulation and devices, so it is not the size of a batch.
    """
    done, planned = state["global_step"], int(state.get("max_steps") or 0)
    passes = float(state.get("epoch") or 0) * planned / max(1, done)
    found: dict[str, Any] = {"planned": (planned, passes)}
    # The state of a checkpoint may be older than an adapter above it, by less than the next save.
    every = int(state.get("save_steps") or 0)  # 500 also if a checkpoint is saved each epoch
    every = every if every and done % every == 0 else done / (float(state.get("epoch") or 0) or 1)
    if done < planned and (is_own or planned - done >= every):
        found["end"] = f"step {done} of {planned}"
    best = re.search(r"checkpoint-(\d+)$", str(state.get("best_model_checkpoint")))
    if best and int(best[1]) < done:
        found["best_step"] = int(best[1])
    # Of a training that was ended by its number of steps the number of epochs is only a bound.
    epochs = state.get("num_train_epochs") or 0
    by_epochs = epochs and math.isclose(float(state.get("epoch") or 0), epochs, abs_tol=0.01)
    name = "num_train_epochs" if by_epochs else "max_steps"
    found |= {name: state[name]} if state.get(name) else {}
    rates = [
        (int(entry["step"]), float(entry["learning_rate"]))
        for entry in state["log_history"]
        if isinstance(entry, dict) and {"step", "learning_rate"} <= {*entry}
    ]
    if fitted := fit_schedule(rates, planned):
        kind, peak, warmup = fitted
        found["lr_scheduler_type"] = kind + "_with_warmup" * (kind == "constant" and warmup > 0)
        found |= {"learning_rate": peak, "warmup_steps": warmup} if peak else {}
    return found


def factor(kind: str, step_R: np.ndarray, *, warmup: int, steps: int) -> np.ndarray:
    """Returns the share of the peak rate at steps counted from 0, as in transformers."""
    done_R = np.clip((step_R - warmup) / max(1, steps - warmup), 0, 1)
    falls = {"linear": 1 - done_R, "cosine": (1 + np.cos(np.pi * done_R)) / 2}
    return np.where(step_R < warmup, step_R / max(1, warmup), falls.get(kind, 1.0))


def fit_schedule(rates: Sequence[tuple[int, float]], steps: int) -> tuple[str, float, int] | None:
    """Returns kind, peak and warm-up steps of the schedule that gives logged rates.

    Older trainers log the rate of the next step, newer ones that of the step itself. Both are
    tried. Returns None for fewer than two rates, and if no or several kinds give them within a
    thousandth. The warm-up is the shortest. If longer ones change the peak by 5 %, it is 0.

    Args:
      rates: pairs of a step, counted from 1, and its rate.
      steps: number of steps of the whole training.
    """
    if len(rates) < 2 or steps < 1:
        return None
    (step_R, rate_R), fits = np.array(rates, np.float64).T, list[tuple[float, int, str, float]]()
    tried = itertools.product(("linear", "cosine", "constant"), range(steps // 2 + 1), (1, 0))
    for kind, warmup, shift in tried:
        share_R = factor(kind, step_R - shift, warmup=warmup, steps=steps)
        peak = float(share_R @ rate_R / (share_R @ share_R or 1))
        fits.append((float(np.abs(peak * share_R - rate_R).max()), warmup, kind, peak))
    off, most = min(fits)[0], float(rate_R.max())
    near = sorted(fit[1:] for fit in fits if fit[0] <= off + 1e-6 * most)
    if off > 1e-3 * most or len({kind for _, kind, _ in near}) > 1:
        return None
    (warmup, kind, peak), peaks = near[0], [peak for *_, peak in near]
    return kind, float(f"{peak:.4g}") if max(peaks) <= 1.05 * min(peaks) else 0.0, warmup


def _settings(known: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    """Yields the settings of a run that follow from the trainer's arguments."""
    kind = known.get("lr_scheduler_type")
    for name, setting in _TABLES["settings"].items():
        found = known.get(name) or Value(None, "")
        if name.startswith("warmup") and kind and kind.value == "constant":
            continue  # transformers warms up by constant_with_warmup alone
        if found.value is None or (name == "max_steps" and str(found.value)[:1] in "-0F"):
            continue  # -1, 0 and False stand for none
        if name == "warmup_steps" and isinstance(found.value, float):  # below 1 it is a ratio
            setting = "warmup" if 0 < found.value < 1 else setting
            found = found if setting == "warmup" else found._replace(value=int(found.value))
        table = _TABLES["values"].get(name)
        if table is None:
            yield setting, found
        elif str(found.value) in table:
            yield setting, found._replace(value=table[found.value])
    one, whole = known.get("per_device_train_batch_size"), known.get("total_train_batch_size")
    if whole:
        yield "batch_size", whole
    elif one:
        factors = ("gradient_accumulation_steps", "world_size")
        parts = [one, *(known[name] for name in factors if name in known)]
        yield "micro_batch_size", one
        alone = " on one device" * ("world_size" not in known)
        origin = " x ".join(part.origin for part in parts) + alone
        yield "batch_size", Value(math.prod(part.value for part in parts), origin)
    if whole := known.get("train_on_prompt"):
        yield "targets", whole._replace(value="all" if whole.value else "response")
    elif {"completion_only_loss", "assistant_only_loss"} & {*known}:
        # Of TRL. Without either the rows decide: all tokens of a conversation count and, if a row
        # has a prompt and a completion, those of the completion.
        kinds, none = ("completion", "assistant"), Value(None, "")
        of_rows, own = (known.get(f"{kind}_only_loss", none) for kind in kinds)
        # The flag of completions leaves conversations as they are.
        by = {False: "all"}.get(of_rows.value, BY_ROWS)
        yield "targets", own._replace(value="response") if own.value else of_rows._replace(value=by)


def _lacks(known: Mapping[str, Value]) -> Iterator[str]:
    """Yields the parts of the training that this program cannot repeat."""
    for name, found in known.items():
        what, table = _TABLES["lacking"].get(name), _TABLES["values"].get(name, [str(found.value)])
        if found.value not in _OFF and what:
            yield f"{what} ({found.origin} is {shown(found.value)})"
        elif found.value not in _OFF and str(found.value) not in table:
            have = some_of(sorted({*table}), 4, quoted=False)
            yield f"{found.origin} is {shown(found.value)}, this program has {have}"
