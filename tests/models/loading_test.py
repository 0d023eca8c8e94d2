"""A checkpoint and its adapter for use in your own code."""

import warnings

import checkpoint_cases
import jax

import raslik_jax


def test_an_adapter_in_the_folder_of_the_base_is_told(tmp_path):
    name = next(iter(checkpoint_cases.NAMES))
    folder = checkpoint_cases.write_model(tmp_path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not raslik_jax.load_model(folder).lora
    checkpoint_cases.write_adapter(folder, name)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not raslik_jax.load_model(folder).lora
    assert [str(one.message).split("has an ")[1] for one in told] == [
        "adapter too, which is not loaded: pass it as adapter to use it"
    ]
    lora = raslik_jax.load_model(folder, folder).lora
    assert jax.tree.leaves(lora)
