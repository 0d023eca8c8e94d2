"""The report stage on a stored run: every form, from nothing but what is stored."""

import json
import re

import sample_run
from folders import FolderTest

from raslik_jax.config import Config, UnlearnConfig
from raslik_jax.report.writing import report
from raslik_jax.run.workspace import Workspace


def _robustness(strategy):
    """Returns what a measure found of a strategy's model, as metrics.json holds it."""
    rate = {"mean": 0.5, "low": 0.25, "high": 0.75}
    found = [
        {"condition": name, "nats": nats, "forget": rate, "shown": None}
        for name, nats in (("as it is", 2.5), ("nf4", 0.45))
    ]
    return {
        **{"measure": "quantize", "strategy": strategy, "algorithm": "ga_gdr", "epoch": 2},
        "found": {
            **{"now": found, "finetuned": [one | {"nats": 0.1} for one in found]},
            **{"backbone": [one | {"nats": 4.0} for one in found]},
            # After retraining the answers return in nf4 too.
            **({"retrained": found} if strategy == "raslik" else {}),
        },
    }


class ReportStageTest(FolderTest):
    def test_writes_tables_and_the_page(self):
        root = self.folder
        sample_run.write_run(root)
        path = root / "evaluate" / "metrics.json"
        metrics = json.loads(path.read_text())
        metrics["robustness"] = [_robustness("raslik"), _robustness("oracle")]
        path.write_text(json.dumps(metrics))
        (root / "report").mkdir()
        config = Config(name="sample", unlearn=UnlearnConfig(epochs=2))
        report(Workspace(root, config), root / "report")
        names = {path.name for path in (root / "report").iterdir()}
        self.assertEqual(names, {"report.html", "table.txt"})
        page = (root / "report" / "report.html").read_text()
        self.assertEqual(page.count("<figure>"), 2 * 2 + 2 + 1 + 4)
        self.assertNotIn(str(root), page)
        lead, said = "RASLIK GA_GDR, quantization", "In nf4 the target answers have 0.45 nats a"
        self.assertEqual(page.count("Fine-tuned, by the rows of"), 2)
        self.assertIn(f"{lead}: {said}", re.sub(r"<[^>]*>", "", page))
        plain = " ".join(re.sub(r"<[^>]*>", " ", page).split())
        self.assertIn("nf4 0.45 0.50 [0.25, 0.75] yes", plain)
        self.assertIn("This is not a failure of forgetting", plain)
