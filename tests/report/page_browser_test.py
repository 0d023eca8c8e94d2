"""The page in a real headless Chromium: on a laptop and a phone, in light and dark, on paper."""

import base64
import json
import pathlib
import re
import tempfile

import browser
import pytest
import sample_run
from absl.testing import absltest

from raslik_jax.report import page, published, runs

_WIDTHS, _SCHEMES = (1280, 390), ("light", "dark")
# Color and ground of every element that shows text of its own, the ground from above if clear.
_CONTRASTS = """
const number = c => c.match(/[\\d.]+/g).map(Number);
const light = c => {
  const [r, g, b] = number(c).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const found = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  if (!own || e.closest('script') || !e.getClientRects().length) continue;
  let above = e, ground = 'rgba(0, 0, 0, 0)';
  while (above && number(ground)[3] === 0) {
    ground = getComputedStyle(above).backgroundColor;
    above = above.parentElement;
  }
  const style = getComputedStyle(e);
  const pair = [light(e.closest('svg') ? style.fill : style.color), light(ground)].sort();
  found.push([(pair[1] + 0.05) / (pair[0] + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]);
}
return found;
"""
_FOCUSABLE = "a[href], button, select, summary, [tabindex='0']"


@pytest.mark.heavy
class BrowserTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        root = pathlib.Path(cls.folder.name)
        for seed in (0, 1):
            sample_run.write_run(root / str(seed), seed=seed)
        experiments = runs.group_runs([runs.read_run(root / str(seed)) for seed in (0, 1)])
        text = page.render(experiments, paper=published.read_blocks(), show_paper=True)
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
        # The browser itself opens pages of its own, and prints with an empty image.
        asked = {url for url in asked if not url.startswith(("chrome://", "data:"))}
        self.assertEqual(asked, {self.file.as_uri()})
        self.command("Emulation.setScriptExecutionDisabled", value=False)
        super().tearDown()

    def command(self, name, **parameters):
        return self.browser.execute_cdp_cmd(name, parameters)

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def show(self, width=1280, scheme="light", media=""):
        self.command(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=840,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.browser.get(self.file.as_uri())

    def visible_queries(self):
        return self.script(
            "return [...document.querySelectorAll('[data-item]')]"
            ".filter(e => e.offsetParent !== null).map(e => e.querySelector('h4').textContent)"
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
        select = self.browser.find_element(By.TAG_NAME, "select")
        select.send_keys(Keys.HOME)
        self.assertEqual(self.visible_queries(), ["Target query 1 of 10"])
        # Its answers hold the hostile text: nothing of it ran, or an alert would be open.
        self.assertIn(
            sample_run.HOSTILE, self.script("return document.querySelector('.said').textContent")
        )

    def test_without_scripts_all_can_be_read(self):
        self.command("Emulation.setScriptExecutionDisabled", value=True)
        self.show(390)
        self.assertLen(self.visible_queries(), 10)
        self.assertFalse(
            self.script("return document.querySelector('.chooser').getClientRects().length > 0")
        )

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
        self.assertEqual(
            self.script("return document.querySelectorAll('details:not([open])').length"), 0
        )
        self.script("dispatchEvent(new Event('afterprint'))")
        self.assertGreater(
            self.script("return document.querySelectorAll('details:not([open])').length"), 3
        )


if __name__ == "__main__":
    absltest.main()
