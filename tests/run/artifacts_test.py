"""Files of a work directory: each has one owner, and comes back as it was written."""

import ast
import pathlib
import re

import numpy as np
import pytest
from finished import write_manifest

from raslik_jax.data.examples import Example
from raslik_jax.retrieve.behaviors import Behaviors
from raslik_jax.retrieve.chance import Chance
from raslik_jax.retrieve.selectors import Cut
from raslik_jax.run import artifacts

_PACKAGE = pathlib.Path(artifacts.__file__).resolve().parents[1]
_FILE = re.compile(r"[\w.-]+\.(?:jsonl?|np[yz]|html|md|txt)$")
# Of checkpoints too, whose owner is models.storage.
_SHARED = {"config.json"}


def _file_names(path: pathlib.Path) -> set[str]:
    """Returns the names of files in the literals of a module, docstrings left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " not in node.value and (found := _FILE.search(node.value)):
                names.add(found[0])
    return names


def test_the_name_of_a_file_stands_in_one_module():
    owner = pathlib.Path(artifacts.__file__)
    owned = _file_names(owner) - _SHARED
    assert {"influence.npy", "metrics.json", "finetuned.jsonl"} <= owned
    others = {
        str(path.relative_to(_PACKAGE)): sorted(found)
        for path in _PACKAGE.rglob("*.py")
        if path != owner and (found := _file_names(path) & owned)
    }
    assert others == {}


_ROWS = (Example("a", "Why?", "", "so", extra={"mine": 3}, place=7), Example("b", "How?", "", ""))
_TOLD = artifacts.TracedAnswer("q", "a moon", 0.5, (0.25, 0.75), "so", 1.0, 0.5)


@pytest.mark.parametrize(
    ("artifact", "content", "compared"),
    [
        (artifacts.TRAIN, _ROWS, ()),
        (artifacts.measured_rows("held-out", "target"), (), ()),
        (artifacts.traced("finetuned"), [_TOLD], ()),
        (artifacts.traced(3, "raslik-ga"), [_TOLD._replace(expected=None, spread=None)], ()),
        (artifacts.CUT, Cut(3, 0.0, 0.2, 0.1, 4), ()),
        (artifacts.SIZES_FINDING, "nothing", ()),
        (artifacts.PAGE, "<p>", ()),
    ],
)
def test_what_is_written_is_read_again(artifact, content, compared, tmp_path):
    assert artifact.find(tmp_path) is None and artifact.current(tmp_path) is None
    (tmp_path / artifact.unit).mkdir(parents=True)
    artifact.write(tmp_path / artifact.unit, content)
    assert artifact.read(tmp_path, *compared) == artifact.current(tmp_path) == content


def test_a_result_of_other_settings_is_not_current(tmp_path):
    unit = artifacts.RECIPE.unit
    write_manifest(tmp_path, unit, **{"unlearn.retrain.epochs": 2.0, "sketch.size": 8})
    artifacts.RECIPE.write(tmp_path / unit, {"steps": 8, "of": 8})
    for epochs, is_there in ((2.0, True), (3.0, False)):
        settings = {"unlearn": {"retrain": {"epochs": epochs}}, "retrieve": {"center": True}}
        found = artifacts.RECIPE.current(tmp_path, settings=settings)
        assert (found is not None) == is_there


def test_arrays_are_compared_with_the_rows_of_the_run(tmp_path):
    folder = tmp_path / "retrieve" / "chance"
    folder.mkdir(parents=True)
    artifacts.CHANCE.write(folder, Chance(*np.arange(8.0).reshape(4, 2)))
    np.testing.assert_array_equal(artifacts.CHANCE.read(tmp_path, 2).q_N, [6, 7])
    with pytest.raises(ValueError, match="must be 3 x 4 numbers"):
        artifacts.CHANCE.read(tmp_path, 3)
    assert np.isnan(artifacts.read_sigma(tmp_path, 2)).all()


def test_behaviors_are_told_by_the_ids_of_queries(tmp_path):
    artifacts.BEHAVIORS.write(tmp_path, Behaviors(((0, 2), (1,)), 0.1), ids=["a", "b", "c"])
    assert artifacts.BEHAVIORS.read_in(tmp_path, ["c", "b"]) == Behaviors(((0,), (1,)), 0.1)


def test_the_finding_of_a_run_is_that_of_the_unit_that_ended_it(tmp_path):
    assert artifacts.read_finding(tmp_path) == ""
    folder = tmp_path / artifacts.SIZES_FINDING.unit
    folder.mkdir(parents=True)
    artifacts.SIZES_FINDING.write(folder, "nothing")
    assert artifacts.read_finding(tmp_path) == "nothing"
    assert artifacts.finding("retrieve/traced").find(tmp_path) is None


def test_an_answer_that_is_missing_names_its_file(tmp_path):
    artifacts.answers("backbone").write(tmp_path, {"q": "so"})
    said = artifacts.answers("backbone").read_in(tmp_path)
    assert said == {"q": "so"}
    with pytest.raises(ValueError, match="backbone.jsonl' has no answer to 'p'"):
        said["p"]
