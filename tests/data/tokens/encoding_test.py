"""Examples as token rows: whole, cut, and back from a file."""

from unittest import mock

import numpy as np
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.data.examples import make_example, make_examples
from raslik_jax.data.tokens import encoding
from raslik_jax.data.tokens.prompts import TEMPLATES, fill_form
from raslik_jax.data.tokens.tokenization import train_bpe

_EXAMPLES = make_examples(
    [
        make_example("Name a pet.", "", "A cat."),
        make_example("Say nothing.", "", ""),
        make_example("Copy.", "one two", "one two, three four five six"),
    ]
)
_TOKENIZER = train_bpe([fill_form(row, TEMPLATES["brief"]) for row in _EXAMPLES], vocab_size=300)


def _encode(*, max_len=1000, targets="response"):
    whole = encoding.encode(_EXAMPLES, _TOKENIZER, template="brief")
    return whole.cut(max_len, targets=targets)


class EncodeTest(FolderTest):
    def test_tokens_are_prompt_response_and_eos(self):
        encoded = _encode()
        prompts = encoding.encode_prompts(_EXAMPLES, _TOKENIZER, max_len=1000, template="brief")
        for row, tokens, prompt in zip(_EXAMPLES, encoded.tokens, prompts, strict=True):
            self.assertEqual(tokens.dtype, np.int32)
            self.assertEqual(tokens[: len(prompt)].tolist(), prompt)
            self.assertEqual(_TOKENIZER.decode(prompt), fill_form(row, TEMPLATES["brief"]))
            self.assertEqual(_TOKENIZER.decode(tokens[len(prompt) :].tolist()), row.output)
            self.assertEqual(tokens[-1], _TOKENIZER.eos_id)
        self.assertEqual(encoded.ids, tuple(row.example_id for row in _EXAMPLES))
        self.assertEqual(encoded.start_N.tolist(), [len(prompt) for prompt in prompts])
        self.assertEqual(encoded.num_targets_N[1], 1)  # an empty answer still ends
        self.assertEqual(encoding.describe_cuts(encoded, "rows", max_len=1000), "")

    def test_the_ends_are_those_of_the_targets_in_their_order(self):
        whole, eos = _encode(), _TOKENIZER.eos_id
        count_N = whole.num_targets_N.tolist()
        width = max(count_N) + 2
        expected_NT = np.zeros((3, width), bool)
        for row, count in enumerate(count_N):
            expected_NT[row, count - 1] = True  # the last target; what follows is no target
        np.testing.assert_array_equal(whole.ends([eos], width), expected_NT)
        # A row that is cut has lost its end; an empty list of ends finds none.
        cut = _encode(max_len=int(whole.lengths_N.max()) - 2)
        expected_NT[2] = False
        np.testing.assert_array_equal(cut.ends([eos], width), expected_NT)
        self.assertFalse(whole.ends([], width).any())

    def test_ends_follow_the_masks_and_any_of_several_ids_is_one(self):
        # Targets of the first row: 7, 2, 9, 3. Of the second: 2. The 2 of a prompt is no target.
        rows = [np.array([2, 7, 2, 5, 9, 3], np.int32), np.array([2, 8, 2], np.int32)]
        masks = [np.array([0, 1, 1, 0, 1, 1], bool), np.array([0, 0, 1], bool)]
        encoded = _encode()._replace(
            ids=("a", "b"),
            tokens=encoding.Ragged.of(rows),
            start_N=np.array([1, 2]),
            masks=encoding.Ragged.of(masks),
        )
        found_NT = encoded.ends([2, 3], 5)
        self.assertEqual(found_NT.astype(int).tolist(), [[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])

    def test_rows_that_are_encoded_in_parts_are_the_same(self):
        whole, rows = _encode(), [*_EXAMPLES] * 3
        with mock.patch.object(encoding, "_PART_ROWS", 2):
            found = encoding.encode(rows, _TOKENIZER, template="brief")
            empty = encoding.encode([], _TOKENIZER, template="brief")
        self.assertEqual(found.ids, whole.ids * 3)
        self.assertEqual([*map(list, found.tokens)], [*map(list, whole.tokens)] * 3)
        self.assertEqual(found.start_N.tolist(), whole.start_N.tolist() * 3)
        self.assertEqual((found.masks, len(empty.ids)), (None, 0))

    def test_rows_of_a_million_characters_are_named(self):
        rows = [*_EXAMPLES, make_example("Copy.", "", "a " * 600_000)]
        said = encoding.describe_long(rows)
        self.assertIn(
            f"1 of 4 rows have more than 1,000,000 characters ({rows[-1].example_id!r})", said
        )
        self.assertEqual(encoding.describe_long(_EXAMPLES), "")

    def test_long_rows_lose_their_right_end_and_are_counted(self):
        whole = _encode()
        longest = int(whole.lengths_N.max())
        cut = _encode(max_len=longest - 2)
        told = encoding.describe_cuts(whole, "rows", max_len=longest - 2)
        self.assertEqual(
            told, f"1 of 3 rows are cut at {longest - 2} tokens ({_EXAMPLES[2].example_id!r})"
        )
        self.assertEqual(cut.tokens[2].tolist(), whole.tokens[2][:-2].tolist())
        self.assertEqual(cut.num_targets_N[2], whole.num_targets_N[2] - 2)
        gone = _encode(max_len=3)
        self.assertEqual(gone.num_targets_N.tolist(), [0, 0, 0])

    @parameterized.parameters("response", "all")
    def test_a_row_whose_answer_is_cut_away_is_told_and_left_out(self, targets):
        room = int(_encode().start_N[2])  # the prompt of the longest one, and nothing behind it
        encoded = _encode(max_len=room, targets=targets)
        self.assertEqual(encoded.num_targets_N[2], 0)
        told = encoding.describe_cuts(_encode(), "rows", max_len=room)
        name = _EXAMPLES[2].example_id
        self.assertIn(f"1 of them lose their whole answer and are left out ({name!r})", told)
        kept = encoded.with_answers()
        self.assertEqual(kept.ids, tuple(row.example_id for row in _EXAMPLES[:2]))
        self.assertLen({len(kept.tokens), len(kept.start_N)}, 1)
        with self.assertRaisesRegex(ValueError, f"the prompts of '{name}' have up to {room}"):
            encoding.require_answers(encoded, "queries", max_len=room)

    def test_all_targets_leave_out_only_the_first_token(self):
        encoded = _encode(targets="all")
        np.testing.assert_array_equal(encoded.num_targets_N, encoded.lengths_N - 1)

    def test_prompts_are_never_cut(self):
        with self.assertRaisesRegex(ValueError, "must have at most 3 tokens, 3 have more"):
            encoding.encode_prompts(_EXAMPLES, _TOKENIZER, max_len=3, template="brief")

    def test_rows_come_back_from_a_file_and_by_name(self):
        encoded = _encode()
        path = self.folder / "rows.npz"
        for rows in (encoded, encoded.take(np.zeros(0, np.int64))):
            encoding.save_parts(path, [rows])
            again = encoding.load_encoded(path)
            self.assertEqual((again.ids, again.pad_id), (rows.ids, rows.pad_id))
            for name in ("tokens", "start_N"):
                for got, expected in zip(getattr(again, name), getattr(rows, name), strict=True):
                    np.testing.assert_array_equal(got, expected)
        picked = encoded.named([_EXAMPLES[2].example_id, _EXAMPLES[0].example_id])
        np.testing.assert_array_equal(picked.tokens[0], encoded.tokens[2])
        np.testing.assert_array_equal(picked.start_N, encoded.start_N[[2, 0]])

    def test_parts_are_joined_with_their_masks(self):
        whole = _encode()
        first, last = whole.take(np.array([0])), whole.take(np.array([2, 1]))
        is_target = np.zeros(len(first.tokens[0]), np.bool_)
        is_target[-1] = True
        marked = first._replace(masks=(is_target,))
        for parts in ((first, last), (last, first), (marked, last), (last, marked)):
            joined = encoding.join(parts)
            self.assertEqual(joined.ids, parts[0].ids + parts[1].ids)
            self.assertEqual(joined.masks is None, all(part.masks is None for part in parts))
            counts = [*parts[0].num_targets_N, *parts[1].num_targets_N]
            self.assertEqual(joined.num_targets_N.tolist(), counts)
            path = self.folder / "rows.npz"
            stored = encoding.save_parts(path, iter(parts))
            self.assertEqual([*self.folder.iterdir()], [path])
            self.assertEqual(stored.num_targets_N.tolist(), counts)
            self.assertEqual([*map(list, stored.tokens)], [*map(list, joined.tokens)])
