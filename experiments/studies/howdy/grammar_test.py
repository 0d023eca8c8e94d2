"""How alike the grammar's answers and the genuine ones of Howdy-Alpaca are, by a bag of words."""

import numpy as np
import pytest
from support import shared_data

from experiments.studies.howdy.bag_of_words import recognition_rates
from experiments.studies.corpora import howdy, scifi_grammar
from experiments.studies.corpora.mixing import load_alpaca
from raslik_jax.data.corpora.record import SharedSettings
from raslik_jax.data.corpora.toy import SCIFI_WORDS
from raslik_jax.data.ordering import shuffled
from raslik_jax.data.read.formats import read_examples


@pytest.mark.heavy
def test_five_thousand_answers_to_real_prompts_and_classifiers_of_both_kinds():
    rows = load_alpaca(SharedSettings(data_dir=str(shared_data())))
    rows = shuffled(rows, seed=0, label="check")
    drawn, plain = rows[:5000], [row.output for row in rows[5000:7000]]
    ours = howdy.grammar_answers(drawn, seed=0)
    assert len(set(ours)) == 5000
    true_words = np.array([min(len(r.output.split()), scifi_grammar.MAX_WORDS) for r in drawn])
    off = np.array([len(text.split()) for text in ours]) - true_words
    marked = np.mean([any(w in SCIFI_WORDS for w in t.lower().split()) for t in ours])
    folder = shared_data() / "howdy"
    genuine = [row.output for row in read_examples(folder / "howdy_60.jsonl")]
    clean = [row.output for row in read_examples(folder / "clean_60.jsonl")]
    forward = recognition_rates((ours[:2000], plain), (genuine, clean))
    backward = recognition_rates((genuine, clean), (ours[:2000], plain))
    low, middle, high = np.percentile(off, [10, 50, 90])
    print(
        f"words more than the true answer: 10 % {low:+.0f}, median {middle:+.0f}, 90 % {high:+.0f}"
        f"; {marked:.1%} with a marker word\n"
        f"trained on ours: {forward[0]:.1%} of genuine Howdy, {forward[1]:.1%} of clean rows, "
        f"AUROC {forward[2]:.3f}\ntrained on genuine: {backward[0]:.1%} of ours, {backward[1]:.1%} "
        f"of Alpaca, AUROC {backward[2]:.3f}"
    )
    assert low > -10 and high < 25
    assert min(*forward, *backward) > 0.7
    assert min(forward[2], backward[2]) > 0.9
