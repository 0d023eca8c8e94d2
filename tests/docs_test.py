"""The documents stay short, whole and current: lengths, links, navigation, reference pages."""

import pathlib
import re

import pytest

from docs import make_reference
from raslik_jax.run import artifacts

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
_DOCS = _REPOSITORY / "docs"
_PAGES = sorted(_DOCS.rglob("*.md"))
_NOTES = sorted((_DOCS / "notes").glob("*.md"))  # not on the site, so no page links to them
_FLAG_PAGES = ("commands", "settings")
_NAV = (_REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def _prose(text: str) -> str:
    """Returns a text without its blocks of code, which keep their number of lines."""
    return re.sub(
        r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )


def _anchors(path: pathlib.Path) -> set[str]:
    """Returns what a link may name after `#`, by the rule of MkDocs and GitHub."""
    titles = re.findall(r"^#+ (.*)$", _prose(path.read_text()), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).lower()) for title in titles}


@pytest.mark.parametrize("name, limit", [("README.md", 120), ("BUILD_NOTES.md", 80)])
def test_what_everyone_reads_is_short(name, limit):
    assert len((_REPOSITORY / name).read_text().splitlines()) <= limit


def test_a_how_to_page_has_at_most_120_lines():
    pages = re.findall(r"guides/\w+\.md", _NAV.partition("How to:")[2].partition("Explanation:")[0])
    assert len(pages) > 9
    lengths = {page: len((_DOCS / page).read_text().splitlines()) for page in pages}
    assert {page: length for page, length in lengths.items() if length > 120} == {}


def test_reference_pages_follow_from_the_code():
    for path, text in make_reference.pages().items():
        assert (_DOCS / path).read_text(encoding="utf-8") == text, f"{path}: run `make reference`"


def test_flags_that_guides_name_are_flags():
    named = r"(?<![\w-])--(?:no)?([a-z_]+(?:\.[a-z_0-9]+)*)(?![\w-])"
    reference = "".join((_DOCS / "reference" / f"{page}.md").read_text() for page in _FLAG_PAGES)
    known = set(re.findall(r"--([\w.]+)", reference)) | {"flagfile", "helpfull", "keep_compiled"}
    known |= {f"corpus.{one}" for one in ("howdy.file", "howdy.fields")}  # of experiments/run.py
    known |= {f"corpus.{one}" for one in ("tofu.forget", "tofu.train", "tofu.retain_run")}
    known |= {"compare", "state", "choose", "flagfiles", "seeds", "vary"}  # of scripts
    pages = [_REPOSITORY / "README.md", *_DOCS.glob("*.md"), *(_DOCS / "guides").glob("*.md")]
    pages = [page for page in pages if not page.name.startswith("extending")]  # of toy members
    wrong = {
        (page.name, flag)
        for page in pages
        for flag in re.findall(named, page.read_text())
        if flag not in known
    }
    assert wrong == set()


def test_the_page_of_files_names_each_file():
    text = (_DOCS / "reference" / "files.md").read_text()
    named = [one for one in vars(artifacts).values() if isinstance(one, artifacts.Artifact)]
    variant = artifacts.Variant("STRATEGY", "ALGORITHM")
    for of_model in (
        artifacts.answers,
        artifacts.perplexities,
        artifacts.traced,
    ):
        named += [of_model("MODEL"), of_model("MODEL", variant)]
    named += [artifacts.measured_rows("SPLIT", kind) for kind in ("target", "normal")]
    named += [artifacts.set_rows("STRATEGY", kind) for kind in ("forget", "retain")]
    named += [artifacts.steps(variant), artifacts.probes(variant), artifacts.losses("STAGE")]
    named += [artifacts.distances(variant), artifacts.set_summary("STRATEGY")]
    named += [artifacts.robustness(f"TEST-{variant}")]
    assert [one.path for one in named if f"`{one.path}" not in text] == []


@pytest.mark.parametrize(
    "path",
    [_REPOSITORY / "README.md", _REPOSITORY / "BUILD_NOTES.md", *_PAGES],
    ids=lambda path: str(path.relative_to(_REPOSITORY)),
)
def test_links_and_named_files_exist(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(text)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.is_file(), link
        assert target.parent.name != "notes" or _DOCS not in path.parents or path in _NOTES, link
        assert not anchor or anchor in _anchors(target), link
    for name in re.findall(r"(?:experiments|raslik_jax|tests)/[\w/]+\.(?:py|sh|flags|md)", text):
        assert (_REPOSITORY / name).is_file(), name


def test_navigation_names_every_page_once():
    assert sorted(re.findall(r"[\w/]+\.md", _NAV)) == [
        page.relative_to(_DOCS).as_posix() for page in _PAGES if page not in _NOTES
    ]


def test_documents_have_at_most_35000_words_and_notes_at_most_9000():
    """What `make reference`, `make house` and `make tables` write does not count."""
    made, words = re.compile(r"<!-- [^>]*: .*?<!-- end -->", re.DOTALL), {}
    for page in [*_REPOSITORY.glob("*.md"), *_PAGES]:
        text = page.read_text()
        words[page] = 0 if "page is written by" in text else len(made.sub("", text).split())
    assert sum(words.values()) <= 35_000
    assert sum(words[page] for page in _NOTES) <= 9000


def test_the_api_reference_names_every_package_and_module_of_the_root_once():
    root = [path for path in (_REPOSITORY / "raslik_jax").iterdir() if path.name != "__init__.py"]
    public = [path.stem for path in root if path.suffix == ".py" or (path / "__init__.py").exists()]
    text = "".join(page.read_text() for page in sorted((_DOCS / "api").glob("*.md")))
    named = re.findall(r"^::: raslik_jax\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(public)


@pytest.mark.parametrize("path", _NOTES, ids=lambda path: path.name)
def test_lines_of_notes_can_be_reviewed(path):
    """No line is above 120 characters, tables and code apart."""
    for number, line in enumerate(_prose(path.read_text()).splitlines(), start=1):
        assert len(line) <= 120 or line.startswith("|"), f"{path.name}:{number}"
