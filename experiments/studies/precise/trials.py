"""Tries other ways to unlearn on the validation and records what each leaves of other answers.

  python experiments/studies/precise/trials.py --runs=runs/precise --trials=own,projected

measure.py has to have run with --cases=workshop,rude --objectives=cap_klr in the folder of --runs.
A trial repeats the steps of CAP_KLR with one thing changed, in orders of its own, and reads the
rule of the end after steps 8, 10, 15, 16, 20, 24, 25 and 30. After the end it bisects the least
part of the change at which the rule still finds enough gone. A trial with a `line` takes the least
multiple of one change instead. Results go to RUNS/trials.jsonl. trials.json has those of the study.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies.precise.measure import VALIDATION, cases
from raslik_jax.base.settings import Settings, setting
from raslik_jax.cli import command
from raslik_jax.config import config_from_json
from raslik_jax.data import batches
from raslik_jax.data.examples import Example, answered
from raslik_jax.data.tokens import encoding
from raslik_jax.evaluate import rates, stopping, verdict
from raslik_jax.models import decode
from raslik_jax.run import artifacts, probing
from raslik_jax.run.stages import unlearn
from raslik_jax.run.workspace import Workspace
from raslik_jax.sketch.loss import find_targets, mean_over_targets
from raslik_jax.train import losses
from raslik_jax.train.losses import BoundModel
from raslik_jax.train.objectives import CappedSettings

LOOKS = (8, 10, 15, 16, 20, 24, 25, 30)


class Silent:
    """Takes the numbers of probes and shows nothing."""

    def write(self, *names: Any) -> None: ...

    def write_text(self, *names: Any) -> None: ...


class Traced:
    """A traced case: its sets, the rule that ends unlearning, and what is asked afterwards."""

    def __init__(self, name: str, runs: pathlib.Path):
        self.case, self.name = cases()[name], name
        root = runs / f"run-{name}-0-cap_klr"
        config = config_from_json(json.loads((root / "config.json").read_text()))
        self.ws = ws = Workspace(root, config)
        self.sets = {kind: unlearn.read_set(ws, "raslik", kind) for kind in ("forget", "retain")}
        self.start, self.base, self.decoder = ws.finetuned, ws.model.base, ws.model.decoder
        self.flat, self.tree = ravel_pytree(self.start)
        self.zero = jax.tree.map(jnp.zeros_like, self.start)
        is_b = lambda path, leaf: jnp.full_like(leaf, path[-1].key == "b")
        self.is_b = ravel_pytree(jax.tree_util.tree_map_with_path(is_b, self.start))[0]
        folder = runs / "trials" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "probes.json").unlink(missing_ok=True)
        save = lambda *names: None
        self.prober = probing.Prober(ws, self.sets, folder, Silent(), save=save, start=self.start)
        held = self.case.rows("held_out")
        self.kinds = [row["behavior"] for row in held]
        self.asked = [
            Example(str(n), row["messages"][0]["content"], "", "") for n, row in enumerate(held)
        ]
        self.before = self.ask(self.start)
        ordinary = [
            answered(row, text)
            for row, text, kind in zip(self.asked, self.before, self.kinds, strict=True)
            if not kind
        ]
        self.ordinary = self.batch(ws.encode(ordinary).with_answers())
        self.forget = self.batch(self.sets["forget"])
        self.divergence = jax.jit(self._divergence)

    def batch(self, rows: encoding.Encoded) -> batches.Batch:
        made = batches.make_batch(rows, batches.plan_rows(rows, np.arange(len(rows.ids))))
        return jax.tree.map(jnp.asarray, made)

    def ask(self, lora: Any) -> list[str]:
        model = BoundModel(self.decoder, lora, self.base)
        plan = lambda rows, batch_size: batches.plan_one_shape(rows, batch_tokens=10**6)
        return [text.strip() for text in self.ws.generate(model, self.asked, "", most=40, plan=plan)]

    def _divergence(self, lora: Any, base: Any, batch: batches.Batch) -> Any:
        models = (BoundModel(self.decoder, one, base) for one in (lora, self.start))
        outputs = (losses.Outputs(one, batch) for one in models)
        kl_B = losses.kl_by_example(*outputs, direction="forward")
        return losses.weighted_mean(kl_B, batch, mean="tokens")

    def score(self, flat: Any) -> dict[str, Any]:
        """Returns prompts that show each behavior, equal answers, and the KL on ordinary ones."""
        lora = self.tree(flat)
        triples = [*zip(self.kinds, self.before, self.ask(lora), strict=True)]
        ordinary = [old == new for kind, old, new in triples if not kind]
        others = [triple for triple in triples if triple[0] not in ("", self.name)]
        shows = lambda kind, text: bool(cases()[kind].marker.search(text))
        return {
            "shown": sum(shows(kind, new) for kind, _, new in triples if kind == self.name),
            "equal": sum(ordinary),
            "of": len(ordinary),
            "others_equal": sum(old == new for _, old, new in others),
            "others_lost": sum(shows(kind, old) > shows(kind, new) for kind, old, new in others),
            "kl": round(float(self.divergence(lora, self.base, self.ordinary)), 5),
        }

    def check(self, flat: Any) -> dict[str, Any]:
        """Returns whether the rule that ends unlearning finds enough gone."""
        model = self.ws.with_adapter(self.tree(flat))
        probe = self.prober._measure(1, model, self.prober._nats(model))
        rise = stopping.rise_of(probe["levels"], self.prober._probes[0]["levels"])
        gone = probe["gone"]
        return {
            "is_gone": bool(verdict.is_enough(gone)),
            "is_enough": bool(verdict.is_enough(gone)) and rise <= 0.1,
            "gone": " ".join(f"{one['gone']}/{one['of']}" for one in gone.values()),
            "way": round(min(one["way"] for one in gone.values()), 2),
            "rise": round(rise, 4),
        }

    def frozen(self, batch: batches.Batch) -> Any:
        """Returns a batch and its final hidden states under the model before and under the base."""

        def hidden(lora: Any, base: Any) -> Any:
            return losses.Outputs(BoundModel(self.decoder, lora, base), batch).targets.hidden_TE

        return batch, *(jax.jit(hidden)(lora, self.base) for lora in (self.start, self.zero))

    def gradients(self, push: "Push") -> Callable[..., Any]:
        """Returns the function to both terms of frozen batches and their gradients as vectors."""

        def outputs(flat: Any, base: Any, rows: Any) -> list[losses.Outputs]:
            batch, *known = rows
            trees = zip((self.tree(flat), self.start, self.zero), (None, *known), strict=True)
            models = ((BoundModel(self.decoder, tree, base), one) for tree, one in trees)
            return [losses.Outputs(model, batch, known_BTE=one) for model, one in models]

        def pushed(flat: Any, base: Any, rows: Any) -> Any:
            return jnp.mean(push(self.ws.end_ids, *outputs(flat, base, rows)))

        def kept(flat: Any, base: Any, rows: Any) -> Any:
            found = outputs(flat, base, rows)
            return jnp.mean(losses.kl_by_example(*found[:2], direction="reverse"))

        both = [jax.jit(jax.value_and_grad(one)) for one in (pushed, kept)]
        return lambda flat, *parts: [
            found
            for one, part in zip(both, parts, strict=True)
            for found in one(flat, self.base, part)
        ]

    def rows_of(self, ids: Any) -> list[Example]:
        known = {row.example_id: row for row in self.ws.corpus.train}
        return [known[name] for name in ids if known[name].instruction]

    def said(self, rows: list[Example], drawing: Any = None, most: int = 40) -> encoding.Encoded:
        """Returns prompts with the answers of the model before unlearning, greedy or drawn."""
        model = BoundModel(self.decoder, self.start, self.base)
        texts = self.ws.generate(model, rows, "", most=most, drawing=drawing)
        pairs = zip(rows, texts, strict=True)
        return self.ws.encode([answered(row, text) for row, text in pairs if text]).with_answers()

    def drawn_prompts(self) -> list[Example]:
        """Returns prompts that the model draws after the template's words before a prompt."""
        tokens = self.ws.tokenizer
        rows = [Example(text, text, "", "") for text in ("zebra of the", "What")]
        one, other = encoding.encode_prompts(
            rows, tokens, max_len=256, template=self.ws.template_name
        )
        first = next(n for n, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)
        said = decode.generate(
            *(self.decoder, self.start, self.base, [np.array(one[:first])] * 64),
            max_new_tokens=16,
            eos_id=self.ws.end_ids,
            pad_id=tokens.pad_id,
            batch_size=64,
            drawing=decode.Drawing(jax.random.split(jax.random.key(2), 1)[0]),
        )
        texts = sorted({tokens.decode(ids).split("<|im_end|>")[0].strip() for ids in said})
        return [Example(f"drawn {n}", text, "", "") for n, text in enumerate(texts) if text]

    def retained_gradients(self, retain: batches.Batch, seed: int) -> Any:
        """Returns for each row the gradient of drawn labels' log likelihoods with random signs.

        Their outer products have the mean of the rows' Fisher information.
        """

        def of_row(base: Any, tokens: Any, mask: Any, key: Any) -> Any:
            def total(flat: Any) -> Any:
                found = find_targets(
                    self.decoder, self.tree(flat), base, tokens, mask,
                    num_targets=retain.num_targets,
                )  # fmt: skip
                logits_TV = self.decoder.logits(self.start, base, found.hidden_TE)
                log_p_TV = jax.nn.log_softmax(logits_TV)
                draw, flip = jax.random.split(key)
                label_T = jax.random.categorical(draw, jax.lax.stop_gradient(log_p_TV))
                sign_T = jax.random.rademacher(flip, label_T.shape, jnp.float32)
                said_T = jnp.take_along_axis(log_p_TV, label_T[:, None], -1)[:, 0] * sign_T
                count = jnp.maximum(jnp.sum(found.is_counted_T), 1)
                return jnp.sum(jnp.where(found.is_counted_T, said_T, 0.0)) / jnp.sqrt(count)

            return jax.grad(total)(self.flat)

        keys = jax.random.split(jax.random.key(seed), len(retain.tokens_BL))
        rows = retain.tokens_BL, retain.target_mask_BL, keys
        of_rows = lambda base, *rows: jax.lax.map(
            lambda row: of_row(base, *row), rows, batch_size=8
        )
        return jax.jit(of_rows)(self.base, *rows)


Push = Callable[[Any, losses.Outputs, losses.Outputs, losses.Outputs], Any]


def capped(ends: Any, *outputs: losses.Outputs, cap: float = CappedSettings().cap) -> Any:
    """Returns the forget term of CAP_KLR. With a `cap` near 0 the goal is the base's distribution.

    This is then the term of BASE_KLR at tokens that carry the behavior.
    """
    return losses.capped_kl_by_example(*outputs, cap=cap, end_ids=ends)


def _off_label(
    model: losses.Outputs, teacher: losses.Outputs, *, by: float, skipped: int = 0
) -> Any:
    """Returns the cross entropy from a teacher whose logit of the label is lowered by a number."""

    def of_example(targets: Any, logits_TV: Any, teacher_TV: Any) -> Any:
        label_TV = jax.nn.one_hot(targets.label_T, logits_TV.shape[-1])
        goal_TV = jax.nn.softmax(teacher_TV - by * label_TV)
        is_counted_T = targets.is_counted_T & (jnp.cumsum(targets.is_counted_T) > skipped)
        nll_T = -jnp.sum(goal_TV * jax.nn.log_softmax(logits_TV), axis=-1)
        return mean_over_targets(nll_T, is_counted_T)

    teacher_BTV = jax.lax.stop_gradient(teacher.logits_BTV)
    return jax.vmap(of_example)(model.targets, model.logits_BTV, teacher_BTV)


def undial(ends: Any, model: losses.Outputs, reference: losses.Outputs, backbone: Any) -> Any:
    """Returns H(softmax(z_reference - 10 * label), p): UNDIAL (Dong et al., arXiv:2402.10052).

    10 is the strength in open-unlearning's configuration.
    """
    return _off_label(model, reference, by=10.0)


def ce_u(ends: Any, model: losses.Outputs, reference: Any, backbone: Any) -> Any:
    """Returns H(softmax(z with the label's at -infinity), p), z of the model: CE-U (Yang,
    arXiv:2503.01224). As in open-unlearning, the first token of an answer does not count.
    """
    return _off_label(model, model, by=1e9, skipped=1)


def orders(count: int, draw: np.random.Generator) -> Callable[[int], Any]:
    """Returns the function that takes the next so many rows of endless random orders."""
    left: list[int] = []

    def take(number: int) -> Any:
        while len(left) < number:
            left.extend(draw.permutation(count).tolist())
        taken = jnp.array(left[:number])
        del left[:number]
        return taken

    return take


def adam(rate: Any = 4e-4) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def even_steps(length: float) -> optax.GradientTransformation:
    """Returns momentum with steps of one length."""
    return optax.chain(optax.trace(0.9), optax.normalize_by_update_norm(length), optax.scale(-1))


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a trial changes.

    Attributes:
      line: makes a change of the adapter, as a vector. Its least multiple is taken; nothing below
        is read.
      push: the forget term.
      retain: makes the retained rows.
      rows: of a step, to forget and to retain.
      halving: steps after which the factor of the retained rows is half as large.
      bound: of the KL on retained rows; the factor is then a dual variable that starts at 30 and
        rises by 1000 for a nat above the bound.
      project: makes the function from the gradients of both terms to the first one's part.
      more: steps after the end at a factor of 60 with a rate that falls to 0.
      looks: steps after which the rule of the end is read.
      mean: number of the last steps whose weights are averaged; 1: the last weights.
    """

    title: str
    line: Callable[[Traced], Any] | None = None
    push: Push = capped
    retain: Callable[[Traced], encoding.Encoded] = lambda at: at.said(
        at.rows_of(at.sets["retain"].ids)
    )
    rows: tuple[int, int] = (8, 8)
    halving: float = 10.0
    bound: float | None = None
    more: int = 0
    looks: tuple[int, ...] = LOOKS
    mean: int = 1
    tx: optax.GradientTransformation = adam()
    project: Callable[[Traced, batches.Batch], Callable[[Any, Any], Any]] | None = None
    scale: Callable[[Traced, batches.Batch], Any] | None = None


def stored(at: Traced) -> encoding.Encoded:
    return at.sets["retain"]


def near(at: Traced, number: int = 64) -> encoding.Encoded:
    """Returns the rows of the highest scores with other answers than all rows to forget.

    An answer is another one at a ROUGE-L below 0.4. Stored rows to retain follow up to 64.
    """
    ids = at.sets["forget"].ids
    barred = {*artifacts.SIZES.read(at.ws.root)["barred"], *ids}
    said = [row.output for row in at.ws.corpus.train if row.example_id in ids]
    score_N = artifacts.INFLUENCE.read(at.ws.root)
    best = (at.ws.corpus.train[place] for place in np.argsort(-score_N))
    found = (
        row.example_id
        for row in best
        if row.example_id not in barred
        and max(rates.rouge_l_f1(row.output, one) for one in said) < 0.4
    )
    taken = [*itertools.islice(found, number)]
    taken += [name for name in stored(at).ids if name not in taken][: 64 - number]
    return unlearn.cut_rows(at.ws, taken, "retain")


def scaled(at: Traced) -> Any:
    """Returns the change that takes the adapter away: that of its factors B to 0."""
    return -at.is_b * at.flat


def negated(at: Traced, start: Callable[[Traced], Any]) -> Any:
    """Returns the negated change of B by 16 steps of Adam on the rows to forget.

    A stays as it is, so the change of the weights B A is negated too. Task arithmetic (Ilharco et
    al., arXiv:2212.04089) trains from the base model.
    """
    take, tx = orders(len(at.sets["forget"].ids), np.random.default_rng(0)), adam(2e-3)
    flat = begin = start(at)
    state = tx.init(flat)

    def nll(flat: Any, base: Any, batch: batches.Batch) -> Any:
        model = BoundModel(at.decoder, at.tree(flat), base)
        return jnp.mean(losses.nll_by_example(losses.Outputs(model, batch)))

    gradient = jax.jit(jax.grad(nll))
    for _ in range(16):
        rows = take(8)
        batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], at.forget)
        change, state = tx.update(at.is_b * gradient(flat, at.base, batch), state)
        flat = flat + change
    return begin - flat


def drawn_answers(at: Traced) -> encoding.Encoded:
    return at.said(at.rows_of(at.sets["retain"].ids), decode.Drawing(jax.random.key(1)))


def with_drawn_prompts(at: Traced) -> encoding.Encoded:
    own = at.said(at.rows_of(at.sets["retain"].ids))
    return encoding.join([own, at.said(at.drawn_prompts(), most=20)]).cut(48).with_answers()


def off_conflict(at: Traced, retain: batches.Batch) -> Callable[[Any, Any], Any]:
    """Returns A-GEM's projection off the retained gradient (Chaudhry et al., arXiv:1812.00420)."""

    def project(push: Any, keep: Any) -> Any:
        dot, square = jnp.vdot(push, keep), jnp.maximum(jnp.vdot(keep, keep), 1e-20)
        return jnp.where(dot < 0, push - dot / square * keep, push)

    return project


def off_first_component(at: Traced, retain: batches.Batch) -> Callable[[Any, Any], Any]:
    """Returns what takes the first singular component out of each factor's forget gradient.

    RepSelect (arXiv:2606.17168) in the form that a LoRA factor allows.
    """

    def of_leaf(leaf: Any) -> Any:
        u, s, vt = jnp.linalg.svd(leaf, full_matrices=False)
        return (u[..., 1:] * s[..., None, 1:]) @ vt[..., 1:, :]

    made = jax.jit(lambda push: ravel_pytree(jax.tree.map(of_leaf, at.tree(push)))[0])
    return lambda push, keep: made(push)


def off_retained(at: Traced, retain: batches.Batch) -> Callable[[Any, Any], Any]:
    """Returns the function that takes 128 retained gradients out of one, with a ridge."""
    parts = [at.retained_gradients(retain, seed) for seed in range(2)]
    g_NP = jnp.concatenate(parts) / np.sqrt(2 * len(retain.tokens_BL))
    k_NN = g_NP @ g_NP.T
    inverse_NN = jnp.linalg.inv(k_NN + 1e-2 * jnp.trace(k_NN) / len(k_NN) * jnp.eye(len(k_NN)))
    return lambda push, keep: push - g_NP.T @ (inverse_NN @ (g_NP @ push))


def by_fisher(at: Traced, retain: batches.Batch) -> Any:
    """Returns the inverse of the diagonal Fisher information of the retained rows."""
    diagonal = jnp.mean(at.retained_gradients(retain, 0) ** 2, axis=0)
    return 1 / (diagonal + jnp.mean(diagonal))


TRIALS = {
    "cap_klr": Trial("CAP_KLR", retain=stored),
    "scaled": Trial("adapter scaled down", line=scaled),
    "negated": Trial(
        "negation of a forget adapter", line=lambda at: negated(at, lambda at: at.flat + scaled(at))
    ),
    "negated_more": Trial(
        "negation of further steps", line=lambda at: negated(at, lambda at: at.flat)
    ),
    "mean_8": Trial("CAP_KLR, mean of the last 8 steps", retain=stored, mean=8),
    "mean": Trial("CAP_KLR, mean of all steps", retain=stored, mean=max(LOOKS)),
    "slow": Trial(
        "CAP_KLR, half the rate", retain=stored, tx=adam(2e-4), halving=20,
        looks=tuple(2 * step for step in LOOKS),
    ),
    "undial": Trial("UNDIAL and the KL of CAP_KLR", retain=stored, push=undial),
    "ce_u": Trial("CE-U and the KL of CAP_KLR", retain=stored, push=ce_u),
    "near": Trial("CAP_KLR, near rows", retain=near),
    "half_near": Trial("CAP_KLR, half near rows", retain=functools.partial(near, number=32)),
    "goal": Trial(
        "CAP_KLR, the base as the goal", retain=stored, push=functools.partial(capped, cap=1e-30)
    ),
    "own": Trial("own answers"),
    "split": Trial("own answers, 4 and 12 rows", rows=(4, 12)),
    "constant": Trial("own answers, 4 and 12 rows, constant factor", rows=(4, 12), halving=1e9),
    "drawn": Trial("drawn answers, 4 and 12 rows", retain=drawn_answers, rows=(4, 12)),
    "prompts": Trial(
        "own answers and drawn prompts, 4 and 12 rows", retain=with_drawn_prompts, rows=(4, 12)
    ),
    "projected": Trial("own answers, off 128 retained gradients", project=off_retained),
    "agem": Trial("own answers, A-GEM", project=off_conflict),
    "repselect": Trial("own answers, RepSelect", project=off_first_component),
    "dual": Trial("own answers, bound in place of the factor", bound=0.003),
    "stages": Trial("own answers, two stages", more=8),
    "warm": Trial(
        "own answers, 8 steps of warm-up", tx=adam(optax.linear_schedule(5e-5, 4e-4, 7))
    ),
    "fisher": Trial("own answers, diagonal Fisher", scale=by_fisher, tx=even_steps(0.1)),
    "momentum": Trial("own answers, momentum in place of Adam", tx=even_steps(0.1)),
}


def least(
    at: Traced, change: Any, low: float, high: float, found: Any, record: Callable[..., None]
) -> None:
    """Bisects and records the least part of a change at which the rule finds enough gone."""
    for _ in range(3):
        part = (low + high) / 2
        one = at.check(at.flat + part * change)
        low, high, found = (low, part, one) if one["is_gone"] else (part, high, found)
    record("least part", part=high, **found, **at.score(at.flat + high * change))


def run_line(at: Traced, trial: Trial, record: Callable[..., None]) -> None:
    """Records the least multiple of a trial's change at which the rule finds enough gone."""
    change, high = trial.line(at), 1.0
    check = lambda part: at.check(at.flat + part * change)
    found = check(high)
    while not found["is_gone"] and high < 64:
        high *= 2
        found = check(high)
    while (half := check(high / 2))["is_gone"]:
        high, found = high / 2, half
    least(at, change, high / 2, high, found, functools.partial(record, steps=0))


def run_trial(at: Traced, trial: Trial, record: Callable[..., None], parts: bool) -> None:
    """Unlearns by a trial to the end of the rule and records the end and the least part of it."""
    rows = trial.retain(at)
    retain, gradients = at.batch(rows), at.gradients(trial.push)
    frozen = at.frozen(at.forget), at.frozen(retain)
    draw = np.random.default_rng(0)
    take = orders(len(at.sets["forget"].ids), draw), orders(len(rows.ids), draw)
    project = trial.project(at, retain) if trial.project else lambda push, keep: push
    scale = 1.0 if trial.scale is None else trial.scale(at, retain)
    flat, tx = at.flat, trial.tx
    state, factor = tx.init(flat), CappedSettings().hold

    def terms(counts: tuple[int, int]) -> Any:
        sets = zip(frozen, (one(n) for one, n in zip(take, counts)))
        return gradients(flat, *(jax.tree.map(lambda leaf: leaf[n], of) for of, n in sets))

    last: list[bool] = []
    path: deque[Any] = deque(maxlen=trial.mean)
    for step in range(1, max(trial.looks) + 1):
        _, push, kl, keep = terms(trial.rows)
        if trial.bound is None:
            factor = CappedSettings().hold * 0.5 ** ((step - 1) / trial.halving)
        else:
            factor = max(0.0, factor + 1000 * (float(kl) - trial.bound))
        change, state = tx.update(scale * (project(push, keep) + factor * keep), state)
        flat = flat + change
        path.append(flat)
        if step in trial.looks:
            found = at.check(sum(path) / len(path))
            last.append(found["is_enough"])
            if last[-1] and (trial.more or last[-2:] == [True, True]):
                break
    flat = sum(path) / len(path)
    if trial.more:
        tx = adam(optax.linear_schedule(2e-4, 0.0, trial.more))
        state = tx.init(flat)
        for _ in range(trial.more):
            _, push, _, keep = terms((4, 12))
            change, state = tx.update(push + 60 * keep, state)
            flat = flat + change
        found, step = at.check(flat), step + trial.more
    record("end", part=1.0, steps=step, **found, **at.score(flat))
    if found["is_gone"] and parts:
        least(at, flat - at.flat, 0.4, 1.0, found, functools.partial(record, steps=step))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What is tried."""

    runs: str = setting("runs/precise", "Folder of the runs that measure.py made.")
    cases: tuple[str, ...] = setting(VALIDATION, "Cases.", choices=VALIDATION)
    trials: tuple[str, ...] = setting(tuple(TRIALS), "Trials.", choices=tuple(TRIALS))
    parts: bool = setting(True, "Whether the least part of a trained change is searched too.")


def main(options: Options) -> None:
    """Runs the trials on the cases."""
    runs = pathlib.Path(options.runs).resolve()
    for name in options.cases:
        at = Traced(name, runs)

        for trial in (TRIALS[key] for key in options.trials):
            begin = time.process_time()

            def record(model: str, **numbers: Any) -> None:
                spent = round(time.process_time() - begin)
                named = {"name": trial.title, "model": model, "case": name}
                line = json.dumps(named | numbers | {"cpu_seconds": spent})
                with (runs / "trials.jsonl").open("a") as file:
                    print(line, file=file)
                print(line, flush=True)

            if trial.line:
                run_line(at, trial, record)
            else:
                run_trial(at, trial, record, options.parts)


if __name__ == "__main__":
    command.start(main, Options())
