"""Token ids are lossless, reproducible and cannot be forged by a row's text."""

import json

import tokenizers
from absl.testing import parameterized
from folders import FolderTest
from hypothesis import given
from hypothesis import strategies as st
from support import shared_data

from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import make_example
from raslik_jax.data.tokens import chat, encoding
from raslik_jax.data.tokens import tokenization as tk

_TEXTS = ["the cat sat on the mat", "the dog sat on the cat", "a cat and a dog"] * 4
_TOKENIZER = tk.train_bpe(_TEXTS, vocab_size=300)


def _by_transformers(folder):
    import transformers  # it takes long to load

    return transformers.AutoTokenizer.from_pretrained(folder)


class BpeTest(parameterized.TestCase):
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_survives(self, text):
        self.assertEqual(_TOKENIZER.decode(_TOKENIZER.encode(text)), text)

    def test_special_tokens_are_id_0_and_cannot_be_forged(self):
        self.assertEqual((_TOKENIZER.eos_id, _TOKENIZER.pad_id), (0, 0))
        self.assertNotIn(0, _TOKENIZER.encode("a <|endoftext|> b"))
        self.assertEqual(_TOKENIZER.decode([0] + _TOKENIZER.encode("cat") + [0]), "cat")

    def test_same_texts_give_the_same_tokenizer(self):
        again = tk.train_bpe(_TEXTS, vocab_size=300)
        self.assertEqual(again.backend.to_str(), _TOKENIZER.backend.to_str())
        self.assertLessEqual(_TOKENIZER.vocab_size, 300)

    def test_a_batch_is_its_texts_one_by_one(self):
        texts = ["the cat", "", "a dog sat"]
        self.assertEqual(_TOKENIZER.encode_batch(texts), [_TOKENIZER.encode(t) for t in texts])


class LayersTest(FolderTest):
    """Files next to an adapter decide, what they lack is the base's."""

    def setUp(self):
        super().setUp()
        self.base, self.own = self.folder / "base", self.folder / "adapter"
        self.own.mkdir()
        backend = tokenizers.Tokenizer.from_str(_TOKENIZER.backend.to_str())
        backend.add_special_tokens(["<bos>"])
        self.tokenizer = _TOKENIZER._replace(
            backend=backend, chat_template="base", special_tokens={"bos_token": "<bos>"}
        )
        tk.save_tokenizer(self.base, self.tokenizer)

    def read(self):
        own, base = tk.load_tokenizer(self.own, self.base), tk.load_tokenizer(self.base)
        return own, base, tk.describe_difference(own, base)

    def write(self, name, content):
        text = content if isinstance(content, str) else json.dumps(content)
        (self.own / name).write_text(text)

    def test_a_copy_keeps_the_names_that_a_template_of_a_file_reads(self):
        tk.save_tokenizer(self.own, self.tokenizer._replace(chat_template=""))
        copy = tk.load_tokenizer(self.own)
        self.assertEqual((copy.special_tokens["bos_token"], copy.chat_template), ("<bos>", ""))

    def test_nothing_of_its_own_is_the_base(self):
        own, base, differs = self.read()
        self.assertEqual(own[1:], base[1:])
        self.assertEqual(differs, "")

    @parameterized.parameters("chat_template.jinja", "tokenizer_config.json", "chat_template.json")
    def test_a_template_alone_takes_the_place_of_the_bases(self, name):
        self.write(name, "own" if name.endswith("jinja") else {"chat_template": "own"})
        (self.base / "chat_template.jinja").write_text("base")
        own, base, differs = self.read()
        self.assertEqual((own.chat_template, base.chat_template), ("own", "base"))
        self.assertEqual(own.special_tokens["bos_token"], "<bos>")
        self.assertEqual(own.eos_id, base.eos_id)
        self.assertEqual(differs, "chat template")

    @parameterized.parameters(True, False)
    def test_rows_with_tools_have_the_template_for_tools(self, is_listed):
        """As transformers chooses it."""
        if is_listed:
            named = zip(("default", "tool_use"), ("plain", "TOOLS"), strict=True)
            listed = [{"name": name, "template": text} for name, text in named]
            self.write("tokenizer_config.json", {"chat_template": listed})
        else:
            self.write("chat_template.jinja", "plain")
            (self.own / "additional_chat_templates").mkdir()
            self.write("additional_chat_templates/tool_use.jinja", "TOOLS")
        own, *_ = self.read()
        template = chat.ChatTemplate(own.chat_template, {})
        messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        of_tools = ({"tools": tools} for tools in ([{"name": "f"}], []))
        for options, text in (({}, "plain"), *((one, "TOOLS") for one in of_tools)):
            self.assertEqual(
                chat._Writer.of(template, Conversation(messages, options=options)).write(
                    (messages, False)
                )[0][0],
                text,
            )

    def test_a_file_of_a_template_takes_the_place_of_a_whole_list(self):
        """As in transformers (`from_pretrained` of tokenization_utils_base.py, 5.23)."""
        named = zip(("default", "tool_use"), ("old", "OLD"), strict=True)
        listed = [{"name": name, "template": text} for name, text in named]
        self.write("tokenizer_config.json", {"chat_template": listed})
        self.write("chat_template.jinja", "new")
        self.assertEqual(self.read()[0].chat_template, "new")

    @parameterized.parameters("special_tokens_map.json", "tokenizer_config.json")
    def test_special_tokens_alone_take_the_place_of_the_bases(self, name):
        self.write(name, {"eos_token": {"content": "a"}, "pad_token": "c", "unk_token": None})
        own, base, differs = self.read()
        ids = own.backend.token_to_id
        self.assertEqual((own.eos_id, own.pad_id), (ids("a"), ids("c")))
        self.assertEqual((own.chat_template, base.eos_id), ("base", _TOKENIZER.eos_id))
        self.assertEqual(differs, "EOS a, not <|endoftext|>; PAD c, not <|endoftext|>")

    def test_a_whole_tokenizer_with_more_tokens_is_taken(self):
        backend = tokenizers.Tokenizer.from_str(self.tokenizer.backend.to_str())
        backend.add_special_tokens(["<|im_end|>"])
        tk.save_tokenizer(self.own, self.tokenizer._replace(backend=backend, chat_template=""))
        self.write("tokenizer_config.json", {"eos_token": "<|im_end|>"})
        own, base, differs = self.read()
        self.assertEqual(own.vocab_size, base.vocab_size + 1)
        self.assertEqual(own.eos_id, base.vocab_size)
        self.assertEqual(own.chat_template, "base")
        self.assertIn("1 more tokens ('<|im_end|>')", differs)

    @parameterized.parameters(
        ({"added_tokens_decoder": {"0": "<|endoftext|>"}}, "c"), ({"pad_token": "c"}, "a")
    )
    def test_the_map_decides_where_the_config_lists_no_added_tokens(self, more, eos):
        self.write("special_tokens_map.json", {"eos_token": "a", "pad_token": "c"})
        self.write("tokenizer_config.json", {"eos_token": "c"} | more)
        own, _, _ = self.read()
        self.assertEqual(own.backend.id_to_token(own.eos_id), eos)

    def test_tokens_that_the_config_adds_to_its_own_tokenizer_are_known(self):
        tk.save_tokenizer(self.own, self.tokenizer)
        first = tk.load_tokenizer(self.own).vocab_size
        kinds = {str(first): {"content": "<x>", "special": True}}
        self.write("tokenizer_config.json", {"eos_token": "<x>", "added_tokens_decoder": kinds})
        own = tk.load_tokenizer(self.own)
        self.assertEqual((own.eos_id, own.encode_marked(["<x>"])[0].ids), (first, [first]))
        # As in transformers: the file's own ids, no older file, no names beyond the model's rows.
        kinds |= {"7": {"content": "<bos>"}, str(first + 9): {"content": "<y>"}}
        self.write("added_tokens.json", {"<pad>": first})
        self.write("tokenizer_config.json", {"added_tokens_decoder": kinds})
        self.write("config.json", {"vocab_size": first})
        self.assertEqual(tk.load_tokenizer(self.own).vocab_size, first)
        self.write("tokenizer_config.json", {})
        self.assertEqual(tk.load_tokenizer(self.own).vocab_size, first)
        self.write("config.json", {"vocab_size": first + 1})
        self.assertEqual(tk.load_tokenizer(self.own).vocab_size, first + 1)
        (self.own / "added_tokens.json").unlink()
        for name in ("additional_special_tokens", "extra_special_tokens"):
            self.write("tokenizer_config.json", {name: ["a", "", {"content": "<x>"}]})
            with self.assertRaisesRegex(ValueError, "must have ids, got '<x>' without one"):
                tk.load_tokenizer(self.own)
        self.write("tokenizer_config.json", {"split_special_tokens": True})
        with self.assertRaisesRegex(ValueError, "split_special_tokens=true"):
            tk.load_tokenizer(self.own)

    @parameterized.parameters("file", "decoder", "list", "dict")
    def test_a_special_token_of_the_vocabulary_alone_is_one_token(self, listed):
        tk.save_tokenizer(self.own, self.tokenizer)
        state = json.loads((self.own / "tokenizer.json").read_text())
        token = state["model"]["vocab"]["<bos>"] = state["added_tokens"].pop()["id"]
        self.write("tokenizer.json", state)
        config = {
            "file": {"eos_token": "<bos>"},
            "decoder": {"added_tokens_decoder": {str(token): {"content": "<bos>"}}},
            "list": {"extra_special_tokens": ["<bos>"]},
            "dict": {"extra_special_tokens": {"repo_token": "<bos>"}},
        }[listed]
        self.write("tokenizer_config.json", config)
        own = tk.load_tokenizer(self.own)
        self.assertEqual(own.encode_marked(["a<bos>"])[0].ids[-1], token)
        self.assertEqual(token in own.encode("a<bos>"), listed == "decoder")
        theirs = _by_transformers(self.own)
        self.assertEqual(theirs("a<bos>")["input_ids"], own.encode_marked(["a<bos>"])[0].ids)

    def test_flags_of_the_config_replace_those_of_the_file_as_in_transformers(self):
        tk.save_tokenizer(self.own, self.tokenizer)
        token = self.tokenizer.backend.token_to_id("<bos>")
        for flags in ({"rstrip": True, "special": True}, {"lstrip": True}, {"special": False}):
            kinds = {str(token): {"content": "<bos>", **flags}}
            self.write("tokenizer_config.json", {"added_tokens_decoder": kinds})
            own, text = tk.load_tokenizer(self.own), "a <bos>\n b"
            theirs = _by_transformers(self.own)
            ids = own.encode_marked([text])[0].ids
            self.assertEqual(theirs(text)["input_ids"], ids)
            self.assertEqual(own.decode(ids), theirs.decode(ids, skip_special_tokens=True))

    def test_templates_know_the_names_of_transformers_5(self):
        tk.save_tokenizer(self.own, self.tokenizer)
        self.write("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<i>"}})
        self.assertEqual(tk.load_tokenizer(self.own).special_tokens["image_token"], "<i>")

    @parameterized.parameters("added_tokens.json", "tokenizer_config.json")
    def test_tokens_that_are_added_without_a_tokenizer_json_are_known(self, name):
        first = tk.load_tokenizer(self.base).vocab_size
        names = {"<x>": first, "<y>": first + 1}
        kinds = {str(token): {"content": one, "special": True} for one, token in names.items()}
        is_map = name == "added_tokens.json"
        self.write(name, names if is_map else {"added_tokens_decoder": kinds})
        own, _, _ = self.read()
        self.assertEqual(own.encode_marked(["<y><x>"])[0].ids, [first + 1, first])
        self.assertNotIn(first, own.encode("<x>"))
        self.write(
            name, {"<z>": 7} if is_map else {"added_tokens_decoder": {"7": kinds[str(first)]}}
        )
        with self.assertRaisesRegex(ValueError, "must have id 7, got .*tokenizer.json"):
            tk.load_tokenizer(self.own, self.base)

    @parameterized.parameters("tokenizer.model", "vocab.json")
    def test_a_folder_with_a_tokenizer_of_another_kind_alone_is_refused(self, name):
        (self.own / name).touch()
        with self.assertRaisesRegex(ValueError, f"must be a .*, got {name} alone: save it so"):
            tk.read_backend(self.own, self.base)
        tk.save_tokenizer(self.own, self.tokenizer)
        file, _ = tk.read_backend(self.own, self.base)
        self.assertEqual(file, self.own / "tokenizer.json")


class FilesTest(FolderTest):
    def test_a_saved_tokenizer_comes_back(self):
        tk.save_tokenizer(self.folder / "new", _TOKENIZER)
        for path in (self.folder / "new", self.folder / "new" / "tokenizer.json"):
            read = tk.load_tokenizer(path)
            self.assertEqual(read[1:6], _TOKENIZER[1:6])
            self.assertEqual(tk.tokenizer_hash(read), tk.tokenizer_hash(_TOKENIZER))
            self.assertNotIn(0, read.encode("<|endoftext|>"))

    def test_hash_tells_vocabularies_and_special_tokens_apart(self):
        other = tk.train_bpe(_TEXTS, vocab_size=262)
        hashes = {tk.tokenizer_hash(t) for t in (_TOKENIZER, other, _TOKENIZER._replace(pad_id=1))}
        self.assertLen(hashes, 3)

    @parameterized.parameters(
        ("<bos> $A", None, True),
        ("<bos> $A", True, True),
        ("$A", None, False),
        ("$A", False, False),
        ("$A <bos>", None, False),
    )
    def test_prompts_begin_as_the_tokenizer_begins_them(self, template, add_bos_token, has_bos):
        backend = tokenizers.Tokenizer.from_str(_TOKENIZER.backend.to_str())
        backend.add_special_tokens(["<bos>"])
        bos = backend.token_to_id("<bos>")
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", bos)]
        )
        tk.save_tokenizer(self.folder, _TOKENIZER._replace(backend=backend))
        config = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<bos>"}}
        if add_bos_token is not None:
            config["add_bos_token"] = add_bos_token
        (self.folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"add_bos_token": not has_bos})
        )
        with self.assertRaisesRegex(ValueError, f"got {not has_bos} where that adds"):
            tk.load_tokenizer(self.folder)
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
        read = tk.load_tokenizer(self.folder)
        self.assertEqual(read.prompt_prefix, (bos,) if has_bos else ())
        self.assertEqual(
            read.encode_prompts(["the cat"]), [[bos] * has_bos + read.encode("the cat")]
        )
        tk.save_tokenizer(self.folder / "again", read)
        again = tk.load_tokenizer(self.folder / "again")
        self.assertEqual(again.prompt_prefix, read.prompt_prefix)
        plain = read._replace(prompt_prefix=())
        self.assertEqual(tk.tokenizer_hash(read) != tk.tokenizer_hash(plain), has_bos)
        row = make_example("Say.", "", "cat")
        encoded = encoding.encode([row], read, template="brief")
        (prompt,) = encoding.encode_prompts([row], read, max_len=99, template="brief")
        self.assertEqual(encoded.tokens[0][: len(prompt)].tolist(), prompt)
        self.assertEqual(prompt[0] == bos, has_bos)
        self.assertEqual(encoded.start_N.tolist(), [len(prompt)])

    @parameterized.parameters(
        ("LlamaTokenizerFast", True, True),
        ("LlamaTokenizer", True, True),
        ("LlamaTokenizerFast", False, False),
        ("Qwen2Tokenizer", False, False),
    )
    def test_a_class_that_heeds_add_bos_token_begins_with_bos(self, kind, is_asked, has_bos):
        """As DeepSeek-R1-Distill is published: its post-processor adds nothing."""
        backend = tokenizers.Tokenizer.from_str(_TOKENIZER.backend.to_str())
        backend.add_special_tokens(["<bos>"])
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
        tk.save_tokenizer(self.folder, _TOKENIZER._replace(backend=backend))
        plain = tk.load_tokenizer(self.folder)
        config = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<bos>"}}
        config |= {"add_bos_token": is_asked, "tokenizer_class": kind}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
        read = tk.load_tokenizer(self.folder)
        expected = (backend.token_to_id("<bos>"),) if has_bos else ()
        self.assertEqual(read.prompt_prefix, expected)
        tk.save_tokenizer(self.folder / "again", read)
        again = tk.load_tokenizer(self.folder / "again")
        self.assertEqual(again.prompt_prefix, expected)
        self.assertEqual(tk.tokenizer_hash(again), tk.tokenizer_hash(read))
        for one in (read, again):
            self.assertEqual(one.encode("the cat"), plain.encode("the cat"))
            (marked,), (own,) = one.encode_marked(["the cat"]), plain.encode_marked(["the cat"])
            self.assertEqual((marked.ids, marked.offsets), (own.ids, own.offsets))

    @parameterized.parameters({"length": 9}, {"pad_to_multiple_of": 8}, {"direction": "left"})
    def test_padding_and_truncation_of_a_saved_tokenizer_change_no_ids(self, **padding):
        """As a script saves it that pads its rows."""
        backend = tokenizers.Tokenizer.from_str(_TOKENIZER.backend.to_str())
        backend.add_special_tokens(["<bos>"])
        bos = backend.token_to_id("<bos>")
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bos)]
        )
        backend.enable_padding(pad_token="<|endoftext|>", pad_id=0, **padding)
        backend.enable_truncation(2)
        tk.save_tokenizer(self.folder, _TOKENIZER._replace(backend=backend))
        config = {"bos_token": "<bos>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
        read = tk.load_tokenizer(self.folder)
        self.assertEqual(read.prompt_prefix, (bos,))
        self.assertEqual(read.encode("the cat sat"), _TOKENIZER.encode("the cat sat"))

    @parameterized.parameters((0, True), (1, False))
    def test_a_place_of_an_image_that_the_model_has_no_row_for_is_ordinary_text(self, more, is_out):
        backend = tokenizers.Tokenizer.from_str(_TOKENIZER.backend.to_str())
        backend.add_special_tokens(["<image>"])
        size = _TOKENIZER.vocab_size
        tk.save_tokenizer(self.folder, _TOKENIZER._replace(backend=backend))
        path = self.folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token": "<image>"}))
        (self.folder / "config.json").write_text(json.dumps({"vocab_size": size + more}))
        (self.folder / "added_tokens.json").write_text(json.dumps({"<image>": size}))
        read = tk.load_tokenizer(self.folder)
        self.assertEqual(read.vocab_size, size + more)
        (marked,) = read.encode_marked(["the <image><|endoftext|>"])
        self.assertEqual(marked.ids[-1], read.eos_id)
        self.assertEqual(max(marked.ids) < size, is_out)
        self.assertEqual(read.decode_marked(marked.ids), "the <image><|endoftext|>")

    def test_missing_and_foreign_files_are_refused(self):
        with self.assertRaisesRegex(ValueError, "a tokenizer must exist, .*tokenizer.json"):
            tk.load_tokenizer(self.folder)
        (self.folder / "tokenizer.json").write_text("{}")
        with self.assertRaisesRegex(ValueError, "must be a tokenizer.json"):
            tk.load_tokenizer(self.folder)
        tk.save_tokenizer(self.folder, _TOKENIZER)
        (self.folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        with self.assertRaisesRegex(ValueError, "none with the name \\['</s>'\\]"):
            tk.load_tokenizer(self.folder)

    @parameterized.parameters(
        ("pythia", 50_277, 0, 1),
        ("gpt2", 50_257, 50_256, 50_256),
        ("olmo2", 100_278, 100_257, 100_277),
    )
    def test_published_tokenizers_have_their_known_ids(self, name, vocab_size, eos_id, pad_id):
        tokenizer = tk.load_tokenizer(shared_data() / "tokenizers" / name)
        self.assertEqual(tokenizer[1:5], (eos_id, pad_id, vocab_size, ()))  # and none adds BOS
        text = "It is 3 o'clock.\n\n  def f(x):\n\treturn x  # done" * 20
        ids = tokenizer.encode(text)
        self.assertEqual(tokenizer.decode(ids), text)
        self.assertGreater(len(ids), 200)  # GPT-2's own file would have cut at 50
