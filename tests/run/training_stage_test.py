"""Fine-tuning and unlearning as stages: killed and resumed they leave the same bytes."""

import collections
import dataclasses
import hashlib
import itertools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from folders import FolderTest
from support import tiny_model_config

from raslik_jax import config as config_lib
from raslik_jax.data.examples import QUERY_SETS, Corpus, Example, write_examples
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.tokens.encoding import encode
from raslik_jax.data.tokens.tokenization import train_bpe
from raslik_jax.evaluate import reproduction, verdict
from raslik_jax.models import decoder, quantize
from raslik_jax.models.lora import LoRAConfig
from raslik_jax.run import artifacts
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.stages import finetune as finetune_stage
from raslik_jax.run.stages import retrain as retrain_stage
from raslik_jax.run.stages import unlearn as unlearn_stage
from raslik_jax.run.workspace import Model, Workspace
from raslik_jax.train import loop, resuming, steps
from raslik_jax.train.objectives import OBJECTIVES, RetrainSettings

_ROWS = tuple(
    Example(f"{n:03d}", f"Say {word} {n % 3} times", "", f"{word} " * (1 + n % 3))._replace(
        is_target=n < 6, source="made"
    )
    for n, word in enumerate(("red", "green", "blue", "gray", "pink") * 4)
)
_LORA = {"lora_rank": 2, "lora_dropout": 0.3, "lora_targets": ("dense",)}
_LORA |= {"batch_size": 8, "micro_batch_size": 4, "schedule": "cosine"}
_FINETUNE = config_lib.FinetuneConfig(**_LORA, epochs=3, fixed_padding=True)
_MEMBERS = {
    name: dataclasses.replace(OBJECTIVES[name].settings, learning_rate=1e-2)
    for name in ("ga_gdr", "ga_klr")
}
_SIZES = {"epochs": 3, "batch_size": 4, "micro_batch_size": 2, "fixed_padding": True}
_UNLEARN = config_lib.UnlearnConfig(algorithms=(*_MEMBERS,), members=_MEMBERS, **_SIZES)


def _workspace(root, *, base_format="plain", finetune=_FINETUNE, unlearn=_UNLEARN, seed=0):
    """Returns a workspace with a model of a thousand weights, as the stages before leave it."""
    settings = config_lib.Config(
        seed=seed,
        corpus=config_lib.CorpusConfig(max_len=64, template="brief"),
        references=config_lib.ReferencesConfig(max_new_tokens=32),
        backbone=config_lib.BackboneConfig(format=base_format),
        finetune=finetune,
        unlearn=unlearn,
    )
    workspace = Workspace(root, settings)
    tokenizer = train_bpe([f"{row.instruction} {row.output}" for row in _ROWS], vocab_size=300)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16}
    model_config = tiny_model_config(tokenizer.vocab_size, initializer_range=0.02, **sizes)
    lora_config = LoRAConfig(rank=2, alpha=16.0, dropout=0.3, targets=("dense",))
    graphdef, lora, base = decoder.create(
        model_config, lora_config, key=jax.random.key(0), dtype=jnp.float32
    )
    if base_format != "plain":
        base = quantize.quantize_base(base, base_format, double_quant=False)
    queries = {name: () for name in QUERY_SETS}
    queries["retrieval"] = (_ROWS[0]._replace(example_id="q", instruction="Say red"),)
    workspace.__dict__.update(
        corpus=Corpus(backbone=(), train=_ROWS, queries=queries),
        tokenizer=tokenizer,
        template_name="brief",
        train_rows=encode(_ROWS, tokenizer, template="brief"),
        model=Model(decoder.bind(graphdef), base, lambda seed=0: lora, lora_config, graphdef),
        finetuned=jax.tree.map(lambda leaf: leaf + 0.1, lora),
    )
    sets = root / "retrieve" / "raslik"
    if not sets.exists():
        sets.mkdir(parents=True)
        (sets / "summary.json").write_text("{}")
        for name, rows in (("forget", _ROWS[:6]), ("retain", _ROWS[6:17])):
            labels = [{"is_target": row.is_target, "source": row.source} for row in rows]
            write_examples(sets / f"{name}.jsonl", rows, extra=labels)
    return workspace


def _bytes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "resume" not in path.parts
    }


class TrainingStageTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.root = self.folder
        # Optax's AdamW raises float32 to an integer power, which strict promotion refuses.
        self.enter_context(jax.numpy_dtype_promotion("standard"))

    def made(self, name):
        """Returns a new folder."""
        folder = self.root / name
        folder.mkdir(parents=True)
        return folder

    def run_and_kill(self, stage, after, *, damage=False):
        """Runs a stage whole and, elsewhere, killed after a checkpoint and begun again.

        Args:
          stage: what is run.
          after: number of the checkpoint after which it is killed.
          damage: flip a byte of that checkpoint, so that the one before is gone on from.
        """
        folders = [self.made(name) for name in ("undisturbed", "killed")]
        # One workspace, so that a step compiles once; processes are killed in run_test.
        workspace = _workspace(self.root)
        stage(workspace, folders[0])

        saved = []

        def save_and_die(folder, step, progress):
            save(folder, step, progress)
            saved.append(step)
            if len(saved) == after:
                raise KeyboardInterrupt

        save = resuming.save_progress
        self.enter_context(mock.patch.object(resuming, "save_progress", save_and_die))
        with self.assertRaises(KeyboardInterrupt):
            stage(workspace, folders[1])
        self.assertTrue((folders[1] / "resume").is_dir())
        if damage:
            seal = folders[1] / "resume" / str(saved[-1]) / "seal.json"
            seal.write_text(seal.read_text().replace("a", "b", 1))
        stage(workspace, folders[1])
        return folders, saved

    def test_fine_tuning_goes_on_with_the_same_bytes(self):
        (whole, killed), saved = self.run_and_kill(finetune_stage.make_adapter, 2)
        self.assertEqual(saved, [3, 6])
        self.assertEqual(_bytes(killed), _bytes(whole))
        self.assertLen(json.loads((whole / "losses.json").read_text()), 9)

    def test_unlearning_goes_on_with_the_same_bytes(self):
        def stage(workspace, folder):
            unlearn_stage.unlearn(workspace, Variant("raslik", "ga_klr"), folder)

        (whole, killed), saved = self.run_and_kill(stage, 2, damage=True)
        # Three steps of four examples see all eleven of the retain set.
        self.assertEqual(saved, [3, 6, 6])
        self.assertEqual(_bytes(killed), _bytes(whole))
        log = json.loads((whole / "steps.json").read_text())
        self.assertLen(log, 9)
        self.assertGreater(log[-1]["forget_nll"], log[0]["forget_nll"])
        self.assertLess(abs(log[0]["retain_term"]), 1e-6)  # the KL of the model with itself

    def test_a_batch_has_the_frozen_states_of_its_own_rows(self):
        unlearn = dataclasses.replace(_UNLEARN, algorithms=("cap_klr",), members={})
        workspace = _workspace(self.root, unlearn=unlearn)
        model, find = workspace.model, steps.find_states(workspace.model.decoder)
        frozen = {"reference": workspace.finetuned, "backbone": workspace.backbone.lora}
        sets = [unlearn_stage.read_set(workspace, "raslik", kind) for kind in ("forget", "retain")]
        seen = collections.Counter()
        drawn = unlearn_stage.draw_pairs(workspace, "cap_klr", sets, 0)
        for batch in itertools.chain(*itertools.islice(drawn, 3)):
            for name, known_BTE in batch.known.items():
                alone = dataclasses.replace(batch, known={})
                found_BTE = np.asarray(find(frozen[name], model.base, alone))
                for row, count in enumerate(np.asarray(batch.target_mask_BL).sum(axis=1)):
                    expected = found_BTE[row, :count]
                    np.testing.assert_allclose(known_BTE[row, :count], expected, atol=1e-5)
                    seen[name] += int(count)
        self.assertTrue(all(seen[name] > 0 for name in frozen), seen)

    def test_the_settings_of_unlearning_reach_its_step(self):
        own = dataclasses.replace(OBJECTIVES["cap_klr"].settings, learning_rate=2e-3)
        values = {"mean": "tokens", "forget_weight": 0.25, "retain_weight": 0.75}
        values |= {"clip": 0.5, "weight_decay": 0.125, "micro_batch_size": 4}
        unlearn = dataclasses.replace(
            _UNLEARN, algorithms=("cap_klr",), members={"cap_klr": own}, **values
        )
        workspace = _workspace(self.root, unlearn=unlearn)
        with (
            mock.patch.object(steps, "unlearning") as step,
            mock.patch.object(loop, "adamw") as adamw,
        ):
            workspace.unlearning("cap_klr", 1e-3, (7,))
        adamw.assert_called_once_with(1e-3, weight_decay=0.125, clip=0.5)
        objective, _, tx, options, settings = step.call_args.args
        self.assertEqual((objective, settings), (OBJECTIVES["cap_klr"], own))
        self.assertIs(tx, adamw.return_value)
        weights = {"forget_weight": 0.25, "retain_weight": 0.75, "micro_batch": 4}
        self.assertEqual(options, steps.Options(mean="tokens", end_ids=(7,), **weights))

    def test_retraining_goes_on_with_the_same_bytes_and_leaves_rows_out(self):
        own = RetrainSettings(learning_rate=1e-2, epochs=2.5, batch_size=4, micro_batch_size=2)
        members = {"retrain": own}
        unlearn = dataclasses.replace(_UNLEARN, algorithms=("retrain",), members=members)
        made = []

        def stage(workspace, folder):
            workspace = _workspace(self.root, unlearn=unlearn)
            retrain_stage.retrain(workspace, Variant("raslik", "retrain"), folder)
            made.append(retrain_stage.rows_left(workspace, "raslik"))

        (whole, killed), saved = self.run_and_kill(stage, 2)
        self.assertEqual(made[0], [row.example_id for row in _ROWS[6:]])
        # A file names a row that is too long to be unlearned.
        summary = artifacts.set_summary("raslik").place(self.root)
        summary.write_text(json.dumps({"named": [_ROWS[7].example_id]}))
        left = retrain_stage.rows_left(_workspace(self.root, unlearn=unlearn), "raslik")
        self.assertEqual(left, [made[0][0], *made[0][2:]])
        self.assertEqual(saved, [4, 8])  # four steps an epoch of 14 rows, ten in all
        self.assertEqual(_bytes(killed), _bytes(whole))
        log = [entry["loss"] for entry in json.loads((whole / "steps.json").read_text())]
        self.assertLen(log, 10)
        self.assertLess(log[-1], log[0])
        # The seed of the run is added: 1 and 0 train as 0 and 1 do, and not as 0 and 0.
        firsts = []
        for run_seed, own_seed in ((0, 0), (0, 1), (1, 0)):
            seeded = {"retrain": dataclasses.replace(own, seed=own_seed, epochs=0.5)}
            workspace = _workspace(
                self.root, unlearn=dataclasses.replace(unlearn, members=seeded), seed=run_seed
            )
            folder = self.root / f"seeded-{run_seed}-{own_seed}"
            folder.mkdir()
            retrain_stage.retrain(workspace, Variant("raslik", "retrain"), folder)
            firsts.append((folder / "steps.json").read_text())
        self.assertEqual(firsts[1], firsts[2])
        self.assertNotEqual(firsts[0], firsts[1])

    def test_rows_above_the_length_are_cut_or_dropped(self):
        workspace = _workspace(self.root, unlearn=_UNLEARN)
        told = self.enter_context(mock.patch.object(workspace, "told", set()))
        lengths_N = workspace.train_rows.lengths_N
        most = int(np.median(lengths_N))
        for kind, number in (("cut", len(lengths_N)), ("drop", int((lengths_N <= most).sum()))):
            settings = RetrainSettings(max_len=most, long_rows=kind, targets="all")
            found = retrain_stage.encode_rows(workspace, settings)
            self.assertLen(found.ids, number)
            self.assertEqual(found.lengths_N.max(), most)
        self.assertLess(number, len(lengths_N))
        self.assertIn(
            f"{len(lengths_N) - number} training examples above {most} tokens are dropped", told
        )

    def test_with_all_tokens_a_row_counts_that_is_cut_before_its_answer(self):
        workspace = _workspace(self.root, unlearn=_UNLEARN)
        for targets in ("response", "all"):
            settings = RetrainSettings(max_len=8, targets=targets)
            most = min(workspace.train_rows.start_N.max(), 8)
            found = retrain_stage.encode_rows(
                workspace, dataclasses.replace(settings, max_len=int(most))
            )
            has = workspace.train_rows.start_N < most
            self.assertLen(found.ids, len(has) if targets == "all" else has.sum())
        self.assertEqual(found.num_targets_N.tolist(), (found.lengths_N - 1).tolist())

    def test_a_recipe_is_checked_against_the_adapter_that_it_gave(self):
        own = RetrainSettings(learning_rate=1e-2, epochs=2.0, batch_size=4, check_recipe=1.0)
        log = self.root / "trainer_state.json"

        def at(name, **values):
            """A workspace whose adapter was trained by the recipe, and one that checks another."""
            settings = dataclasses.replace(own, check_log=str(log), **values)
            members = {"algorithms": ("retrain",), "members": {"retrain": settings}}
            return _workspace(self.root / name, unlearn=dataclasses.replace(_UNLEARN, **members))

        first, variant = at("trained"), Variant("raslik", "retrain")
        write_examples(self.root / "trained/retrieve/raslik/forget.jsonl", [])  # on all rows
        folder = self.made(f"trained/unlearn/{variant}")
        retrain_stage.retrain(first, variant, folder)
        losses = [entry["loss"] for entry in json.loads((folder / "steps.json").read_text())]
        logged = [{"step": n, "loss": losses[n - 1] + losses[n - 2]} for n in (2, 4, 6, 8, 10)]
        logged = [entry | {"loss": entry["loss"] / 2} for entry in logged]
        log.write_text(json.dumps({"log_history": [*logged, {"train_loss": 1.0}]}))
        adapter = first.adapter("unlearn", str(variant), "epoch-1")

        def check(name, **values):
            workspace = at(name, **values)
            workspace.__dict__["finetuned"] = adapter
            retrain_stage.check_recipe(workspace, "retrain", workspace.root)
            return artifacts.RECIPE.read_in(workspace.root)

        same = check("same")
        self.assertEqual((same["steps"], same["of"], same["rows"]), (10, 10, 20))
        given, trained, start, _ = same["loss"]
        self.assertEqual(given, trained)
        self.assertLess(given, start)
        self.assertEqual(same["answers"][:2], [1, 1])
        np.testing.assert_allclose(*same["curve"][:2], rtol=1e-6)
        self.assertTrue(reproduction.is_confirmed(same))
        half = check("half", check_recipe=0.5)
        self.assertEqual((half["steps"], half["of"]), (5, 10))
        np.testing.assert_allclose(half["curve"][:2], np.mean(losses[:4]), rtol=1e-6)
        self.assertNotIn("loss", half)
        self.assertTrue(reproduction.is_confirmed(half))
        other = check("other", learning_rate=1e-5)
        self.assertGreater(other["loss"][1], other["loss"][0])
        self.assertFalse(reproduction.is_confirmed(other))

    @parameterized.parameters(0, 48)
    def test_a_retain_set_that_loses_all_its_answers_is_refused_in_one_sentence(self, own):
        # The prompts to retain are longer than the rows to forget.
        unlearn = dataclasses.replace(_UNLEARN, max_len=own)
        workspace = _workspace(self.root, unlearn=unlearn)
        long = tuple(
            row._replace(instruction=row.instruction * 9, example_id=f"long {row.example_id}")
            for row in _ROWS[6:9]
        )
        rows = encode((*_ROWS[:6], *long), workspace.tokenizer, template="brief")
        length = own or workspace.config.corpus.max_len
        self.assertGreaterEqual(rows.start_N[6:].min(), length)
        self.assertLess(rows.lengths_N[:6].max(), length)
        workspace.train_rows = rows
        folder = self.root / "retrieve" / "raslik"
        for kind, part in (("forget", _ROWS[:6]), ("retain", long)):
            write_examples(folder / f"{kind}.jsonl", part)
        flag = "unlearn" if own else "corpus"
        with self.assertRaisesRegex(
            ValueError,
            f"^examples to retain .* in {length} tokens, no example .*: raise --{flag}.max_len$",
        ):
            unlearn_stage.unlearn(workspace, Variant("raslik", "ga_gdr"), self.root)
        sets = [unlearn_stage.read_set(workspace, "raslik", kind) for kind in ("forget", "retain")]
        unlearn_stage.require_rows(workspace, "ga", sets)  # has no retain term

    def probed(self, **probe):
        """Returns a function that unlearns with probes after every second step and epoch."""
        probe = config_lib.ProbeConfig(**{"steps": 2, "rows": 4, "answers": 0} | probe)
        self.workspace = _workspace(self.root, unlearn=dataclasses.replace(_UNLEARN, probe=probe))

        def stage(workspace, folder):
            unlearn_stage.unlearn(self.workspace, Variant("raslik", "ga_gdr"), folder)

        return stage

    def slow_level(self, params, ids):
        """Returns the mean over rows of the mean nats a token of their answers, one by one."""
        model, found = self.workspace.model, []

        @jax.jit
        def logits_of(tokens_L):
            hidden_LE = model.decoder.hidden(params, model.base, tokens_L)
            return model.decoder.logits(params, model.base, hidden_LE)

        for name in ids:
            rows = self.workspace.train_rows.named([name])
            (tokens,), start = rows.tokens, int(rows.start_N[0])
            # One shape for all: what follows a token does not change it.
            logits_LV = np.float64(logits_of(np.pad(tokens, (0, 64 - len(tokens)))))
            log_p_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
            found.append(-np.mean([log_p_LV[n - 1, tokens[n]] for n in range(start, len(tokens))]))
        return np.mean(found)

    def test_a_probe_finds_what_the_obvious_computation_finds_and_changes_nothing(self):
        plain, folder = self.made("plain"), self.made("probed")
        unlearn_stage.unlearn(_workspace(self.root), Variant("raslik", "ga_gdr"), plain)
        self.probed(answers=1, answer_tokens=4)(None, folder)
        found = json.loads((folder / "probes.json").read_text())
        self.assertEqual([probe["step"] for probe in found["probes"]], [0, 2, 3, 4, 6, 8, 9])
        same = _bytes(folder)
        del same["probes.json"]
        self.assertEqual(same, _bytes(plain))
        forget, retain = ([row.example_id for row in rows] for rows in (_ROWS[:6], _ROWS[6:17]))
        workspace = self.workspace
        for place, params in ((0, workspace.finetuned), (-1, workspace.adapter("probed/epoch-3"))):
            levels = found["probes"][place]["levels"]
            for kind, ids in (("forget", forget), ("retain", retain)):
                chosen = shuffled(ids, seed=0, label=f"probed {kind} rows")[:4]
                self.assertAlmostEqual(levels[kind], self.slow_level(params, chosen), places=4)
            # Rows 17 to 19 are in neither set.
            kept = self.slow_level(params, [row.example_id for row in _ROWS[17:]])
            self.assertAlmostEqual(levels["kept"], kept, places=4)
        backbone = self.slow_level(workspace.model.initial, [r.example_id for r in _ROWS[17:]])
        self.assertAlmostEqual(found["backbone"]["kept"], backbone, places=4)
        self.assertEqual(found["rows"], {"forget": 4, "behavior": 1, "retain": 4, "kept": 3})
        self.assertEqual(list(found["probes"][0]["answers"]), ["q"])
        lines = (self.root / "live" / "unlearn" / "raslik-ga_gdr.jsonl").read_text().splitlines()
        live = [line for line in map(json.loads, lines) if "probe/kept" in line]
        for line, probe in zip(live, found["probes"], strict=True):
            levels = {name: line[f"probe/{name}"] for name in probe["levels"]}
            self.assertEqual((line["step"], levels), (probe["step"], probe["levels"]))

    def test_a_traced_answer_that_is_a_training_row_is_asked_once(self):
        stage = self.probed(answers=8, answer_tokens=4, rows=6, stop="forgotten")
        self.workspace.corpus.queries["retrieval"] = (_ROWS[2],)
        stage(None, folder := self.made("copy"))
        found = json.loads((folder / "probes.json").read_text())
        ids = list(found["probes"][-1]["answers"])
        self.assertEqual(ids[0], _ROWS[2].example_id)
        self.assertCountEqual(ids, [row.example_id for row in _ROWS[:6]])

    def test_a_killed_run_keeps_the_step_that_an_undisturbed_one_keeps(self):
        # Nothing ends it: the bound is wide, the goal is far.
        stage = self.probed(stop="forgotten", max_rise=5.0, forget_rise=50.0)
        (whole, killed), saved = self.run_and_kill(stage, 2, damage=True)
        self.assertEqual(saved, [3, 6, 6])
        self.assertEqual(_bytes(killed), _bytes(whole))
        self.assertEqual([path.name for path in whole.glob("*-*")], ["epoch-3"])
        found = json.loads((whole / "probes.json").read_text())
        self.assertGreater(found["kept"], 0)

    def test_it_ends_where_the_rule_says_and_the_model_before_is_kept_where_nothing_helped(self):
        folder = self.made("short")
        # Ascent raises some tokens of so small a model: half of what the rule asks is enough here.
        with mock.patch.object(
            verdict, "is_enough", lambda gone: min(one["way"] for one in gone.values()) > 0.2
        ):
            self.probed(stop="forgotten", max_rise=50.0, forget_rise=1e-3)(None, folder)
        found = json.loads((folder / "probes.json").read_text())
        self.assertEqual(found["natural"], {"forget": False, "behavior": False})
        self.assertEqual(found["end"], "forgotten")
        last = found["probes"][-1]["step"]
        self.assertIn(found["kept"], [probe["step"] for probe in found["probes"][-2:]])
        self.assertLen(json.loads((folder / "steps.json").read_text()), last)
        self.assertLess(last, 9)
        none = self.made("none")
        self.probed(stop="forgotten", max_rise=1e-9, forget_rise=50.0)(None, none)
        found = json.loads((none / "probes.json").read_text())
        self.assertEqual((found["end"], found["kept"]), ("others lose too much", 0))
        kept = self.workspace.adapter("none", "epoch-3")
        jax.tree.map(np.testing.assert_array_equal, kept, self.workspace.finetuned)

    @parameterized.parameters((6, "weights"), (5, "grad_norm"))
    def test_unlearning_that_diverges_leaves_the_epochs_before(self, last, what):
        def step(state, frozen, batch):
            number = state.step + 1
            grown = jnp.where(number == last, jnp.inf, 1.0)
            params = jax.tree.map(lambda leaf: leaf * grown, state.params)
            norm = jnp.where((number == 5) & (last == 5), jnp.inf, 1.0)
            ones = jnp.ones(3)
            return loop.State(params, (), number), steps.Info(*ones, norm)

        def init(params):
            return loop.State(params, (), jnp.int32(0))

        algorithm = loop.Algorithm(init, step, steps.Info._fields)
        self.enter_context(mock.patch.object(Workspace, "unlearning", lambda *names: algorithm))
        folder = self.made("unlearn")
        with self.assertRaisesRegex(
            ValueError,
            f"unlearning .* diverged: .*{what}.* step {last}.*--unlearn.ga_gdr.learning_rate",
        ):
            unlearn_stage.unlearn(_workspace(self.root), Variant("raslik", "ga_gdr"), folder)
        self.assertEqual(sorted(path.name for path in folder.iterdir()), ["epoch-1", "resume"])
        self.assertEqual([path.name for path in (folder / "resume").iterdir()], ["3"])

    @parameterized.parameters("loss", "weights", "likelihoods")
    def test_a_training_that_its_probes_end_may_diverge_and_leaves_the_kept_step(self, what):
        def step(state, frozen, batch):
            number = state.step + 1
            grown = jnp.where(
                number == 5, {"weights": jnp.inf, "likelihoods": 1e28}.get(what, 1), 64
            )
            params = jax.tree.map(lambda leaf: leaf * grown, state.params)
            loss = jnp.where((number == 5) & (what == "loss"), jnp.nan, 1.0)
            return loop.State(params, (), number), steps.Info(*jnp.ones(3), loss)

        algorithm = loop.Algorithm(
            lambda params: loop.State(params, (), jnp.int32(0)), step, steps.Info._fields
        )
        self.enter_context(mock.patch.object(Workspace, "unlearning", lambda *names: algorithm))
        folder = self.made(what)
        self.probed(stop="forgotten", steps=1, max_rise=50.0, forget_rise=50.0)(None, folder)
        found = json.loads((folder / "probes.json").read_text())
        self.assertEqual(found["end"], "diverged")
        self.assertEqual([probe["step"] for probe in found["probes"]], [0, 1, 2, 3, 4])
        self.assertGreater(found["kept"], 0)
        self.assertEqual([path.name for path in folder.glob("*-*")], ["epoch-3"])
        kept, factor = self.workspace.adapter(what, "epoch-3"), 64.0 ** found["kept"]
        for leaf, before in zip(
            jax.tree.leaves(kept), jax.tree.leaves(self.workspace.finetuned), strict=True
        ):
            np.testing.assert_array_equal(leaf, before * factor)

    @parameterized.parameters("int8", "nf4")
    @pytest.mark.heavy
    def test_fine_tunes_and_unlearns_on_a_quantized_base(self, base_format):
        quick = dataclasses.replace(_FINETUNE, epochs=1, remat=True)
        once = dataclasses.replace(_UNLEARN, epochs=1, remat=True)
        workspace = _workspace(self.root, base_format=base_format, finetune=quick, unlearn=once)
        for name, stage in (
            ("finetune", finetune_stage.make_adapter),
            ("unlearn", lambda w, f: unlearn_stage.unlearn(w, Variant("raslik", "ga_gdr"), f)),
        ):
            stage(workspace, self.made(name))
        losses = json.loads((self.root / "finetune" / "losses.json").read_text())
        self.assertTrue(np.isfinite(losses).all())
        self.assertTrue((self.root / "unlearn" / "epoch-1" / "adapter_config.json").is_file())
