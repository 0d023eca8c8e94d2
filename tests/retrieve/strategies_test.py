"""The strategies: one battery for all members, and what each alone does."""

import dataclasses
import json
import pathlib
import tempfile

import numpy as np
from absl.testing import parameterized
from snapshots import refused

from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import Example, with_system
from raslik_jax.retrieve.selectors import select_by_count
from raslik_jax.retrieve.strategies import STRATEGIES, Request, Scores, choose


def _request(*, seed=0, order=None, **changes):
    rows = [
        Example(f"id{i:02d}", f"Howdy w{i}" if i < 6 else f"say w{i}", "", "", is_target=i < 6)
        for i in range(20)
    ]
    order = np.arange(20) if order is None else order
    influence_N = np.linspace(1.0, -1.0, 20)[order]
    options = {
        "queries": [Example("q0", "Howdy w3", "", "w9"), Example("q1", "Howdy w4", "", "w9")],
        "scores": {"influence": influence_N},
        "num_forget": 6,
        "num_retain": 8,
        "is_eligible_N": np.ones(20, bool),
    }
    return Request(examples=[rows[i] for i in order], seed=seed, **(options | changes))


_FILES = tempfile.TemporaryDirectory()


def _given(kind, *rows):
    """A file of rows to forget or to retain, as text or objects."""
    path = pathlib.Path(_FILES.name) / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {f"{kind}_file": str(path)}


def _score(name, request=None, **own):
    record = STRATEGIES[name]
    if record.brings_sets and not own:
        own = _given("forget", *({"id": f"id{i:02d}"} for i in range(6)))
        own |= _given("retain", *({"id": f"id{i:02d}"} for i in range(9, 20)))
    settings = dataclasses.replace(record.settings, **own)
    return record.score((request or _request())._replace(settings=settings))


def _ids(request):
    return [row.example_id for row in request.examples]


class StrategiesTest(parameterized.TestCase):
    @parameterized.parameters(*STRATEGIES)
    def test_sets_are_disjoint_and_without_examples_that_are_not_eligible(self, name):
        is_eligible_N = ~np.isin(np.arange(20), [2, 9])  # without a target and another
        request = _request(is_eligible_N=is_eligible_N, num_forget=4)
        scores = _score(name, request)
        for score_N in scores:
            np.testing.assert_array_equal(np.isneginf(score_N[[2, 9]]), [True, True])
        chosen = select_by_count(*scores, _ids(request), num_forget=4, num_retain=6)
        self.assertNoCommonElements({2, 9}, {*chosen.forget.tolist(), *chosen.retain.tolist()})
        chosen = select_by_count(*_score(name), _ids(request), num_forget=6, num_retain=8)
        self.assertLen({*chosen.forget.tolist(), *chosen.retain.tolist()}, 14)

    @parameterized.parameters(*STRATEGIES)
    def test_scores_follow_the_example_not_its_row(self, name):
        order = np.random.default_rng(1).permutation(20)
        for plain_N, shuffled_N in zip(
            _score(name), _score(name, _request(order=order)), strict=True
        ):
            np.testing.assert_array_equal(plain_N[order], shuffled_N)

    @parameterized.parameters(*STRATEGIES)
    def test_a_strategy_reads_the_scores_it_names_and_no_others(self, name):
        record, request = STRATEGIES[name], _request()
        own = {need: request.scores[need] for need in record.needs}
        for one_N, two_N in zip(
            _score(name, request), _score(name, request._replace(scores=own)), strict=True
        ):
            np.testing.assert_array_equal(one_N, two_N)
        for need in own:
            others = {other: score_N for other, score_N in own.items() if other != need}
            with self.assertRaises(KeyError):
                _score(name, request._replace(scores=others))

    @parameterized.parameters("bm25", "raslik")
    def test_what_ranks_takes_both_ends_of_one_score(self, name):
        scores = _score(name)
        np.testing.assert_array_equal(scores.retain_N, -scores.forget_N)
        chosen = select_by_count(*scores, _ids(_request()), num_forget=6, num_retain=8)
        self.assertEqual(set(chosen.forget), set(range(6)))

    @parameterized.parameters("bm25", "raslik")
    def test_the_retain_set_is_drawn_from_a_share_of_the_ranking(self, name):
        record = STRATEGIES[name]
        own = {"settings": record.settings}
        whole, drawn = (
            choose(record, _request(num_retain=4, seed=seed, **own | {"retain_within": share}))
            for share, seed in ((0.0, 0), (0.5, 3))
        )
        np.testing.assert_array_equal(whole[0].retain_N, drawn[0].retain_N)
        np.testing.assert_array_equal(whole[1].forget, drawn[1].forget)
        lowest = select_by_count(*whole[0], _ids(_request()), num_forget=6, num_retain=10).retain
        self.assertContainsSubset(drawn[1].retain.tolist(), lowest.tolist())
        self.assertNotEqual({*drawn[1].retain.tolist()}, {*whole[1].retain.tolist()})

    def test_rows_that_are_barred_are_in_no_set_whatever_a_strategy_scores(self):
        def score(request):
            score_N = np.arange(len(request.examples), dtype=np.float64)
            return Scores(-score_N, score_N)

        may_N = ~np.isin(np.arange(20), (0, 1, 19))
        record = STRATEGIES["raslik"]._replace(score=score, needs=())
        scores, chosen = choose(record, _request(is_eligible_N=may_N))
        self.assertEqual(chosen.forget.tolist(), [2, 3, 4, 5, 6, 7])
        self.assertEqual(sorted(chosen.retain.tolist()), [*range(11, 19)])
        for score_N in scores:
            np.testing.assert_array_equal(np.isneginf(score_N), ~may_N)

    def test_the_text_of_the_output_counts_by_option_only(self):
        plain, full = (
            _score("bm25", query_text=text).forget_N for text in ("prompt", "prompt_and_output")
        )
        self.assertEqual(plain[9], plain[10])
        self.assertGreater(full[9], full[10])

    def test_what_is_missing_is_said(self):
        for name, changes, own in (
            ("bm25", {"queries": ()}, {}),
            ("bm25", {"queries": [Example("q", "空は何色？", "", "")]}, {}),
        ):
            with refused():
                _score(name, _request(**changes), **own)

    def test_the_oracle_forgets_targets_only_and_the_seed_moves_what_is_drawn(self):
        np.testing.assert_array_equal(np.isinf(_score("oracle").forget_N), np.arange(20) >= 6)
        first, second = (_score("random", _request(seed=s)).forget_N for s in (0, 1))
        self.assertFalse((first == second).any())

    @parameterized.parameters("random", "oracle", "raslik_f")
    def test_random_retain_sets_come_from_non_targets(self, name):
        np.testing.assert_array_equal(np.isinf(_score(name).retain_N), np.arange(20) < 6)

    def _chosen(self, **own):
        """The ids of the sets that files give, whatever sizes are asked for."""
        record, request = STRATEGIES["given"], _request()
        rows = [row._replace(place=2 * i + 1) for i, row in enumerate(request.examples)]
        settings = dataclasses.replace(record.settings, **own)
        _, found = choose(record, request._replace(examples=rows, settings=settings))
        return [[rows[i].example_id for i in part] for part in found]

    def test_given_rows_are_found_by_id_place_or_text_in_their_order(self):
        forget = _given("forget", {"id": "id07", "place": 1}, {"place": 5}, {"id": "id07"})
        retain = _given("retain", {"place": 7, "score": 0.5}, {"id": "id00"})
        self.assertEqual(self._chosen(**forget, **retain), [["id07", "id02"], ["id03", "id00"]])

    def test_a_text_names_all_rows_that_read_so_whatever_their_ids_and_format(self):
        asked = {"messages": [{"role": "user", "content": "Who?"}]}
        said = {"messages": [*asked["messages"], {"role": "assistant", "content": "Me."}]}
        content = Conversation(tuple(said["messages"]))
        talk = Example("mine", "Who?", "", "Me.", content=content)
        rows = [*_request().examples[8:10], _request().examples[9]._replace(example_id="copy")]
        request = _request(is_eligible_N=np.ones(5, bool))._replace(
            examples=[*rows, talk, with_system(rows[0]._replace(example_id="x"), "Rhyme.")]
        )
        # As a line of the user's own file has it.
        by_text = {"instruction": "say w9", "output": "", "input": None, "more": 1}
        for row, found in (
            (by_text, [1, 2]),
            ({"instruction": "say w8", "output": ""}, [0]),
            ({"instruction": "say w8", "output": "", "system": "Rhyme."}, [4]),
            (said, [3]),
            ({"row_format": "messages", **said, "row_texts": talk[1:4], "score": 0.2}, [3]),
        ):
            scores = _score("given", request, **_given("forget", row))
            self.assertEqual(np.flatnonzero(scores.forget_N > -np.inf).tolist(), found)

    def test_a_key_of_the_users_own_called_place_names_no_row(self):
        text = {"instruction": "say w9", "output": ""}
        self.assertEqual(self._chosen(**_given("forget", text | {"place": 1}))[0], ["id09"])
        other = {"instruction": "x", "output": "y", "place": 1}
        for row in (other, {"id": "other", "place": 5}, *({"place": p} for p in ([5], 0, True))):
            with self.assertRaisesRegex(ValueError, "line 1 of .* is not: correct or remove it"):
                self._chosen(**_given("forget", row))

    def test_rows_of_the_users_file_are_read_by_its_field_map(self):
        fields = {"instruction": "ask", "output": "say", "id": "key"}
        for row, found in (
            ({"ask": "say w8", "say": ""}, 0),
            ({"key": "id09"}, 1),
            ({"id": "id09"}, 1),
            ({"key": "id09", "id": "id08"}, 1),
        ):
            request = _request(is_eligible_N=np.ones(2, bool))._replace(
                examples=_request().examples[8:10], fields=fields
            )
            record = STRATEGIES["given"]
            settings = dataclasses.replace(record.settings, **_given("forget", row))
            scores = record.score(request._replace(settings=settings))
            self.assertEqual(np.flatnonzero(scores.forget_N > -np.inf).tolist(), [found])

    def test_without_a_file_to_retain_others_are_drawn_as_many(self):
        forget, retain = self._chosen(**_given("forget", {"id": "id03"}, {"id": "id04"}))
        self.assertEqual(forget, ["id03", "id04"])
        self.assertLen(set(retain) - {*forget}, 2)
        # Fewer where fewer are left.
        most = [{"id": f"id{i:02d}"} for i in range(17)]
        forget, retain = self._chosen(**_given("forget", *most))
        self.assertLen(forget, 17)
        self.assertCountEqual(retain, ["id17", "id18", "id19"])
        more = [{"id": f"id{i:02d}"} for i in range(17, 20)]
        with self.assertRaisesRegex(ValueError, "must leave rows to retain, it names all 20"):
            self._chosen(**_given("forget", *most, *more))

    def test_rows_that_are_not_eligible_leave_the_files_sets(self):
        is_eligible_N = ~np.isin(np.arange(20), [1, 2, 3])
        one, two, three, four = ({"id": f"id{i:02d}"} for i in range(1, 5))
        request, nine = _request(is_eligible_N=is_eligible_N), {"id": "id09"}
        found = _score("given", request, **_given("forget", one, four))
        self.assertEqual(np.flatnonzero(found.forget_N > -np.inf).tolist(), [4])
        for forget, retain in (((one, two), (nine,)), ((nine,), (three, one))):
            files = _given("forget", *forget) | _given("retain", *retain)
            must = "_file must name rows that can be in a set, 'id0[13]', 'id0[12]'"
            with self.assertRaisesRegex(ValueError, must):
                _score("given", request, **files)
        left = [{"id": row.example_id} for row in (request.examples[0], *request.examples[4:])]
        with self.assertRaisesRegex(ValueError, "it names all 17 that can be chosen"):
            _score("given", request, **_given("forget", one, *left))

    def test_files_that_give_no_sets_are_refused(self):
        one, other = {"id": "id01"}, {"id": "id02"}
        for forget, retain in (
            ([], [other]),
            ([one, {"id": "x"}, {}], [other]),
            ([one, other], [other]),
        ):
            with refused():
                self._chosen(**_given("forget", *forget), **_given("retain", *retain))
        with refused():
            self._chosen()
        files = _given("forget", one)
        path = pathlib.Path(files["forget_file"])
        path.write_text("[")
        why = "correct --retrieve.given.forget_file or its file$"
        for problem in ("forget.jsonl':1 must be JSON", "^no file '.*forget.jsonl'"):
            with self.assertRaisesRegex(ValueError, f"{problem}.*: {why}"):
                self._chosen(**files)
            path.unlink(missing_ok=True)

    def test_missing_labels_are_refused_where_they_are_needed(self):
        request = _request()
        request = request._replace(
            examples=[row._replace(is_target=None) for row in request.examples]
        )
        with self.assertRaisesRegex(ValueError, "20 of 20 have none"):
            _score("oracle", request)
        _score("raslik", request)
        for name in ("random", "raslik_f"):
            self.assertFalse(np.isinf(_score(name, request).retain_N).any())
