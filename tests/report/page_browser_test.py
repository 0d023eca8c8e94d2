"""The page in a real headless Chromium: on a laptop and a phone, in light and dark, on paper."""

import base64
import csv
import json
import pathlib
import re
import tempfile

import browser
import numpy as np
import pytest
import sample_run
from absl.testing import absltest
from waiting import wait_until

from raslik_jax.report import facts, page

_WIDTHS, _SCHEMES = (1280, 390), ("light", "dark")
_CONTRASTS, _LONG = (
    (pathlib.Path(__file__).parents[1] / "fixtures" / "page" / name).read_text()
    for name in ("contrasts.js", "long.js")
)
_FOCUSABLE = "a[href], button, input, select, summary, [tabindex='0']"


@pytest.mark.heavy
class BrowserTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        root = pathlib.Path(cls.folder.name)
        for seed in (0, 1):
            sample_run.write_run(root / str(seed), seed=seed)
        sample_run.write_found(root / "0")
        experiments = facts.group_runs([facts.read_facts(root / str(seed)) for seed in (0, 1)])
        text = page.render(experiments)
        cls.file = root / "report.html"
        cls.file.write_text(text)
        cls.num_figures = text.count("<figure>")
        cls.browser = browser.start(root / "profile")

    @classmethod
    def tearDownClass(cls):
        cls.browser.quit()
        cls.folder.cleanup()
        super().tearDownClass()

    def tearDown(self):
        # Whatever a test did, the page had nothing to complain of and asked nobody for anything.
        self.assertEqual(self.browser.get_log("browser"), [])
        messages = [json.loads(row["message"]) for row in self.browser.get_log("performance")]
        asked = {
            message["message"]["params"]["request"]["url"].partition("#")[0]
            for message in messages
            if message["message"]["method"] == "Network.requestWillBeSent"
        }
        # The browser itself opens pages of its own, and prints with an empty image; what is saved
        # is the page's own.
        asked = {url for url in asked if not url.startswith(("chrome://", "data:", "blob:"))}
        self.assertEqual(asked, {self.file.as_uri()})
        self.command("Emulation.setScriptExecutionDisabled", value=False)
        super().tearDown()

    def command(self, name, **parameters):
        return self.browser.execute_cdp_cmd(name, parameters)

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def show(self, width=1280, scheme="light", media="", is_alive=True, is_open=True):
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in features.items()]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)
        screen = {"width": width, "height": 840, "deviceScaleFactor": 1, "mobile": False}
        self.command("Emulation.setDeviceMetricsOverride", **screen)
        self.browser.get(self.file.as_uri())
        if is_alive:  # the rows are shown when all else is
            self.wait("return !document.querySelector('[data-controls]').hidden")
        if is_open:
            for part in self.browser.find_elements("css selector", "details.part"):
                self.script("arguments[0].open = true", part)

    def wait(self, claim):
        wait_until(lambda: self.script(claim), claim)

    def visible_queries(self):
        return self.script(
            "return [...document.querySelectorAll('[data-item]')]"
            ".filter(e => e.offsetParent !== null).map(e => e.querySelector('h3').textContent)"
        )

    def test_fits_and_can_be_read_at_every_width_in_light_and_dark(self):
        grounds = set()
        for width in _WIDTHS:
            for scheme in _SCHEMES:
                self.show(width, scheme)
                # Folded parts, too.
                self.script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
                found = self.script("return document.documentElement.scrollWidth")
                self.assertLessEqual(found, width, (width, scheme))
                sizes = self.script(
                    "return [...document.querySelectorAll('figure svg')].map(e => {"
                    "const r = e.getBoundingClientRect(); return [r.left, r.right, r.height]; })"
                )
                self.assertLen(sizes, self.num_figures)
                for left, right, height in sizes:
                    self.assertTrue(0 <= left < right <= width and height > 80, (width, scheme))
                    self.assertGreater(right - left, 250)
                contrasts = self.script(_CONTRASTS)
                self.assertGreater(len(contrasts), 300)
                self.assertEqual([pair for pair in contrasts if pair[0] < 4.5], [], (width, scheme))
                grounds.add(
                    (scheme, self.script("return getComputedStyle(document.body).backgroundColor"))
                )
        self.assertLen(grounds, 2)

    def test_axe_finds_no_barrier(self):
        import axe_core_python

        axe = (pathlib.Path(axe_core_python.__file__).parent / "axe.min.js").read_text()
        self.browser.set_script_timeout(300)  # a busy machine takes half a minute
        for scheme, is_open in (("light", False), ("dark", True)):
            self.show(scheme=scheme, is_open=is_open)
            self.script(axe)
            found = self.browser.execute_async_script(
                "axe.run().then(r => arguments[0](r.violations.map(v => [v.id, v.nodes[0].html])))"
            )
            self.assertEqual(found, [], scheme)
            self.script("document.querySelector('.definition').showPopover()")
            found = self.browser.execute_async_script(
                "axe.run('.definition').then(r => arguments[0](r.violations.map(v => v.id)))"
            )
            self.assertEqual(found, [], scheme)

    def test_a_number_has_its_definition_on_hover_a_tap_and_by_keyboard(self):
        from selenium.webdriver.common.keys import Keys

        self.show(390, is_open=False)
        opened = "return document.querySelector(':popover-open')?.lastChild.textContent || ''"
        terms = self.browser.find_elements("css selector", ".verdict .term, .duo .term")
        self.assertGreater(len(terms), 2)
        for term in terms:
            term.click()
            self.assertEqual(self.script(opened), term.get_attribute("title"))
            self.assertGreater(len(term.get_attribute("title")), 30)
            self.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
            self.assertEqual(self.script(opened), "")
            term.send_keys(Keys.ENTER)
            self.assertEqual(self.script(opened), term.get_attribute("title"))
            term.send_keys(Keys.ESCAPE)

    def test_figures_draw_inside_their_frames(self):
        self.show()
        outside = self.script(
            "return [...document.querySelectorAll('figure svg')].flatMap(svg => {"
            "const f = svg.getBoundingClientRect();"
            "return [...svg.querySelectorAll('text, circle, .point')].filter(e => {"
            "const r = e.getBoundingClientRect();"
            "return r.left < f.left - 1 || r.right > f.right + 1 || r.top < f.top - 1"
            " || r.bottom > f.bottom + 1; })"
            ".map(e => svg.getAttribute('aria-label') + ': ' + e.textContent); })"
        )
        self.assertEqual(outside, [])

    def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(self):
        from selenium.webdriver.common.keys import Keys

        self.show()
        expected = self.script(
            f'return [...document.querySelectorAll("{_FOCUSABLE}")]'
            ".filter(e => e.checkVisibility({contentVisibilityAuto: true})).length"
        )
        self.script(
            "window.order = [...document.querySelectorAll('*')]; window.seen = [];"
            "addEventListener('focusin', e => {"
            "const s = getComputedStyle(e.target);"
            "window.seen.push([order.indexOf(e.target), e.target.tagName, s.outlineStyle,"
            " parseFloat(s.outlineWidth)]); })"
        )
        body = self.browser.switch_to.active_element
        for _ in range(expected):
            body.send_keys(Keys.TAB)
            body = self.browser.switch_to.active_element
        seen = self.script("return window.seen")
        places = [place for place, *_ in seen]
        self.assertLen(set(places), expected)
        self.assertEqual(places, sorted(places))
        self.assertEqual(seen[0][1], "A")
        for _, name, style, width in seen:
            self.assertNotEqual(style, "none", name)
            self.assertGreaterEqual(width, 2, name)

    def test_queries_are_chosen_by_keyboard(self):
        from selenium.webdriver.common.by import By
        from selenium.webdriver.common.keys import Keys

        self.show()
        self.assertEqual(self.visible_queries(), ["Target query 2 of 10"])
        next_one = self.browser.find_element(By.CSS_SELECTOR, "[data-step='1']")
        next_one.send_keys(Keys.ENTER)
        self.assertEqual(self.visible_queries(), ["Target query 3 of 10"])
        previous = self.browser.find_element(By.CSS_SELECTOR, "[data-step='-1']")
        for _ in range(3):
            previous.send_keys(Keys.SPACE)
        self.assertEqual(self.visible_queries(), ["Normal query 10 of 10"])
        select = self.browser.find_element(By.CSS_SELECTOR, "[data-switch] select")
        select.send_keys(Keys.HOME)
        self.assertEqual(self.visible_queries(), ["Target query 1 of 10"])
        # Its answers hold the hostile text: nothing of it ran, or an alert would be open.
        self.assertIn(
            sample_run.HOSTILE, self.script("return document.querySelector('.said').textContent")
        )

    def test_without_scripts_all_can_be_read(self):
        self.command("Emulation.setScriptExecutionDisabled", value=True)
        self.show(390, is_alive=False)
        self.assertLen(self.visible_queries(), 10)
        self.assertIn(
            "corpus/train.jsonl",
            self.browser.find_element("css selector", "[data-waiting]").text,
        )
        self.assertFalse(
            self.script("return document.querySelector('.chooser').getClientRects().length > 0")
        )

    def rows(self):
        """Returns the cells of the rows that the grid has drawn, by field, from the top."""
        return self.script(
            "return [...document.querySelectorAll('.tabulator-row')].map(row => Object.fromEntries("
            "[...row.querySelectorAll('.tabulator-cell')].map("
            "cell => [cell.getAttribute('tabulator-field'), cell.textContent])))"
        )

    def told(self, claim):
        self.wait(f"return document.querySelector('[data-said]').textContent === {claim!r}")

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def test_a_stranger_finds_a_row_its_queries_and_their_rows(self):
        from selenium.webdriver.common.keys import Keys

        self.show()
        self.told("60 of 60 rows")
        # By the score first; a word of an answer, by the keyboard alone from here.
        scores = [float(row["score"].replace("\u2212", "-")) for row in self.rows()]
        self.assertEqual(scores, sorted(scores, reverse=True))
        self.assertGreater(len(scores), 8)
        self.assertLess(len(scores), 60)  # only what is in view
        search = self.find("[data-search]")
        search.send_keys("ANSWER 1")
        # Both words: rows 10 to 19, 21 to 51, and the first, whose prompt has a 1.
        self.told("15 of 60 rows")
        row = self.find(".tabulator-col[tabulator-field=line]")
        row.send_keys(Keys.ENTER)
        self.assertEqual([one["line"] for one in self.rows()][:2], ["1,052", "1,042"])
        row.send_keys(Keys.ENTER)
        self.assertEqual(self.rows()[0]["line"], "1,001")
        self.assertEqual(row.get_attribute("aria-sort"), "ascending")
        holder = self.find(".tabulator-tableholder")
        for key, line in (
            (Keys.ARROW_DOWN, "1,001"),
            (Keys.ARROW_DOWN, "1,011"),
            (Keys.END, "1,052"),
            (Keys.HOME, "1,001"),
        ):
            holder.send_keys(key)
            marked = self.find(f"#{holder.get_attribute('aria-activedescendant')}.current")
            self.assertIn(line, marked.text)
        holder.send_keys(Keys.ENTER)
        heading = self.find("[data-heading]")
        self.assertEqual(heading.text, "Row 1,001 of the file")
        self.find("[data-after]").send_keys(Keys.ENTER)
        self.assertEqual(heading.text, "Row 1,011 of the file")
        body = self.find("[data-body]").text
        for words in ("10 of 99 unrelated prompts", "p 0.11, q 0.5", "Row 10", "answer 10"):
            self.assertIn(words, body)
        self.find("[data-after]").send_keys(Keys.ENTER)
        self.assertEqual(heading.text, "Row 1,012 of the file")
        # From the row to the query that it explains, and from that to its rows.
        explains = self.browser.find_elements("css selector", ".explains button")
        self.assertEqual([e.text for e in explains], ["+0.1100 Query 1?", "\u22120.1100 Query 0?"])
        explains[0].send_keys(Keys.ENTER)
        self.assertFalse(heading.is_displayed())
        self.wait("return document.querySelector('.tabulator-row').textContent.includes('1,052')")
        self.assertEqual(self.script("return document.querySelector('[data-query]').value"), "1")
        self.assertEqual(self.rows()[0]["score"], "+0.5100")
        self.find("[data-clear]").send_keys(Keys.ENTER)
        self.told("60 of 60 rows")

    def test_a_row_has_its_heat_map_and_hostile_rows_are_text(self):
        from selenium.webdriver.common.keys import Keys

        self.show(390, "dark")
        self.find(".tabulator-row").click()
        tones = self.script(
            "return [...document.querySelectorAll('dialog .tokens span')]"
            ".map(e => [e.className, e.textContent, e.title])"
        )
        expected = [["up3", " moon", "+0.3000"], ["down1", " x", "\u22120.1000"]]
        self.assertEqual(tones, [*expected, ["up3", "mo", "+0.2000"]])
        self.assertIn("<b> moon x", self.find("[data-body]").text)
        self.assertLessEqual(self.script("return document.documentElement.scrollWidth"), 390)
        self.assertEqual([p for p in self.script(_CONTRASTS) if p[0] < 4.5], [])
        self.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        self.assertFalse(self.find("[data-heading]").is_displayed())
        self.find("[data-search]").send_keys("onerror")
        self.told("1 of 60 rows")
        self.find(".tabulator-row").click()
        self.assertIn("<img src=x", self.find("[data-body]").text)
        foreign = "#explorer img, #explorer script:not([type]), #explorer b, #explorer iframe"
        self.assertEmpty(self.browser.find_elements("css selector", foreign))

    def test_the_histogram_is_brushed_and_rows_are_saved_without_formulas(self):
        from selenium.webdriver.common.action_chains import ActionChains

        self.show()
        bars = self.find("[data-histogram]")
        ActionChains(self.browser).move_to_element(bars).click_and_hold().move_by_offset(
            bars.size["width"] // 2 - 4, 0
        ).release().perform()
        low, high = (
            float(self.find(f"[data-{end}]").get_attribute("value")) for end in ("low", "high")
        )
        score_N = np.load(self.file.parent / "0/retrieve/influence/influence.npy")
        middle = (score_N.min() + score_N.max()) / 2
        self.assertAlmostEqual(low, middle, delta=0.01)
        found = int(((score_N >= low) & (score_N <= high)).sum())
        self.assertBetween(found, 1, 59)
        self.told(f"{found} of 60 rows")
        ActionChains(self.browser).click(bars).perform()
        self.told("60 of 60 rows")
        self.find("[data-search]").send_keys("HYPERLINK")
        self.told("1 of 60 rows")
        folder = self.file.parent
        where = {"behavior": "allow", "downloadPath": str(folder)}
        self.command("Browser.setDownloadBehavior", **where)
        self.find("[data-save]").click()
        saved = folder / "rows.csv"
        wait_until(saved.is_file)
        with saved.open(newline="", encoding="utf-8-sig") as file:
            (row,) = csv.DictReader(file)
        self.assertEqual(row["said"], "'" + sample_run.FORMULA)
        self.assertAlmostEqual(float(row["score"]), float(score_N[1]), places=5)
        self.assertEqual((row["line"], row["id"], row["q"]), ("1002", "row1", "0.5"))

    def test_prints(self):
        self.show(scheme="dark")
        printed = base64.b64decode(self.command("Page.printToPDF", printBackground=True)["data"])
        self.assertStartsWith(printed.decode("latin-1"), "%PDF")
        num_pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", printed))
        self.assertBetween(num_pages, 5, 60)
        # Dark on the screen is light on paper, and nothing is cut off at the side.
        self.show(700, "dark", media="print")
        self.assertLessEqual(self.script("return document.documentElement.scrollWidth"), 700)
        self.assertEqual(
            self.script("return getComputedStyle(document.body).backgroundColor"),
            "rgb(255, 255, 255)",
        )
        self.script("dispatchEvent(new Event('beforeprint'))")
        # Of rows that are drawn as they come into view the first are printed.
        printed = "return document.querySelectorAll('.tabulator-print-table tbody tr').length"
        self.assertEqual(self.script(printed), 40)
        self.assertLessEqual(self.script("return document.documentElement.scrollWidth"), 700)
        self.script("dispatchEvent(new Event('afterprint'))")
        self.assertEqual(self.script(printed), 0)
        # What is folded away stays away: an incident fits on two pages.
        self.show(is_open=False)
        printed = base64.b64decode(self.command("Page.printToPDF", printBackground=True)["data"])
        self.assertLessEqual(len(re.findall(rb"/Type\s*/Page\b(?!s)", printed)), 2)

    def test_the_first_screen_tells_one_story_and_links_open_what_is_folded(self):
        for width, height in ((1440, 900), (390, 840)):
            self.show(width, is_open=False)
            shown = self.script("return document.body.innerText")
            self.assertLess(len(shown.split()), 1200)
            self.assertEqual(self.script(_LONG), [], width)
            parts = self.script("return [...document.querySelectorAll('.part')].map(e => e.open)")
            self.assertEqual(parts, [False] * len(parts))
            (*_, now) = self.browser.find_elements("css selector", ".story > div")
            self.assertLessEqual(now.rect["y"] + now.rect["height"], height, width)
        self.script("location.hash = 'tables'")
        self.wait("return document.querySelector('#method').open")
        self.assertTrue(self.find("#tables").is_displayed())
        self.assertEqual(self.script("return document.querySelectorAll('.part[open]').length"), 1)
