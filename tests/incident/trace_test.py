"""What `raslik trace` and `raslik unlearn` say and draw, without a model."""

import json
import shutil

import numpy as np
import pytest
from finished import write_manifest

from raslik_jax.base.files import read_json_lines, write_json
from raslik_jax.base.settings import SettingsError, replaced
from raslik_jax.config import Config, MeshConfig, to_json
from raslik_jax.data import toy_model
from raslik_jax.data.examples import HELD_OUT, Example, make_example, write_examples
from raslik_jax.data.read import sources
from raslik_jax.data.read.rows import FIELDS, FORMATS, Row, detect_format
from raslik_jax.incident import configuring, making, trace, unlearn
from raslik_jax.report import drawing, figures, rows
from raslik_jax.run import artifacts, plan, written


def _scored(folder, num=20):
    rows = [make_example(f"q{n}", "", str(n)) for n in range(num)]
    for name in ("corpus", "retrieve/influence", "retrieve/sizes"):
        (folder / name).mkdir(parents=True)
    write_examples(folder / "corpus" / "train.jsonl", rows)
    np.save(folder / "retrieve" / "influence" / "influence.npy", np.linspace(0.3, -0.3, num))
    cut = {"num_forget": 9, "num_out": 9, "middle": 0.5, "edge": 0.6, "gap": 0.1}
    (folder / "retrieve" / "sizes" / "cut.json").write_text(json.dumps(cut))


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn, in place of pictures."""
    found = []
    monkeypatch.setattr(figures, "draw_cut", lambda score_N, **what: found.append(what))
    monkeypatch.setattr(drawing, "save_figure", lambda figure, path, **how: (f"{path}.png", None))
    return found


@pytest.mark.parametrize("is_traced", [True, False])
def test_where_no_row_is_found_the_rows_and_the_band_are_shown_and_no_way_on(
    tmp_path, monkeypatch, drawn, is_traced
):
    _scored(tmp_path)
    config = replaced(Config(), {"evaluate.traced": is_traced, "retrieve.select": "gap"})
    if is_traced:
        (tmp_path / "retrieve" / "traced").mkdir()
        told = {"id": "q", "traced": "bad", "nll": 4.5, "nats": [4.5], "output": "good"}
        (tmp_path / "retrieve" / "traced" / "finetuned.jsonl").write_text(json.dumps(told))

    monkeypatch.setattr(trace, "make_config", lambda options: config)
    monkeypatch.setattr(making, "make", lambda *args, **how: "no row taught it")
    found = trace.trace(prompt="x", workdir=tmp_path, top=2)
    said = str(found)
    assert found.finding and not (found.forget or found.held_out)
    assert ("4.50 nats a token under the model" in said) == is_traced
    assert "   1. +0.3000" in said and "   3." not in said and "forget" not in said
    assert "finding: no row taught it." in said and "go on" not in said
    assert drawn == [{"num_forget": 0, "middle": 0.5, "edge": 0.6}]


def test_the_picture_has_the_number_that_was_given(tmp_path, drawn):
    _scored(tmp_path)
    for changes, is_of_the_cut in (
        ({"retrieve.select": "gap"}, True),
        ({"retrieve.select": "gap", "retrieve.num_forget": 4}, False),
        ({"retrieve.select": "count"}, False),
    ):
        found = trace.TraceResult(workdir=tmp_path, config=replaced(Config(), changes), finding="")
        assert trace.draw(found, 4).endswith("scores.png")
        place = drawn.pop()
        assert place["num_forget"] == 4 and 0 < place["edge"]
        assert ((place["middle"], place["edge"]) == (0.5, 0.6)) == is_of_the_cut


def test_few_rows_have_no_picture(tmp_path, drawn):
    _scored(tmp_path, num=9)
    found = trace.TraceResult(workdir=tmp_path, config=Config(), finding="")
    assert trace.draw(found, 4).endswith("because 9 rows are too few")
    assert drawn == []


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "a", "output": "b"}, {"instruction": "Q", "output": "A"}),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "messages"),
        ({"prompt": "a", "completion": "b"}, {"prompt": "Q", "completion": "A"}),
        ({"text": "a"}, {"prompt": "Q", "completion": "A"}),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_what_is_traced_is_read_again_beside_rows_of_every_format(tmp_path, row, asked, is_named):
    if asked == "messages":
        answer = {"role": "assistant", "content": "A"}
        asked = {"messages": [{"role": "user", "content": "Q"}, answer]}
        row = {**row, next(iter(row)): [*next(iter(row.values())), _said(row)]}
    train = tmp_path / "train.jsonl"
    train.write_text(f"{json.dumps(row)}\n" * 100 + '{"no": "row"}\n')
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(train)}
    own |= {"corpus.records.queries_file": str(tmp_path / "queries.jsonl")}
    if is_named:
        name = "sharegpt" if "conversations" in row else None
        own["corpus.records.format"] = name or next(n for n in FORMATS if row.keys() & _OWN[n])
    config = replaced(Config(), own)
    trace.write_query(trace.TraceOptions(prompt="Q", response="A"), config)
    assert json.loads((tmp_path / "queries.jsonl").read_text()) == asked | {"split": "retrieval"}
    train.write_text(json.dumps(row) + "\n")
    (query,) = config.corpus.load(seed=0).queries["retrieval"]
    assert (query.instruction, query.output) == ("Q", "A")


_OWN = {name: {*record.names} for name, record in FORMATS.items()}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"instruction": "a", "output": "b"}, {"instruction": "Q", "output": "A", "system": "S"}),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_a_system_prompt_stands_before_the_traced_prompt(row, asked):
    if asked == "messages":
        said = zip(("system", "user", "assistant"), "SQA", strict=True)
        asked = {"messages": [{"role": role, "content": text} for role, text in said]}
    assert trace.as_row(_like(row), "Q", "A", "S") == asked


@pytest.mark.parametrize(
    "row", [{"instruction": "a", "input": "i", "output": "b"}, {"prompt": "a", "completion": "b"}]
)
def test_the_input_of_a_prompt_is_framed_as_the_rows_are(row, tmp_path):
    train, queries = tmp_path / "train.jsonl", tmp_path / "q.jsonl"
    train.write_text(json.dumps(row) + "\n")
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(train)}
    config = replaced(Config(), own | {"corpus.records.queries_file": str(queries)})
    options = trace.TraceOptions(prompt="Q", input="I", response="A")
    if "prompt" in row:
        with pytest.raises(ValueError, match="--input needs rows with an instruction and an input"):
            trace.write_query(options, config)
    else:
        trace.write_query(options, config)
        (query,) = config.corpus.load(seed=0).queries["retrieval"]
        assert query[1:4] == ("Q", "I", "A")


@pytest.mark.parametrize("first", [["S"], []])
def test_a_prompt_without_the_system_prompt_of_the_rows_is_said(first, tmp_path, capsys):
    roles = ("system", "user", "assistant")[-2 - len(first) :]
    said = zip(roles, [*first, "a", "b"], strict=True)
    talk = [{"role": role, "content": text} for role, text in said]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(tmp_path / "train.jsonl")}
    own |= {"corpus.records.queries_file": str(tmp_path / "q.jsonl")}
    trace.write_query(trace.TraceOptions(prompt="Q", response="A"), replaced(Config(), own))
    assert ("give it as --system" in capsys.readouterr().out) == bool(first)


def _like(row):
    read = Row(row, {field: field for field in FIELDS})
    return FORMATS[detect_format(read)].read(read, False)


@pytest.mark.parametrize("answer", ["", "A"])
def test_a_prompt_has_the_options_that_the_rows_have(answer):
    options = {"tools": [{"name": "look"}], "chat_template_kwargs": {"enable_thinking": False}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (user, said) = ({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"})
    like = _like({"messages": talk, **options})
    assert trace.as_row(like, "Q", answer) == {
        "messages": [user, said] if answer else [user],
        **options,
    }
    like = _like({"prompt": talk[:1], "completion": talk[1:], **options})
    expected = {"prompt": [user], "completion": [said]} if answer else {"prompt": [user]}
    assert trace.as_row(like, "Q", answer) == expected | options


def test_rows_that_are_framed_have_no_system_prompt(tmp_path):
    train, base = tmp_path / "train.jsonl", str(toy_model.model_folder() / "base")
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(train)}
    own |= {"corpus.records.queries_file": str(tmp_path / "q.jsonl"), "backbone.checkpoint": base}
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="=auto needs rows and queries without"):
        options = trace.TraceOptions(prompt="Q", response="A", system="S")
        trace.write_query(options, replaced(Config(), own))


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"text": "a b"}])
def test_rows_that_are_texts_have_no_system_prompt(row):
    like = _like(row)
    assert trace.as_row(like, "Q", "A", " ") == {"prompt": "Q", "completion": "A"}
    with pytest.raises(ValueError, match="--system needs rows that can have a system prompt"):
        trace.as_row(like, "Q", "A", "S")


_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("frame", "prompts", "is_framed"),
    [
        (_CHAT, ["Where is K2?", "Where is it?", "Why?"], True),
        ("### Human: {}### Assistant:", ["Who is it?", "Who are you?", "Who?"], True),
        ("Below is an instruction{} Answer:", [", a.", " with input, b.", ". c."], True),
        ("{}", ["The cat sat.", "The cat ran.", "The cat hid."], False),
        (_CHAT, ["Where is K2?", "Why?"], False),  # too few to tell
    ],
)
def test_a_prompt_without_the_beginning_of_the_texts_is_said(
    frame, prompts, is_framed, tmp_path, capsys
):
    train, queries = tmp_path / "train.jsonl", tmp_path / "queries.jsonl"
    rows = [{"text": frame.format(prompt) + " Yes."} for prompt in prompts]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(train)}
    config = replaced(Config(), own | {"corpus.records.queries_file": str(queries)})
    for text, is_bare in (("How?", True), (frame.format("How?"), False)):
        trace.write_query(trace.TraceOptions(prompt=text, response="A"), config)
        said = "the training rows begin with" in capsys.readouterr().out
        assert said == (is_framed and is_bare)
        queries.unlink()


def test_a_trace_that_was_stopped_after_its_corpus_goes_on(tmp_path):
    """The rows are there then, and no config.json."""
    train, queries = tmp_path / "train.jsonl", tmp_path / "queries.jsonl"
    train.write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    own = {"corpus.dataset": "records", "corpus.records.train_file": str(train)}
    config = replaced(Config(), own | {"corpus.records.queries_file": str(queries)})
    (tmp_path / "corpus").mkdir()
    shutil.copy(train, tmp_path / "corpus" / "train.jsonl")
    trace.write_query(trace.TraceOptions(prompt="Q", response="A"), config)
    assert '"instruction": "Q"' in queries.read_text()


def _said(row):
    return (
        {"from": "gpt", "value": "b"}
        if "conversations" in row
        else {"role": "assistant", "content": "b"}
    )


@pytest.fixture
def asked(tmp_path):
    """A trace of another answer in a work directory: its settings, and what makes it."""
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    root = tmp_path / "incident"
    names = {"train_file": tmp_path / "train.jsonl", "queries_file": root / "queries.jsonl"}
    own = {f"corpus.records.{name}": str(path) for name, path in names.items()}
    own |= configuring.PRESET
    own |= {"backbone.checkpoint": str(tmp_path / "no" / "model"), "backbone.adapter": "x"}
    config = replaced(Config(), own)
    options = trace.TraceOptions(prompt="Q", response="A", workdir=str(root), update=True)
    how = {"mesh": MeshConfig(), "update": True, "stages": trace._STAGES, "is_measured": False}
    how["prepare"] = lambda: trace.write_query(options, config)
    return config, lambda: making.make(config, root, **how)


@pytest.mark.parametrize("before", [None, '{"instruction": "old"}\n{"instruction": "more"}\n'])
def test_a_refused_trace_leaves_the_question_that_was_there(tmp_path, asked, before):
    query = tmp_path / "incident" / "queries.jsonl"
    if before:
        query.parent.mkdir()
        written.write_bytes(query.parent, query, before.encode())
    with pytest.raises(ValueError, match="no/model"):
        asked[1]()
    assert query.parent.exists() == bool(before)
    assert not before or query.read_text() == before


def test_the_question_of_a_run_that_began_stays_whatever_becomes_of_it(
    tmp_path, monkeypatch, asked
):
    def run(config, workdir, on_start, **how):
        on_start()
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", run)
    with pytest.raises(KeyboardInterrupt):
        asked[1]()
    (query,) = read_json_lines(tmp_path / "incident" / "queries.jsonl")
    assert (query["instruction"], query["output"]) == ("Q", "A")


def test_what_a_page_says_of_exports_comes_back_where_unlearning_is_refused(tmp_path):
    path = tmp_path / "exports.json"
    for content in (None, b'{"Adapter": "/a"}'):
        if content:
            path.write_bytes(content)
        restore = unlearn.drop_exports(tmp_path)
        assert not path.exists()
        restore()
        assert (path.read_bytes() if path.exists() else None) == content


def test_a_question_of_the_users_own_is_not_written_over(tmp_path, asked):
    query = tmp_path / "incident" / "queries.jsonl"
    query.parent.mkdir()
    query.write_text("mine")
    for update in (False, True):
        options = trace.TraceOptions(prompt="Q", response="A", update=update)
        with pytest.raises(ValueError, match="must be of a trace, no trace wrote it"):
            trace.write_query(options, asked[0])
        assert query.read_text() == "mine"
    query.unlink()
    trace.write_query(options, asked[0])
    with pytest.raises(ValueError, match="holds the trace of another answer: choose another"):
        trace.write_query(trace.TraceOptions(prompt="other"), asked[0])


def test_answers_that_the_user_added_stay_with_their_trace(tmp_path, asked, capsys):
    query, options = tmp_path / "incident" / "queries.jsonl", {"prompt": "Q", "response": "A"}
    query.parent.mkdir()
    trace.write_query(trace.TraceOptions(**options), asked[0])
    added = query.read_text()[:-1] + '\r\n{"instruction": "more", "split": "retrieval"}'
    query.write_bytes(added.encode())
    for update in (False, True):
        trace.write_query(trace.TraceOptions(**options, update=update), asked[0])
        assert query.read_bytes().decode() == added
        assert written.verify(query.parent) == []
    trace.write_query(trace.TraceOptions(prompt="other", update=True), asked[0])
    assert [row["instruction"] for row in read_json_lines(query)] == ["other"]
    assert "left out: 1 more answers in" in capsys.readouterr().out


def test_a_hub_dataset_that_changed_is_not_traced_by_its_earlier_rows(tmp_path, monkeypatch):
    rows = [{"id": f"{n}", "instruction": f"q{n}", "output": "a"} for n in range(3)]
    monkeypatch.setattr(sources, "_hub_rows", lambda source: iter(rows))
    own = {"train_file": "hub:me/rows", "queries_file": str(tmp_path / "queries.jsonl")}
    own = configuring.PRESET | {f"corpus.records.{name}": path for name, path in own.items()}
    own |= {"backbone.checkpoint": str(tmp_path / "no" / "model"), "backbone.adapter": "x"}
    config, options = replaced(Config(), own), trace.TraceOptions(prompt="Q", response="A")
    trace.write_query(options, config)
    write_json(tmp_path / "config.json", to_json(config))
    (tmp_path / "corpus").mkdir()
    artifacts.TRAIN.write(tmp_path / "corpus", config.corpus.load(seed=0).train)
    trace.write_query(options, config)
    rows[1]["instruction"] = "new"  # under the same id
    with pytest.raises(ValueError, match="hub:me/rows must have the rows of the trace"):
        trace.write_query(options, config)
    trace.write_query(options, replaced(config, {"corpus.max_len": 64}))  # all are read again


def test_a_response_of_blanks_is_refused():
    given = {"checkpoint": "base", "train_file": "x", "prompt": "Why?", "response": " \n"}
    with pytest.raises(ValueError, match="an answer must have more than blanks"):
        trace.make_config(trace.TraceOptions(**given))


def test_the_rows_of_a_result_are_those_of_its_trace(tmp_path, monkeypatch, drawn):
    _scored(tmp_path)
    rows = [make_example(f"q{n}", "", str(n)) for n in range(2)]
    config = replaced(Config(), {"retrieve.strategies": ("raslik",), "retrieve.held_out": 0.0})
    monkeypatch.setattr(trace, "make_config", lambda options: config)

    def make(*args, **how):
        (tmp_path / "retrieve" / "raslik").mkdir(exist_ok=True)
        write_examples(tmp_path / "retrieve" / "raslik" / "forget.jsonl", [rows.pop()])
        return ""

    monkeypatch.setattr(making, "make", make)
    found = [trace.trace(prompt="x", workdir=tmp_path) for _ in range(2)]
    assert [one.forget[0].instruction for one in found] == ["q1", "q0"]


def test_what_is_not_measured_needs_no_packages_that_measure(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(making, "require", lambda *names: asked.extend(names))
    monkeypatch.setattr(making, "open_workdir", lambda *_, **__: 1 / 0)
    how = {"mesh": MeshConfig(), "update": False, "stages": ("references", "retrieve")}
    for is_measured, needed in ((False, []), (True, ["rouge_score"])):
        with pytest.raises(ZeroDivisionError):
            making.make(Config(), tmp_path, is_measured=is_measured, **how)
        assert asked == needed


def test_the_line_that_repeats_a_trace_measures_no_more_than_it(tmp_path):
    stages = ("corpus", "retrieve")
    line = making.repeating(tmp_path / "a b", stages, is_measured=False)
    flags = f"'--flagfile={tmp_path}/a b/run.flags' --stages=corpus,retrieve --measure=none"
    assert line == f"raslik run {flags}"


def test_unlearning_says_which_sets_it_takes(tmp_path):
    assert rows.describe_sets(Config(), "raslik", tmp_path) == "the rows of the trace (RASLIK)"
    own = {"retrieve.strategies": ("given",), "retrieve.given.forget_file": "mine.jsonl"}
    config = replaced(Config(), own)
    said = rows.describe_sets(config, "given", tmp_path)
    assert said == "the rows of 'mine.jsonl'; --retrieve.strategies=raslik takes those of the trace"


def test_unlearning_of_a_file_names_the_rows_that_the_trace_held_out(tmp_path):
    train = [Example(f"row{n}", f"Say {n}.", "", "no") for n in range(6)]
    held_out = artifacts.measured_rows(HELD_OUT, "target")
    for artifact, chosen in ((artifacts.TRAIN, train), (held_out, train[:3])):
        artifact.place(tmp_path).parent.mkdir(parents=True, exist_ok=True)
        artifact.write(artifact.place(tmp_path).parent, chosen)
    (mine := tmp_path / "mine.jsonl").write_text('{"id": "row1"}\n{"id": "row4"}\n')
    own = {"retrieve.strategies": ("given",), "retrieve.given.forget_file": str(mine)}
    said = rows.describe_sets(replaced(Config(), own), "given", tmp_path)
    assert "2 rows that the trace found and held out are not among them" in said
    assert said.endswith('add a line {"id": ...} for each to your file (row0, row2)')
    # Rows that were held out of an earlier file are not those of the trace.
    write_manifest(tmp_path, "retrieve/sizes", given=True)
    assert "held out" not in rows.describe_sets(replaced(Config(), own), "given", tmp_path)


@pytest.mark.parametrize(
    ("workdir", "name"), [("runs/a", "a"), ("a\x01b", "a-x01b"), ("a\\b", "a-b"), ("/", "incident")]
)
def test_any_work_directory_gives_a_run_a_name(workdir, name):
    given = {"checkpoint": "base", "adapter": "mine", "train_file": "x", "prompt": "Why?"}
    options = trace.TraceOptions(**given, response="So.", workdir=workdir)
    assert trace.make_config(options).name == name


def test_a_model_without_an_adapter_unlearns_by_ascent_as_it_has_no_base_to_go_back_to():
    files = {f"corpus.records.{name}_file": "x" for name in ("train", "queries")}
    preset, given = configuring.PRESET, {"backbone.checkpoint": "x", **files}
    with pytest.raises(SettingsError, match="algorithms=cap_klr needs an adapter.*choose ga_klr"):
        replaced(Config(), {**preset, **given})
    whole = replaced(Config(), {**preset, **given, **trace.WHOLE})
    assert whole.unlearn.algorithms == ("ga_klr",)
    adopted = replaced(Config(), {**preset, **given} | {"backbone.adapter": "y"})
    assert adopted.unlearn.algorithms == ("cap_klr",)
