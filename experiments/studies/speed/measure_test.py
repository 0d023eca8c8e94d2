"""The study of speed: what is missing, turns, merged results and ratios."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from experiments.studies.speed import measure, page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ("bergson",), "python": "/bin/false"}, "must have bergson, peft, torch, trans"),
        ({"tools": ("loop",), "python": "/no"}, "must have peft, torch, transformers, got /no"),
        ({"tasks": ("decode",)}, "torch and peft must be installed: pip install torch peft"),
        ({"tools": ("ours",), "data": "/no"}, "must have alpaca/alpaca_data.json.xz, got /no"),
    ],
    ids=["bergson", "python", "torch", "data"],
)
def test_what_is_missing_is_said_before_anything_starts(monkeypatch, options, message):
    find, missing = importlib.util.find_spec, {"torch", "peft"}
    if "decode" in options.get("tasks", ()):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *of: None if name in missing else find(name)
        )
    with pytest.raises(ValueError, match=message):
        measure.require_all(measure.Options(**({"tasks": ("index",)} | options)))


def test_programs_take_turns_and_each_finds_its_caches_empty_or_its_own(monkeypatch, tmp_path):
    found, stored = [], []

    def run(line: list[str], caches: pathlib.Path) -> float:
        name, count = line
        found.append((name, int(count), caches.exists() and caches.joinpath("of").read_text()))
        caches.mkdir(exist_ok=True)
        caches.joinpath("of").write_text(name)
        (tmp_path / "index").mkdir()
        return float(len(found))

    def line(start: measure.Start, options: measure.Options, name: str) -> list[str]:
        return [name, str(start.num_rows)]

    for name in ("ours", "loop"):
        tool = measure.TOOLS[name]._replace(
            line=lambda start, options, name=name: line(start, options, name)
        )
        monkeypatch.setitem(measure.TOOLS, name, tool)
    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(
        measure, "check", lambda *_: {"ours/float32": [1.0, 1.0], "loop/float32": [1.0, 1.0]}
    )
    encoded = type("Encoded", (), {"lengths_N": np.array([3, 4])})
    made = measure.Files(*[tmp_path] * 4, rows={9: measure.Rows(tmp_path, tmp_path, encoded)})
    options = measure.Options(tasks=("index",), rows=9, fewer=4, repeats=2)
    measure.time_index(options, made, tmp_path, stored.append)
    turn = [("ours", 9, False), ("ours", 9, "ours"), ("ours", 4, False)]
    turn += [("loop", 9, False), ("loop", 4, False)]
    # The caches of fewer rows are kept.
    later = [(name, count, found or (count == 4 and name)) for name, count, found in turn]
    assert found == turn + later
    last = stored[-1]
    assert (last["rows"], last["fewer"], last["mean_tokens"]) == (9, 4, 3.5)
    assert last["each"]["ours/float32"]["filled"] == [2.0, 7.0]
    assert last["each"]["loop/float32"]["filled"] == last["each"]["loop/float32"]["cold"]
    assert [len(part["each"]) for part in stored] == [1, 2, 2, 2]


def test_results_are_merged_with_those_that_were_measured_in_the_same_way():
    now = {"rows": 9, "each": {"ours/float32": 1}}
    first = measure.merge({}, now, "a")
    assert first == now | {"commands": ["a"]}
    more = measure.merge(first, {"rows": 9, "each": {"loop/float32": 2}}, "b")
    assert more["each"] == {"ours/float32": 1, "loop/float32": 2}
    assert more["commands"] == ["a", "b"]
    assert measure.merge(more, {"rows": 8, "each": {"x": 3}}, "c")["each"] == {"x": 3}


def test_cosines_are_those_of_rows():
    random = np.random.default_rng(0)
    own_NK, other_NK = random.normal(size=(2, 3, 5))
    expected = [
        np.corrcoef([*a, *-a], [*b, *-b])[0, 1] for a, b in zip(own_NK, other_NK, strict=True)
    ]
    np.testing.assert_allclose(measure._cosines(own_NK, other_NK), expected)
    long_NK = np.random.default_rng(1).normal(size=(2, 460_800)).astype(np.float32)
    np.testing.assert_allclose(measure._cosines(long_NK, long_NK), 1.0, rtol=1e-12)


def test_a_command_is_stored_without_folders():
    options = measure.Options(checkpoint="/mine", python="/my/python", tasks=("index",), rows=50)
    assert options.shown().endswith("measure.py --tasks=index --rows=50")


_INDEX = {
    "rows": 10,
    "fewer": 5,
    "each": {
        "ours/float32": {
            "cosine": [1.0],
            "cold": [9, 8, 10],
            "filled": [7, 6],
            "fewer": [2, 2],
        },
        "ours/bfloat16": {"cosine": [0.9], "cold": [12], "filled": [3.0], "fewer": [1.0]},
        "bergson/float32": {"cosine": [1.0], "cold": [9], "filled": [9], "fewer": [3]},
    },
}


def test_seconds_are_medians_of_turns_and_the_fastest_dtype_counts():
    found = {"index": _INDEX, "decode": {"each": {"ours/float32": {"seconds": [3, 1, 2]}}}}
    assert page.seconds_of(found, "cold", "ours", "float32") == 9
    assert page.seconds_of(found, "cold", "ours") == 9
    assert page.seconds_of(found, "further", "ours") == pytest.approx(2 / 5)
    assert page.seconds_of(found, "decode", "ours") == 2
    assert page.seconds_of(found, "decode", "loop") is None
    further, loop, cold, filled, decode = (page.ratio_of(found, bar) for bar in page.BARS)
    assert further == pytest.approx((2 / 5) / (6 / 5))
    assert (loop, cold, filled, decode) == (None, 1.0, 3 / 9, None)


def test_tables_show_the_range_over_machines_and_whether_a_goal_is_reached(monkeypatch, tmp_path):
    slow = json.loads(json.dumps(_INDEX))
    slow["each"]["ours/bfloat16"]["filled"] = [8.0]
    machines = {"a": _INDEX, "b": slow}
    stored = {name: {"smollm2-135m": {"index": index}} for name, index in machines.items()}
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    page.RESULTS.write_text(json.dumps(stored))
    assert "| raslik_jax | bfloat16 | 12.0 | 3.0 to 8.0 |" in page.time_table("smollm2-135m")
    goals = page.bars_table().splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in goals] == ["no", "-", "yes", "no", "-"]
    assert page.span([], 1) == "-"
