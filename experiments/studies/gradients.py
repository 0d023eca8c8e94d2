"""What the studies of whole gradients share: options, a run's gradients, tables over runs."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from raslik_jax.config import Config
from raslik_jax.data.examples import QUERY_SETS
from raslik_jax.index.combine import Aggregate
from raslik_jax.messages import shown
from raslik_jax.report import tables
from raslik_jax.run import exact_gradients
from raslik_jax.run.plan import open_run
from raslik_jax.run.workspace import Workspace
from raslik_jax.settings import Settings, setting

# How the scores of several queries become one.
Combination = Aggregate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Options of both studies."""

    runs: tuple[str, ...] = setting((), "Work directories of runs that differ in their seed.")
    query_sets: tuple[str, ...] = setting(
        ("retrieval",),
        "Query sets taken together; test_target has answers of the fine-tuned model too.",
    )
    sketch_sizes: tuple[int, ...] = setting((256, 1024, 4096, 16384, 65536), "Ks.", low=1)
    store_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "Dtype of the gradients on disk."
    )
    batch_tokens: int = setting(2048, "Tokens of a batch of gradients.", low=1)
    num_buckets: int = setting(2, "Padded lengths, each compiled.", low=1)
    report_only: bool = setting(False, "Only join the results that are there.")

    def problems(self) -> list[str]:
        """Returns what is wrong with the options together."""
        names = [pathlib.Path(run).name for run in self.runs]
        found = []
        if len(set(names)) < len(names):
            found.append(f"--runs must have different names, got {shown(','.join(names))}")
        if not set(self.query_sets) <= set(QUERY_SETS):
            found.append(
                f"--query_sets must be of {', '.join(QUERY_SETS)}, got {', '.join(self.query_sets)}"
            )
        return found


class RunGradients(NamedTuple):
    """A run, its rows, and what makes their gradients."""

    workspace: Workspace
    rows: exact_gradients.Rows
    maker: exact_gradients.GradientMaker


def open_gradients(
    options: Options, root: pathlib.Path, folder: pathlib.Path, *, needs_own: bool = True
) -> RunGradients:
    """Returns a run's gradients, which are kept in a folder."""
    workspace = open_run(root, "corpus", "finetune", "references/retrieval")
    rows = exact_gradients.load_rows(workspace, options.query_sets, needs_own=needs_own)
    maker = exact_gradients.GradientMaker(
        workspace,
        folder / "passes",
        rows,
        dtype=options.store_dtype,
        batch_tokens=options.batch_tokens,
        num_buckets=options.num_buckets,
    )
    return RunGradients(workspace, rows, maker)


def own_pass(config: Config) -> str:
    """Returns the pass of a run's own setting; of a trajectory, its end."""
    sketch = config.sketch
    adapter = sketch.gradient_at if sketch.gradient_at != "trajectory" else "finetuned"
    return f"{adapter}/{sketch.loss}/{sketch.targets}"


def join_table(
    entries: Sequence[Mapping[str, Any]],
    by: Mapping[str, str],
    values: Mapping[str, str],
    render: Callable[[Mapping[str, float]], str],
) -> str:
    """Returns joined records as a Markdown table.

    Args:
      entries: of `rankings.join_records`.
      by: titles of the fields that name a row.
      values: titles of the joined fields.
      render: the text of mean, low and high.
    """
    columns = (*map(tables.Column, by.values()), tables.Column("seeds", "right"))
    columns += tuple(map(tables.Column, values.values()))
    rows = tuple(
        (
            *(str(entry[name]) for name in by),
            str(entry["count"]),
            *("-" if entry[name] is None else render(entry[name]) for name in values),
        )
        for entry in entries
    )
    return tables.render_markdown(tables.Table(columns, rows))
