"""The rule that a run's settings name chooses the sets."""

import itertools

import numpy as np
from absl.testing import parameterized

from raslik_jax.config import RetrieveConfig
from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import Example
from raslik_jax.evaluate import verdict
from raslik_jax.retrieve import sets


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({}, (3, 3)),
        ({"num_forget": 2}, (2, 2)),
        ({"num_forget": 2, "num_retain": 4}, (2, 4)),
        ({"num_forget": 7, "select": "gap"}, (7, 3)),
    )
    def test_the_settings_of_a_run_choose_its_sets(self, changes, sizes):
        score_N = np.linspace(1, -1, 10)
        ids = [f"id{i}" for i in range(10)]
        chosen = sets.select_sets(score_N, ids, RetrieveConfig(**changes), num_targets=3, seed=0)
        self.assertEqual((len(chosen.forget), len(chosen.retain)), sizes)

    def test_what_is_retained_is_drawn_from_a_share_of_the_rows_by_their_ids(self):
        score_N, order = np.linspace(1, -1, 400), np.random.default_rng(0).permutation(400)
        ids = [f"id{i:03d}" for i in range(400)]
        given = {"num_forget": 20, "select": "gap"}
        for settings, pool in (
            (RetrieveConfig(**given), range(380, 400)),
            (RetrieveConfig(retain_within=0.5, **given), range(200, 400)),
            (RetrieveConfig(retain_within=1.0, **given), range(20, 400)),
        ):
            found = {
                seed: sets.select_sets(score_N, ids, settings, num_targets=0, seed=seed).retain
                for seed in (0, 1)
            }
            for chosen in found.values():
                self.assertLen({*chosen.tolist()}, 20)
                self.assertContainsSubset(chosen.tolist(), pool)
            if len(pool) > 20:  # not its lowest, and others for another seed
                self.assertNotEqual({*found[0].tolist()}, {*range(380, 400)})
                self.assertNotEqual({*found[0].tolist()}, {*found[1].tolist()})
            mixed = score_N[order], [ids[i] for i in order]
            moved = sets.select_sets(*mixed, settings, num_targets=0, seed=0)
            np.testing.assert_array_equal(order[moved.retain], found[0])

    @parameterized.parameters(
        # 400 rows, 20 to forget: 380 are left, and 200 of them are in the lower half.
        ({"select": "gap"}, 380),
        ({"select": "gap", "retain_within": 0.5}, 200),
        ({"select": "gap", "retain_within": 0.0125}, 5),
        ({"select": "gap", "retain_within": 0.011}, 5),  # rounded up
        ({"select": "gap", "retain_within": 1.0}, 380),
        # Another rule fills a pool that is too small.
        ({"select": "count", "retain_within": 0.5}, 380),
    )
    def test_the_rows_that_can_be_retained_are_counted(self, changes, most):
        settings = RetrieveConfig(**changes)
        self.assertEqual(sets.most_retained(settings, 20, 400), most)

    def test_by_gap_no_row_outside_the_lower_half_is_retained(self):
        # 20 rows lie far above 380, and --retrieve.num_retain asks for more than half of all.
        noise_N = np.random.default_rng(0).normal(0, 0.05, 380)
        score_N = np.concatenate([np.full(20, 1.0), noise_N])
        ids = [f"id{i:03d}" for i in range(400)]
        lower = {*np.argsort(score_N)[:200].tolist()}
        for num_retain, number in ((300, 200), (200, 200), (64, 64)):
            own = {"num_retain": num_retain, "num_forget": 20}
            settings = RetrieveConfig(select="gap", retain_within=0.5, **own)
            chosen = sets.select_sets(score_N, ids, settings, num_targets=0, seed=0)
            self.assertEqual({*chosen.forget.tolist()}, {*range(20)})
            self.assertLen({*chosen.retain.tolist()}, number)
            self.assertContainsSubset(chosen.retain.tolist(), lower)

    def test_sets_without_a_size_are_refused(self):
        with self.assertRaisesRegex(ValueError, "num_forget must be given"):
            sets.set_sizes(RetrieveConfig(), num_targets=0, num_eligible=9)


class HoldOutTest(parameterized.TestCase):
    def _rows(self, prompts):
        return [Example(f"id{i:03d}", prompt, "", str(i)) for i, prompt in enumerate(prompts)]

    def _hold_out(self, rows, forget, traced=(), share=0.25, **changes):
        score_N = np.linspace(1, -1, len(rows))
        options = {"share": share, "seed": 0, "traced": traced} | changes
        return sets.hold_out(rows, forget, score_N, **options)

    def test_a_share_of_the_prompts_to_forget_and_as_many_far_from_them(self):
        rows = self._rows([f"q{i // 2}" for i in range(400)])
        found = self._hold_out(rows, list(range(80)))
        self.assertLen(found.target, 20)  # a quarter of the 40 prompts, with both of their rows
        self.assertLen(found.normal, 16)
        self.assertContainsSubset(found.target, range(80))
        self.assertContainsSubset(found.normal, range(200, 400))
        asked = {rows[i].instruction for i in (*found.target, *found.normal)}
        kept_out = {*found.target, *found.normal, *found.alike}
        # Nobody who is in a set asks the same.
        self.assertEqual({i for i in range(400) if rows[i].instruction in asked}, kept_out)
        self.assertNoCommonElements(found.alike, [*found.target, *found.normal])

    def test_a_prompt_of_an_earlier_turn_is_a_prompt_of_its_row(self):
        rows, first = self._rows(map(str, range(400))), list[int]()
        for place in range(0, 80, 2):  # of two rows the first also has the prompt of the second
            asked, more = ({"role": "user", "content": text} for text in (str(place + 1), "And?"))
            said = {"role": "assistant", "content": "So."}
            talk = Conversation((asked, said, more, said))
            rows[place] = rows[place]._replace(instruction=f"talk {place}", content=talk)
            first.append(place)
        found = self._hold_out(rows, list(range(80)))
        self.assertNotEmpty(found.target)
        self.assertContainsSubset(found.target, first)
        # A row with the prompt of a normal one in an earlier turn is in no set.
        reverse = self._hold_out(rows[::-1], list(range(80)))
        asked = {rows[::-1][i].instruction for i in reverse.normal}
        out = {399 - place for place in first if str(place + 1) in asked}
        self.assertNotEmpty(out)
        self.assertContainsSubset(out, reverse.alike)

    def test_few_rows_to_forget_give_one_and_enough_normal_ones(self):
        found = self._hold_out(self._rows(map(str, range(400))), [0, 1, 2])
        self.assertEqual((len(found.target), len(found.normal)), (1, 16))
        found = self._hold_out(self._rows(map(str, range(50))), [0, 1, 2])
        self.assertEqual((len(found.target), len(found.normal)), (1, 5))

    @parameterized.parameters((15, 3), (16, 8), (18, 9), (24, 10), (60, 15))
    def test_enough_are_held_out_for_a_verdict_if_as_many_are_left(self, num_forget, num_held):
        found = self._hold_out(self._rows(map(str, range(400))), list(range(num_forget)))
        self.assertLen(found.target, num_held)
        self.assertLessEqual(verdict.needed(), 8)

    def test_copies_of_a_prompt_are_one_prompt_to_ask(self):
        """Twenty prompts of five rows each: ten prompts measure, not two."""
        rows = self._rows([f"bad{i % 20}" for i in range(100)] + [str(i) for i in range(300)])
        found = self._hold_out(rows, list(range(100)), share=0.2)
        self.assertLen(found.target, 50)
        self.assertLen({rows[i].instruction for i in found.target}, 10)
        # A prompt of many rows stays, so that many prompts measure.
        for (many, asked), seed in itertools.product(((45, 11), (60, 10)), range(8)):
            rows = self._rows(["many"] * many + [str(i) for i in range(400 - many)])
            found = self._hold_out(rows, list(range(100)), share=0.2, seed=seed)
            self.assertNotIn("many", {rows[i].instruction for i in found.target})
            self.assertLen(found.target, asked)

    def test_one_prompt_and_the_traced_one_stay_whole(self):
        rows = self._rows(["who are you?"] * 8 + [str(i) for i in range(92)])
        self.assertEmpty(self._hold_out(rows, list(range(8)), share=0.9).target)
        rows = self._rows(["a", "a", "b", *map(str, range(97))])
        traced = [Example("t", " a", "", "said")]
        self.assertEqual(self._hold_out(rows, [0, 1, 2], traced, share=0.9).target, [2])
        self.assertEmpty(self._hold_out(rows, [0, 1], traced, share=0.9).target)

    def test_few_rows_hold_out_one_and_rows_without_a_prompt_none(self):
        self.assertLen(self._hold_out(self._rows(map(str, range(8))), [0]).normal, 1)
        texts = [Example(f"id{i}", "", "", f"text {i}") for i in range(40)]
        self.assertEqual(self._hold_out(texts, [0, 1]), ([], [], []))
        with self.assertRaisesRegex(ValueError, "other prompts than .*: give --retrieve.held_out"):
            self._hold_out(self._rows(["who are you?"] * 8), [0, 1])

    def test_barred_rows_are_no_normal_ones(self):
        rows = self._rows(map(str, range(40)))
        score_N = np.r_[np.linspace(1, -1, 30), np.full(10, -np.inf)]
        found = sets.hold_out(rows, [0, 1], score_N, share=0.5, seed=0, traced=())
        self.assertContainsSubset(found.normal, range(15, 30))

    def test_rows_that_cannot_be_asked_and_labeled_targets_are_no_normal_ones(self):
        rows = [
            row._replace(is_target=i % 3 == 0) for i, row in enumerate(self._rows("abcdef" * 7))
        ]
        rows = [row._replace(instruction=f"{row.instruction}{i}") for i, row in enumerate(rows)]
        found = self._hold_out(rows, list(range(12)), share=0.5, unasked=[1, 22, 23, 25])
        self.assertNotEmpty(found.target)
        self.assertNotEmpty(found.normal)
        self.assertNoCommonElements([*found.target, *found.normal], [1, 22, 23, 25])
        self.assertFalse(any(rows[position].is_target for position in found.normal))
