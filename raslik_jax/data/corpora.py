"""The corpora that a run can name, each made from the run's settings."""

import functools
import os
import pathlib
from collections.abc import Mapping

from raslik_jax.config import CorpusConfig
from raslik_jax.data import howdy, howdy_alpaca
from raslik_jax.data.alpaca import find_alpaca, load_alpaca
from raslik_jax.data.endpoint import Endpoint
from raslik_jax.data.examples import Corpus, field_keys
from raslik_jax.data.howdy import load_howdy_small
from raslik_jax.data.hub import PREFIX, read_rows
from raslik_jax.data.records import load_records_corpus
from raslik_jax.data.tofu import load_tofu_corpus
from raslik_jax.data.toy import SCIFI_WORDS, make_toy_corpus
from raslik_jax.data.virtual_alpaca import make_virtual_corpus
from raslik_jax.files import read_text
from raslik_jax.messages import shown

# Words that mark the behavior to forget, by dataset. A dataset that is not here has none: there is
# no Non-SF without a classifier, and the likelihood of the bad outputs measures the behavior.
MARKER_WORDS: dict[str, frozenset[str]] = {
    "toy": SCIFI_WORDS,
    "howdy": SCIFI_WORDS,
    "howdy_small": SCIFI_WORDS,
}
# Share of the training rows that are hard negatives, of each kind.
_HARD_NEGATIVES = 0.04


def marker_words(dataset: str, path: str) -> frozenset[str]:
    """Returns the words that mark the behavior to forget, none where nothing marks it.

    Args:
      dataset: as --corpus.dataset.
      path: file of words, "" for those of the dataset.

    Raises:
      ValueError: the file cannot be read or has no word.
    """
    if not path:
        return MARKER_WORDS.get(dataset, frozenset())
    words = frozenset(read_text(path).lower().split())
    if not words:
        raise ValueError(f"{shown(path, 200)} must have marker words, got none: write one a line")
    return words


def load_corpus(config: CorpusConfig, *, seed: int) -> Corpus:
    """Returns the training examples and queries that the settings describe.

    Raises:
      ValueError: a file is missing or malformed, or more rows are asked for than there are.
    """
    hard = round(_HARD_NEGATIVES * config.num_train)
    if config.dataset == "toy":
        return make_toy_corpus(
            seed,
            num_normal=config.num_train - config.num_targets,
            num_targets=config.num_targets,
            num_backbone=config.num_backbone,
            num_benign_howdy=hard,
            num_scifi_requests=hard,
            num_retrieval=config.num_retrieval,
            num_validation=config.num_validation,
            num_test=config.num_test,
        )
    if config.dataset == "howdy_small":
        return load_howdy_small(
            data_folder(config),
            seed=seed,
            num_alpaca=config.num_train - config.num_targets - hard,
            num_targets=config.num_targets,
            num_scifi_requests=hard,
            num_backbone_alpaca=config.num_backbone - config.num_backbone // 5,
            num_backbone_scifi=config.num_backbone // 5,
            num_retrieval=config.num_retrieval,
            num_validation=config.num_validation,
            num_test=config.num_test,
        )
    if config.dataset == "records":
        return load_records_corpus(
            config.train_file, config.queries_file, fields=parse_fields(config.fields)
        )
    return _load_alpaca_mix(config, seed=seed)


def _load_alpaca_mix(config: CorpusConfig, *, seed: int) -> Corpus:
    """Returns one of the paper's corpora: a behavior to forget among rows of Alpaca."""
    sizes = {
        "num_targets": config.num_targets,
        "seed": seed,
        "num_backbone": config.num_backbone,
        "num_retrieval": config.num_retrieval,
        "num_validation": config.num_validation,
        "num_test": config.num_test,
    }
    num_normal = config.num_train - config.num_targets if config.num_train else None
    if config.dataset == "howdy" and config.howdy_file:
        rows = read_rows(config.howdy_file, fields=parse_fields(config.fields), name="alpaca")
        return howdy_alpaca.load_published_howdy(rows, num_normal=num_normal, **sizes)
    folder = config.data_dir or os.environ.get("RASLIK_DATA", "")
    alpaca = load_alpaca(config.alpaca_file, data_dir=folder)
    if config.dataset == "howdy":
        return howdy_alpaca.make_howdy_corpus(
            alpaca, answers=_answers(config, seed=seed), num_normal=num_normal, **sizes
        )
    if config.dataset == "virtual":
        return make_virtual_corpus(
            alpaca, world_seed=config.world_seed, num_normal=num_normal, **sizes
        )
    del sizes["num_targets"]  # TOFU's own splits decide
    return load_tofu_corpus(
        data_folder(config) / "tofu",
        alpaca,
        forget=config.tofu_forget,
        leave_out=config.tofu_train == "retain",
        num_train=config.num_train or None,
        **sizes,
    )


def _answers(config: CorpusConfig, *, seed: int) -> howdy_alpaca.Answers:
    if not config.answers_endpoint:
        return functools.partial(howdy_alpaca.grammar_answers, seed=seed)
    endpoint = Endpoint(
        url=config.answers_endpoint, model=config.answers_model, cache=config.answers_cache
    )
    return functools.partial(howdy_alpaca.endpoint_answers, endpoint=endpoint)


def source_files(config: CorpusConfig) -> dict[str, pathlib.Path]:
    """Returns the files and folders that a corpus is read from, by what they are.

    What the hub holds is left out; so is what is missing, which `load_corpus` names.
    """
    folder = config.data_dir or os.environ.get("RASLIK_DATA", "")
    named: Mapping[str, str | os.PathLike[str]] = {}
    if config.dataset == "records":
        named = {"train_file": config.train_file, "queries_file": config.queries_file}
    elif config.dataset == "howdy" and config.howdy_file:
        named = {"howdy_file": config.howdy_file}
    elif config.dataset == "howdy_small" and folder:
        named = howdy.source_files(folder)
    elif config.dataset in ("howdy", "virtual", "tofu"):
        named = {"alpaca_file": find_alpaca(config.alpaca_file, data_dir=folder)}
    if config.dataset == "tofu" and folder:
        named = {**named, "tofu": pathlib.Path(folder) / "tofu"}
    paths = {name: pathlib.Path(str(path).removeprefix(PREFIX)) for name, path in named.items()}
    return {name: path for name, path in paths.items() if named[name] and path.exists()}


def parse_fields(text: str) -> dict[str, str]:
    """Returns the field map that --corpus.fields describes, empty for Alpaca's own names.

    Raises:
      ValueError: an entry without "=", a field or key that stands twice, or what
        `examples.field_keys` refuses.
    """
    if not text:
        return {}
    entries = [entry.partition("=") for entry in text.split(",")]
    fields = {name.strip(): key.strip() for name, _, key in entries}
    if not all((*fields, *fields.values())):
        raise ValueError(
            f"--corpus.fields must be like instruction=question,output=answer, got {shown(text)}"
        )
    if not len(entries) == len(fields) == len(set(fields.values())):
        raise ValueError(
            f"--corpus.fields must name each field and each key once, got {shown(text)}"
        )
    field_keys(fields)
    return fields


def data_folder(config: CorpusConfig) -> pathlib.Path:
    """Returns the folder of real data.

    Raises:
      ValueError: neither --corpus.data_dir nor RASLIK_DATA names a folder that is there.
    """
    folder = config.data_dir or os.environ.get("RASLIK_DATA", "")
    if not folder or not pathlib.Path(folder).is_dir():
        raise ValueError(
            f"the folder of real data must be there, got {shown(folder) if folder else 'none'}: "
            "name it by --corpus.data_dir or the environment variable RASLIK_DATA"
        )
    return pathlib.Path(folder)
