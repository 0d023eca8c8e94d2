"""The HTML page, read with a parser: what stands on it, that it is closed in, and its bounds."""

import base64
import collections
import hashlib
import html.parser
import pathlib
import re
import tempfile

import pytest
import sample_run
from absl.testing import absltest
from folders import FolderTest

from raslik_jax.evaluate import judgment
from raslik_jax.report import facts, page, tables, tidy

_VOID = ("meta", "br", "hr", "img", "input", "link")


class _Element:
    def __init__(self, name, attributes, parent):
        self.name, self.attributes, self.parent = name, attributes, parent
        self.children = []

    def all(self, name=None, **attributes):
        """Returns the elements below with this name and these attributes, in order."""
        found = []
        for child in self.children:
            if isinstance(child, _Element):
                wanted = {k.rstrip("_").replace("_", "-"): v for k, v in attributes.items()}
                if name in (None, child.name) and wanted.items() <= child.attributes.items():
                    found.append(child)
                found += child.all(name, **attributes)
        return found

    def text(self):
        return "".join(c if isinstance(c, str) else c.text() for c in self.children)

    def is_inside(self, name):
        above = self.parent
        while above is not None and above.name != name:
            above = above.parent
        return above is not None


class _Parser(html.parser.HTMLParser):
    """Builds a tree, and refuses what is not closed in order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = self.open = _Element("root", {}, None)

    def handle_starttag(self, name, attributes):
        child = _Element(name, dict(attributes), self.open)
        self.open.children.append(child)
        if name not in _VOID:
            self.open = child

    def handle_endtag(self, name):
        if name != self.open.name:
            raise AssertionError(f"</{name}> closes <{self.open.name}> on line {self.getpos()}")
        self.open = self.open.parent

    def handle_data(self, text):
        self.open.children.append(text)


def _parse(text):
    parser = _Parser()
    parser.feed(text)
    parser.close()
    if parser.open is not parser.root:
        raise AssertionError(f"<{parser.open.name}> is left open")
    return parser.root


def _read(folder, **options):
    root = pathlib.Path(folder) / "run"
    sample_run.write_run(root, **options)
    return facts.read_facts(root)


class PageTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for i, options in enumerate(({"seed": 0}, {"seed": 1}, {"name": "other <b>"})):
                found.append(_read(pathlib.Path(folder) / str(i), **options))
        cls.experiments = facts.group_runs(found)
        cls.text = page.render(cls.experiments)
        cls.tree = _parse(cls.text)

    def test_equal_runs_give_equal_bytes(self):
        again = page.render(self.experiments)
        self.assertEqual(again, self.text)

    def test_it_is_closed_in(self):
        """Nothing is loaded, and only what is written here may style or run."""
        (policy,) = self.tree.all("meta", http_equiv="Content-Security-Policy")
        (style,), scripts = self.tree.all("style"), self.tree.all("script")
        # Rows are data: of a kind that no browser runs.
        *rows, script = scripts
        self.assertEqual({e.attributes["type"] for e in rows}, {"application/gzip"})
        self.assertEqual(script.attributes, {})
        for name, part in (("style", style), ("script", script)):
            digest = base64.b64encode(hashlib.sha256(part.text().encode()).digest()).decode()
            self.assertIn(f"{name}-src 'sha256-{digest}'", policy.attributes["content"])
        self.assertStartsWith(policy.attributes["content"], "default-src 'none'; ")
        self.assertNotIn("unsafe", policy.attributes["content"])
        for element in self.tree.all():
            self.assertContainsNoneOf(
                element.attributes,
                ("src", "style", "srcset", "action", "onclick", "onload", "xmlns"),
            )
            if "href" in element.attributes:
                self.assertRegex(
                    element.attributes["href"], "^#|^data:application/octet-stream;base64,"
                )
        self.assertEqual(self.tree.all("link"), [])
        self.assertNotRegex(style.text(), r"@import|url\(|expression")
        # The grid draws SVG, whose name is an address.
        addresses = set(re.findall(r"https?://[^\"'\s<]+", self.text))
        self.assertEqual(addresses, {"http://www.w3.org/2000/svg"})

    def assertContainsNoneOf(self, attributes, names):
        self.assertEqual([name for name in names if name in attributes], [])

    def test_hostile_text_is_shown_and_is_nothing_else(self):
        for name in ("img", "iframe", "b"):
            foreign = [e for e in self.tree.all(name) if e.text() not in self._own_bold()]
            self.assertEqual(foreign, [], name)
        self.assertLen(self.tree.all("script"), 1 + len(self.experiments))
        self.assertLen(self.tree.all("style"), 1)
        said = [e.text() for e in self.tree.all("p", class_="said")]
        # One of each model's answers: two experiments, ten models each.
        self.assertEqual(said.count(sample_run.HOSTILE), 20)
        asked = [e.text() for e in self.tree.all("p", class_="prompt")]
        self.assertEqual(sum(sample_run.HOSTILE in text for text in asked), 4)
        self.assertTrue(any(sample_run.HOSTILE in e.text() for e in self.tree.all(class_="asked")))
        self.assertIn("other <b>", [e.text() for e in self.tree.all("h3")])

    def _own_bold(self):
        return [e.text() for e in self.tree.all("b") if e.parent.name in ("figcaption", "li")]

    def test_headings_are_in_order(self):
        levels = [int(e.name[1]) for e in self.tree.all() if re.fullmatch("h[1-6]", e.name)]
        self.assertEqual(levels[0], 1)
        self.assertEqual(levels.count(1), 1)
        for before, after in zip(levels, levels[1:], strict=False):
            self.assertLessEqual(after, before + 1)

    def test_references_within_the_page_resolve_and_ids_are_unique(self):
        ids = collections.Counter(
            e.attributes["id"] for e in self.tree.all() if "id" in e.attributes
        )
        self.assertEqual([name for name, count in ids.items() if count > 1], [])
        wanted = [e.attributes["href"][1:] for e in self.tree.all("a")]
        labels = self.tree.all("label")
        wanted += [e.attributes["for"] for e in labels if "for" in e.attributes]
        around = [e for e in labels if "for" not in e.attributes]
        self.assertTrue(all(e.all("input") + e.all("select") for e in around))
        wanted += [
            e.attributes["aria-labelledby"]
            for e in self.tree.all()
            if "aria-labelledby" in e.attributes
        ]
        wanted += re.findall(r"url\(#([^)]*)\)", self.text)
        terms = [e.attributes["popovertarget"] for e in self.tree.all("button", class_="term")]
        defined = [e.attributes["id"] for e in self.tree.all("div", class_="definition")]
        self.assertGreater(len(defined), 5)
        self.assertEqual({*terms}, {*defined})
        self.assertEqual([name for name in wanted if name not in ids], [])
        self.assertEqual(self.tree.all("a")[0].attributes["href"], "#main")

    def test_every_figure_is_there_and_named(self):
        # For 2 experiments x 2 algorithms: F and R. Frontiers: 2 seeds x 2, 1 x 2. Histograms: 3.
        # Losses: backbone, fine-tuning and two algorithms each.
        found = self.tree.all("figure")
        self.assertLen(found, 2 * 2 * 2 + 6 + 3 + 2 * 4)
        for figure in found:
            (drawing,) = figure.all("svg")
            self.assertEqual(drawing.attributes["role"], "img")
            self.assertNotEmpty(figure.all("figcaption")[0].text())
        names = [figure.all("svg")[0].attributes["aria-label"] for figure in found]
        self.assertLen(set(names), len(names))
        for drawing in self.tree.all("svg"):
            if not drawing.is_inside("figure"):
                self.assertEqual(drawing.attributes["aria-hidden"], "true")
        self.assertNotIn("nan", " ".join(e.attributes.get("d", "") for e in self.tree.all("path")))

    def test_tables_have_captions_headings_and_a_box_to_scroll_in(self):
        for table in self.tree.all("table"):
            self.assertNotEmpty(table.all("caption")[0].text())
            self.assertTrue(all("scope" in e.attributes for e in table.all("th")))
            self.assertEqual(table.parent.attributes["role"], "region")
            self.assertEqual(table.parent.attributes["tabindex"], "0")
            widths = set()
            for row in table.all("tr"):
                cells = [c for c in row.children if isinstance(c, _Element)]
                widths.add(sum(int(c.attributes.get("colspan", 1)) for c in cells))
            self.assertLen(widths, 1)

    def test_without_the_script_every_query_can_be_read(self):
        items = [e for e in self.tree.all("div") if "data-item" in e.attributes]
        self.assertLen(items, 2 * 10)
        self.assertFalse(any("hidden" in e.attributes for e in items))
        for chooser in self.tree.all("div", class_="chooser"):
            self.assertIn("hidden", chooser.attributes)
            # target0 holds hostile text alone: the first at which the model was caught is 1.
            selected = [e for e in chooser.all("option") if "selected" in e.attributes]
            self.assertEqual([e.attributes["value"] for e in selected], ["1"])
            self.assertLen(chooser.all("option"), 10)

    def test_marker_words_and_empty_answers_show(self):
        marks = {e.text() for e in self.tree.all("mark")}
        self.assertEqual(marks, {"starship", "galaxy"})
        self.assertLen(self.tree.all("p", class_="said nothing"), 20)

    def test_numbers_are_those_of_the_metrics(self):
        metrics = self.experiments[1].metrics[0]
        (entry,) = (
            e
            for e in tidy.last_epochs(metrics["methods"])
            if (e["algorithm"], e["strategy"]) == ("ga_klr", "raslik")
        )
        cells = [
            row.text()
            for row in self.tree.all("tr")
            if row.text().startswith("RASLIK") and "[" in row.text()
        ]
        self.assertTrue(any(tables.format_interval(entry["forget"]) in text for text in cells))
        summary = self.tree.all("section", id="summary")[0].text()
        self.assertIn(f"F is {tables.format_interval(entry['forget'])}.", summary)


class EdgesTest(FolderTest):
    def _render(self, run):
        return _parse(page.render(facts.group_runs([run])))

    def test_the_metrics_alone_will_do(self):
        run = _read(self.folder)
        run.metrics.update(settings={}, versions={})
        bare = run._replace(queries=(), answers={}, sets={}, losses={})
        bare = bare._replace(incident=None, explorer=None)
        tree = self._render(bare)
        names = [e.attributes["id"] for e in tree.all("section")]
        self.assertEqual(names, ["retrieval", "summary", "frontier", "tables", "settings"])

    @pytest.mark.heavy
    def test_size_stays_bounded(self):
        run = _read(self.folder, num_queries=30)
        long = {
            model: {name: "word " * 4000 for name in texts} for model, texts in run.answers.items()
        }
        for answers, most in ((run.answers, 18), (long, 18)):
            tree = self._render(run._replace(answers=answers))
            shown = sum("data-item" in e.attributes for e in tree.all("div"))
            self.assertLessEqual(shown, most)
            (section,) = tree.all("section", id="answers")
            self.assertIn(f"{60 - shown} more queries are not shown here.", section.text())
        self.assertLess(len(page.render(facts.group_runs([run._replace(answers=long)]))), 2_000_000)
        self.assertIn("characters more)", section.text())

    def test_without_labels_or_backbone(self):
        run = _read(self.folder)
        del run.metrics["backbone"]
        for entry in run.metrics["methods"]:
            del entry["judgment"]
        columns = run.explorer.columns | {"label": [None] * len(run.explorer.score_N)}
        tree = self._render(run._replace(explorer=run.explorer._replace(columns=columns)))
        self.assertNotIn("backbone", tree.all("section", id="summary")[0].text().lower())

    def test_a_model_that_never_learned_is_named_first(self):
        run = _read(self.folder)
        run.metrics["behavior"] = judgment.find_behavior("words", finetuned=0.03, backbone=0.0)
        warnings = [e.text() for e in self._render(run).all("p", class_="warn")]
        self.assertRegex(warnings[0], "shows the behavior on 3.0% of target .* too little to trace")

    def test_the_page_says_what_was_judged_and_nothing_else(self):
        run = _read(self.folder)
        entries = run.metrics["methods"]
        for entry in entries:
            judged = {"verdict": "damaged", "reasons": ["normal answers empty: 9 of 48"]}
            entry["judgment"] = judged | {"inputs": []}
        text = self._render(run).all("section", id="summary")[0].text()
        self.assertIn("Damaged. Normal answers empty: 9 of 48.", text)
        self.assertIn("are damaged. Their low F", text)
        self.assertNotIn("forgotten:", text)

    def test_figures_take_their_colors_from_the_page_in_light_and_in_dark(self):
        run = _read(self.folder)
        for entry in run.metrics["methods"]:
            if entry["strategy"] == "oracle":
                entry["strategy"] = "unheard_of"
        html = page.render(facts.group_runs([run._replace(answers={})]))
        style, body = html.split("</style>", 1)
        body, _ = body.rsplit(
            "<script>", 1
        )  # the grid has colors of its own, which it does not use
        used = set(re.findall(r"var\((--c-\w+)\)", body))
        self.assertGreater(len(used), 8)
        for name in used:
            self.assertEqual(style.count(f"{name}:#"), 2, name)
        self.assertEmpty(re.findall(r'(?:fill|stroke|color)="#', body))
