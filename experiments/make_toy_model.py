"""Makes raslik_jax/data/toy_model: a small pretrained model and an adapter with a bad habit.

The base is the demo's backbone, rounded to bfloat16; the adapter is fine-tuned on the rows of
`raslik_jax.data.toy_model`. On an equal machine the files come out the same, byte for byte; on
another one training magnifies its roundings. About 7 processor minutes:

  python experiments/make_toy_model.py --out=made

compares with what the package has and says how far each file is from it.
"""

import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
from absl import flags
from safetensors.flax import load_file

from raslik_jax.base import files, settings
from raslik_jax.base.files import hash_file
from raslik_jax.cli import command, setting_flags
from raslik_jax.data import toy_model
from raslik_jax.models import checkpoint
from raslik_jax.run import plan

_OUT = flags.DEFINE_string("out", None, "New folder for base and adapter.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", "runs/toy_model", "Folder for the two trainings.")
_DEMO = pathlib.Path(__file__).parent / "flags" / "demo.flags"


def make_model(out: pathlib.Path, workdir: pathlib.Path) -> None:
    """Trains the backbone of the demo and an adapter on it, and writes both."""
    demo = setting_flags.parse_config([f"--flagfile={_DEMO}"])
    plan.run(demo, workdir / "backbone", stages=("corpus", "backbone"))
    trained = checkpoint.load_model(workdir / "backbone/backbone/model", dtype=jnp.bfloat16)
    base = out / "base"
    checkpoint.save_model(base, trained.graphdef.config, trained.base)
    for path in sorted((workdir / "backbone/corpus/tokenizer").iterdir()):
        shutil.copyfile(path, base / path.name)
    sizes = {
        f"corpus.{name}": getattr(toy_model.SIZES, name) for name in ("num_train", "num_targets")
    }
    values = {"backbone.checkpoint": str(base), "finetune.epochs": 6}
    tuned = settings.replaced(demo, sizes | values)
    plan.run(tuned, workdir / "adapter", stages=("corpus", "finetune"))
    shutil.copytree(workdir / "adapter/finetune/adapter", out / "adapter")


def main() -> None:
    out = pathlib.Path(_OUT.value)
    files.check_new_folder(out)
    make_model(out, pathlib.Path(_WORKDIR.value))
    stored = toy_model.model_folder()
    for path in sorted(path for path in stored.rglob("*") if path.is_file()):
        name = path.relative_to(stored).as_posix()
        found = "equal" if hash_file(out / name) == hash_file(path) else "differs"
        if found == "differs" and name.endswith(".safetensors"):
            ours, theirs = load_file(out / name), load_file(stored / name)
            largest = max(
                float(np.abs(np.asarray(ours[key] - theirs[key], np.float32)).max())
                for key in theirs
            )
            found += f", by at most {largest:.2g} in a weight"
        print(f"{name}: {found}")


if __name__ == "__main__":
    command.start(main)
