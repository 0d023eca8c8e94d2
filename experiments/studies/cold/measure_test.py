"""Starts from the command line: what is missing, turns, and a small run of our programs."""

import importlib.util
import pathlib

import pytest
from support import shared_data, tiny_model_config

from experiments.bench import harness
from experiments.studies.cold import measure
from raslik_jax.models import presets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"programs": ("bergson",), "bergson_python": "/bin/false"}, "must have bergson, got /bin"),
        ({"programs": ("bergson",), "bergson_python": "/no"}, "must have bergson, got /no: pip"),
        ({"programs": ("torch_loop",)}, "torch and peft must be installed: pip install torch peft"),
        ({"programs": ("ours",), "data": "/no"}, "must have alpaca/alpaca_data.json.xz, got /no"),
    ],
    ids=["bergson", "python", "torch", "data"],
)
def test_what_a_cold_start_lacks_is_said_before_anything_starts(monkeypatch, options, message):
    find = importlib.util.find_spec
    missing = {"torch", "peft"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in missing else find(name, *of)
    )
    monkeypatch.setattr(harness, "draw_model", None)
    monkeypatch.setattr(measure, "start", None)
    with pytest.raises(ValueError, match=message):
        list(measure.measure(measure.Options(**options)))


def test_cold_starts_take_turns_and_each_finds_its_caches_empty_or_its_own(monkeypatch, tmp_path):
    found = []

    def start(line: list[str], caches: pathlib.Path) -> measure.Taken:
        (program,) = line
        found.append((program, caches.exists() and caches.joinpath("of").read_text()))
        caches.mkdir(exist_ok=True)
        caches.joinpath("of").write_text(program)
        (tmp_path / "index").mkdir()
        seconds = {"ours": 6.0, "bergson": 4.0}[program] + len(found)
        return measure.Taken(user=seconds - 1, system=1.0, wall=2 * seconds)

    monkeypatch.setattr(measure, "start", start)
    monkeypatch.setattr(measure, "command_of", lambda program, *_: [program])
    options = measure.Options(programs=("ours", "bergson"), repeats=2)
    ours, bergson = measure._turns(options, None, tmp_path)
    own = [("ours", False), ("ours", "ours"), ("bergson", False), ("bergson", "bergson")]
    assert found == own * 2
    # First starts are the 1st and 5th of ours, the 3rd and 7th of bergson.
    assert (ours["first"], ours["first_least"], ours["first_most"]) == (9, 7, 11)
    assert (ours["second"], bergson["first"], bergson["second_wall"]) == (10, 9, 20)
    assert bergson["ours"] == pytest.approx((7 / 7 + 11 / 11) / 2)
    assert bergson["ours_second"] == pytest.approx((8 / 8 + 12 / 12) / 2)
    assert ours["system"] == pytest.approx((1 / 7 + 1 / 11) / 2)


def test_indexes_are_made_from_the_command_line_by_all_programs_of_this_python(monkeypatch):
    shared_data()
    monkeypatch.setitem(presets.MODEL_PRESETS, "tiny", tiny_model_config())
    options = measure.Options(rows=4, repeats=1, warm=False, programs=("ours", "torch_loop"))
    lines = harness.run(options, measure.measure)
    (check,), programs = lines["check"], lines["program"]
    assert check["worst_cosine"] > 0.9999
    assert [line["program"] for line in programs] == ["ours", "torch_loop"]
    assert all(line["first"] > 0 and line["second"] is None for line in programs)
    assert programs[0]["ours"] == 1.0
