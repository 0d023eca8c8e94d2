"""Training an adapter gives the adapter that TRL and PEFT give on the same rows in their order."""

import functools
import itertools
import json
import pathlib

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import shared_data

from raslik_jax.data.batches import Batch
from raslik_jax.models import adapters, checkpoint, decoder
from raslik_jax.train import loop, recipe, steps

pytestmark = pytest.mark.heavy

_STEPS, _WARMUP, _ROWS, _IGNORED = 20, 5, 4, -100
_FILE = pathlib.Path(__file__).parents[1] / "fixtures" / "recipes" / "trained.json"
_CASES = json.loads(_FILE.read_text())


def _rows():
    """Rows of random tokens and lengths; the first tokens of each are a prompt."""
    draw = np.random.default_rng(0)
    for _ in range(48):
        ids = draw.integers(3, 500, int(draw.integers(6, 24))).tolist()
        prompt = int(draw.integers(1, 5))
        yield {"input_ids": ids, "labels": [_IGNORED] * prompt + ids[prompt:]}


def _train_by_trl(folder, arguments):
    """Trains by TRL and leaves start/ and end/, adapters as PEFT saves them.

    Returns the batches of each forward pass, and the settings as TRL writes them.
    """
    import datasets
    import peft
    import torch
    import transformers
    import trl

    torch.manual_seed(0)
    base = shared_data() / "models" / "stories260k"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():  # else A has no gradient at the first step
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    model.save_pretrained(folder / "start")
    batches = []

    class Recording(trl.SFTTrainer):
        def training_step(self, model, inputs, *more, **named):
            batches.append((inputs["input_ids"].numpy(), inputs["labels"].numpy() != _IGNORED))
            return super().training_step(model, inputs, *more, **named)

    trainer = Recording(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(folder),
            max_steps=_STEPS,
            warmup_steps=_WARMUP,
            per_device_train_batch_size=_ROWS,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            **arguments,
        ),
        train_dataset=datasets.Dataset.from_list(list(_rows())),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=transformers.AutoTokenizer.from_pretrained(
                str(families.TOY.parent)
            ).backend_tokenizer,
            pad_token="<|endoftext|>",
            eos_token="<|endoftext|>",
        ),
    )
    trainer.train()
    trainer.model.save_pretrained(folder / "end")
    (folder / "training_args.json").write_text(trainer.args.to_json_string())
    trainer.state.save_to_json(str(folder / "trainer_state.json"))
    return batches


def _joined(parts):
    """Returns the batches that one step accumulates as one batch, padded on the right."""
    longest = max(ids.shape[1] for ids, _ in parts)

    def pad(array):
        return np.pad(array, ((0, 0), (0, longest - array.shape[1])))

    tokens_BL = np.concatenate([pad(ids) for ids, _ in parts]).astype(np.int32)
    mask_BL = np.concatenate([pad(mask) for _, mask in parts])
    most = int(mask_BL.sum(axis=1).max())
    return Batch(tokens_BL, mask_BL, most, np.arange(len(tokens_BL)))


def _flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("name", _CASES)
def test_the_adapter_is_that_of_trl(name, tmp_path):
    batches = _train_by_trl(tmp_path, _CASES[name])
    found = recipe.read_recipe(recipe.find_files(tmp_path))
    assert found.lacks == ()
    told = {key: value.value for key, value in found.settings.items()}
    assert told["steps"] == _STEPS
    parts = itertools.batched if hasattr(itertools, "batched") else _batched
    joined = [_joined(one) for one in parts(batches, told["batch_size"] // _ROWS)]

    config = checkpoint.read_config(shared_data() / "models" / "stories260k")
    own = adapters.read_adapter_config(tmp_path / "start", config)
    model = checkpoint.load_model(
        str(shared_data() / "models" / "stories260k"), dtype=jnp.float32, lora_config=own
    )
    start, end = (adapters.load_adapter(tmp_path / place, config) for place in ("start", "end"))
    rate = loop.make_schedule(
        told["learning_rate"], _STEPS, kind=told["schedule"], warmup_steps=told["warmup_steps"]
    )
    make = {
        "sgd": loop.sgd,
        "adamw": functools.partial(
            loop.adamw, beta1=told["beta1"], beta2=told["beta2"], epsilon=told["epsilon"]
        ),
    }[told["optimizer"]]
    tx = make(rate, weight_decay=told["weight_decay"], clip=told["clip"])
    algorithm = steps.supervised(decoder.bind(model.graphdef), tx, mean="tokens", micro_batch=_ROWS)
    with jax.numpy_dtype_promotion("standard"):  # as Optax needs it
        fitted = loop.fit(
            algorithm, start, model.base, lambda done: iter(joined[done:]), num_steps=_STEPS
        )
    ours, theirs, before = _flat(fitted.state.params), _flat(end), _flat(start)
    moved = np.linalg.norm(theirs - before)
    assert moved > 0.05 * np.linalg.norm(before)
    assert np.linalg.norm(ours - theirs) < 1e-3 * moved


def _batched(values, count):
    return [tuple(values[place : place + count]) for place in range(0, len(values), count)]
