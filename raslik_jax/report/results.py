"""The tables of a run and of several seeds: declared columns over the records of metrics.json."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from raslik_jax.evaluate import judgment
from raslik_jax.evaluate import metrics as metrics_lib
from raslik_jax.evaluate.metrics import METRICS, IntervalEntry
from raslik_jax.evaluate.summary import BASELINE, Metrics
from raslik_jax.report.names import algorithm_name, kernel_notes, strategy_name
from raslik_jax.report.notes import DAMAGED, distance_notes, result_notes
from raslik_jax.report.records import REFERENCES, Model, Record, collect_models, read_records
from raslik_jax.report.tables import (
    NOT_KNOWN,
    Column,
    Table,
    format_number,
)

Epochs = Literal["last", "all"]


class Field(NamedTuple):
    """A declared column: it is there where some model has one of its metrics.

    Attributes:
      title: its heading.
      metrics: names of the records that it shows.
      show: gives the cell of a model that has one of them.
      align: where its cells stand.
    """

    title: str
    metrics: tuple[str, ...]
    show: Callable[[Model], str]
    align: Literal["left", "right"] = "left"

    def is_known(self, model: Model) -> bool:
        """Returns whether there is anything to show of a model."""
        return any(model.values.get(metric) for metric in self.metrics)


def fields_of(table: str, *, is_spread: bool = False) -> list[Field]:
    """Returns the columns that metrics have in a table; metrics of one title share their column.

    Args:
      table: its name in `Metric.columns`.
      is_spread: show the mean over seeds with the smallest and the largest, not the interval over
        queries.
    """
    titles: dict[str, dict[str, metrics_lib.Column]] = {}
    for name, metric in METRICS.items():
        if table in metric.columns:
            titles.setdefault(metric.columns[table].title, {})[name] = metric.columns[table]

    def show(columns: Mapping[str, metrics_lib.Column], model: Model) -> str:
        known = {name: records for name in columns if (records := model.values.get(name))}
        return " / ".join(
            _show(name, columns[name], records, model, is_spread) for name, records in known.items()
        )

    return [
        Field(
            title,
            tuple(columns),
            functools.partial(show, columns),
            "left" if any(column.ends for column in columns.values()) else "right",
        )
        for title, columns in titles.items()
    ]


def _show(
    name: str,
    column: metrics_lib.Column,
    records: Sequence[Record],
    model: Model,
    is_spread: bool,
) -> str:
    """Returns a value with its interval, or with its spread over seeds."""
    entry, note = records[0].interval, ""
    if is_spread:
        values = [record.value for record in records]
        mean = sum(values) / len(values)
        if METRICS[name].is_log:  # one run that exploded does not hide the others
            mean = math.exp(sum(map(math.log, values)) / len(values))
        entry = IntervalEntry(mean=mean, low=min(values), high=max(values))
        is_partial = len(records) < len(model.epochs)
        note = f" ({len(records)} runs)" if is_partial else ""
    warned = model.get(_WARNINGS.get(name, ""))
    text = format_number(entry["mean"], column.spec).rstrip(".")
    if column.ends:
        low, high = (format_number(entry[e], column.ends).rstrip(".") for e in ("low", "high"))
        text += f" [{low}, {high}]"
    return text + ("!" if warned and warned.value else "") + note


def _pareto(model: Model) -> str:
    tie = model.get("tie")
    flag = "yes" if model.values["pareto"][0].value else "no"
    return flag + (" ~" if tie and tie.value else "")


def _verdict(model: Model) -> str:
    verdict, reasons = (
        model.values[f"judgment/{name}"][0].value for name in ("verdict", "reasons")
    )
    return f"{verdict}: {reasons}"


def _judged(model: Model) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in model.verdicts().items())


def _count(title: str, metric: str, holds: Callable[[Record], bool]) -> Field:
    """Returns a column of the number of seeds in which something holds."""

    def show(model: Model) -> str:
        return f"{sum(map(holds, model.values[metric]))} of {len(model.values[metric])}"

    return Field(title, (metric,), show, "right")


# Where the second holds, the first is marked.
_WARNINGS = {"mahalanobis/distance": "mahalanobis/is_negative"}
_EPOCH = Field("Epoch", ("epoch",), lambda model: str(model.epochs[0]), "right")
_ALGORITHM = Field("Algorithm", ("algorithm",), lambda model: algorithm_name(model.algorithm))
_PARETO = Field("Pareto", ("pareto",), _pareto)
_JUDGMENT = Field("Judgment", ("judgment/verdict",), _verdict)
_SEEDS = (
    _count("Below\nRandom", "forget_minus_random", lambda r: r.high is not None and r.high < 0),
    _count("Closer", "is_closer", lambda record: record.value),
)
_JUDGED = Field("Judged", ("judgment/verdict",), _judged)


def _table(
    models: Sequence[Model],
    fields: Sequence[Field],
    notes: Sequence[str],
    *,
    name: str = "Model",
    heading: Callable[[str], str] | None = algorithm_name,
    is_marked: bool = True,
    is_full: bool = False,
) -> Table:
    """Returns the table of some models, without the columns that none has a value for.

    Args:
      models: its rows.
      fields: its columns after the name.
      notes: sentences below.
      name: title of the first column.
      heading: gives the heading over the models of an algorithm; None for no headings.
      is_marked: mark damaged models.
      is_full: keep the columns without any value.
    """
    shown = [field for field in fields if is_full or any(map(field.is_known, models))]
    rows: list[tuple[str, ...] | str] = []
    algorithm = ""
    if heading:
        order = [model.algorithm for model in models]
        models = sorted(models, key=lambda model: order.index(model.algorithm))
    for model in models:
        if heading and model.algorithm != algorithm:
            algorithm = model.algorithm
            rows.append(heading(algorithm))
        label = REFERENCES.get(model.strategy) or strategy_name(model.strategy)
        mark = f" {DAMAGED}" if is_marked and model.num_damaged() else ""
        cells = (f.show(model) if f.is_known(model) else NOT_KNOWN for f in shown)
        rows.append((f"{label}{mark}", *cells))
    columns = (Column(name), *(Column(field.title, field.align) for field in shown))
    return Table(columns, tuple(rows), tuple(notes))


def methods_of(models: Sequence[Model]) -> list[Model]:
    return [model for model in models if model.algorithm]


def results_table(metrics: Metrics, *, epochs: Epochs = "last") -> Table:
    """Returns the result table of a run: fine-tuned, every method, backbone.

    Methods stand below the name of their algorithm. Brackets hold 95 % bootstrap intervals over
    queries. A column that no row has a value for (F and R, Non-SF, D_mah, differences to Random) is
    left out; without F and R the judgment stands in their place.

    Args:
      metrics: the content of metrics.json.
      epochs: the last epoch of each method, or all of them.

    Returns:
      The table; its notes say what the columns mean, and name empty predictions if there are any.
    """
    models = collect_models([metrics], is_last=epochs == "last")
    methods, is_chosen = methods_of(models), bool(metrics.get("chosen"))
    fields = [*([_EPOCH] if epochs == "all" or is_chosen else []), *fields_of("results"), _PARETO]
    if metrics["finetuned"]["euclidean"] is None:
        fields.append(_JUDGMENT)

    def heading(algorithm: str) -> str:
        if epochs == "all":
            return algorithm_name(algorithm)
        if is_chosen:
            return f"{algorithm_name(algorithm)}, at the chosen learning rates"
        after = sorted({m.epochs[0] for m in methods if m.algorithm == algorithm})
        return f"{algorithm_name(algorithm)}, after epoch {' and '.join(map(str, after))}"

    return _table(models, fields, result_notes(metrics, methods), heading=heading)


def checks_table(metrics: Metrics) -> Table:
    """Returns the table that tells forgetting from damage: the judgment and what it rests on."""
    models = collect_models([metrics])
    notes = [
        "Distinct-2: share of different word pairs over all answers to target / normal queries. "
        "Repetition-4: share of four-word runs that an answer has said before, likewise.",
        judgment.RULE_TEXT,
    ]
    judged = [e["judgment"]["inputs"] for e in metrics["methods"] if "judgment" in e]
    if inputs := list(dict.fromkeys(name for names in judged for name in names)):
        notes.append(f"Judged by what was measured: {', '.join(inputs)}.")
    fields = (_ALGORITHM, _EPOCH, *fields_of("checks"), _JUDGMENT)
    return _table(models, fields, notes, heading=None)


def perplexity_table(metrics: Metrics) -> Table | None:
    """Returns the perplexity of every model on the three sets; None where it was not taken."""
    found = metrics["finetuned"].get("perplexity")
    if not found:
        return None
    note = (
        "Perplexity of labeled answers, which no model wrote: training examples to forget, other "
        "training examples, held-out normal queries. Higher on the first alone is forgetting, "
        "higher everywhere is damage."
    )
    if "behavior" in found:
        note += (
            " Bad outputs: the outputs that retrieval traces, and the labeled answers to target "
            "queries."
        )
    return _table(collect_models([metrics]), (_EPOCH, *fields_of("perplexity")), [note])


def tofu_table(metrics: Metrics) -> Table | None:
    """Returns TOFU's own metrics of every model; None where they were not taken."""
    found = metrics["finetuned"].get("tofu")
    if not found:
        return None
    notes = [
        "Of each set: probability of the answer / ROUGE-L recall / truth ratio (closer to 1 is "
        "better, also on the forget set, where 1 means that the model cannot tell). Model utility: "
        "harmonic mean of the nine numbers of the other sets. Forget quality: p-value of a "
        "Kolmogorov-Smirnov test against a model that was never trained on the forget set."
    ]
    if "forget_quality" not in found:
        notes.append(
            "No forget quality: it takes a retain model; name a run with "
            "--corpus.tofu.train=retain by --evaluate.retain_run."
        )
    if found.get("model_utility") is None:
        notes.append("No model utility: with all of TOFU to forget there is no retain set.")
    return _table(collect_models([metrics]), (_EPOCH, *fields_of("tofu")), notes)


def distances_table(metrics: Metrics) -> Table | None:
    """Returns every distance to R = 1, F = 0 of the last epoch of each method.

    Euclidean raw and in min-max normalized space, D_mah where there are enough methods, and what
    tells how far to trust it; None without F and R.
    """
    if metrics["finetuned"]["euclidean"] is None:
        return None
    methods = methods_of(collect_models([metrics]))
    notes = [
        "Min-max: after F and R were stretched to 0 to 1 over the methods of one algorithm and "
        "epoch, so it depends on which are compared.",
        *distance_notes(methods, is_chosen=bool(metrics.get("chosen"))),
    ]
    if not any(model.get("mahalanobis/distance") for model in methods):
        notes.append("D_mah takes 5 methods of one algorithm and epoch whose rates differ.")
    return _table(methods, (_EPOCH, *fields_of("distances")), notes, is_full=True)


def retrieval_table(metrics: Metrics) -> Table:
    """Returns what each strategy retrieved, and how well it matches the labels if there are any."""
    records = [r for r in read_records(metrics) if r.metric.startswith("retrieval/")]
    models = [
        Model(name, "", (), {r.metric: [r] for r in records if r.strategy == name})
        for name in metrics["retrieval"]
    ]
    notes = [
        "Precision: share of the forget set that is labeled a target. Score >= 0: retain items "
        "that are not anti-aligned with the queries."
    ]
    if any(entry.get("base_rate") in (0, 1) for entry in metrics["retrieval"].values()):
        notes.append("No AUROC and no AUPRC: all training examples have the same label.")
    notes += kernel_notes(metrics["settings"], metrics["retrieval"])
    return _table(models, fields_of("retrieval"), notes, name="Strategy", is_full=True)


def seeds_table(runs: Sequence[Metrics]) -> Table:
    """Returns the last epoch of several seeds of one experiment, as mean [smallest, largest].

    Args:
      runs: the metrics of each seed, at least one, all with the same methods.

    Returns:
      The table. "Below Random" counts the seeds whose whole interval of F minus F of Random lies
      below zero, and "closer" those with a smaller Euclidean distance than Random.

    Raises:
      ValueError: no run, or runs of different methods.
    """
    models = collect_models(runs)
    random = {model.algorithm: model for model in models if model.strategy == BASELINE}
    models = [_against(model, random.get(model.algorithm)) for model in models]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    note = (
        f"Mean over the {len(runs)} seeds {seeds}, in brackets the smallest and the largest. Below "
        "Random: seeds with the whole 95 % interval of F minus F of Random below zero. Closer: "
        "seeds with a smaller distance to R = 1, F = 0 than Random."
    )
    kernel = kernel_notes(runs[0]["settings"], [model.strategy for model in methods_of(models)])
    fields = (*fields_of("seeds", is_spread=True), *_SEEDS)
    return _table(models, fields, [note, *kernel], is_marked=False)


def _against(model: Model, random: Model | None) -> Model:
    """Returns the model with what is closer to the ideal in each seed, it or Random."""
    if random is None or model is random:
        return model
    pairs = zip(model.values.get("euclidean", ()), random.values.get("euclidean", ()), strict=True)
    closer = [own._replace(value=own.value < other.value) for own, other in pairs]
    return model._replace(values={**model.values, "is_closer": closer})


def seeds_checks_table(runs: Sequence[Metrics]) -> Table:
    """Returns what stands behind the rates over several seeds, as mean [smallest, largest].

    Non-SF of normal queries, diversity, perplexity, what the seeds were judged, and TOFU's two
    figures. Where some seeds have not measured something, the cell says so.

    Args:
      runs: as `seeds_table`.

    Raises:
      ValueError: as `seeds_table`.
    """
    note = (
        f"Over the same {len(runs)} seeds and epochs, likewise. Judged: how many seeds have which "
        "judgment (the run's own report says why). Perplexity: geometric mean."
    )
    fields = (*fields_of("seeds_checks", is_spread=True), _JUDGED)
    return _table(collect_models(runs), fields, [note], is_marked=False)


def tables_of(runs: Sequence[Metrics]) -> list[Table]:
    """Returns the tables of one run with intervals over queries, of several with those of seeds."""
    if len(runs) > 1:
        return [seeds_table(runs), seeds_checks_table(runs)]
    makers = (retrieval_table, results_table, checks_table, perplexity_table, tofu_table)
    return [table for make in makers if (table := make(runs[0])) is not None]


def completions_table(
    prompts: Mapping[str, str], answers: Mapping[str, Mapping[str, str]], *, width: int = 80
) -> Table:
    """Returns the answers of all models one below the other, under their prompt.

    Args:
      prompts: instruction by query id: the queries to show, in this order.
      answers: for each model, in the order of the rows, its answer by query id.
      width: characters at which answers wrap in the terminal.

    Returns:
      The table; an empty answer shows as "(empty)".
    """
    rows: list[tuple[str, ...] | str] = []
    for i, prompt in prompts.items():
        rows.append(f"> {prompt}")
        rows += [(name, texts[i].strip() or "(empty)") for name, texts in answers.items()]
    return Table((Column("Model"), Column("Answer", width=width)), tuple(rows))
