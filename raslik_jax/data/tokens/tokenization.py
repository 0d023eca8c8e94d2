"""Text to token ids and back, over one `tokenizers.Tokenizer`."""

import hashlib
import json
import os
import pathlib
import string
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raslik_jax.base import bounded, files
from raslik_jax.base.messages import one_line, shown, some_of
from raslik_jax.data.words import refused

END_OF_TEXT = "<|endoftext|>"
_PAD_CANDIDATES = ("<|pad|>", "<|padding|>")
# Classes of transformers 4 that begin a text with BOS where add_bos_token says so, whatever the
# post-processor of tokenizer.json does: DeepSeek-R1-Distill is published for one of them.
_HEEDING = tuple(
    f"{name}Tokenizer{suffix}"
    for name in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")
    for suffix in ("", "Fast")
)


class Tokenizer(NamedTuple):
    """A tokenizer with the two ids that batches and decoding need.

    The `tokenizers.Tokenizer` never truncates, pads or adds a token of its own. `pad_id` may equal
    `eos_id`, because masks tell pads from tokens. A model may have more rows than `vocab_size`,
    which is one more than the largest id. A prompt begins with `prompt_prefix`, such as BOS.
    `chat_template` is its own in Jinja, empty for none. It may read the names of `special_tokens`,
    such as that of `bos_token`.
    """

    backend: Any
    eos_id: int
    pad_id: int
    vocab_size: int
    prompt_prefix: tuple[int, ...] = ()
    chat_template: str = ""
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text alone, without EOS.

        The name of a special token in the text is ordinary text: no row can forge an EOS.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of every text, on all cores."""
        return [encoding.ids for encoding in self._encode_all(texts)]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Returns the ids that a model reads of each prompt with `prompt_prefix` first."""
        return [[*self.prompt_prefix, *ids] for ids in self.encode_batch(prompts)]

    def encode_marked(self, texts: Sequence[str]) -> list[Any]:
        """Returns the encoding of every text with names of special tokens as those tokens."""
        self.backend.encode_special_tokens = False
        try:
            return self._encode_all(texts)
        finally:
            self.backend.encode_special_tokens = True

    def _encode_all(self, texts: Sequence[str]) -> list[Any]:
        try:
            return [*self.backend.encode_batch([*texts], add_special_tokens=False)]
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust: a pattern needs too many steps
            raise refused("tokenizer_panic", error=one_line(str(error), 80)) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids; special tokens give no text."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def decode_marked(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids with the names of special tokens for `encode_marked`."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def special_names(self) -> dict[int, str]:
        """Returns the names of the special tokens by their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}


def _check_patterns(normalizer: Any, pre_tokenizer: Any) -> None:
    """Splits runs of each character, in the child process of `bounded`."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.encode_batch([f"{sign * 500}\0 {sign}" for sign in string.printable])


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE fitted to the texts; id 0 is EOS and pad at once.

    Any text survives encode and decode unchanged, since all 256 bytes are in the vocabulary. The
    same texts in the same order give the same tokenizer. It has fewer than vocab_size entries if
    the texts have no more pairs.
    """
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _wrap(backend, END_OF_TEXT, END_OF_TEXT, "the new tokenizer")


def load_tokenizer(path: str | os.PathLike[str], *others: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json, or of a folder that has one.

    The special tokens are those of the files next to it. Otherwise EOS is "<|endoftext|>" and the
    pad is "<|pad|>", "<|padding|>" or EOS. The post-processor of tokenizer.json puts BOS in front.
    With a class of transformers 4 that reads add_bos_token, this setting does so too. If the two
    contradict each other otherwise, the folder is refused. Parts that are missing in the folder
    come from the first of the other folders that has them: tokenizer.json, a special token, the
    chat template.
    """
    own = pathlib.Path(path)
    folders = (own if own.is_dir() else own.parent, *others)
    file, backend = read_backend(path, *others)
    place = folders.index(file.parent)
    special = _special_tokens(*folders)
    _add_tokens(backend, folders[: place + 1], file, special)
    eos = special.get("eos_token") or END_OF_TEXT
    found = (token for token in _PAD_CANDIDATES if backend.token_to_id(token) is not None)
    pad = special.get("pad_token") or next(found, eos)
    _begin(backend, _read_beside("tokenizer_config.json", *folders[: place + 1]), special, file)
    tokenizer = _wrap(backend, eos, pad, str(file))
    templates = (template for folder in folders if (template := _chat_template(folder)))
    return tokenizer._replace(
        prompt_prefix=_prefix_of(tokenizer),
        chat_template=next(templates, ""),
        special_tokens=special,
    )


def _prefix_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that the post-processor puts in front of a text, not those that end one."""
    text, ids = tokenizer.encode("a"), tokenizer.backend.encode("a", add_special_tokens=True).ids
    return tuple(ids[: next((n for n in range(len(ids)) if ids[n : n + len(text)] == text), 0)])


def _begin(
    backend: Any, config: Mapping[str, Any], special: Mapping[str, str], file: pathlib.Path
) -> None:
    """Lets the post-processor begin a text as add_bos_token says; refuses a contradiction."""
    import tokenizers

    is_asked, bos = config.get("add_bos_token"), special.get("bos_token", "")
    has_prefix = bool(_prefix_of(Tokenizer(backend, 0, 0, 0)))
    if not isinstance(is_asked, bool) or is_asked == has_prefix:
        return
    token = backend.token_to_id(bos)
    if not is_asked or token is None or config.get("tokenizer_class") not in _HEEDING:
        added = "one" if has_prefix else "none"
        raise refused("bos", file=shown(str(file), 120), asked=is_asked, added=added)
    begun = tokenizers.processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 $B:1", special_tokens=[(bos, token)]
    )
    parts = [backend.post_processor] if backend.post_processor else []
    backend.post_processor = tokenizers.processors.Sequence([*parts, begun])


def _add_tokens(
    backend: Any, folders: Sequence[pathlib.Path], file: pathlib.Path, special: dict[str, str]
) -> None:
    """Adds the tokens that other files add to the tokenizer.json `file`, but that of an image.

    As in transformers, ids of `file` stay in its folder, and flags come from the decoder. A special
    token of the vocabulary is one token in a text. Names beyond the model's rows are text.
    """
    import tokenizers

    def token_of(fields: Mapping[str, Any]) -> tokenizers.AddedToken:
        names = ("special", "lstrip", "rstrip", "single_word", "normalized")
        kept = {name: bool(fields[name]) for name in names if name in fields}
        return tokenizers.AddedToken(str(fields.get("content")), **kept)

    added: dict[int, dict[str, Any]] = {}
    image, model = special.get("image_token"), _read_beside("config.json", file.parent)
    for folder in reversed(folders):
        config = _read_beside("tokenizer_config.json", folder)
        if config.get("split_special_tokens") is True:
            raise refused("split_special", folder=shown(str(folder), 120))
        known = config.get("added_tokens_decoder")
        if not isinstance(known, dict):  # then the file of older releases
            older = _read_beside("added_tokens.json", folder)
            known = {str(token): name for name, token in older.items() if isinstance(token, int)}
        flagged = list[tokenizers.AddedToken]()  # one call for each would take long
        for token, one in ((int(key), one) for key, one in known.items() if key.isdecimal()):
            fields = one if isinstance(one, dict) else {"content": one, "special": True}
            is_known = backend.token_to_id(str(fields.get("content"))) is not None
            is_out = isinstance(rows := model.get("vocab_size"), int) and token >= rows
            if folder == file.parent and is_known:
                flagged += [token_of(one)] if isinstance(one, dict) else []
            elif folder != file.parent or not is_out:
                added[token] = fields
        backend.add_tokens(flagged)
    for token, fields in sorted(added.items()):
        if (content := str(fields.get("content"))) == image:
            continue  # `read_backend` left it out, or has it
        if backend.token_to_id(content) is None:
            backend.add_tokens([token_of(fields)])
        if (got := backend.token_to_id(content)) != token:
            own, found = (shown(str(path), 120) for path in (folders[0], file))
            ids = {"token": shown(content), "id": token, "got": got}
            raise refused("token_id", folder=own, file=found, **ids)
    config = _read_beside("tokenizer_config.json", *folders)
    lists = (config.get(f"{kind}_special_tokens") for kind in ("additional", "extra"))
    listed = [one for names in lists if isinstance(names, list) for one in names]
    contents = [str(one.get("content") if isinstance(one, dict) else one) for one in listed]
    if unknown := [n for n in contents if n not in ("", image) and backend.token_to_id(n) is None]:
        raise refused("token_listed", folder=shown(str(folders[0]), 120), got=some_of(unknown, 3))
    kinds = {one.content: one for one in backend.get_added_tokens_decoder().values()}
    names = ({*contents, *special.values()} - {image}) & backend.get_vocab().keys()
    backend.add_special_tokens([kinds.get(name, name) for name in sorted(names)])


def describe_difference(own: Tokenizer, base: Tokenizer) -> str:
    """Returns how the tokenizer of an adapter differs from its base's; "" if it does not."""
    parts = ["chat template"] if own.chat_template != base.chat_template else []
    for name in ("eos", "pad", "bos"):
        tokens = [one.special_tokens.get(f"{name}_token", "none") for one in (own, base)]
        parts += [f"{name.upper()} {tokens[0]}, not {tokens[1]}"] if len({*tokens}) > 1 else []
    if own.backend.to_str() == base.backend.to_str():  # cheaper than the hash
        return "; ".join(parts)
    ours, theirs = (one.backend.get_vocab(with_added_tokens=True) for one in (own, base))
    if more := ours.keys() - theirs:
        parts.append(f"{len(more)} more tokens ({some_of(more, 3)})")
    parts += [f"{len(less)} fewer tokens"] if (less := theirs.keys() - ours) else []
    if any(ours[name] != theirs[name] for name in ours.keys() & theirs):
        parts.append("ids of tokens")
    if not parts and tokenizer_hash(own) != tokenizer_hash(base):
        parts.append("splitting of text")
    return "; ".join(parts)


def save_tokenizer(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Writes tokenizer.json and tokenizer_config.json into a folder and makes it if need be."""
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.backend.id_to_token(tokenizer.eos_id),
        "pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id),
    }
    if tokenizer.chat_template:
        config["chat_template"] = tokenizer.chat_template
    files.write_text(folder / "tokenizer.json", tokenizer.backend.to_str())
    files.write_json(folder / "tokenizer_config.json", config)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns 16 hex digits of the sha256 of all that decides the ids, in any file layout."""
    state = json.loads(tokenizer.backend.to_str())
    kept = {
        "vocab": sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items()),
        "merges": state["model"].get("merges"),
        "normalizer": state["normalizer"],
        "pre_tokenizer": state["pre_tokenizer"],
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
    }
    if tokenizer.prompt_prefix:
        kept["prompt_prefix"] = tokenizer.prompt_prefix
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def read_backend(path: str | os.PathLike[str], *others: pathlib.Path) -> tuple[pathlib.Path, Any]:
    """Returns a tokenizer.json and its `tokenizers.Tokenizer`, with settings of its own.

    The file is that of the first folder that has one. A folder that has only a tokenizer.model or a
    vocab.json is refused. The token of an image is left out if the model has no embedding for it.
    """
    import tokenizers

    own = pathlib.Path(path)
    names = [one / "tokenizer.json" if one.is_dir() else one for one in (own, *others)]
    file = next((name for name in names if name.is_file()), names[0])
    for folder in (name.parent for name in names[: names.index(file) + (not file.is_file())]):
        if slow := [one for one in ("tokenizer.model", "vocab.json") if (folder / one).is_file()]:
            raise refused("slow_tokenizer", folder=folder, got=slow[0])
    if not file.is_file():
        raise refused("no_tokenizer", file=file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception, and nothing else
        raise ValueError(f"{file} must be a tokenizer.json, got {error}: fetch it again") from error
    # Published files carry settings of their own: GPT-2's tokenizer.json cuts at 50 tokens.
    backend.no_truncation()
    backend.no_padding()
    name, parts = shown(str(file), 120), (backend.normalizer, backend.pre_tokenizer)
    try:
        bounded.call(_check_patterns, *parts, what=f"the tokenizer {name}")
    except bounded.OverLimit:
        raise
    except ValueError as error:
        raise refused("tokenizer_split", file=name, error=one_line(str(error), 80)) from error
    # The text models of Gemma 3 come with the tokenizer of those that read images, whose place of
    # an image is one beyond the text models' embedding. Without it its name is ordinary text.
    folders = file.parent, *others
    num_rows = _read_beside("config.json", *folders).get("vocab_size")
    name = _special_tokens(*folders).get("image_token", "")
    token = backend.token_to_id(name)
    if token is None or not isinstance(num_rows, int) or token < num_rows:
        return file, backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] != name]
    return file, tokenizers.Tokenizer.from_str(json.dumps(state))


def _wrap(backend: Any, eos_token: str, pad_token: str, where: str) -> Tokenizer:
    ids = {token: backend.token_to_id(token) for token in (eos_token, pad_token)}
    missing = [token for token, value in ids.items() if value is None]
    if missing:
        raise refused("special_tokens", where=where, got=missing)
    backend.encode_special_tokens = True
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(backend, ids[eos_token], ids[pad_token], vocab_size)


def _read_beside(name: str, *folders: pathlib.Path) -> dict[str, Any]:
    """Returns the fields of the JSON files of this name; for each the first folder counts."""
    mend = "fetch the file again, or move it away"
    found: dict[str, Any] = {}
    for path in (folder / name for folder in reversed(folders)):
        fields = files.read_json(path, dict, mend=mend) if path.is_file() else {}
        found |= {field: value for field, value in fields.items() if value is not None}
    return found


def _chat_template(folder: pathlib.Path) -> str:
    """Returns the chat template of a tokenizer's folder.

    If there are several, rows with tools take `tool_use`, as in transformers, and others `default`.
    """
    file = folder / "chat_template.jinja"  # of transformers 5, which then reads no list
    more = folder / "additional_chat_templates" / "tool_use.jinja"
    found = _read_beside("tokenizer_config.json", folder).get("chat_template")
    found = found or _read_beside("chat_template.json", folder).get("chat_template")
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    named = {one.get("name"): one.get("template") for one in listed} or {"default": found}
    named = {"default": files.read_text(file)} if file.is_file() else named
    named |= {"tool_use": files.read_text(more)} if more.is_file() else {}
    texts = {name: text for name, text in named.items() if isinstance(text, str)}
    default = texts.get("default", "")
    if not (default and "tool_use" in texts):
        return default
    return f"{{% if tools is not none %}}{texts['tool_use']}{{% else %}}{default}{{% endif %}}"


def _special_tokens(*folders: pathlib.Path) -> dict[str, str]:
    """Returns the names of special tokens; for each the first folder counts.

    As in transformers, the map decides in older folders, whose config lists no added tokens.
    """
    found: dict[str, Any] = {}
    for folder in reversed(folders):
        of_map = _read_beside("special_tokens_map.json", folder)
        config = _read_beside("tokenizer_config.json", folder)
        found |= of_map | config if "added_tokens_decoder" in config else config | of_map
    more = found.get("extra_special_tokens")  # transformers 5 gives their names to templates
    found |= more if isinstance(more, dict) else {}
    names = {key: v.get("content") if isinstance(v, dict) else v for key, v in found.items()}
    return {k: v for k, v in names.items() if k.endswith("_token") and isinstance(v, str)}
