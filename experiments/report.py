"""Several seeds of one experiment in one table, and what stands behind the rates in another.

  python experiments/report.py --runs=runs/quickstart-0,runs/quickstart-1,runs/quickstart-2

Reads nothing but the metrics.json of each work directory. A cell is the mean over the runs with
the smallest and the largest in brackets.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from raslik_jax.pipeline import read_json  # noqa: E402
from raslik_jax.reporting import tables  # noqa: E402

_RUNS = flags.DEFINE_list("runs", [], "Work directories of runs that differ in their seed.")
_FORMAT = flags.DEFINE_enum("format", "terminal", ["terminal", "markdown"], "Form of the table.")


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) > 1 or not _RUNS.value:
            raise ValueError("work directories wanted as --runs=DIR,DIR, none came")
        runs = [read_json(pathlib.Path(run) / "metrics.json") for run in _RUNS.value]
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"runs of different seeds wanted, these have {seeds}")
        joined = (tables.seeds_table(runs), tables.seeds_checks_table(runs))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    is_markdown = _FORMAT.value == "markdown"
    render = tables.render_markdown if is_markdown else tables.render_terminal
    print("\n\n".join(map(render, joined)))


if __name__ == "__main__":
    app.run(main)
