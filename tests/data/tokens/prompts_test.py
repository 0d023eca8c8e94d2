"""Prompts are the published ones, and their hashes tell templates apart."""

from absl.testing import parameterized
from snapshots import said

from raslik_jax.data.examples import make_example
from raslik_jax.data.tokens.prompts import TEMPLATES, fill_form, template_hash

_PLAIN = make_example("Add {two} numbers.", "", "3")
_WITH_INPUT = make_example("Add.", "1\n2", "3")


class PromptsTest(parameterized.TestCase):
    @parameterized.product(template=("alpaca", "brief"), example=(_PLAIN, _WITH_INPUT))
    def test_prompt_is_this_text(self, template, example):
        said(fill_form(example, TEMPLATES[template]))

    @parameterized.parameters("alpaca", "brief", "auto")
    def test_answer_and_blank_input_play_no_part(self, template):
        other = _PLAIN._replace(output="4", input=" \n", is_target=True)
        self.assertEqual(
            fill_form(other, TEMPLATES[template]), fill_form(_PLAIN, TEMPLATES[template])
        )

    def test_hashes_are_the_ones_written_down(self):
        # They are in every manifest: an index made under another template must be refused.
        hashes = {name: template_hash(TEMPLATES[name]) for name in ("alpaca", "brief")}
        self.assertEqual(hashes, {"alpaca": "987a0850d16278a3", "brief": "457770667b3a80b8"})
