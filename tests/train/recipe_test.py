"""A recipe says what the trainer's own files say, and names what cannot be repeated."""

import json
import pathlib
import re

import numpy as np
import pytest

from raslik_jax.train import recipe

# What trainers write, cut to what matters here: the first is of TRL 1.16 and transformers 5.23.
_FILES = ("trl.json", "axolotl.yml", "llama_factory.yaml", "card.md")
_ARGUMENTS, _AXOLOTL, _LLAMA_FACTORY, _CARD = (
    (pathlib.Path(__file__).parents[1] / "fixtures" / "recipes" / name).read_text()
    for name in _FILES
)


def _read(tmp_path, **files):
    paths = []
    for name, content in files.items():
        path = tmp_path / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(path)
    return recipe.read_recipe(paths)


def _values(found):
    return {name: value.value for name, value in found.settings.items()}


def test_trainers_arguments(tmp_path):
    found = _read(tmp_path, training_args__json=_ARGUMENTS)
    expected = {"learning_rate": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95}
    expected |= {"epsilon": 1e-8, "clip": 0.5, "warmup_steps": 5, "max_len": 1024, "steps": 20}
    expected |= {"epochs": 3.0, "seed": 3, "optimizer": "adamw", "schedule": "cosine"}
    expected |= {"micro_batch_size": 4, "batch_size": 12, "targets": "response"}
    assert _values(found) == expected
    assert found.settings["batch_size"].origin == (
        "training_args.json: per_device_train_batch_size x "
        "training_args.json: gradient_accumulation_steps on one device"
    )
    assert found.lacks == found.differences == ()


@pytest.mark.parametrize(
    ("completion", "assistant", "targets"),
    [
        (True, False, recipe.BY_ROWS),  # of a conversation TRL then trains on all tokens
        (None, False, recipe.BY_ROWS),
        (False, False, "all"),
        (None, True, "response"),
        (False, True, "response"),
    ],
)
def test_the_tokens_that_trl_counts(completion, assistant, targets, tmp_path):
    flags = {"completion_only_loss": completion, "assistant_only_loss": assistant}
    assert _values(_read(tmp_path, training_args__json=flags))["targets"] == targets


def test_axolotl(tmp_path):
    found = _read(tmp_path, config__yml=_AXOLOTL)
    expected = {"learning_rate": 2e-4, "weight_decay": 0.0, "warmup": 0.1, "max_len": 2048}
    expected |= {"epochs": 1, "schedule": "cosine", "micro_batch_size": 2, "batch_size": 4}
    assert _values(found) == expected | {"targets": "response", "long_rows": "drop"}
    lacks = [text.split(" (")[0].split(" is ")[0] for text in found.lacks]
    assert lacks == ["packing", "config.yml: optim"]


def test_llama_factory(tmp_path):
    expected = {"learning_rate": 1e-4, "warmup": 0.1, "max_len": 2048, "epochs": 3.0}
    expected |= {"schedule": "cosine", "micro_batch_size": 1, "batch_size": 8}
    expected |= {"targets": "response"}
    assert _values(_read(tmp_path, sft__yaml=_LLAMA_FACTORY)) == expected


def test_a_model_card(tmp_path):
    expected = {"learning_rate": 2e-5, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-7, "epochs": 2}
    expected |= {"warmup_steps": 10, "seed": 42, "optimizer": "adamw", "schedule": "linear"}
    assert _values(_read(tmp_path, README__md=_CARD)) == expected | {"batch_size": 32}


def _state(kind, warmup, shift, steps):
    share_R = recipe.factor(kind, np.array(steps) - shift, warmup=warmup, steps=60)
    pairs = zip(steps, share_R.tolist(), strict=True)
    rates = [{"step": s, "learning_rate": 3e-4 * share} for s, share in pairs]
    return {"global_step": 60, "max_steps": 60, "train_batch_size": 8, "log_history": rates}


def test_rates_that_several_peaks_give_name_none(tmp_path):
    """After its warm-up a linear schedule is the same line for many warm-ups."""
    found = _read(tmp_path, trainer_state__json=_state("linear", 7, 1, [20, 40, 60]))
    assert _values(found) == {"schedule": "linear", "steps": 60}
    found = _values(_read(tmp_path, trainer_state__json=_state("cosine", 7, 1, [20, 40, 60])))
    assert (found["learning_rate"], found["warmup_steps"]) == (3e-4, 7)


@pytest.mark.parametrize(
    ("values", "lack"),
    [
        ({"global_step": 20, "epoch": 1.0}, "an end before the planned one"),
        ({"global_step": 50, "epoch": 2.5, "save_steps": 50}, ""),  # a save before the last step
        # A save at the end of each epoch, with the default of 500 steps.
        ({"global_step": 40, "epoch": 2.0, "save_steps": 500}, "an end before the planned one"),
        ({"best_model_checkpoint": "out/checkpoint-20"}, "an end at the best step"),
        ({"best_model_checkpoint": "out/checkpoint-60"}, ""),
    ],
)
def test_an_adapter_of_an_earlier_step_is_no_whole_training(values, lack, tmp_path):
    state = _state("linear", 0, 1, [1, 20, 40]) | {"num_train_epochs": 3, "epoch": 3.0, **values}
    paths = [tmp_path / "training_args.json", tmp_path / "checkpoint-60" / "trainer_state.json"]
    paths[1].parent.mkdir()
    paths[1].write_text(json.dumps(state))
    for loads in (True, False):
        paths[0].write_text(json.dumps({"load_best_model_at_end": loads}))
        expected = lack if loads or "best" not in lack else ""
        assert "".join(recipe.read_recipe(paths).lacks).split(" (")[0] == expected
        alone = recipe.read_recipe(paths[:1]).lacks  # without a state the step is not known
        assert [one.split(" (")[0] for one in alone] == ["an end at the best step"] * loads
    if values.get("global_step"):  # the adapter of this very checkpoint
        (lacks,) = recipe.read_recipe(paths, paths[1].parent).lacks
        assert f"step {values['global_step']} of 60" in lacks


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_a_state_gives_the_schedule_of_its_rates(kind, warmup, shift, tmp_path):
    state = _state(kind, warmup, shift, [1, 4, 5, 10, 20, 30, 40, 50, 60])
    state |= {"num_train_epochs": 3, "epoch": 2.4}  # ended by its steps
    found = _values(_read(tmp_path, trainer_state__json=state))
    assert found.pop("learning_rate") == pytest.approx(3e-4, rel=1e-3)
    # The size of a batch is not among them: the state lacks accumulation and devices.
    rise = {"warmup_steps": warmup} if warmup or kind != "constant" else {}
    assert found == {"schedule": kind, "steps": 60} | rise


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neat_packing", True),
        ("use_dft_loss", True),
        ("relora_steps", 100),
        ("loss_type", "dft"),
        ("train_sampling_strategy", "group_by_length"),
        ("truncation_mode", "keep_end"),
        ("loss_scale", "last_round"),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("cosine_min_lr_ratio", 0.1),
        ("optim_args", "eps=1e-4"),
        ("val_set_size", 0.05),
        ("split_dataset_ratio", 0.1),
        ("auto_find_batch_size", True),
        ("dataloader_drop_last", True),
        ("max_samples", 100),
        ("mask_history", True),
        ("loss_type", ["sigmoid"]),
        ("beta", 0.1),
        ("stage", "dpo"),
        ("rl", "kto"),
        ("lora_model_dir", "./first"),
        ("adapter_name_or_path", "./first"),
        ("use_muon", True),
        ("disable_shuffling", True),
        ("dataset_exact_deduplication", True),
        ("mix_strategy", "interleave_over"),
    ],
)
def test_what_changes_the_training_and_has_no_counterpart_is_named(name, value, tmp_path):
    (lack,) = _read(tmp_path, training_args__json={name: value}).lacks
    assert f"training_args.json: {name} is {value!r}" in lack


def test_names_of_older_versions_and_values_that_change_nothing(tmp_path):
    values = {"max_seq_length": 256, "loss_type": "nll", "train_sampling_strategy": "random"}
    found = _read(tmp_path, training_args__json=values | {"val_set_size": 0, "neat_packing": False})
    assert (_values(found), found.lacks) == ({"max_len": 256}, ())


def test_packing_of_two_names_is_packing(tmp_path):
    values = {"cutoff_len": 8, "neat_packing": True, "packing": False}
    assert len(_read(tmp_path, sft__yaml=values).lacks) == 1


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup"])
def test_a_constant_rate_warms_up_only_where_its_name_says_so(kind, tmp_path):
    values = {"lr_scheduler_type": kind, "warmup_steps": 5, "warmup_ratio": 0.1}
    found = _values(_read(tmp_path, training_args__json=values))
    assert found.pop("schedule") == "constant"
    assert set(found) == (set() if kind == "constant" else {"warmup_steps", "warmup"})


def test_rates_of_no_known_schedule_give_none():
    assert recipe.fit_schedule([(s, 1e-4 * (s % 3 + 1)) for s in range(1, 30)], 30) is None
    assert recipe.fit_schedule([(10, 1e-4)], 30) is None


def test_the_first_file_decides_and_a_difference_is_named(tmp_path):
    found = _read(tmp_path, training_args__json=_ARGUMENTS, README__md=_CARD)
    assert _values(found)["learning_rate"] == 0.01
    names = "adam_beta2 adam_epsilon gradient_accumulation_steps learning_rate lr_scheduler_type"
    names += " num_train_epochs per_device_train_batch_size seed warmup_steps"
    assert sorted(text.split(" is ")[0] for text in found.differences) == names.split()


def test_an_earlier_file_decides_the_whole_batch_and_the_length(tmp_path):
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    arguments |= {"num_train_epochs": 2.5, "max_steps": -1}
    card = "### Training hyperparameters\n\n- train_batch_size: 8\n- training_steps: 66\n"
    card += "- total_train_batch_size: 32\n- num_devices: 4\n"
    values = _values(_read(tmp_path, training_args__json=arguments, README__md=card))
    assert values == {"micro_batch_size": 4, "batch_size": 48, "epochs": 2.5}
    state = {"global_step": 66, "max_steps": 66, "epoch": 2.5, "num_train_epochs": 3}
    state["log_history"] = []
    yml = "base_model: a\nnum_epochs: 2.5\n"
    for files in ({"README__md": card}, {"trainer_state__json": state}):
        assert _values(_read(tmp_path, **files))["steps"] == 66
        values = _values(_read(tmp_path, a__yml=yml, **files))
        assert values["epochs"] == 2.5 and "steps" not in values
    values = _values(_read(tmp_path, a__yml=yml + "max_steps: 5\n", README__md=card))
    assert values["steps"] == 5


def test_axolotl_lists_other_optimizers_and_schedules_as_adamw_with_cosine(tmp_path):
    listed = "- optimizer: Use OptimizerNames.ADAMW_TORCH_FUSED with betas=(0.9,0.98)\n"
    listed += "- lr_scheduler_type: cosine\n- training_steps: 66\n"
    yml = "base_model: a\nnum_epochs: 4\noptimizer: muon\nlr_scheduler: rex\n"
    block = f"<details><summary>See axolotl config</summary>\n\n```yaml\n{yml}```\n"
    card = f"{block}</details>\n\n### Training hyperparameters\n\n{listed}"
    found = _read(tmp_path, README__md=card)
    assert [text.partition(",")[0] for text in found.lacks] == [
        "README.md: optim is 'muon'",
        "README.md: lr_scheduler_type is 'rex'",
    ]
    assert found.settings["beta2"].value == 0.98 and _values(found)["epochs"] == 4
    assert "steps" not in found.settings
    arguments = {"sample_packing": True, "alternate_lr_scheduler_type": "rex"}
    assert len(_read(tmp_path, training_args__json=arguments).lacks) == 2
    assert len(_read(tmp_path, a__yml="cutoff_len: 8\npissa_init: true\n").lacks) == 1


def test_axolotl_says_of_each_dataset_what_counts(tmp_path):
    text = "base_model: a\ndatasets:\n  - path: rows.jsonl\n    "
    later = "\n  - path: more.jsonl\n    roles_to_train: [gpt, assistant]\n    train_on_eos: turn"
    others = ("roles_to_train: [user, assistant]", "train_on_eos: all", "train_on_eot: none")
    others += ("roles_to_train: []", "shards: 4", "drop_system_message: true", "type: alpaca_chat")
    for line in (*others, "message_field_training: keep"):
        (lack,) = _read(tmp_path, a__yml=text + line + later).lacks
        assert f"(a.yml: {line.partition(':')[0]} is " in lack
    whole = "base_model: a\nroles_to_train: [assistant]\ntrain_on_eos: turn\n"
    assert _read(tmp_path, b__yml=whole).lacks == ()
    assert len(_read(tmp_path, b__yml=whole.replace("turn", "all")).lacks) == 1
    same = ("roles_to_train: [assistant]", "train_on_eos: turn", "type: alpaca")
    for line in (*same, "message_field_training: train"):
        assert _read(tmp_path, b__yml=text + line + later).lacks == ()


def test_texts_in_place_of_numbers_are_left_for_the_settings_to_refuse(tmp_path):
    values = {"max_steps": "1,000", "warmup_steps": "auto", "learning_rate": 1e-4}
    found = _values(_read(tmp_path, training_args__json=values))
    assert found["steps"] == "1,000" and found["warmup_steps"] == "auto"
    for none in (-1, 0, False):
        assert "steps" not in _values(_read(tmp_path, training_args__json={"max_steps": none}))


def test_steps_that_follow_from_a_share_are_no_difference(tmp_path):
    state = _state("linear", 6, 0, range(5, 61, 5))
    for share in ({"warmup_ratio": 0.1, "warmup_steps": 0}, {"warmup_steps": 0.1}):
        files = {"training_args__json": share, "trainer_state__json": state}
        assert _read(tmp_path, **files).differences == ()
    state = _state("constant", 0, 0, range(5, 61, 5))
    for kind in ("constant", "constant_with_warmup"):
        given = {"lr_scheduler_type": kind}
        files = {"training_args__json": given, "trainer_state__json": state}
        assert _read(tmp_path, **files).differences == ()
    (text,) = _read(tmp_path, **files | {"training_args__json": {"warmup_steps": 9}}).differences
    assert text.startswith("warmup_steps is 9 in ")


def test_a_pickle_is_not_read(tmp_path):
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="pickle.*to_json_string"):
        recipe.read_recipe([tmp_path / "training_args.bin"])


def test_files_are_found_beside_an_adapter_and_in_its_last_checkpoint(tmp_path):
    last = "checkpoint-20/trainer_state.json"
    for place in ("README.md", "checkpoint-9/trainer_state.json", last):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("{}")
    assert recipe.find_files(tmp_path) == [tmp_path / "README.md", tmp_path / last]
    inner = [tmp_path / "README.md", tmp_path / "checkpoint-9" / "trainer_state.json"]
    assert recipe.find_files(tmp_path / "checkpoint-9") == inner


def test_a_null_replaces_no_value_and_is_no_clipping(tmp_path):
    values = {"max_length": 48, "max_grad_norm": None, "max_seq_length": None}
    found = _values(_read(tmp_path, training_args__json=values))
    assert found == {"max_len": 48, "clip": 0.0}
    assert _values(_read(tmp_path, training_args__json={"max_seq_length": 96})) == {"max_len": 96}
    assert "clip" not in _values(_read(tmp_path, a__yml="micro_batch_size: 2\nmax_grad_norm:\n"))


def test_the_devices_of_all_machines_count(tmp_path):
    values = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    found = _read(tmp_path, training_args__json=values | {"global_world_size": 3}).settings
    assert found["batch_size"].value == 24 and "one device" not in found["batch_size"].origin


def test_axolotls_batch_of_all_accumulated_rows(tmp_path):
    text = "base_model: a\nmicro_batch_size: 4\nbatch_size: 128\n"
    assert _values(_read(tmp_path, a__yml=text))["batch_size"] == 128
    text += "gradient_accumulation_steps: 2\n"  # it decides, as in axolotl
    assert _values(_read(tmp_path, b__yml=text))["batch_size"] == 8


def test_long_rows_of_axolotl_are_dropped_unless_it_cuts_them(tmp_path):
    text = "base_model: a\nmicro_batch_size: 4\n"
    assert _values(_read(tmp_path, a__yml=text))["long_rows"] == "drop"
    assert (
        _values(_read(tmp_path, n__yml=text + "excess_length_strategy:\n"))["long_rows"] == "drop"
    )
    text += "excess_length_strategy: "
    assert _values(_read(tmp_path, b__yml=text + "truncate\n"))["long_rows"] == "cut"
    (lack,) = _read(tmp_path, c__yml=text + "raise\n").lacks
    assert "excess_length_strategy is 'raise'" in lack
    values = _values(_read(tmp_path, d__yml="cutoff_len: 8\nper_device_train_batch_size: 4\n"))
    assert "long_rows" not in values


def test_what_yaml_leaves_out_has_the_trainers_default(tmp_path):
    found = _read(tmp_path, a__yml="base_model: a\nlearning_rate: 1e-4\n")
    expected = {"schedule": "cosine", "warmup": 0.03, "optimizer": "adamw", "epochs": 1.0}
    expected |= {"learning_rate": 1e-4, "micro_batch_size": 1, "batch_size": 1, "max_len": 512}
    assert _values(found) == expected | {"targets": "response", "long_rows": "drop"}
    assert found.settings["warmup"].origin == "default of axolotl"
    values = _values(_read(tmp_path, b__yml="cutoff_len: 8\n"))
    assert values["learning_rate"] == 5e-5 and values["schedule"] == "linear"
    # axolotl makes 3 % whole and stops at 100 steps.
    for planned, steps in ((20, 0), (60, 2), (100, 3), (5000, 100)):
        state = {"global_step": planned, "max_steps": planned, "log_history": []}
        files = {"a__yml": "base_model: a\n", "trainer_state__json": state}
        assert _values(_read(tmp_path, **files))["warmup_steps"] == steps
        files["a__yml"] += "warmup_ratio: 0.5\n"
        assert "warmup_steps" not in _values(_read(tmp_path, **files))
    # The arguments of a trainer are complete: what they leave out has no default of YAML.
    given = {"completion_only_loss": False, "assistant_only_loss": False}
    files = {"training_args__json": given, "a__yml": "base_model: a\n"}
    assert _values(_read(tmp_path, **files)) == {"targets": "all"}
    # Those of transformers alone lack what axolotl does with long rows.
    files["training_args__json"] = {"learning_rate": 1e-3}
    expected = {"learning_rate": 1e-3, "max_len": 512, "long_rows": "drop", "targets": "response"}
    assert _values(_read(tmp_path, **files)) == expected
    # What another file says comes before a default.
    later = _read(tmp_path, a__yml="base_model: a\n", README__md=_CARD)
    values = _values(later)
    assert values["warmup_steps"] == 10 and values["schedule"] == "linear"
    assert "warmup" not in values and later.differences == ()


def test_the_yaml_that_axolotl_puts_into_a_card(tmp_path):
    before, after = _CARD.split("###", maxsplit=1)
    block = "<details><summary>See axolotl config</summary>\n\naxolotl version: `0.4.1`\n"
    card = f"{before}{block}```yaml\n{_AXOLOTL}\n```\n\n</details><br>\n\n###{after}"
    found = _read(tmp_path, README__md=card)
    values = _values(found)
    # Only the YAML has these; the list, which the trainer itself wrote, decides the others.
    assert values["targets"] == "response" and values["max_len"] == 2048
    assert values["batch_size"] == 32 and values["learning_rate"] == 2e-5
    assert any(text.startswith("packing (README.md: packing") for text in found.lacks)
    assert _read(tmp_path, README__md=card.replace("\n", " \r\n")) == found
    older = re.sub("^- optimizer: .*$", "- optimizer: Adam with betas=(0.9,0.98)", card, flags=re.M)
    assert any("optim is 'adamw_8bit'" in text for text in _read(tmp_path, README__md=older).lacks)
    with pytest.raises(ValueError, match=r"README\.md.*must be YAML"):
        _read(tmp_path, README__md=card.replace("adapter: lora", "adapter: [lora"))


@pytest.mark.parametrize(
    ("steps", "setting", "value"), [(10.0, "warmup_steps", 10), (0.1, "warmup", 0.1)]
)
def test_warmup_steps_are_whole_or_a_share(steps, setting, value, tmp_path):
    found = _values(_read(tmp_path, training_args__json={"warmup_steps": steps}))
    assert found == {setting: value} and isinstance(found[setting], type(value))
