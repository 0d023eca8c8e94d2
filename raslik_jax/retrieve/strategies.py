"""Retrieval strategies: each scores every training example for both sets.

A strategy takes one `Request` and returns one `Scores`. A score of minus infinity bars an example
from a set. STRATEGIES has a record of each with the facts that reports and the plan of a run need.
Nothing here loads jax.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from raslik_jax.base.messages import some_of
from raslik_jax.base.settings import Settings, setting
from raslik_jax.data.examples import Example
from raslik_jax.data.words import refused
from raslik_jax.index.combine import opposite
from raslik_jax.retrieve.named import find_rows, with_copies
from raslik_jax.retrieve.selectors import Selection, select_by_count, spread_retain

QueryText = Literal["prompt", "prompt_and_output"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bm25Settings(Settings):
    """Settings of BM25."""

    query_text: QueryText = setting(
        "prompt", "Text of a query. prompt_and_output has the output of --sketch.query_output."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenSettings(Settings):
    """Sets that the user chose or edited."""

    forget_file: str = setting(
        "",
        "JSONL file of the rows to forget, for example an edited forget.jsonl of a run. Each "
        "row is found by its id, place or text.",
        is_path=True,
    )
    retain_file: str = setting(
        "",
        "JSONL file of the rows to retain; empty: as many random others.",
        is_path=True,
    )


class Request(NamedTuple):
    """The inputs of a strategy.

    `is_eligible_N` marks the examples that may be in a set: those with an answer token and the
    needed scores. `seed` is for random draws. `retain_within` is the share of a ranking from which
    the retain set is drawn (0: its end). `settings` are those of the strategy. `scores` has an
    entry for each name in `needs` of its record: one value or several values per example, minus
    infinity without a value.
    `fields` is the field map of the user's rows.
    """

    examples: Sequence[Example]
    is_eligible_N: Bool[np.ndarray, " N"]
    seed: int
    num_forget: int
    num_retain: int
    retain_within: float = 0.0
    settings: Any = None
    queries: Sequence[Example] = ()
    scores: Mapping[str, Float[np.ndarray, " N ..."]] = {}
    fields: Mapping[str, str] = {}


class Scores(NamedTuple):
    """Scores of every training example for the two sets; higher is better."""

    forget_N: Float[np.ndarray, " N"]
    retain_N: Float[np.ndarray, " N"]


class Strategy(NamedTuple):
    """A member of the family.

    `needs` names the entries of `Request.scores` that it reads. A unit of the run makes each if
    some strategy needs it. `ranks_all` says whether the forget score orders all examples and can be
    measured as a ranking. `retains_opposite` says whether the retain score is the other end of this
    ranking. With `retain_within` the retain set is drawn from its best. `named` returns the
    examples that files name, by the flag of each file. All of them that are not barred are in a set
    of any size. An empty color or marker becomes the next free one. `is_subject` marks the strategy
    that a report describes if it was run.
    """

    title: str
    score: Callable[[Request], Scores]
    needs: tuple[str, ...] = ()
    ranks_all: bool = False
    retains_opposite: bool = False
    named: Callable[[Request], Mapping[str, Sequence[int]]] | None = None
    settings: Settings = Settings()
    color: str = ""
    marker: str = ""
    is_subject: bool = False

    @property
    def brings_sets(self) -> bool:
        """Whether its sets are those of files."""
        return self.named is not None

    @property
    def is_by_gradients(self) -> bool:
        """Whether it ranks by gradients and so by the kernel of the run's settings."""
        return "influence" in self.needs


def query_text(example: Example, include: QueryText = "prompt") -> str:
    """Returns instruction and input, as EmbeddingSim compares (Appendix), or also the output."""
    prompt = f"{example.instruction} {example.input}".strip()
    return prompt if include == "prompt" else f"{prompt} {example.output}".strip()


def choose(record: Strategy, request: Request) -> tuple[Scores, Selection]:
    """Returns a strategy's scores and its sets: the best of both in the requested sizes."""
    sizes, may_N = (request.num_forget, request.num_retain), request.is_eligible_N
    scores = Scores(*(np.where(may_N, score_N, -np.inf) for score_N in record.score(request)))
    if record.brings_sets:
        sizes = int((scores[0] > -np.inf).sum()), int((scores[1] > -np.inf).sum())
    ranked = draw_retain(request, scores) if record.retains_opposite else scores
    ids = ids_of(request)
    return scores, select_by_count(*ranked, ids, num_forget=sizes[0], num_retain=sizes[1])


def draw_retain(request: Request, poles: Scores) -> Scores:
    """Returns poles whose retain scores are a random draw within `retain_within`."""
    if not request.retain_within:
        return poles
    share, seed = request.retain_within, request.seed
    retain_N = spread_retain(poles.retain_N, ids_of(request), share=share, seed=seed)
    return poles._replace(retain_N=retain_N)


def uniform(request: Request, stream: int) -> Float[np.ndarray, " N"]:
    """Returns one uniform draw per example that follows its id when rows are shuffled."""
    generator = np.random.Generator(np.random.Philox(key=[request.seed, stream]))
    draw_N = generator.random(len(request.examples))
    order = np.argsort(np.asarray([example.example_id for example in request.examples]))
    score_N = np.empty_like(draw_N)
    score_N[order] = draw_N
    return np.where(request.is_eligible_N, score_N, -np.inf)


def _random_retain(request: Request) -> np.ndarray:
    """Returns a uniform draw of the rows that are not labeled as targets."""
    is_target_N = np.array([bool(example.is_target) for example in request.examples])
    return np.where(is_target_N, -np.inf, uniform(request, stream=1))


def take_poles(request: Request, score_N: Float[np.ndarray, " N"]) -> Scores:
    """Returns s_F and s_R = -s_F; minus infinity in both if barred."""
    forget_N = np.where(request.is_eligible_N, score_N, -np.inf)
    return Scores(forget_N, opposite(forget_N))


def random(request: Request) -> Scores:
    """Returns a uniform ranking of all examples, the baseline of Section 4.2."""
    return Scores(forget_N=uniform(request, stream=0), retain_N=_random_retain(request))


def oracle(request: Request) -> Scores:
    """Returns a uniform ranking of the labeled targets; only labels can give it."""
    labels = [example.is_target for example in request.examples]
    if None in labels:
        raise refused("labels", none=labels.count(None), count=len(labels))
    forget_N = np.where(np.array(labels, bool), uniform(request, stream=0), -np.inf)
    return Scores(forget_N, _random_retain(request))


def raslik_f(request: Request) -> Scores:
    """Returns the aligned pole of RASLIK with a random retain set."""
    return Scores(
        take_poles(request, request.scores["influence"]).forget_N, _random_retain(request)
    )


def bm25(request: Request) -> Scores:
    """Returns both ends of the mean BM25 score over queries (Section 4.2).

    A document is an example's whole text. Whitespace separates its tokens, as in rank_bm25. It
    raises a ValueError if queries and rows have no token in common: the order of the rows would
    decide.
    """
    from raslik_jax.retrieve import bm25 as bm25_lib  # with SciPy, which takes long to load

    if not request.queries:
        raise ValueError("BM25 must have queries to compare texts with, got none: give one")
    index = bm25_lib.index_documents(
        [f"{row.instruction} {row.input} {row.output}".split() for row in request.examples]
    )
    score_QN = bm25_lib.score_queries(
        index, [query_text(row, request.settings.query_text).split() for row in request.queries]
    )
    if not score_QN.any():
        raise refused("bm25")
    return take_poles(request, score_QN.mean(axis=0))


def given(request: Request) -> Scores:
    """Returns the sets of files in their order; without a retain file, as many random rows.

    Rows that are not eligible are left out. It raises a ValueError if a file names no other row.
    """
    named = named_rows(request)
    for flag, positions in named.items():
        if not request.is_eligible_N[positions].any():
            ids = some_of(request.examples[place].example_id for place in positions)
            raise refused("given_barred", flag=flag, ids=ids)
    flags = [f"--retrieve.given.{kind}_file" for kind in Selection._fields]
    forget, retain = (named.get(flag, []) for flag in flags)
    if not forget:
        raise ValueError("--retrieve.given.forget_file must name the rows to forget: give it")
    known = {*retain}
    if both := [request.examples[place].example_id for place in forget if place in known]:
        raise refused("given_both", ids=some_of(both))
    if not retain:
        draw_N = uniform(request, stream=1)
        draw_N[forget] = -np.inf
        most = min(len(forget), int((draw_N > -np.inf).sum()))
        if not most:
            raise refused("given_all", count=int(request.is_eligible_N.sum()))
        retain = np.argsort(-draw_N, kind="stable")[:most].tolist()
    scores = []
    for positions in (forget, retain):
        score_N = np.full(len(request.examples), -np.inf)
        score_N[positions] = np.linspace(1, 0, len(positions))
        scores.append(np.where(request.is_eligible_N, score_N, -np.inf))
    return Scores(*scores)


def named_rows(request: Request) -> dict[str, list[int]]:
    """Returns the training examples of each given file by its flag, eligible or not.

    Exact copies of the rows to forget are among them, because they teach the same.
    """
    paths = dataclasses.asdict(request.settings).items()
    files = {f"--retrieve.given.{name}": path for name, path in paths if path}
    rows, fields = request.examples, request.fields
    found = {flag: find_rows(rows, path, flag=flag, fields=fields) for flag, path in files.items()}
    return {
        flag: with_copies(rows, places) if flag.endswith("forget_file") else places
        for flag, places in found.items()
    }


def ids_of(request: Request) -> list[str]:
    """Returns the names of the examples."""
    return [row.example_id for row in request.examples]


def by_score(title: str, need: str, **more: Any) -> Strategy:
    """Returns a strategy that takes both poles of one of a request's scores."""
    return Strategy(
        title,
        lambda request: take_poles(request, request.scores[need]),
        needs=(need,),
        ranks_all=True,
        retains_opposite=True,
        **more,
    )


# In the paper's order; colors of Okabe and Ito, which stay apart for color-blind readers.
STRATEGIES: dict[str, Strategy] = {
    "random": Strategy("Random", random, color="#7A7A7A", marker="o"),
    "bm25": Strategy(
        "BM25",
        bm25,
        ranks_all=True,
        retains_opposite=True,
        settings=Bm25Settings(),
        color="#E69F00",
        marker="v",
    ),
    "oracle": Strategy("Oracle", oracle, color="#009E73", marker="D"),
    "raslik_f": Strategy(
        "RASLIK-F", raslik_f, needs=("influence",), ranks_all=True, color="#56B4E9", marker="s"
    ),
    "raslik": by_score("RASLIK", "influence", color="#D55E00", marker="^", is_subject=True),
    # Sets that were chosen by hand or with another tool.
    "given": Strategy(
        "Given", given, named=named_rows, settings=GivenSettings(), color="#000000", marker="h"
    ),
}
