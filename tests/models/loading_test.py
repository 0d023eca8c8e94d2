"""A checkpoint and its adapter for use in your own code."""

import json
import re
import warnings

import checkpoint_cases
import jax
import pytest

import raslik_jax


def test_an_adapter_in_the_folder_of_the_base_is_warned_of(tmp_path):
    name = next(iter(checkpoint_cases.NAMES))
    folder = checkpoint_cases.write_model(tmp_path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not raslik_jax.load_model(folder).lora
    checkpoint_cases.write_adapter(folder, name)
    with pytest.warns(UserWarning, match=re.escape(str(folder))):
        assert not raslik_jax.load_model(folder).lora
    lora = raslik_jax.load_model(folder, folder).lora
    assert jax.tree.leaves(lora)


def test_another_base_than_that_of_the_adapter_is_warned_of(tmp_path):
    name = next(iter(checkpoint_cases.NAMES))
    folder = checkpoint_cases.write_model(tmp_path, name)
    checkpoint_cases.write_adapter(folder, name)
    config = json.loads((folder / "adapter_config.json").read_text())
    for base, is_other in ((str(folder), False), ("owner/another", True)):
        config["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raslik_jax.load_model(folder, folder)
        assert [True] * is_other == ["owner/another" in str(one.message) for one in caught]
