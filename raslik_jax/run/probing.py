"""Probes a model while it unlearns and decides when it ends and which step is kept.

`artifacts.probes` has the results. With --unlearn.probe.stop the folder `kept-STEP` has the model
of the best step so far. At the end it becomes the last epoch. A killed run continues with the
probes up to its checkpoint. Later probes are repeated with the same result.
"""

import itertools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raslik_jax.base.axes import Tree
from raslik_jax.base.messages import one_line
from raslik_jax.base.progress import say
from raslik_jax.data.examples import Example, prompt_of
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens import encoding
from raslik_jax.data.words import refused
from raslik_jax.evaluate import likelihood, rates, stopping, verdict
from raslik_jax.evaluate.likelihood import NotFinite
from raslik_jax.evaluate.sentences import write
from raslik_jax.run import artifacts
from raslik_jax.run.live import Live
from raslik_jax.run.workspace import Workspace
from raslik_jax.train.loop import Diverged
from raslik_jax.train.losses import BoundModel


class Prober:
    """The probes of one unlearning.

    Args:
      sets: the rows of "forget" and "retain" that are trained on.
      folder: the folder of the unit.
      save: function that writes the model of some parameters to a folder.
      start: the parameters before the first step.
    """

    def __init__(
        self,
        workspace: Workspace,
        sets: Mapping[str, encoding.Encoded],
        folder: pathlib.Path,
        live: Live,
        *,
        save: Callable[[pathlib.Path, Tree], None],
        start: Tree,
    ):
        self._workspace, self._folder, self._live = workspace, folder, live
        self._save, self._start = save, start
        self._settings = workspace.config.unlearn.probe
        drawn = {name: self._draw(rows, name) for name, rows in sets.items()}
        behavior, kept = _unseen_rows(workspace, sets)
        asked = workspace.encode(behavior, "probed answers").with_answers()
        drawn |= {"behavior": self._draw(asked, "behavior"), "kept": self._draw(kept, "kept")}
        self._rows = {name: rows for name in stopping.SETS if (rows := drawn[name]).ids}
        self._joined = encoding.join([*self._rows.values()])
        ends = [0, *itertools.accumulate(len(part.ids) for part in self._rows.values())]
        # The positions of each set among all rows.
        self._parts = {name: slice(*ends[n : n + 2]) for n, name in enumerate(self._rows)}
        by_id = {row.example_id: row for row in behavior}
        prompts = [by_id[name] for name in drawn["behavior"].ids]
        if len(prompts) < self._settings.answers:  # then those of rows to forget as well
            known = {row.example_id: row for row in workspace.corpus.train}
            asked_for = {part for row in prompts for part in (row.example_id, prompt_of(row))}
            more = (known[name] for name in drawn["forget"].ids if known[name].instruction)
            prompts += [row for row in more if not {row.example_id, prompt_of(row)} & asked_for]
        fits = workspace.fit(prompts)
        self._prompts = [*itertools.compress(prompts, fits)][: self._settings.answers]
        self._said_by_base: list[str] = []
        self._file = artifacts.probes(artifacts.Variant("", ""))  # whatever the variant
        self._kept_before: list[float] = []  # nats a token of the rows to keep, before unlearning
        self._probes: list[stopping.Probe] = []
        self._begin()

    @property
    def is_stopping(self) -> bool:
        """Whether it ends the training and keeps the model of a step."""
        return self._settings.stop != "never"

    def _draw(self, rows: encoding.Encoded, name: str) -> encoding.Encoded:
        places, seed = range(len(rows.ids)), self._workspace.config.seed
        chosen = shuffled(places, seed=seed, label=f"probed {name} rows")[: self._settings.rows]
        return rows.take(np.array(chosen, np.int64))

    def _begin(self) -> None:
        """Finds the start of the sets under the model and the backbone, and their goals."""
        model, backbone = self._workspace.with_adapter(self._start), self._workspace.backbone
        start_NT, backbone_NT = self._nats(model), self._nats(backbone)
        is_begun = (self._folder / self._file.file).is_file()
        stored = self._file.read_in(self._folder) if is_begun else None
        if stored:  # of a run that was killed
            self._kept_before = stored["kept_before"]
        self._levels(start_NT)  # what the rows to keep had before, which other levels move from
        self._backbone = self._levels(backbone_NT)
        is_end_NT = self._joined.ends(self._workspace.end_ids, start_NT.shape[1])
        self._goals = {
            name: verdict.make_goal(
                start_NT[part],
                backbone_NT[part],
                self._joined.num_targets_N[part],
                forget_rise=self._settings.forget_rise,
                is_end_NT=is_end_NT[part],
            )
            for name, part in self._parts.items()
            if name in stopping.FORGOTTEN
        }
        self._announce()
        if self._prompts and self.is_stopping:
            self._said_by_base = self._answer(backbone)
        self._probes = stored["probes"] if stored else [self._measure(0, model, start_NT)]
        if not stored:
            self._record()

    def _nats(self, model: BoundModel) -> np.ndarray:
        """Returns the nats of every token of all sets' rows under a model in one pass."""
        measure = self._workspace.measure(likelihood.token_likelihood, model.decoder)
        found: np.ndarray = measure(model.lora, model.base, self._joined)
        return found

    def _levels(self, nll_NT: np.ndarray) -> dict[str, float]:
        """Returns the level of each set."""
        nats_N = nll_NT.sum(axis=1) / self._joined.num_targets_N
        found = {name: nats_N[part] for name, part in self._parts.items()}
        levels = {name: float(part.mean()) for name, part in found.items()}
        if "kept" in found:
            self._kept_before = self._kept_before or found["kept"].tolist()
            before_N = np.array(self._kept_before)
            change = stopping.middle_mean((found["kept"] - before_N).tolist())
            levels["kept"] = float(before_N.mean()) + change
        return levels

    def _measure(self, step: int, model: BoundModel, nll_NT: np.ndarray) -> stopping.Probe:
        levels, answers = self._levels(nll_NT), {}
        gone = {n: goal.progress(nll_NT[self._parts[n]]) for n, goal in self._goals.items()}
        if self._prompts:
            texts = self._answer(model)
            ids = [row.example_id for row in self._prompts]
            answers = dict(zip(ids, texts, strict=True))
            if self._said_by_base:
                before = [*self._probes[0]["answers"].values()] if self._probes else texts
                said = verdict.answers_progress(
                    *(
                        [rates.likeness(*pair) for pair in zip(of, before, strict=True)]
                        for of in (texts, self._said_by_base)
                    )
                )
                gone |= {"said": said} if said else {}
        self._live.write(step, {f"probe/{name}": level for name, level in levels.items()})
        for name, text in answers.items():
            self._live.write(step, {f"answer/{name}": text})
        return stopping.Probe(step=step, levels=levels, gone=gone, answers=answers)

    def _answer(self, model: BoundModel) -> list[str]:
        """Returns a model's greedy answers to the probed prompts."""
        most = self._settings.answer_tokens
        return self._workspace.generate(model, self._prompts, "", most=most)

    def _announce(self) -> None:
        rows = ", ".join(f"{len(part.ids)} {name}" for name, part in self._rows.items())
        say(f"    probes of {rows} rows, in nats a token (before, base model):")
        bare = [name for name, goal in self._goals.items() if not goal.is_natural]
        if bare and self.is_stopping:
            say(f"    {write('probes_without_base', bare, self._settings.forget_rise)}")

    def look(self, step: int, save: Callable[[Tree], Any] | None, params: Tree) -> bool:
        """Saves the model of an epoch's end and probes it; returns whether unlearning ends."""
        if save:
            save(params)
        earlier = [probe for probe in self._probes if probe["step"] < step]
        model = self._workspace.with_adapter(params)
        try:
            self._probes = [*earlier, self._measure(step, model, self._nats(model))]
        except NotFinite as error:
            raise Diverged(f"at step {step:,} {error}") from error
        say(f"    {self._describe()}")
        end: stopping.End = ""
        if self.is_stopping:
            if self._chosen == step:
                # The older one goes last: a process may be killed in between.
                self._save(self._folder / f"kept-{step}", params)
                self._remove_but(f"kept-{step}")
            end = stopping.find_end(self._probes, max_rise=self._settings.max_rise)
        self._record(end)
        if end:
            say(f"    ends after step {step:,}: {stopping.SAID[end]}")
        return bool(end)

    @property
    def _chosen(self) -> int:
        place = stopping.choose_step(self._probes, max_rise=self._settings.max_rise)
        return self._probes[place]["step"]

    def _describe(self) -> str:
        """Returns the newest probe in a line."""
        newest, start = self._probes[-1], self._probes[0]["levels"]
        levels, parts = newest["levels"], []
        for name in self._rows:
            parts.append(
                f"{name} {levels[name]:.2f} ({start[name]:.2f}, {self._backbone[name]:.2f})"
            )
        text = f"step {newest['step']}: {', '.join(parts)}; "
        text += verdict.describe_progress(newest["gone"])
        return text + "".join(
            f"; {one_line(answer, 60)!r}" for answer in [*newest["answers"].values()][:1]
        )

    def _record(self, end: str = "") -> None:
        found: dict[str, Any] = {
            "rows": {name: len(part.ids) for name, part in self._rows.items()},
            "backbone": self._backbone,
            "kept_before": self._kept_before,
            "natural": {name: goal.is_natural for name, goal in self._goals.items()},
            "probes": self._probes,
        }
        if self.is_stopping:
            found |= {"kept": self._chosen, "end": end}
        self._file.write(self._folder, found)

    def _remove_but(self, name: str) -> None:
        for folder in self._folder.glob("kept-*"):
            if folder.name != name:
                shutil.rmtree(folder)

    def end_diverged(self, why: str) -> None:
        """Records that the training diverges and ends after the newest probe."""
        say(f"    ends after a probe at step {self._probes[-1]['step']:,}: {why}")
        self._record("diverged")

    def finish(self, last: pathlib.Path) -> None:
        """Puts the model of the kept step in the place of the last epoch."""
        if not self.is_stopping:
            return
        step, kept = self._chosen, self._folder / f"kept-{self._chosen}"
        if not step:
            self._save(last, self._start)
            say(f"    {write('nothing_forgotten')}")
        elif kept.is_dir():
            shutil.rmtree(last, ignore_errors=True)
            kept.rename(last)
            say(f"    the model after step {step:,} is kept")
        elif not last.is_dir():  # where it is, a process was killed after the line above
            raise refused("probed_model", step=step, name=kept.name, folder=self._folder)
        self._remove_but("")


def _unseen_rows(
    workspace: Workspace, sets: Mapping[str, encoding.Encoded]
) -> tuple[tuple[Example, ...], encoding.Encoded]:
    """Returns rows that no step sees: answers that show the behavior, and rows to keep.

    They are the validation queries if these have answers and do not measure the run. Otherwise they
    are the traced answers, and training examples that are in no set and have no target label.
    """
    config, queries = workspace.config, workspace.corpus.queries
    behavior: tuple[Example, ...] = ()
    normal: tuple[Example, ...] = ()
    if config.references.query_split != "validation":
        behavior, normal = (
            tuple(row for row in queries[f"validation_{kind}"] if row.output.strip())
            for kind in ("target", "normal")
        )
    behavior = behavior or workspace.retrieval_queries()
    if normal:
        return behavior, workspace.encode(normal, "probed answers").with_answers()
    seen = {name for rows in sets.values() for name in rows.ids}
    if config.retrieve.held_out:  # the run is measured on them, and some are of the behavior
        seen |= {*artifacts.SIZES.read(workspace.root)["barred"]}
    left = [
        row.example_id
        for row in workspace.corpus.train
        if not row.is_target and row.example_id not in seen
    ]
    max_len = config.unlearn.max_len or config.corpus.max_len
    return behavior, workspace.train_rows.named(left).cut(max_len).with_answers()
