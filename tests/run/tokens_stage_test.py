"""Rows that stand for their near-duplicates, and the text of tokens."""

import numpy as np
from absl.testing import absltest

from raslik_jax.data.tokens.tokenization import train_bpe
from raslik_jax.index.search import center_queries
from raslik_jax.run.stages import tokens


class TokensStageTest(absltest.TestCase):
    def test_near_duplicates_stand_behind_the_first_of_them(self):
        generator = np.random.default_rng(0)
        first_MK = np.eye(4, 32)
        near = 0.1 * generator.normal(size=(6, 32)) / np.sqrt(32)
        rows_NK = np.concatenate([first_MK[[0, 0, 1, 0, 2, 1]] + near, first_MK[3:]])
        rows = center_queries(rows_NK)
        self.assertEqual(tokens.distinct_rows(rows, 3), [0, 2, 4])
        self.assertEqual(tokens.distinct_rows(rows, 9), [0, 2, 4, 6])
        best = np.array([0, 2, 4])
        cosine_NM = rows.direction_QK @ rows.direction_QK[best].T
        self.assertEqual(tokens.group_rows(cosine_NM, best), [[1, 3], [5], []])

    def test_pieces_make_the_text_and_a_character_of_several_tokens_stands_once(self):
        tokenizer = train_bpe(["a kettle hums", "a kettle boils"], vocab_size=280)
        ids = np.array(tokenizer.encode("a kettle hums 🚀 in\n orbit, é"))
        pieces = tokens.token_pieces(tokenizer, ids)
        self.assertEqual("".join(pieces), tokenizer.decode(ids))
        self.assertLen(pieces, len(ids))
        self.assertIn("🚀", "|".join(pieces).replace(" ", ""))
        self.assertNotIn("\ufffd", "".join(pieces))

    def test_every_share_has_a_text(self):
        tokenizer = train_bpe(["a kettle hums"], vocab_size=280)
        ids = np.array([*tokenizer.encode("a 🚀"), tokenizer.eos_id])
        pieces = tokens.token_pieces(tokenizer, ids)
        shares = [None, *(0.25 * n for n in range(1, len(ids)))]
        whole = tokens.whole_pieces([*zip(pieces, shares, strict=True)])
        self.assertEqual("".join(text for text, _ in whole), "a 🚀<|endoftext|>")
        self.assertNotIn("", [text for text, _ in whole])
        self.assertAlmostEqual(sum(s for _, s in whole if s), sum(s for s in shares if s))
        cut = tokens.whole_pieces([("a", 0.5), ("", 0.25), ("", 0.125)])
        self.assertEqual(cut, [("a", 0.5), ("\ufffd", 0.375)])
