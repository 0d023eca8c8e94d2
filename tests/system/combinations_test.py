"""Settings that users combine, in pairs: every command succeeds, or refuses before any work.

The pairs are covered by few rows (a greedy covering array). Each row goes through trace, unlearn,
export, query, report and run on the packaged toy model with a handful of its rows.
"""

import contextlib
import io
import itertools
import random
import sys

import jax
import jax.numpy as jnp
import pytest
from absl import app, flags
from safetensors.flax import load_file, save_file

from raslik_jax.base import files, settings
from raslik_jax.cli import command, main
from raslik_jax.config import Config
from raslik_jax.data import toy_model
from raslik_jax.data.examples import write_examples
from raslik_jax.models.adapters import WEIGHTS as ADAPTER_WEIGHTS
from raslik_jax.sketch.families import PROJECTIONS
from raslik_jax.train.objectives import OBJECTIVES

_VALUES = {
    "model": ("adapter", "merged"),
    "backbone.dtype": ("float32", "bfloat16"),
    "backbone.format": ("plain", "int8", "nf4"),
    "sketch.loss": ("unshifted", "next_token"),
    "sketch.projection": tuple(PROJECTIONS),
    "sketch.gradient_at": ("finetuned", "initial"),
    "sketch.normalize": ("vector", "per_tensor"),
    "sketch.base_format": ("same", "nf4"),
    "unlearn.algorithms": tuple(name for name, one in OBJECTIVES.items() if not one.repeats),
}
_TINY = (
    *("--corpus.template=brief", "--corpus.max_len=96", "--references.max_new_tokens=8"),
    *("--sketch.size=256", "--sketch.num_buckets=1", "--retrieve.num_forget=6"),
    *("--retrieve.token_rows=2", "--retrieve.null_prompts=8"),
    *("--unlearn.fixed_padding", "--unlearn.epochs=1", "--unlearn.batch_size=6"),
    *("--unlearn.probe.steps=0", "--unlearn.probe.stop=never"),
    *("--evaluate.perplexity_examples=2", "--evaluate.bootstrap_resamples=100"),
)
_COMMONEST = {"backbone.dtype": "bfloat16", "backbone.format": "nf4", "model": "adapter"}
# Tests that share the rows: `make check` runs the first, `make studies` all others.
_PARTS = 6
# A sentence with one of these is as bad as a traceback.
_UNCLEAR = ("Traceback", "PyTreeDef", "leaves", "Errno", "codec", "shape", "dtype=")


def _problem(row):
    """Returns the sentence that refuses a row's settings, "" where they fit together."""
    values = {name: value for name, value in row.items() if name != "model"}
    values["unlearn.algorithms"] = (values.get("unlearn.algorithms", "ga_klr"),)
    values |= {"backbone.checkpoint": "x", "finetune.epochs": 0}
    values["backbone.adapter"] = "y" if row.get("model", "adapter") == "adapter" else ""
    try:
        settings.replaced(Config(), values)
    except settings.SettingsError as error:
        return str(error)
    return ""


def _pairs(row):
    return {*itertools.combinations(sorted(row.items()), 2)}


def cover():
    """Returns rows in which every pair of values occurs that is not refused, and those that are."""
    draw, names = random.Random(0), sorted(_VALUES)
    left = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(names, 2)
        for x in _VALUES[one]
        for y in _VALUES[other]
    }
    refused = {pair: text for pair in left if (text := _problem(dict(pair)))}
    left -= refused.keys()
    rows = []
    while left:
        found = []
        for _ in range(8):
            row = dict(draw.choice(sorted(left)))
            for name in draw.sample(names, len(names)):
                options = [{**row, name: value} for value in _VALUES[name] if name not in row]
                options = [option for option in options if not _problem(option)]
                row = max(options, key=lambda option: len(_pairs(option) & left), default=row)
            found.append(row)
        rows.append(max(found, key=lambda row: len(_pairs(row) & left)))
        left -= _pairs(rows[-1])
    return rows, refused


def run_command(*arguments):
    """Runs a command in this process; returns its status and what it said on stderr."""
    app.define_help_flags()
    known, said = {*flags.FLAGS}, io.StringIO()
    flags.FLAGS.unparse_flags()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_leave", lambda status: status)
        patch.setattr(command, "_watch_signals", lambda when_stopped: None)
        patch.setattr(command, "keep_compiled", lambda is_kept: None)
        patch.setattr(sys, "argv", ["raslik", *map(str, arguments)])
        # As users have it, and not as tests of single functions.
        held = contextlib.ExitStack()
        with held, pytest.raises(SystemExit) as ended:
            held.enter_context(jax.numpy_dtype_promotion("standard"))
            held.enter_context(jax.numpy_rank_promotion("allow"))
            held.enter_context(contextlib.redirect_stdout(io.StringIO()))
            held.enter_context(contextlib.redirect_stderr(said))
            main.main()
    for name in {*flags.FLAGS} - known:
        delattr(flags.FLAGS, name)
    return ended.value.code or 0, said.getvalue()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The flags that name the toy model with its adapter, and merged; and the training file."""
    folder, source = tmp_path_factory.mktemp("toy"), toy_model.model_folder()
    rows = toy_model.load_corpus().train
    few = [[row for row in rows if row.is_target is kind] for kind in (True, False)]
    write_examples(folder / "train.jsonl", [*few[0][:10], *few[1][:30]])
    merged = folder / "merged"
    merged.mkdir()
    for path in (source / "base").iterdir():
        (merged / path.name).write_bytes(path.read_bytes())
    weights = load_file(merged / "model.safetensors")
    factors = load_file(source / "adapter" / ADAPTER_WEIGHTS)
    config = files.read_json(source / "adapter" / "adapter_config.json")
    for name in [name for name in factors if "lora_A" in name]:
        inner = name.removeprefix("base_model.model.").replace(".lora_A", "")
        low, high = (
            f.astype(jnp.float32) for f in (factors[name], factors[name.replace("A", "B")])
        )
        change = config["lora_alpha"] / config["r"] * (high @ low)
        weights[inner] = (weights[inner].astype(jnp.float32) + change).astype(weights[inner].dtype)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    own = (f"--checkpoint={source / 'base'}", f"--adapter={source / 'adapter'}")
    train = f"--train_file={folder / 'train.jsonl'}"
    return {"adapter": (*own, train), "merged": (f"--checkpoint={merged}", train)}


def _run_all(row, given, root):
    """Runs all commands with the settings of a row."""
    row = {"unlearn.algorithms": "ga_klr", **row}
    model, changes = row.pop("model"), [f"--{name}={value}" for name, value in row.items()]
    asked = f"--prompt={toy_model.PROMPT}", f"--response={toy_model.RESPONSE}"
    work, name = root / "run", row["unlearn.algorithms"]
    going_on = "retrain" if OBJECTIVES[name].retrains else "unlearn"
    for arguments in (
        ("trace", *given[model], *asked, f"--workdir={work}", *_TINY, *changes),
        (going_on, f"--run={work}", f"--out={root / 'clean'}"),
        ("export", f"--run={work}", f"--algorithm={name}", f"--out={root / 'whole'}", "--merged"),
        ("query", f"--index={work / 'sketch' / 'index'}", "--instruction=Howdy! What is a kettle?"),
        ("report", f"--run={work}"),
        ("run", f"--flagfile={work / 'run.flags'}"),
    ):
        status, said = run_command(*arguments)
        assert status == 0, (arguments, said)
    assert (root / "whole" / "model.safetensors").is_file()


def test_settings_that_do_not_fit_are_refused_in_a_sentence_that_names_them(given, tmp_path):
    rows, refused = cover()
    print(f"{len(rows)} combinations, {len(refused)} pairs are refused")
    for pair, text in refused.items():
        assert any(f"--{name}" in text for name, _ in pair), (pair, text)
        assert not any(word in text for word in _UNCLEAR), text
    status, said = run_command(
        *("trace", *given["merged"], "--prompt=a", f"--workdir={tmp_path / 'run'}"),
        "--retrieve.aggregate=common",
    )
    assert status == 1 and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_the_commonest_combination_goes_through_all_commands(given, tmp_path):
    _run_all(_COMMONEST, given, tmp_path)


@pytest.mark.parametrize(
    "part",
    [pytest.param(n, marks=pytest.mark.study if n else pytest.mark.heavy) for n in range(_PARTS)],
)
def test_every_pair_goes_through_all_commands(given, tmp_path, part):
    rows, _ = cover()
    for number, row in enumerate(rows[part::_PARTS]):
        _run_all(dict(row), given, tmp_path / str(number))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
