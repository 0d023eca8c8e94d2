"""What a page opens with: every sentence from the numbers of a run."""

import base64
import json
import pathlib
import re

import numpy as np
import pytest
import sample_metrics
import sample_run
from snapshots import said

from raslik_jax.data.examples import Example
from raslik_jax.report import facts, incident, page, rows
from raslik_jax.retrieve import chance
from raslik_jax.run import artifacts
from raslik_jax.run.artifacts import TracedAnswer


def test_of_several_unlearned_models_the_shown_one_is_named():
    metrics = sample_metrics.sample_metrics(num_epochs=2)
    queries = [Example("q", "what is it?", "", "", is_target=True)]
    answers = {("", "finetuned"): {"q": "a moon"}}
    found = incident.example_incident(metrics, queries, answers, {})
    number = len({(one["strategy"], one["algorithm"]) for one in metrics["methods"]})
    assert number > 1
    assert found.which == f"This is the model of RASLIK with GA_GDR, one of {number} new models."
    metrics["methods"] = metrics["methods"][:1]
    assert incident.example_incident(metrics, queries, answers, {}).which == ""


def test_a_run_that_measured_nothing_tells_what_became_of_the_answer(tmp_path):
    said = {"id": "q", "traced": "a moon", "nats": [0.5], "nll": 0.5, "output": "a moon"}
    after = said | {"nats": [0.7], "nll": 0.7}
    base = said | {"nats": [2.5], "nll": 2.5}
    for name, row in (
        ("retrieve/traced/finetuned", said),
        ("retrieve/traced/backbone", base),
        ("generate/traced-raslik-ga/epoch-1", after),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    gone = {"behavior": {"way": 0.1, "gone": 0, "of": 1}}
    probe = {"step": 5, "levels": {}, "gone": gone, "answers": {}}
    found = {"kept_before": [], "probes": [probe], "kept": 5, "end": ""}
    (tmp_path / "unlearn" / "raslik-ga").mkdir(parents=True)
    (tmp_path / "unlearn" / "raslik-ga" / "probes.json").write_text(json.dumps(found))
    ended, judged, went = incident.read_outcome(tmp_path, "raslik", "ga", None)
    assert judged.startswith("Judgment: unknown")
    assert ended.startswith("Not forgotten: unlearning ended because its epochs ended")
    assert (
        "0.50 nats a token before and 0.70 after, 2.50 under the base. Tokens that carry the "
        "behavior moved 10%" in went
    )


def test_the_cost_is_that_of_the_method_that_is_shown():
    metrics = sample_metrics.sample_metrics(num_epochs=2)
    (entry,) = [
        e
        for e in metrics["methods"]
        if (e["strategy"], e["algorithm"], e["epoch"]) == ("raslik", "ga_gdr", 2)
    ]
    entry["retain"]["mean"] = 0.9766
    entry["perplexity"] = {"held-out": {"mean": 3.214, "low": 3.0, "high": 4.0}}
    metrics["finetuned"]["perplexity"] = {"held-out": {"mean": 3.1, "low": 3.0, "high": 4.0}}
    found = incident.cost_sentence(metrics, "raslik", "ga_gdr")
    wording = "answers to other prompts keep 97.6 % of their wording"
    rise = "The perplexity of held-out answers goes from 3.1 to 3.21"
    assert found.startswith(f"The cost: {wording}. {rise}.")


def test_colors_are_thirds_of_the_largest_share():
    pieces = [["a", 0.3], ["b", -0.21], ["c", 0.09], ["d", 0.01], ["e", None]]
    assert [tone for *_, tone in incident.shaded(pieces)] == [3, -2, 1, 0, 0]
    assert [tone for *_, tone in incident.shaded([["a", None], ["b", 0.0]])] == [0, 0]


@pytest.fixture(name="root")
def _root(tmp_path):
    sample_run.write_run(tmp_path)
    return tmp_path


def _write(path: pathlib.Path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_without_a_traced_answer_opens_with_one_example(root):
    run = facts.read_facts(root)
    found = run.incident
    assert found and not found.is_traced
    assert found.traced[0].asked == incident.asked_of(run.queries[0])
    assert [*found.traced[0].said] == ["before", "base", "now"]
    assert found.cards[0].row.output == run.sets["raslik"]["forget"].rows[0][0].output
    text = page.render(facts.group_runs([run]))
    assert "One example: a held-out query" in text


def _trace(root: pathlib.Path) -> None:
    told = {"id": "q", "traced": sample_run.HOSTILE}
    _write(root / "corpus/retrieval.jsonl", {"id": "q", "instruction": "Why?", "output": ""})
    for name, nll in (("finetuned", 0.5), ("backbone", 2.5)):
        path = root / "retrieve" / "traced" / f"{name}.jsonl"
        _write(path, told | {"nll": nll, "nats": [nll] * 3, "output": f"{name} says"})
    for epoch in (2, 10):
        path = root / "generate" / "traced-raslik-ga_gdr" / f"epoch-{epoch}.jsonl"
        _write(path, told | {"nll": 2.4, "nats": [2.4] * 3, "output": f"after {epoch}"})
    score_N = np.load(root / "retrieve/influence/influence.npy")
    best = int(score_N.argmax())
    row = {"id": f"row{best}", "score": float(score_N[best]), "alike": ["row1", "row2"]}
    row |= {"row": [["<b>", None], [" moon", 0.3], [" x", -0.1]], "answer": [["mo", 0.2]]}
    row |= {"query": "q", "cosine": 0.3}
    (root / "retrieve/tokens").mkdir()
    (root / "retrieve/tokens/tokens.json").write_text(json.dumps([row]))
    parts = np.tile([[3.0], [240.0], [0.016597], [0.04]], len(score_N)).T
    (root / "retrieve/chance").mkdir()
    artifacts.CHANCE.write(root / "retrieve/chance", chance.Chance(*parts.T))
    sigma_N = np.where(np.arange(len(score_N)) == best, 0.0123, np.nan)
    np.save(root / "retrieve/chance/sigma.npy", sigma_N)
    (root / "retrieve/sizes").mkdir(exist_ok=True)
    cut = {"num_forget": 12, "middle": 0.0, "edge": 0.2, "gap": 0.1, "num_out": 12}
    (root / "retrieve/sizes/cut.json").write_text(json.dumps(cut))
    (root / "cleaned.jsonl").write_text("")
    _make(root, "made")
    exports = {
        "": "made",
        "Cleaned training file": "cleaned.jsonl",
        "New adapter": str(root / "no_such"),
    }
    artifacts.EXPORTS.write(root, exports)


def _make(root, key):
    folder = root / "unlearn/raslik-ga_gdr"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"key": key, "outputs": {}}))


def test_the_page_of_a_trace_opens_with_what_was_asked_said_and_is_said_now(root):
    _trace(root)
    run = facts.read_facts(root)
    found = run.incident
    assert found and found.is_traced
    (traced,) = found.traced
    assert (traced.asked, traced.answer) == ("Why?", sample_run.HOSTILE)
    assert [*traced.said.values()] == ["finetuned says", "backbone says", "after 10"]
    (card,) = found.cards
    assert card.alike == 2 and card.set_name == "forget"
    assert card.sigma == 0.0123
    assert card.chance == "3 of 240 unrelated prompts score this high; p 0.017, q 0.04"
    forget, cleaned = found.downloads
    assert (forget.title, cleaned.title) == ("Rows to forget", "Cleaned training file")
    # What is small is in the page itself.
    held = base64.b64decode(forget.link.removeprefix("data:application/octet-stream;base64,"))
    assert held == (root / forget.place).read_bytes()
    text = page.render(facts.group_runs([run]))
    story, *rest = text.split('<details class="part" id="')
    parts = {one.partition('"')[0]: one for one in rest}
    assert list(parts) == ["evidence", "cost", "method", "files"]
    assert "<h1>Why the model said this, and what it says now</h1>" in story
    told = re.sub(r"<[^>]*>", "", story)
    for words in ("Why?", "after 10", "12 of 60 training rows are behind it", "cleaned.jsonl"):
        assert words in told, words
    for words in (
        "Compared with 240 unrelated prompts",
        "12 of 60 rows stand out.",
        "and 2 nearly the same",
        "± 0.0123",
        'class="up3" title="+0.3000"> moon</span><span class="down1" title="-0.1000"> x</span>',
        "&lt;b&gt;",
        "backbone says",
    ):
        assert words in parts["evidence"] or words in re.sub("<[^>]*>", "", parts["evidence"]), (
            words
        )
    # A row of a high score that was not found is not behind the answer.
    other = run._replace(incident=found._replace(cards=(card._replace(set_name=""), card)))
    story = page.render(facts.group_runs([other])).split('<details class="part" id="')[0]
    assert story.split('<ol class="few">')[1].partition("</ol>")[0].count("<li>") == 1
    # Rows of a user's own are not called found, and no other row is among them.
    given = run._replace(
        incident=found._replace(
            entry=found.entry | {"strategy": "given"}, cards=(card._replace(set_name=""), card)
        )
    )
    story = page.render(facts.group_runs([given])).split('<details class="part" id="')[0]
    assert "12 of 60 training rows were given to forget" in re.sub(r"<[^>]*>", "", story)
    assert story.split('<ol class="few">')[1].partition("</ol>")[0].count("<li>") == 1
    parts["cost"] = re.sub("<[^>]*>", "", parts["cost"])
    assert "moved 95% toward the base" in parts["cost"]
    assert "if that is nearer: the answer is gone." in parts["cost"]
    assert "cleaned.jsonl" in parts["files"]
    assert sample_run.HOSTILE not in text


@pytest.mark.parametrize("other", [-np.inf, -0.1, 0.0])
def test_rows_without_a_positive_score_are_not_told_as_behind_an_answer(other, root):
    _trace(root)
    (root / "retrieve/tokens/tokens.json").unlink()
    path = root / "retrieve/influence/influence.npy"
    score_N = np.load(path)
    score_N[np.argsort(-score_N)[3:]] = other
    np.save(path, score_N)
    found = facts.read_facts(root).incident
    assert found and len(found.cards) == 3
    listed = rows.best_text(root, frozenset(), 10)
    assert listed.count("      answer ") == 3 and "inf" not in listed


def test_a_large_file_and_a_folder_are_told_by_their_places(root):
    _trace(root)
    (root / "cleaned.jsonl").write_text("x" * 100_001)
    (root / "clean").mkdir()
    exports = {"Cleaned training file": "cleaned.jsonl", "New adapter": "clean"}
    artifacts.EXPORTS.write(root, exports | {"": "made"})
    found = facts.read_facts(root).incident
    assert found and [bool(one.link) for one in found.downloads] == [True, False, False]
    # The shown model was made again since, by other settings or without other rows.
    _make(root, "again")
    found = facts.read_facts(root).incident
    assert found and [one.title for one in found.downloads] == ["Rows to forget"]


def _row(nats, drawn=(None, None)):
    return TracedAnswer("q", "a moon", sum(nats) / len(nats), nats, "it says", *drawn)


def _told(*answers, drawn=(None, None)):
    """The results for answers by their nats before, under the base and now; None: no model."""
    levels = zip(("before", "base", "now"), zip(*answers, strict=True), strict=True)
    return {
        model: [_row((nll, nll), drawn if model == "before" else (None, None)) for nll in rows]
        for model, rows in levels
        if None not in rows
    }


@pytest.mark.parametrize(
    "levels",
    [
        (0.5, 2.5, 2.4),
        # A base that is far: of the 3.47 nats to 1/32 it went 1.5, more than the 1.39 to a quarter.
        (0.5, 8.5, 2.0),
        (0.5, 8.5, 1.8),
        # Fine-tuning made it hardly likelier: there is nothing to be gone.
        (0.49, 0.5, 0.51),
        *((0.5, 2.5, 1.1), (0.5, 2.5, 0.4), (0.5, None, 2.0), (2.5, 0.5, 2.4)),
    ],
)
def test_what_is_left_is_told_by_the_rule_of_rows(levels):
    found = incident.gone_sentence(_told(levels))
    assert "forgotten" not in found  # that is a verdict, and no answer alone gives it
    said(found)


def test_nothing_is_told_of_what_the_model_does_not_say_now():
    assert incident.gone_sentence(_told((2.5, 0.5, None))) == ""


def test_one_broken_token_does_not_make_an_answer_gone():
    nats = {"before": (0.1, 0.1, 0.1), "base": (3.0, 3.0, 3.0), "now": (0.1, 0.1, 12.0)}
    found = incident.gone_sentence({model: [_row(of)] for model, of in nats.items()})
    # The mean is beyond the base's; two tokens of three are as they were.
    assert (
        "4.07 after, 3.00 under the base. Tokens that carry the behavior moved 33% toward" in found
    )
    assert "The answer is not gone" in found


def test_several_answers_are_counted():
    found = incident.gone_sentence(_told((0.5, 2.5, 2.5), (1.5, 3.5, 3.3), (0.4, 3.4, 0.4)))
    assert "The 3 answers have 0.80 nats a token before and" in found
    assert "Tokens that carry the behavior moved 63% toward the base" in found
    assert found.endswith(": 2 of 3 are gone.")


@pytest.mark.parametrize(
    ("levels", "is_doubted"),
    [
        # Four spreads of .5 above 1: what the model draws itself hardly ever costs so much.
        ((3.0, 5.0), False),
        ((3.1, 5.0), True),
        ((3.1, None), True),
        ((1.0, 1.09), True),  # the base finds it as likely: log 1.1 = .0953
        ((1.0, 1.1), False),
        ((1.0, None), False),
    ],
)
def test_an_answer_that_tells_little_is_doubted(levels, is_doubted):
    found = incident.doubt_sentence(_told((*levels, 5.0), drawn=(1.0, 0.5)))
    assert bool(found) == is_doubted
    said(found)


# None: nothing was to end it.
@pytest.mark.parametrize(
    "end", ["others lose too much", "no progress", "diverged", "", "forgotten", None]
)
def test_unlearning_that_ended_too_early_is_told_as_not_forgotten(end):
    probes = [
        {"step": 5 * n, "gone": {"forget": {"way": way, "gone": 10 * way, "of": 10}}}
        for n, way in enumerate((0, 0.2, 0.6))
    ]
    one = {"probes": probes}
    found = incident.ending_sentence(one if end is None else one | {"kept": 5, "end": end})
    assert found.startswith("Not forgotten: ") == (end not in ("forgotten", None))
    said(found)
    assert incident.ending_sentence({}) == ""


def test_an_end_at_which_enough_is_gone_once_is_not_told_as_too_early():
    gone = {"forget": {"way": 0.9, "gone": 8, "of": 10}, "behavior": {"way": 1, "gone": 1, "of": 1}}
    one = {"kept": 5, "end": "", "probes": [{"step": 5, "gone": gone}]}
    assert incident.ending_sentence(one) == ""
