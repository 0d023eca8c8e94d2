"""Token ids and targets of conversations, passages and rows of ids, counted by hand."""

import contextlib
import functools
import json
import pathlib

import numpy as np
import tokenizers
from absl.testing import parameterized
from folders import FolderTest

from raslik_jax.data.batches import make_batch, plan_rows
from raslik_jax.data.contents import Conversation
from raslik_jax.data.examples import answered, content_of, make_example
from raslik_jax.data.read.rows import COMMON, FIELDS, FORMATS, Row
from raslik_jax.data.tokens import encoding, tokenization
from raslik_jax.data.tokens.chat import ChatTemplate, render
from raslik_jax.data.tokens.masking import (
    as_trained,
    describe_rows,
    end_ids,
    read_answers,
)
from raslik_jax.data.tokens.prompts import (
    TEMPLATES,
    find_template,
    require_system,
    settle_template,
    template_hash,
)
from raslik_jax.data.tokens.tokenization import Tokenizer

_WORDS = "<e> <u> <a> <s> hi ho yes no be".split()
# <u> hi <e> <a> yes <e>: a word a token, and the end of a turn is EOS.
_PLAIN = (
    "{% for m in messages %}<{{ m.role[0] }}> {{ m.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<a> {% endif %}"
)
_MARKED = (
    "{% for m in messages %}<{{ m.role[0] }}> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <e>{% endgeneration %} "
    "{% else %}{{ m.content }} <e> {% endif %}{% endfor %}"
)
# Earlier answers lose their thought, as with Qwen 3.
_FORGETFUL = (
    "{% for m in messages %}<{{ m.role[0] }}> {% if m.role == 'assistant' and loop.last %}be "
    "{% endif %}{{ m.content }} <e> {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
)
# A system prompt of its own, and no rendering of nothing, as with Qwen 2.5.
_GREETING = "{% if messages[0]['role'] != 'system' %}<s> ho <e> {% endif %}" + _PLAIN
# EOS ends the whole, as with Phi-3.
_ENDED = _PLAIN.replace("<e>", "<s>").replace("<a> {% endif", "<a> {% else %}<e>{% endif")
# The system prompt is part of the last question, and answers have no header, as with Mistral.
_MOVED = (
    "{% for m in messages %}{% if m.role == 'user' %}<u> "
    "{% if not messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }} "
    "{% elif m.role == 'assistant' %}{{ m.content }} <e> {% endif %}{% endfor %}"
)
_RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def _tokenizer(template="", prefix=()):
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="be")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(_WORDS[:4])
    backend.encode_special_tokens = True
    return Tokenizer(backend, 0, 0, len(_WORDS), prefix, template, {"eos_token": "<e>"})


def _messages(*texts, system=""):
    roles = ["system"] * bool(system) + ["user", "assistant"] * 9
    texts = (system, *texts) if system else texts
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def _rows(name, *records, needs_output=True):
    rows = []
    for record in records:
        row = Row(record, {field: field for field in FIELDS if field not in COMMON})
        made = FORMATS[name].read(row, needs_output)
        rows.append(made._replace(example_id=f"{len(rows)}", place=7))
    return rows


def _shown(rows, tokenizer, template="chat", **options):
    """Returns each row in words, its targets in capitals."""
    encoded = encoding.encode(rows, tokenizer, template=template, **options)
    batch = make_batch(encoded, plan_rows(encoded, np.arange(len(rows))))
    shown = []
    for ids, mask, length in zip(
        batch.tokens_BL, batch.target_mask_BL, encoded.lengths_N, strict=True
    ):
        pairs = zip(ids[:length], mask[:length], strict=True)
        shown.append(" ".join(_WORDS[i].upper() if hit else _WORDS[i] for i, hit in pairs))
    return shown


_TEXTS = ["The sky is blue today.", "2+2=4\n", "He said: blue blue sky", "The sky, the sky"] * 3


def _pieces(kind):
    """Returns a small BPE on the texts above, with blanks as a kind of tokenizer has them."""
    if kind == "bytes":
        return tokenization.train_bpe(_TEXTS, vocab_size=300)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<e>"))
    if kind == "metaspace":
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    else:  # as Llama 2 has it
        parts = tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")
        backend.normalizer = tokenizers.normalizers.Sequence([*parts])
        parts = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()
        strip = tokenizers.decoders.Strip(" ", 1, 0)
        backend.decoder = tokenizers.decoders.Sequence([*parts, strip])
    special = ["<e>", "<s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=48, special_tokens=special, show_progress=False, max_token_length=5
    )
    backend.train_from_iterator(_TEXTS, trainer)
    backend.encode_special_tokens = True
    return Tokenizer(backend, 0, 0, backend.get_vocab_size(), (1,))


class AnswersTest(parameterized.TestCase):
    @parameterized.product(
        kind=("bytes", "metaspace", "llama"),
        said=(" blue today.", " blue.\n", " blue", "\nblue sky", ", the sky"),
    )
    def test_an_answer_to_a_text_has_the_ids_that_were_said(self, kind, said):
        tokenizer = _pieces(kind)
        rows = _rows("prompt_completion", {"prompt": "The sky is"}, needs_output=False)
        template = find_template("plain", tokenizer)
        asked = encoding.encode_prompts(rows, tokenizer, max_len=99, template="plain")
        (whole,) = tokenizer.encode_marked(["The sky is" + said])
        ids = [*tokenizer.prompt_prefix, *whole.ids][len(asked[0]) :]
        (text,) = read_answers(rows, asked, [ids], tokenizer, template)
        self.assertEqual(text, said)
        traced = encoding.encode([answered(rows[0], text)], tokenizer, template="plain")
        self.assertEqual(traced.tokens[0].tolist(), [*asked[0], *ids, tokenizer.eos_id])
        self.assertEqual(traced.start_N.tolist(), [len(asked[0])])

    def test_a_call_in_a_chat_keeps_its_special_token(self):
        source = "{% for m in messages %}{{ m.content }} {% endfor %}"
        tokenizer = _tokenizer(source)
        call = f"{_WORDS[1]} {_WORDS[5]}"
        (row,) = _rows("messages", {"messages": _messages(_WORDS[6], call)})
        asked, said = [[6]], [[1, 5]]
        (text,) = read_answers([row], asked, said, tokenizer, find_template("chat", tokenizer))
        self.assertEqual(text, call)

    @parameterized.product(kind=("bytes", "metaspace", "llama"), input=("", "blue"))
    def test_a_question_to_texts_is_a_text(self, kind, input):
        tokenizer, (row,) = _pieces(kind), _rows("text", {"text": "The sky is blue"})
        template = find_template("plain", tokenizer)
        asked = f"The sky is\n{input}" if input else "The sky is"
        (whole,) = tokenizer.encode_marked([asked + " blue"])
        for said in (" blue", ""):
            query = as_trained(make_example("The sky is", input, said), row, template)
            query = query if said else answered(query, " blue")
            self.assertEqual(query[1:4], ("The sky is", input, " blue"))
            traced = encoding.encode([query], tokenizer, template="plain")
            expected = [*tokenizer.prompt_prefix, *whole.ids, tokenizer.eos_id]
            self.assertEqual(traced.tokens[0].tolist(), expected)
        text = _rows("text", {"text": "The sky is blue"})[0]
        for like, name in (
            (make_example("The sky is", "", "x"), "brief"),
            (talk := _rows("messages", {"messages": _messages("hi", "no")})[0], "chat"),
        ):
            with self.assertRaisesRegex(ValueError, "of the form of the training rows"):
                as_trained(text, like, find_template(name, tokenizer))
        # Other queries are what they are, and so are all where rows are instructions.
        self.assertEqual(as_trained(talk, row, template), talk)
        one = make_example("The sky is", input, " blue")
        for like, name in ((one, "plain"), (one, "brief"), (talk, "chat")):
            self.assertEqual(as_trained(one, like, find_template(name, tokenizer)), one)

    @parameterized.parameters("bytes", "metaspace", "llama")
    def test_blanks_belong_to_answers_but_in_chats(self, kind):
        tokenizer, row = _pieces(kind), make_example("The sky is", "", "")
        (whole,) = tokenizer.encode_marked(["The sky is blue"])
        asked = encoding.encode_prompts([row], tokenizer, max_len=99, template="plain")
        ids = [*tokenizer.prompt_prefix, *whole.ids][len(asked[0]) :]
        for name in ("plain", "brief", "chat"):
            template = find_template(name, tokenizer)
            (text,) = read_answers([row], asked, [ids], tokenizer, template)
            self.assertEqual(text.strip(), "blue")
            self.assertEqual(text, "blue" if name == "chat" else tokenizer.decode(ids))
            if name != "chat":
                (prompt,) = encoding.encode_prompts([row], tokenizer, max_len=99, template=name)
                traced = encoding.encode([answered(row, text)], tokenizer, template=name)
                self.assertEqual(traced.tokens[0].tolist(), [*prompt, *ids, tokenizer.eos_id])


class MaskTest(FolderTest):
    @parameterized.named_parameters(
        ("prefixes", _PLAIN, "<u> hi <e> <a> YES <E> <u> ho <e> <a> NO <E>"),
        ("generation", _MARKED, "<u> hi <e> <a> YES <E> <u> ho <e> <a> NO <E>"),
        ("ended", _ENDED, "<u> hi <s> <a> YES <S> <u> ho <s> <a> NO <S> <E>"),
        ("thoughts", _FORGETFUL, "<u> hi <e> <a> YES <E> <u> ho <e> <a> BE NO <E>"),
    )
    def test_every_turn_of_the_assistant_is_learned(self, template, expected):
        rows = _rows("messages", {"messages": _messages("hi", "yes", "ho", "no")})
        self.assertEqual(_shown(rows, _tokenizer(template)), [expected])
        head, last = expected.rsplit("<a>", 1)
        only = head.lower() + "<a>" + last
        self.assertEqual(_shown(rows, _tokenizer(template), only_last=True), [only])

    @parameterized.parameters("", "yes")
    def test_a_muted_answer_is_not_learned_even_if_it_has_no_text(self, text):
        talk = _messages("hi", text, "ho", "no")
        rows = _rows("messages", {"messages": [talk[0], {**talk[1], "weight": 0}, *talk[2:]]})
        source = _MARKED.replace("{{ m.content }} <e>{% end", "{{ m.content or 'be' }} <e>{% end")
        expected = f"<u> hi <e> <a> {text or 'be'} <e> <u> ho <e> <a> NO <E>"
        self.assertEqual(_shown(rows, _tokenizer(source)), [expected])

    @parameterized.named_parameters(
        ("plain", _PLAIN, ""), ("own_system", _GREETING, "<s> ho <e> "), ("marked", _MARKED, "")
    )
    def test_an_answer_that_a_conversation_begins_with_is_learned(self, template, before):
        said = [{"role": "assistant", "content": "yes"}, *_messages("hi", "no")]
        rows = _rows("messages", {"messages": said})
        expected = f"{before}<a> YES <E> <u> hi <e> <a> NO <E>"
        self.assertEqual(_shown(rows, _tokenizer(template)), [expected])

    def test_system_prompts_and_histories_are_rendered(self):
        tokenizer = _tokenizer(_PLAIN)
        talk = {"messages": _messages("hi", "yes", "ho", "no", system="be")}
        history = {"instruction": "ho", "output": "no", "history": [["hi", "yes"]], "system": "be"}
        expected = "<s> be <e> <u> hi <e> <a> YES <E> <u> ho <e> <a> NO <E>"
        self.assertEqual(_shown(_rows("messages", talk), tokenizer), [expected])
        self.assertEqual(_shown(_rows("alpaca", history), tokenizer), [expected])

    @parameterized.named_parameters(
        ("moved_system", _MOVED, "<u> hi YES <E> <u> be ho NO <E>"),
        (
            "no_generation_prompt",
            _PLAIN.partition("{% if add_gen")[0],
            "<s> be <e> <u> hi <e> <a> YES <E> <u> ho <e> <a> NO <E>",
        ),
    )
    def test_no_question_and_no_header_is_learned(self, template, expected):
        talk = _messages("hi", "yes", "ho", "no", system="be")
        rows, tokenizer = _rows("messages", {"messages": talk}), _tokenizer(template)
        self.assertEqual(_shown(rows, tokenizer), [expected])
        (asked,) = encoding.encode_prompts(rows, tokenizer, max_len=99, template="chat")
        before = expected.lower().removesuffix(" no <e>")
        self.assertEqual(" ".join(_WORDS[i] for i in asked), before)

    def test_rows_are_named_whose_thoughts_a_template_leaves_out(self):
        source = _PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
        answers = "<think> ho </think> yes", "no"
        rows = _rows("messages", *({"messages": _messages("hi", one)} for one in answers))
        encoded = encoding.encode(rows, _tokenizer(source), template="chat")
        self.assertEqual(encoded.dropped, {"thought": ["0"]})
        self.assertEqual(encoding.join([encoded, encoded]).dropped, {"thought": ["0", "0"]})
        self.assertIn("1 of 2 rows ('0')", encoding.describe_dropped(encoded, "rows"))

    def test_a_completion_is_all_that_follows_the_prompt(self):
        prompt = _messages("hi", "yes", "ho")
        rows = _rows("prompt_completion", {"prompt": prompt, "completion": _messages("", "no")[1:]})
        for template in (_PLAIN, _MARKED + "{% if add_generation_prompt %}<a> {% endif %}"):
            self.assertEqual(
                _shown(rows, _tokenizer(template)), ["<u> hi <e> <a> yes <e> <u> ho <e> <a> NO <E>"]
            )

    def test_passages_end_once_and_begin_as_the_tokenizer_begins(self):
        tokenizer = _tokenizer(prefix=(3,))
        rows = [
            *_rows("prompt_completion", {"prompt": "hi ho", "completion": " yes"}),
            *_rows("prompt_completion", {"prompt": "hi ho", "completion": " yes <e>"}),
            *_rows("text", {"text": "hi ho"}),
        ]
        self.assertEqual(
            _shown(rows, tokenizer, "alpaca"),
            ["<s> hi ho YES <E>", "<s> hi ho YES <E>", "<s> HI HO <E>"],
        )
        self.assertEqual(_shown(rows[2:], _tokenizer(), "alpaca"), ["hi HO <E>"])

    def test_decoding_starts_where_the_answer_does(self):
        rows = [
            *_rows("messages", {"messages": _messages("hi", "yes", "ho")}, needs_output=False),
            *_rows("prompt_completion", {"prompt": "hi ho", "completion": " yes"}),
            make_example("hi", "ho", "yes"),
        ]
        tokenizer = _tokenizer(_PLAIN, prefix=(3,))
        ids = encoding.encode_prompts(rows, tokenizer, max_len=99, template="chat")
        self.assertEqual(
            [" ".join(_WORDS[i] for i in row) for row in ids],
            ["<u> hi <e> <a> yes <e> <u> ho <e> <a>", "<s> hi ho", "<u> hi ho <e> <a>"],
        )
        # A query that waits for its answer is encoded up to there.
        self.assertEqual(_shown(rows[:1], tokenizer), ["<u> hi <e> <a> yes <e> <u> ho <e> <a> <E>"])
        with self.assertRaisesRegex(ValueError, "must have a prompt"):
            encoding.encode_prompts(
                _rows("text", {"text": "hi"}), tokenizer, max_len=99, template="chat"
            )

    def test_one_rendering_is_of_all_instructions(self):
        records = [{"instruction": "hi", "output": "yes"}, {"instruction": "ho", "output": "no"}]
        more = {"instruction": "hi", "output": "no", "system": "be"}
        framed, mixed = _rows("alpaca", *records), _rows("alpaca", *records, more)
        self.assertEqual(settle_template("auto", lambda: framed), "auto")
        self.assertEqual(settle_template("auto", lambda: mixed), "chat")
        tokenizer = _tokenizer(_PLAIN)
        self.assertEqual(
            _shown(mixed, tokenizer, "chat"),
            ["<u> hi <e> <a> YES <E>", "<u> ho <e> <a> NO <E>", "<s> be <e> <u> hi <e> <a> NO <E>"],
        )
        self.assertIn("3 rows of conversations", describe_rows(mixed, "chat"))
        muted = [framed[0], framed[1]._replace(is_muted=True)]
        self.assertIn(
            "2 rows of instructions, by the template alpaca", describe_rows(muted, "auto")
        )
        self.assertIn("1 of them", describe_rows(muted, "auto"))
        ends = {"alpaca": "('### Response:' before", "alpaca_newline": r"('### Response:\n' before"}
        for name, end in ends.items():
            self.assertIn(f"by the template {name} {end}", describe_rows(framed, name))
        frames = [TEMPLATES[name].with_input for name in ends]
        self.assertEqual(frames[0] + "\n", frames[1])
        # A query that a frame does not say would be asked in a rendering that no row has.
        for query in (mixed[2], *_rows("messages", {"messages": _messages("hi", "no")})):
            for encode in (encoding.encode, functools.partial(encoding.encode_prompts, max_len=99)):
                with self.assertRaisesRegex(ValueError, "needs rows.*=chat"):
                    encode([*framed, query], tokenizer, template="auto")

    @parameterized.parameters(
        ("alpaca", _PLAIN, (0,)), ("chat", _PLAIN.replace("<e>", "<s>"), (0, 3)),
        ("chat", _PLAIN.replace("<e>", "be"), (0,)), ("chat", _RAISES, (0,)),
    )  # fmt: skip
    def test_an_answer_ends_with_eos_or_as_the_template_ends_it(self, name, source, expected):
        tokenizer = _tokenizer(source)
        self.assertEqual(end_ids(tokenizer, find_template(name, tokenizer)), expected)

    @parameterized.parameters(
        ("auto", "messages", {"messages": _messages("hi", "no")}, "chat"),
        ("auto", "prompt_completion", {"prompt": "hi", "completion": "no"}, "plain"),
        ("auto", "text", {"text": "hi"}, "plain"),
        ("auto", "alpaca", {"instruction": "hi", "output": "no"}, "auto"),
        ("brief", "text", {"text": "hi"}, "brief"),
    )
    def test_queries_are_asked_as_the_rows_were_trained(self, name, row_format, record, expected):
        (row,) = _rows(row_format, record)
        self.assertEqual(settle_template(name, lambda: [row]), expected)

    def test_rows_with_holes_survive_cuts_files_and_choices(self):
        talk = {"messages": _messages("hi", "yes", "ho", "no")}
        rows = [*_rows("messages", talk), make_example("hi", "", "yes")]
        whole = encoding.encode(rows, _tokenizer(_PLAIN), template="chat")
        self.assertEqual(whole.num_targets_N.tolist(), [4, 2])
        cut = whole.cut(7)
        self.assertEqual(cut.num_targets_N.tolist(), [2, 2])
        self.assertIsNone(whole.cut(99, targets="all").masks)
        self.assertEqual(whole.cut(99, targets="all").num_targets_N.tolist(), [11, 5])
        path = self.folder / "rows.npz"
        encoding.save_parts(path, [whole])
        for again in (encoding.load_encoded(path), whole.take(np.array([0, 1]))):
            for got, expected in zip(again.masks, whole.masks, strict=True):
                np.testing.assert_array_equal(got, expected)
        framed = encoding.encode(rows[1:], _tokenizer(_PLAIN), template="chat")
        self.assertIsNone(framed.masks)
        joined = encoding.join([framed, whole])
        self.assertEqual(joined.num_targets_N.tolist(), [2, 4, 2])
        self.assertIsNone(encoding.join([framed, framed]).masks)
        (mask,) = whole.named([rows[1].example_id]).masks
        self.assertEqual(mask.tolist(), [False] * 4 + [True] * 2)

    @parameterized.named_parameters(
        ("raises", _RAISES, "chat", _messages("hi", "no", system="be"), "at 7 .*no system"),
        ("none", "", "chat", _messages("hi", "no"), "needs a tokenizer with a chat template"),
        ("frame", _PLAIN, "alpaca", _messages("hi", "no"), "alpaca has no place for conv.*=chat"),
        ("parts", "{{ messages[0].content }} <a>", "chat", _messages("hi", "no"), "with 'no'"),
        ("broken", "{% for %}", "chat", _messages("hi", "no"), "at 7 .*chat template refuses"),
        (
            "unmarked",
            "{{ messages[1].content }}{% if 0 %}{% generation %}{% endgeneration %}{% endif %}",
            "chat",
            _messages("hi", "no"),
            "at 7 .*no learned token",
        ),
    )
    def test_what_cannot_be_rendered_is_one_short_sentence(self, source, name, messages, message):
        rows = _rows("messages", {"messages": messages})
        with self.assertRaisesRegex(ValueError, message) as caught:
            encoding.encode(rows, _tokenizer(source), template=name)
        self.assertLessEqual(len(str(caught.exception)), 300)

    @parameterized.parameters(
        (_PLAIN, "chat", ""),
        (_RAISES + _PLAIN, "chat", "the chat template refuses a system prompt: leave out"),
        (_PLAIN.replace("messages %}<", "messages[1:] %}<"), "chat", "writes no system prompt"),
        ("", "chat", "needs a tokenizer with a chat template"),
        (_PLAIN, "auto", "auto needs rows"),
        (_PLAIN, "brief", "brief has no place for conv.*, system prompts"),
    )
    def test_a_system_prompt_is_asked_only_of_a_template_that_writes_it(self, source, name, why):
        template = find_template(name, _tokenizer(source))
        with self.assertRaisesRegex(ValueError, why) if why else contextlib.nullcontext():
            require_system(template, name)

    @parameterized.parameters(
        ('{{ strftime_now("%d %B %Y, %A") }}', "26 July 2024, Friday"),
        ("{% set now = strftime_now %}{{ now('%Y-%m-%d').split('-')[2] }}", "26"),
        ("{% macro day(how) %}{{ strftime_now(how) }}{% endmacro %}{{ day('%-d %b') }}", "26 Jul"),
        ("{% if strftime_now is defined %}{{ date_string }}{% endif %}", "26 Jul 2024"),
    )
    def test_a_template_writes_the_same_day_whenever_it_is_rendered(self, source, day):
        talk = Conversation(tuple(_messages("hi", "yes")))
        template = ChatTemplate("\n\n" + source + "." + _MARKED, {})
        found, plain = render(template, talk), render(ChatTemplate(_MARKED, {}), talk)
        self.assertEqual(found.text, f"\n\n{day}.{plain.text}")
        shift = len(found.text) - len(plain.text)
        ((start, end),) = plain.spans
        self.assertEqual(found.spans, [(start + shift, end + shift)])

    def test_a_template_of_the_users_own_comes_before_the_tokenizers(self):
        path = str(self.folder / "own.jinja")
        pathlib.Path(path).write_text(_PLAIN)
        rows = _rows("messages", {"messages": _messages("hi", "no")})
        self.assertEqual(_shown(rows, _tokenizer(_RAISES), path), ["<u> hi <e> <a> NO <E>"])
        own = find_template(path, _tokenizer(_RAISES))
        self.assertEqual(
            template_hash(own), template_hash(find_template("chat", _tokenizer(_PLAIN)))
        )
        hashes = {template_hash(find_template(name, _tokenizer(_PLAIN))) for name in TEMPLATES}
        self.assertLen(hashes, len(TEMPLATES))


class MovedSystemTest(parameterized.TestCase):
    def test_a_system_prompt_that_only_a_question_has_is_in_no_row_and_not_asked(self):
        # As the published templates of Mistral 7B v0.3 and Nemo do.
        source = (
            "{% for m in messages %}{% if m.role == 'user' %}<u> "
            "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} "
            "{% endif %}{{ m.content }} <a> {% elif m.role == 'assistant' %}{{ m.content }} <e> "
            "{% endif %}{% endfor %}"
        )
        tokenizer = _tokenizer(source)
        for talk, expected in (
            (_messages("hi", "no", system="be"), "<u> hi <a> NO <E>"),
            (
                _messages("hi", "no", "ho", "yes", system="be"),
                "<u> hi <a> NO <E> <u> ho <a> YES <E>",
            ),
        ):
            rows = _rows("messages", {"messages": talk})
            self.assertEqual(_shown(rows, tokenizer), [expected])
            encoded = encoding.encode(rows, tokenizer, template="chat", only_last=True)
            (asked,) = encoding.encode_prompts(rows, tokenizer, max_len=99, template="chat")
            self.assertEqual(encoded.tokens[0][: encoded.start_N[0]].tolist(), asked)
            self.assertEqual([*encoded.dropped], ["system prompt"])


class MutedTest(parameterized.TestCase):
    def test_only_turns_with_a_flag_are_targets(self):
        talk = _messages("hi", "no", "ho", "yes")
        talk[1]["weight"] = 0
        (row,) = _rows("messages", {"messages": talk})
        expected = "<u> hi <e> <a> no <e> <u> ho <e> <a> YES <E>"
        self.assertEqual(_shown([row], _tokenizer(_PLAIN)), [expected])

    @parameterized.parameters("chat", "auto")
    def test_a_muted_row_has_no_target_under_any_loss(self, name):
        rows = _rows("alpaca", *({"instruction": "hi", "output": "yes"} for _ in range(2)))
        rows[0] = rows[0]._replace(is_muted=True)
        encoded = encoding.encode(rows, _tokenizer(_PLAIN), template=name)
        for targets in ("response", "all"):
            cut = encoded.cut(99, targets=targets)
            self.assertEqual((cut.num_targets_N > 0).tolist(), [False, True])
            self.assertEqual(cut.with_answers().ids, ("1",))
        self.assertEqual(encoding.describe_cuts(encoded, "rows", max_len=99), "")
        encoding.require_answers(encoded, "rows", max_len=99)


class ToolsTest(parameterized.TestCase):
    def test_a_template_reads_the_tools_and_options_of_a_row(self):
        source = "{{ tools[0].name }} {{ mood }} " + _PLAIN
        record = {"messages": _messages("hi", "no"), "chat_template_kwargs": {"mood": "be"}}
        record["tools"] = json.dumps([{"name": "ho"}])
        rows = _rows("messages", record)
        self.assertEqual(_shown(rows, _tokenizer(source)), ["ho be <u> hi <e> <a> NO <E>"])

    def test_nulls_of_calls_and_tools_are_written_and_those_of_messages_are_not(self):
        source = "{{ tools|tojson }}{{ messages[0].tool_calls|tojson }} " + _PLAIN
        call = {"name": "f", "arguments": {"a": 1, "b": None}}
        record = {"messages": _messages("hi", "no"), "tools": [{"name": "f", "x": {"b": None}}]}
        record["messages"][0] |= {"tool_calls": [call], "name": None}
        (row,) = _rows("messages", record)
        source = "{{ 'name' in messages[0] }}" + source
        text = render(ChatTemplate(source, {}), content_of(row)).text
        calls = '[{"name": "f", "arguments": {"a": 1, "b": null}}]'
        expected = f'False[{{"name": "f", "x": {{"b": null}}}}]{calls} <u> hi'
        self.assertTrue(text.startswith(expected), text)

    def test_an_empty_list_of_tools_is_none_of_a_row_without_tools(self):
        source = "{{ 'no' if tools is none else 'ho' }} " + _PLAIN
        rows = [{"messages": _messages("hi", "no"), "tools": tools} for tools in ([], "[]", None)]
        shown = [_shown(_rows("messages", row), _tokenizer(source))[0] for row in rows]
        self.assertEqual([text.split()[0] for text in shown], ["ho", "ho", "no"])
        turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}]
        (row,) = _rows("sharegpt", {"conversations": turns, "tools": "[]"})  # LLaMA-Factory's
        self.assertEqual(content_of(row).options, {})

    def test_messages_and_tools_that_the_template_leaves_out_are_said(self):
        source = _PLAIN.replace("for m in messages", "for m in messages if m.role in roles")
        others = [{"role": "developer", "content": "Be kind."}, {"role": "tool", "content": '"7"'}]
        record = {"messages": [others[0], *_messages("hi", "no"), others[1], *_messages("a", "b")]}
        record["tools"] = [{"type": "function", "function": {"name": "look"}}]
        for roles, expected in (
            (["user", "assistant"], {"developer message", "tool message", "tools"}),
            (["user", "assistant", "developer", "tool"], {"tools"}),
        ):
            (row,) = _rows("messages", record | {"chat_template_kwargs": {"roles": roles}})
            found = render(ChatTemplate(source, {}), content_of(row))
            self.assertEqual({*found.dropped}, expected)

    def test_a_call_of_the_older_key_is_said_to_be_left_out(self):
        messages = _messages("hi", "", "ho", "yes")
        messages[1] = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
        (row,) = _rows("messages", {"messages": messages})
        source = _PLAIN.replace("m.content", "m.content or 'no'")
        encoded = encoding.encode([row], _tokenizer(source), template="chat")
        self.assertEqual(encoded.dropped, {"tool call": ["0"]})
