"""Makes the tables of docs/studies/gpu.md from the stored results.

results.json has the lines of each benchmark with its command, what `experiments/gpu/check.py` once
predicted, and the sums of a profile of gradients and sketch (--profile).
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from experiments.studies.reports import markdown_table

RESULTS = pathlib.Path(__file__).resolve().parent / "results.json"


def read_results() -> Mapping[str, Any]:
    """Returns the stored results by benchmark."""
    found: Mapping[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def lines_of(benchmark: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the lines of a benchmark by stage."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in read_results()[benchmark]["lines"]:
        found.setdefault(line["stage"], []).append(line)
    return found


def shares_table() -> str:
    """Returns what kernels and steps reach, next to their goals."""
    kernels = lines_of("kernels"), lines_of("h200_kernels")
    sketches = lines_of("sketch"), lines_of("h200_sketch")
    dense = kernels[0], lines_of("h200_kernels_16")
    of_gradients, on_top = [], []
    for lines in sketches:
        summary, shape = lines["summary"][0], lines["shape"][0]
        rate = summary["tflops"] * shape["seconds_sketch"] / shape["seconds_gradients"]
        of_gradients.append(_percent(rate / lines["matmul"][0]["tflops"]))
        on_top.append(_percent(summary["sketch_overhead"], 1))
    profile = read_results()["profile"]["sketch_ms"]
    of_sketch = profile["flat gradients and their sketch"]
    of_sketch /= sum(profile.values()) - of_sketch
    copies, binned = (
        [lines[name][0]["gb_per_s"] for lines in kernels] for name in ("copy", "binned")
    )
    alone = [f"{rate / 1e3:.2f}" for rate in binned]
    shares = [_percent(rate / copy) for rate, copy in zip(binned, copies, strict=True)]
    tails = [f"{1e3 * lines['tails'][0]['seconds']:.1f}" for lines in kernels]
    of_128 = [
        max(line["tflops"] for line in lines["dense"] if line["batch"] == 128) for lines in dense
    ]
    of_256 = max(line["tflops"] for line in kernels[0]["dense"])
    ratio = {line["name"]: line["ratio"] for line in lines_of("unlearn")["step"]}
    rows = [
        ["gradients, share of the rate of products", *of_gradients, "85 %"],
        ["binned sketch on top of gradients", *on_top, "1.5 %"],
        ["the same, of its own kernels in a profile", _percent(of_sketch, 1), "-", "1.5 %"],
        ["binned sketch alone, TB/s of gradients", *alone, "1.5"],
        ["the same, share of the rate of a copy", *shares, "35 %"],
        ["dense Rademacher sketch of 128, TFLOP/s", *(f"{rate:.0f}" for rate in of_128), "350"],
        ["the same of 256", f"{of_256:.0f}", "-", "350"],
        ["scores of 52,000 rows with both tails, ms", *tails, "3"],
        ["GA_GDR over fine-tuning", "+" + _percent(ratio["ga_gdr"] - 1), "-", "+15 %"],
        ["GA_KLR over fine-tuning", "+" + _percent(ratio["ga_klr"] - 1), "-", "+50 %"],
    ]
    return markdown_table(["quantity", "H100", "H200", "goal"], rows)


_STAGES = {
    "index": "trace of another answer, with the index of 512 rows",
    "trace": "trace of the bad answer",
    "unlearn": "unlearn, ten steps of CAP_KLR",
    "export": "export of the whole model",
    "report": "report",
}
_UNITS = {
    "trace": {
        "retrieve/traced": "its likelihood under both models",
        "retrieve/queries": "its gradient",
    },
    "unlearn": {
        "references/evaluation": "158 answers and their likelihood before unlearning",
        "unlearn/raslik-cap_klr": "its steps and probes",
    },
}


def incident_table() -> str:
    """Returns what the commands of one incident take, and their longest parts."""
    stages = lines_of("h200_incident")
    rows = []
    for stage, name in _STAGES.items():
        line = stages[stage][0]
        rows.append([name, f"{line['seconds']:.0f}"])
        units = _UNITS.get(stage, {})
        rows += [[f"- {name}", f"{line['units'][unit]:.0f}"] for unit, name in units.items()]
    rows.append(["from the bad answer to the report", f"{stages['summary'][0]['seconds']:.0f}"])
    return markdown_table(["command or part", "seconds"], rows)


def peers_table() -> str:
    """Returns the speed of raslik_jax and of programs in PyTorch."""
    peers = lines_of("peers")
    gradients = {
        "raslik_jax": (lines_of("sketch")["summary"][0]["examples_per_s"], "65,536"),
        "dattri-llm": (peers["dattri_llm"][0]["rows_per_s"], "256 a matrix"),
        "bergson": (peers["bergson"][0]["rows_per_s"], "256 a matrix"),
        "PyTorch, row by row": (peers["loop"][0]["rows_per_s"], "65,536"),
    }
    decoding = {"raslik_jax": lines_of("decode")["batched"][0], "transformers": peers["decode"][0]}
    answers = {name: f"{line['tokens_per_s']:,.0f}" for name, line in decoding.items()}
    rows = [
        [name, size, f"{rate:.1f}", answers.pop(name, "-")]
        for name, (rate, size) in gradients.items()
    ]
    rows += [[name, "-", "-", rate] for name, rate in answers.items()]
    heads = ["program", "coordinates", "rows a second", "new tokens a second"]
    return markdown_table(heads, rows)


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def predicted_table() -> str:
    """Returns the time of each step beside the compiler's least time."""
    steps = {line["name"]: 1e3 * line["seconds"] for line in lines_of("unlearn")["step"]}
    measured = {
        "sketch, binned": 1e3 * lines_of("sketch")["shape"][0]["seconds_sketch"],
        "sketch, dense": 1e3 * lines_of("sketch_dense")["shape"][0]["seconds_sketch"],
        "fine-tuning": steps["lora"],
        "GA_KLR": steps["ga_klr"],
        "decoding": 1e3 * lines_of("decode32")["batched"][0]["seconds"],
        "scores of 52,000 rows": 1e3 * lines_of("kernels")["tails"][0]["seconds"],
    }
    rows = [
        [name, _ms(least), _ms(ms), f"{100 * (ms / least - 1):+.0f} %"]
        for name, least in read_results()["predicted"]["ms"].items()
        for ms in [measured[name]]
    ]
    return markdown_table(["step", "predicted, ms", "measured, ms", "difference"], rows)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def page_tables() -> Mapping[str, Callable[[], str]]:
    """Returns what makes the tables of the study, by name."""
    return {
        "shares": shares_table,
        "peers": peers_table,
        "predicted": predicted_table,
        "incident": incident_table,
    }
