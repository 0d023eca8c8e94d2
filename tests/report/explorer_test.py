"""All rows of a run on its page: what of them stands there, as data that is no markup."""

import base64
import gzip
import hashlib
import json
import pathlib
import re

import numpy as np
import pytest
import sample_run

from raslik_jax.report import explorer, facts, page

_FOLDER = pathlib.Path(explorer.__file__).parents[1] / "third_party" / "tabulator"


@pytest.fixture(name="root")
def _root(tmp_path):
    sample_run.write_run(tmp_path)
    sample_run.write_found(tmp_path)
    return tmp_path


def _unpacked(packed):
    return json.loads(gzip.decompress(base64.b64decode(packed["text"])))


def test_every_row_is_there_with_what_was_found_of_it(root):
    found = facts.read_facts(root).explorer
    packed = explorer.pack(found)
    assert (packed["num_shown"], packed["num_rows"], packed["left_out"], packed["num_cut"]) == (
        60,
        60,
        0,
        0,
    )
    assert packed["has_labels"] and packed["sets"] == ["forget", "retain"]
    assert packed["queries"] == ["Query 0?", "Query 1?"]
    told = _unpacked(packed)
    columns = told["columns"]
    assert (told["left_out"], told["has_lines"]) == (0, True)
    score_N = np.load(root / "retrieve/influence/influence.npy")
    order = np.argsort(-score_N, kind="stable")
    assert columns["id"] == [f"row{n}" for n in order]
    np.testing.assert_allclose(columns["score"], score_N[order], rtol=1e-5)
    assert columns["line"] == (order + 1001).tolist()
    place = columns["id"].index("row0")
    assert columns["said"][columns["id"].index("row1")] == sample_run.FORMULA
    assert sample_run.HOSTILE in columns["asked"][place]
    one = {name: columns[name][place] for name in ("set", "label", "sigma", "higher", "p", "each")}
    expected = {"label": True, "sigma": 0.0123, "higher": 0.0, "p": 0.01, "each": [0, 0]}
    assert one == expected | {"set": "forget"}
    assert columns["each"][columns["id"].index("row7")] == [-700, 700]
    assert told["tokens"] == {
        "0": {
            "row": [["<b>", None, 0], [" moon", 0.3, 3], [" x", -0.1, -1]],
            "answer": [["mo", 0.2, 3]],
            "alike": 2,
        }
    }
    assert sum(told["histogram"]["counts"]) == 60


def test_where_not_all_have_room_both_ends_stay(root):
    found = facts.read_facts(root).explorer
    # Texts that cannot be compressed.
    noise = np.random.default_rng(0).integers(33, 127, (60, 3000), np.uint8)
    said = [row.tobytes().decode() for row in noise]
    packed = explorer.pack(found._replace(columns={**found.columns, "said": said}), 60_000)
    assert len(packed["text"]) <= 60_000 and packed["left_out"] == 60 - packed["num_shown"] > 0
    told = _unpacked(packed)
    shown, order = told["columns"]["id"], [f"row{n}" for n in np.argsort(-found.score_N)]
    lowest = packed["num_shown"] // 3
    assert shown == order[: packed["num_shown"] - lowest] + order[60 - lowest :]
    assert sum(told["histogram"]["counts"]) == 60


def test_long_texts_are_cut_and_counted_and_marks_become_visible(root):
    found = facts.read_facts(root).explorer
    said = ["x" * 30_000, "turn \u202e round \x1b[2J", *found.columns["said"][2:]]
    packed = explorer.pack(found._replace(columns={**found.columns, "said": said}))
    assert packed["num_cut"] == 1
    texts = _unpacked(packed)["columns"]["said"]
    assert max(texts, key=len) == "x" * 20_000 + " … (10,000 characters more)"
    assert "turn \ufffd round \ufffd[2J" in texts


def test_a_row_without_a_gradient_has_no_score_and_comes_last(root):
    found = facts.read_facts(root).explorer
    score_N = np.where(np.arange(60) == 3, -np.inf, found.score_N)
    columns = _unpacked(explorer.pack(found._replace(score_N=score_N)))["columns"]
    assert columns["id"][-1] == "row3"
    assert columns["score"][-1] is None and columns["each"][-1] is None
    assert columns["each"][0] is not None


@pytest.mark.parametrize(
    ("size", "highest", "lowest", "unscored"),
    [(6, 4, 2, 0), (8, 6, 2, 0), (9, 9, 0, 0), (11, 9, 0, 2), (12, 9, 0, 3), (20, 9, 0, 3)],
)
def test_rows_without_a_score_take_no_room_of_others(size, highest, lowest, unscored):
    score_N = np.r_[np.full(3, -np.inf), np.linspace(1, -1, 9)]
    expected = [*range(3, 3 + highest), *range(12 - lowest, 12), *range(unscored)]
    assert explorer.tails(score_N, size).tolist() == expected


def test_left_out_rows_without_a_score_are_counted_apart(root):
    found = facts.read_facts(root).explorer
    score_N = np.where(np.arange(60) % 3 == 0, -np.inf, found.score_N)
    noise = np.random.default_rng(0).integers(33, 127, (60, 3000), np.uint8)
    said = [row.tobytes().decode() for row in noise]
    cut = found._replace(score_N=score_N, columns={**found.columns, "said": said})
    packed = explorer.pack(cut, 60_000)
    assert packed["num_unscored"] == 20 and packed["left_out"] == 40 - packed["num_shown"] > 0
    told = _unpacked(packed)
    assert told["left_out"] == packed["left_out"] and None not in told["columns"]["score"]


def test_queries_are_listed_by_behavior(root):
    assert explorer.pack(facts.read_facts(root).explorer)["groups"] == ((0, 1),)
    groups = {"groups": [["q1"], ["q0"]], "between": -0.1}
    (root / "retrieve/influence/behaviors.json").write_text(json.dumps(groups))
    run = facts.read_facts(root)
    assert explorer.pack(run.explorer)["groups"] == ((1,), (0,))
    listed = [f'<option value="{n}">{n + 1}. Query {n}?</option>' for n in range(2)]
    text = page.render(facts.group_runs([run]))
    assert '<optgroup label="Behavior 1">' in text and '<optgroup label="Behavior 2">' in text
    assert text.index(listed[1]) < text.index('label="Behavior 2"') < text.index(listed[0])


def test_a_query_that_was_not_traced_shifts_no_other(root):
    asked = [{"id": f"q{n}", "instruction": f"Query {n}?", "output": ""} for n in range(3)]
    lines = "".join(f"{json.dumps(row)}\n" for row in asked)
    (root / "corpus/retrieval.jsonl").write_text(lines)
    (root / "references/retrieval").mkdir()
    said = [{"id": f"q{n}", "output": text} for n, text in enumerate((" ", "moons", "stars"))]
    lines = "".join(f"{json.dumps(row)}\n" for row in said)
    (root / "references/retrieval/finetuned.jsonl").write_text(lines)
    groups = {"groups": [["q1"], ["q2"]], "between": -0.1}
    (root / "retrieve/influence/behaviors.json").write_text(json.dumps(groups))
    found = facts.read_facts(root).explorer
    assert found is not None  # its single scores are of two queries
    assert found.queries == (("Query 1?", "moons"), ("Query 2?", "stars"))
    packed = explorer.pack(found)
    assert (packed["queries"], packed["groups"]) == (["Query 1?", "Query 2?"], ((0,), (1,)))
    (root / "references/retrieval/finetuned.jsonl").unlink()
    with pytest.raises(ValueError, match="must have a column for each of 0 queries, got 2"):
        facts.read_facts(root)


def _render(run):
    """Returns the page of rows alone: figures take their time."""
    bare = run._replace(queries=(), answers={}, sets={}, losses={}, incident=None)
    return page.render(facts.group_runs([bare]))


def test_rows_are_no_markup_on_the_page(root):
    text = _render(facts.read_facts(root))
    (block,) = re.findall(r'<script type="application/gzip" id="rows-0">([^<]*)</script>', text)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", block)
    section = text[text.index('id="explorer"') : text.index('id="summary"')]
    assert "All 60 training examples with their scores." in section
    assert sample_run.HOSTILE not in text and sample_run.FORMULA not in text


def test_a_run_without_scores_has_no_explorer_and_no_grid(root):
    (root / "retrieve/influence/influence.npy").unlink()
    text = _render(facts.read_facts(root))
    assert "data-explorer" not in text and "Tabulator" not in text


def test_the_grid_is_as_its_project_published_it():
    notes = (pathlib.Path(__file__).parents[2] / "third_party/README.md").read_text()
    for path in sorted(_FOLDER.iterdir()):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in notes, path.name
    assert "Permission is hereby granted" in explorer.script()
    assert "sourceMappingURL" not in explorer.script() + explorer.style()
