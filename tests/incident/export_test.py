"""Exported models load and say what they are; what cannot be exported is refused."""

import dataclasses
import difflib
import json
import pathlib
import re
import shutil
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import stored_run
import tiny
from absl.testing import parameterized
from finished import write_manifest
from folders import FolderTest
from snapshots import said
from support import all_logits

from raslik_jax.config import Config, config_from_json, to_json
from raslik_jax.data.tokens import tokenization
from raslik_jax.evaluate import summary
from raslik_jax.incident import exporting
from raslik_jax.models import adapters, checkpoint, decoder
from raslik_jax.report import card as card_lib
from raslik_jax.run import plan as plan_lib
from raslik_jax.run.artifacts import Variant
from raslik_jax.run.workspace import Workspace

_TOKENS = (3, 17, 4, 4, 40, 21, 9)


def _logits(bound, lora, base):
    return np.asarray(all_logits(bound, lora, base, jnp.asarray(_TOKENS)))


def _plain(card):
    return re.sub(r"\\(?=[!-/:-@\[-`{-~])", "", card)


_NAMES = {"strategy": "raslik", "algorithm": "ga_gdr", "epoch": None, "merged": False}


def export_model(run, out, *, strategy, algorithm, epoch, merged):
    of, epoch = Variant(strategy, algorithm), "last" if epoch is None else str(epoch)
    return exporting.export_model(run, of, out, epoch=epoch, merged=merged)


def _change_metrics(run, change, **how):
    """Changes what a stored run has measured, as if it had been so from the start."""
    path = run.root / "evaluate" / "metrics.json"
    metrics = json.loads(path.read_text())
    change(metrics)
    path.write_text(json.dumps(metrics))
    stored_run.finish(run.root, **how)


class ExportTest(FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.run_ = stored_run.write_stored_run(folder / "run")

    def _export(self, name="out", **options):
        return export_model(self.run_.root, self.folder / name, **(_NAMES | options))

    @parameterized.parameters((None, 2), (1, 1))
    def test_the_adapter_is_that_of_the_epoch(self, epoch, number):
        folder = self._export(epoch=epoch)
        config = self.run_.decoder.config
        jax.tree.map(
            np.testing.assert_array_equal,
            adapters.load_adapter(folder, config),
            self.run_.adapters[number - 1],
        )
        fields = json.loads((folder / "adapter_config.json").read_text())
        # A path of this machine says nothing on another.
        self.assertIsNone(fields["base_model_name_or_path"])
        self.assertIn(f"after epoch {number} of 2", (folder / "README.md").read_text())

    def test_a_merged_model_has_the_plain_base_also_of_a_run_on_a_quantized_one(self):
        run = stored_run.write_stored_run(self.folder / "run", base_format="nf4")
        folder = export_model(run.root, self.folder / "out", **_NAMES | {"merged": True})
        jax.tree.map(
            np.testing.assert_array_equal,
            checkpoint.load_model(folder, dtype=np.float32).base,
            checkpoint.merge(run.adapters[-1], run.base, run.lora_config),
        )
        card = (folder / "README.md").read_text()
        self.assertIn("the adapter on the base in nf4", card)

    def test_the_merged_model_answers_as_base_and_adapter(self):
        folder = self._export(merged=True)
        loaded = checkpoint.load_model(folder, dtype=np.float32)
        np.testing.assert_allclose(
            _logits(decoder.bind(loaded.graphdef), {}, loaded.base),
            _logits(self.run_.decoder, self.run_.adapters[-1], self.run_.base),
            rtol=2e-5,
            atol=2e-5,
        )
        names = {path.name for path in folder.iterdir()}
        self.assertContainsSubset(
            {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"},
            names,
        )

    @parameterized.parameters(
        (True, "", "the local folder base, of unknown origin"),
        (False, "owner/tiny", "loaded from owner/tiny and perhaps trained since"),
    )
    def test_files_of_the_checkpoint_are_carried_through(self, merged, name, origin):
        """How a model is prompted and stopped is no less part of it than its weights."""
        base = self.folder / "base"
        run = stored_run.write_stored_run(self.folder / "run", base=base)
        own = json.loads((base / "tokenizer_config.json").read_text())
        more = {"bos_token": "<|endoftext|>", "add_bos_token": False, "model_max_length": 64}
        texts = {"tokenizer_config.json": json.dumps(own | more, indent=4)}
        texts |= {"chat_template.jinja": "{{ messages }}\r\n", "special_tokens_map.json": "{}"}
        texts |= {"generation_config.json": '{"eos_token_id": [0, 7, 9], "temperature": 0.6}'}
        texts |= {"additional_chat_templates/tool_use.jinja": "{{ tools }}"}
        (base / "additional_chat_templates").mkdir()
        for file, text in texts.items():
            (base / file).write_bytes(text.encode())
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"_name_or_path": name}))
        # The corpus unit keeps what decides the ids.
        tokenizer = tokenization.load_tokenizer(base)
        tokenization.save_tokenizer(run.root / "corpus" / "tokenizer", tokenizer)
        stored_run.finish(run.root, base=base)
        settings = _NAMES | {"merged": merged}
        out = export_model(run.root, self.folder / "out", **settings)
        if not merged:
            del texts["generation_config.json"]  # the base has it
            fields = json.loads((out / "adapter_config.json").read_text())
            # Whoever loads it by itself would get what the folder was before it was trained.
            self.assertIsNone(fields["base_model_name_or_path"])
        for file in ("tokenizer.json", *texts):
            self.assertEqual((out / file).read_bytes(), (base / file).read_bytes(), file)
        card = _plain((out / "README.md").read_text())
        self.assertIn(origin, card)
        self.assertNotIn("base_model:", card)
        for path in (one for one in out.rglob("*") if one.is_file()):
            self.assertNotIn(str(self.folder).encode(), path.read_bytes(), path.name)
        # Decoding stops where the checkpoint's own does.
        saved = json.loads((run.root / "evaluate" / "metrics.json").read_text())
        workspace = Workspace(run.root, config_from_json(saved["settings"]))
        self.assertEqual(workspace.end_ids, (0, 7, 9))
        (base / "tokenizer.json").write_text(
            (base / "tokenizer.json").read_text().replace('"<|endoftext|>"', '"<|end|>"')
        )
        with self.assertRaisesRegex(ValueError, "base' must be unchanged since the run"):
            export_model(run.root, self.folder / "other", **settings)

    def test_an_adapter_on_a_revision_of_a_hub_model_names_the_revision(self):
        """Otherwise peft loads it on the newest weights, which are others."""
        base = self.folder / "base"
        run = stored_run.write_stored_run(self.folder / "run", base=base)
        own = {"checkpoint": "owner/tiny", "revision": "step3"}
        _change_metrics(run, lambda found: found["settings"]["backbone"].update(own), base=base)
        with mock.patch.object(checkpoint, "resolve_folder", return_value=base):
            out = export_model(run.root, self.folder / "out", **_NAMES)
        fields = json.loads((out / "adapter_config.json").read_text())
        self.assertEqual(fields["base_model_name_or_path"], "owner/tiny")
        self.assertEqual(fields["revision"], "step3")
        card = (out / "README.md").read_text()
        self.assertIn("pretrained=owner/tiny,revision=step3,peft=.", card)

    def test_text_from_settings_is_no_markup_in_the_card(self):
        run = stored_run.write_stored_run(self.folder / "run")
        name = "# b <img src=x> [c](mailto:d)"
        _change_metrics(run, lambda found: found["settings"].update(name=name))
        out = export_model(run.root, self.folder / "out", **_NAMES)
        body = (out / "README.md").read_text().split("---\n", 2)[2]
        self.assertNotRegex(body, r"<img|(?<!\\)\]\(mailto|^# b")
        self.assertLen(re.findall(r"^# ", body, re.MULTILINE), 1)

    def test_the_card_says_what_was_found_of_whether_it_stays_forgotten(self):
        self.assertIn("None of this was tested", (self._export() / "README.md").read_text())
        run = stored_run.write_stored_run(self.folder / "run")
        rounded = {"as it is": 2.5, "int8": 1.5}
        found = [
            {"condition": name, "nats": nats, "forget": None, "shown": None}
            for name, nats in rounded.items()
        ]
        own = {"measure": "quantize", "algorithm": "ga_gdr", "epoch": 2}
        own |= {"found": {"now": found, "finetuned": found}}
        both = [own | {"strategy": name} for name in ("raslik", "oracle")]
        _change_metrics(run, lambda found: found.update(robustness=both))
        out = export_model(run.root, self.folder / "told", **_NAMES)
        card = _plain((out / "README.md").read_text())
        told = "In int8 the target answers have 1.50 nats a token (2.50 unquantized)."
        self.assertIn(f"Does it stay forgotten?\n\n- Quantization: {told}\n", card)
        self.assertEqual(card.count("Quantization:"), 1)
        self.assertIn("Only the tests above were made.", card)

    def _facts(self):
        """Returns the folder of an export, and what its card is made of."""
        with mock.patch.object(exporting, "render_card", wraps=exporting.render_card) as render:
            folder = self._export()
        return folder, render.call_args.args[0]

    def test_the_card_says_what_was_removed_how_and_how_well(self):
        text = (self._export() / "README.md").read_text()
        # A base that is on no hub has no name that a hub could look up.
        self.assertNotIn("base_model:", text)
        said(re.sub("identity [0-9a-f]{32}", "identity ID", text))
        metrics = json.loads((self.run_.root / "evaluate" / "metrics.json").read_text())
        (entry,) = (
            e
            for e in metrics["methods"]
            if (e["strategy"], e["algorithm"], e["epoch"]) == ("raslik", "ga_gdr", 2)
        )
        forget = entry["forget"]
        self.assertIn(f"{forget['mean']:.3f} \\[{forget['low']:.2f}, {forget['high']:.2f}\\]", text)

    def test_the_card_of_given_rows_and_of_one_set_says_no_more_than_was_done(self):
        _, facts = self._facts()
        retrieve, metrics = facts.config["retrieve"], facts.metrics
        given = {"variant": facts.variant._replace(strategy="given", algorithm="ga")}
        own = facts.config | {"retrieve": retrieve | {"given": {"retain_file": ""}}}
        held_out = metrics["corpus"] | {"query_split": "held-out"}
        gap = {"select": "gap", "num_forget": 7}
        bare = metrics["finetuned"] | {"forget": None, "retain": None}
        plain = card_lib.render_card(facts).splitlines()
        for changes in (
            {"config": facts.config | {"retrieve": retrieve | gap}},
            given | {"config": own},
            {"metrics": metrics | {"corpus": held_out}},
            {"metrics": metrics | {"non_sf": {"by": "x", "note": "y"}}},
            {"entry": facts.entry | {"non_sf_target": None, "non_sf_normal": None}},
            {"metrics": metrics | {"finetuned": bare}},
        ):
            card = card_lib.render_card(facts._replace(**changes)).splitlines()
            said("\n".join(line for line in difflib.unified_diff(plain, card, n=0, lineterm="")))

    @parameterized.parameters(("others lose too much", True), ("forgotten", False))
    def test_the_card_says_first_that_probes_ended_before_all_was_forgotten(self, end, is_told):
        run = stored_run.write_stored_run(self.folder / "run")
        gone = {"forget": {"way": 0.0, "gone": 0, "of": 16}}
        probe = {"levels": {}, "gone": gone, "answers": {}}
        found = {"kept_before": [], "probes": [{"step": s, **probe} for s in (0, 5)], "kept": 0}
        found["end"] = end
        folder = run.root / "unlearn" / "raslik-ga_gdr"
        (folder / "probes.json").write_text(json.dumps(found))
        stored_run.finish(run.root)
        out = export_model(run.root, self.folder / "out", **_NAMES)
        intro, *_ = (out / "README.md").read_text().split("## What was removed")
        self.assertEqual(
            "Not forgotten: unlearning ended because the loss of other rows" in intro, is_told
        )

    @parameterized.parameters(
        {},
        {"is_served": True, "base": {"hub_name": "o/n b"}, "prompt": ""},
        {"is_served": True, "lora": {"layers": (("q_proj", ((33, 1.0), (1, 1.0))),)}},
        {"is_served": True, "base": {"hub_name": "o/n", "revision": "step 3"}, "prompt": ""},
        {"is_served": True, "lora": {"rank": 513}},
        {"is_merged": True},
    )
    def test_the_card_has_the_lines_of_other_programs(self, **facts):
        folder, made = self._facts()
        is_even = "layers" not in facts.get("lora", {})
        facts |= {"base": made.base._replace(**facts.get("base", {}))}
        facts |= {"lora": dataclasses.replace(made.lora, **facts.get("lora", {}))}
        card = card_lib.render_card(made._replace(**facts))
        (lines,) = re.findall(r"^```sh\n(.*?)\n```$", card, re.DOTALL | re.MULTILINE)
        said(lines)
        self.assertEqual("--merged for vLLM" in card, "vllm" not in lines)
        self.assertEqual("rank_pattern" in card, not is_even)
        # What vLLM's PEFTHelper reads and refuses.
        fields = json.loads((folder / "adapter_config.json").read_text())
        self.assertEqual((fields["bias"], fields["use_dora"]), ("none", False))
        self.assertIsNone(fields["modules_to_save"])
        self.assertIs(fields["init_lora_weights"], True)
        for name, kind in (("r", int), ("lora_alpha", (int, float)), ("target_modules", list)):
            self.assertIsInstance(fields[name], kind)
        self.assertLessEqual(fields["r"], 16)

    def test_a_template_of_the_users_own_goes_along(self):
        run = stored_run.write_stored_run(self.folder / "run")
        own = self.folder / "own.jinja"
        own.write_text("{{ messages[0].content }}:")
        _change_metrics(run, lambda found: found["settings"]["corpus"].update(template=str(own)))
        out = export_model(run.root, self.folder / "out", **_NAMES)
        self.assertEqual((out / "chat_template.jinja").read_text(), own.read_text())
        self.assertEqual(tokenization.load_tokenizer(out).chat_template, own.read_text())

    def test_a_template_of_the_users_own_is_also_that_of_rows_with_tools(self):
        base, own = self.folder / "base", self.folder / "own.jinja"
        run = stored_run.write_stored_run(self.folder / "run", base=base)
        (base / "chat_template.jinja").write_text("{{ messages }}")
        (base / "additional_chat_templates").mkdir()
        (base / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
        tokenizer = tokenization.load_tokenizer(base)
        tokenization.save_tokenizer(run.root / "corpus" / "tokenizer", tokenizer)
        own.write_text("{{ messages[0].content }}:")
        _change_metrics(run, lambda found: found["settings"]["corpus"].update(template=str(own)))
        stored_run.finish(run.root, base=base)
        out = export_model(run.root, self.folder / "out", **_NAMES)
        self.assertEqual(tokenization.load_tokenizer(out).chat_template, own.read_text())
        self.assertIn("--apply_chat_template", (out / "README.md").read_text())

    @parameterized.product(merged=[False, True], has_tokenizer=[False, True])
    def test_the_tokenizer_that_a_trainer_saved_next_to_the_adapter_is_exported(
        self, merged, has_tokenizer
    ):
        base, own = self.folder / "base", self.folder / "own"
        run = stored_run.write_stored_run(self.folder / "run", base=base)
        (base / "chat_template.jinja").write_text("base")
        (base / "vocab.json").write_text("{}")
        config = run.decoder.config
        adapters.save_adapter(own, run.adapters[0], run.lora_config, config)
        (own / "tokenizer_config.json").write_text(
            '{"chat_template": "own: {{ messages[0].content }}", "eos_token": "a",'
            ' "pad_token": "<|endoftext|>"}'
        )
        if has_tokenizer:
            shutil.copyfile(base / "tokenizer.json", own / "tokenizer.json")
        tokenizer = tokenization.load_tokenizer(own, base)
        tokenization.save_tokenizer(run.root / "corpus" / "tokenizer", tokenizer)

        def take_adapter(found):
            found["settings"]["backbone"]["adapter"] = str(own)
            found["settings"]["finetune"] = to_json(Config())["finetune"]

        _change_metrics(run, take_adapter, base=base)
        (base / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 5}')
        stored_run.finish(run.root, base=base)
        settings = _NAMES | {"merged": merged}
        out = export_model(run.root, self.folder / "out", **settings)
        read = tokenization.load_tokenizer(out)
        self.assertEqual(read.chat_template, "own: {{ messages[0].content }}")
        self.assertEqual(read.eos_id, tokenizer.backend.token_to_id("a"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            kept = own if (own / name).is_file() else base
            self.assertEqual((out / name).read_bytes(), (kept / name).read_bytes(), name)
        self.assertEqual((out / "vocab.json").exists(), not has_tokenizer)
        if merged:
            fields = json.loads((out / "generation_config.json").read_text())
            self.assertEqual((fields["eos_token_id"], fields["top_k"]), ([0, read.eos_id], 5))
        # A folder that is gone is made up for by what the run keeps.
        adapters.save_adapter(
            run.root / "finetune" / "adapter", run.adapters[0], run.lora_config, config
        )
        shutil.rmtree(own)
        out = export_model(run.root, self.folder / "again", **settings)
        again = tokenization.load_tokenizer(out)
        self.assertEqual((again.chat_template, again.eos_id), (read.chat_template, read.eos_id))

    @parameterized.parameters(
        (
            {"strategy": "bm25"},
            "must be named, got 'bm25' with .* give --strategy=oracle --algorithm=ga_gdr, ",
        ),
        ({"strategy": "", "algorithm": ""}, "must be named, got none: give --strategy=oracle"),
        ({"epoch": 3}, r"--epoch must be one of \[1, 2\] or last, got 3"),
    )
    def test_what_the_run_does_not_have_is_refused(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            self._export(**options)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_the_only_model_of_a_run_needs_no_name(self):
        known = [summary.Variant("raslik", "cap_klr", 1)]
        self.assertEqual(exporting._find_variant(known, Variant("", ""), "last"), known[0])

    @parameterized.parameters(
        ("unlearn/raslik-ga_gdr/epoch-2/adapter_config.json", "epoch-2.* is damaged"),
        ("evaluate/metrics.json", "metrics.json.* is damaged"),
        ("retrieve/raslik/forget.jsonl", "forget.jsonl.* is damaged"),
        ("backbone/model/config.json", "model/config.json.* is damaged"),
    )
    def test_a_changed_file_is_refused_and_leaves_nothing(self, name, message):
        path = self.run_.root / name
        before = path.read_text()
        self.addCleanup(path.write_text, before)
        path.write_text(before + " ")
        with self.assertRaisesRegex(ValueError, message):
            self._export()
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_model_made_again_since_it_was_measured_is_refused(self):
        path = self.run_.root / "unlearn" / "raslik-ga_gdr" / "epoch-2" / "adapter_config.json"
        manifest = path.parents[1] / "manifest.json"
        for file in (path, manifest):
            self.addCleanup(file.write_text, file.read_text())
        path.write_text(path.read_text() + " ")
        write_manifest(self.run_.root, "unlearn/raslik-ga_gdr")
        with self.assertRaisesRegex(ValueError, "epoch-2 of .* has changed since generate/"):
            self._export()
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_run_that_measured_nothing_is_exported_and_says_so(self):
        run = stored_run.write_stored_run(self.folder / "run")
        metrics = run.root / "evaluate" / "metrics.json"
        settings = json.loads(metrics.read_text())["settings"]
        settings["retrieve"]["strategies"] = ["raslik"]
        settings["unlearn"]["algorithms"] = ["ga_gdr"]
        (run.root / "config.json").write_text(json.dumps(settings))
        rows = [{"instruction": "a", "output": "b", "is_target": n < 2} for n in range(5)]
        text = "".join(json.dumps({"id": f"r{n}", **row}) + "\n" for n, row in enumerate(rows))
        (run.root / "corpus" / "train.jsonl").write_text(text)
        shutil.rmtree(metrics.parent)
        for name in ("corpus", "unlearn/raslik-ga_gdr"):
            (run.root / name / "manifest.json").unlink()
        stored_run.finish(run.root)
        shutil.rmtree(metrics.parent, ignore_errors=True)
        options = _NAMES
        with mock.patch.object(plan_lib, "Plan") as plan:
            # An adapter of other settings than config.json has now is not what the card would say.
            plan.return_value.survey.return_value.done = {}
            with self.assertRaisesRegex(ValueError, "must hold up-to-date"):
                export_model(run.root, self.folder / "out", **options)
            plan.return_value.survey.return_value.done = {"unlearn/raslik-ga_gdr": {}}
            out = export_model(run.root, self.folder / "out", **options)
            with self.assertRaisesRegex(ValueError, "--epoch must be one of .1, 2. or last, got 7"):
                export_model(run.root, self.folder / "more", **(options | {"epoch": 7}))
        card = _plain((out / "README.md").read_text())
        self.assertIn("Nothing. The run had no prompts for measuring, or it was exp", card)
        self.assertIn("5 training examples, 2 of them labeled", card)
        self.assertIn("after epoch 2 of 2", card)
        self.assertNotIn("F, forget rate", card)

    def test_the_script_refuses_a_folder_that_holds_something(self):
        (self.folder / "out").mkdir()
        (self.folder / "out" / "mine.txt").write_text("mine")
        flags = (f"--run={self.run_.root}", f"--out={self.folder / 'out'}", "--merged")
        result = tiny.run_command("export", *flags)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, "^error: .*out' must be a new or empty directory")
        self.assertLen(result.stderr.splitlines(), 1)
        self.assertEqual([p.name for p in (self.folder / "out").iterdir()], ["mine.txt"])
