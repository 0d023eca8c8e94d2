"""What --backbone.operands is settled to, and that a run keeps what it was begun with."""

import json
import pathlib

import pytest
import tiny
from snapshots import refused, said

from raslik_jax.base.settings import replaced
from raslik_jax.config import config_from_json, to_json
from raslik_jax.models import products
from raslik_jax.run import checking, cost
from raslik_jax.run.recipes import _SETTINGS


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """Products of wide models are measured to be 1.9 times as fast in bfloat16."""
    found = {("float32", "float32"): 1.0, ("float32", "bfloat16"): 1.9}
    asked = []

    def measure_product(*, inputs, outputs, dtype):
        asked.append((inputs, outputs))
        return found[dtype]

    monkeypatch.setattr(products, "measure", measure_product)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    found["asked"] = asked
    return found


def _wide(*flags):
    return tiny.tiny_config("--backbone.hidden_size=256", *flags)


def _settled(config, workdir=pathlib.Path("no such folder")):
    return cost.settled(config, workdir).backbone.operands


def test_what_is_faster_here_is_taken_and_measured_once(rates, capsys):
    assert _settled(_wide()) == "bfloat16"
    said(capsys.readouterr().err)
    assert _settled(_wide()) == "bfloat16"
    assert rates["asked"] == [(256, 1024)] * 2  # float32 and bfloat16, kept for the second time
    rates["float32", "bfloat16"] = 1.1
    assert _settled(_wide("--backbone.hidden_size=512")) == "float32"


def test_a_damaged_file_of_rates_is_measured_again(rates, tmp_path):
    (tmp_path / "operands.json").write_text("[")
    assert cost.measured_gain(576, 1536) == 1.9
    assert [*json.loads((tmp_path / "operands.json").read_text()).values()] == [1.9]


def test_a_folder_that_cannot_be_written_ends_no_run(rates, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file"))
    assert cost.measured_gain(576, 1536) == 1.9


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--backbone.hidden_size=16",), "float32"),
        (("--backbone.operands=float32",), "float32"),
        (("--backbone.dtype=bfloat16",), "bfloat16"),
    ],
)
def test_nothing_is_measured_where_it_is_decided(rates, flags, expected):
    assert _settled(_wide(*flags)) == expected
    assert not rates["asked"]


def test_a_run_keeps_what_it_was_begun_with(rates, tmp_path):
    begun = _wide("--backbone.operands=float32")
    (tmp_path / "config.json").write_text(json.dumps(to_json(begun)))
    assert _settled(_wide(), tmp_path) == "float32"
    assert _settled(begun, tmp_path) == "float32"
    assert _settled(_wide("--backbone.operands=bfloat16"), tmp_path) == "bfloat16"
    # Operands go with the dtype of the weights: of another one they are found anew.
    assert _settled(_wide("--backbone.dtype=bfloat16"), tmp_path) == "bfloat16"
    begun = _wide("--backbone.dtype=bfloat16", "--backbone.operands=bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(to_json(begun)))
    rates["float32", "bfloat16"] = 1.1
    assert _settled(_wide(), tmp_path) == "float32"


def test_operands_of_another_model_are_found_anew(rates, tmp_path):
    begun = replaced(_wide("--backbone.operands=bfloat16"), {"backbone.checkpoint": "a/b"})
    (tmp_path / "config.json").write_text(json.dumps(to_json(begun)))
    assert _settled(replaced(begun, {"backbone.operands": "auto"}), tmp_path) == "bfloat16"
    assert _settled(_wide("--backbone.hidden_size=16"), tmp_path) == "float32"


def test_results_of_the_model_go_by_it_and_a_bfloat16_base_refuses_float32():
    assert "backbone.operands" in _SETTINGS["model"]
    config = _wide("--backbone.operands=bfloat16")
    assert config_from_json(to_json(config)).backbone.dtypes == ("float32", "bfloat16")
    assert checking.shapes_of(config).hidden_size == 256
    with refused():
        _wide("--backbone.dtype=bfloat16", "--backbone.operands=float32")


def test_a_product_is_measured_in_both_dtypes():
    for dtype in ("float32", ("float32", "bfloat16")):
        assert products.measure(inputs=16, outputs=32, dtype=dtype) > 0
