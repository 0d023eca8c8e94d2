"""Links the finished units of other runs that have the keys of a run's own.

python experiments/studies/suite/link.py WORKDIR FLAGS...

The other runs are the folders next to WORKDIR. The suite starts it before each of its runs. It is a
process of its own because JAX would keep the memory of a GPU.
"""

import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from experiments.studies import raslik


def link_units(root: pathlib.Path, arguments: Sequence[str]) -> None:
    """Links units; finished ones are never written in place, so the runs stay independent."""
    from experiments.studies.suite import suite
    from raslik_jax.cli import setting_flags
    from raslik_jax.report import writing
    from raslik_jax.run import cost, manifests, plan
    from raslik_jax.run.workspace import Workspace

    config = cost.settled(setting_flags.parse_config(arguments, suite.RUN_FLAGS), root)
    found = {
        manifest["key"]: other / name
        for other in root.parent.iterdir()
        for name in (manifests.finished_units(other) if other != root else ())
        if (manifest := manifests.read_manifest(other / name))
    }
    units = plan.plan_units(config, Workspace(root, config), more=writing.UNITS)
    own = plan.Plan(root, units).survey()
    for unit in units:
        if unit.name in own.done or own.missing(unit) or (root / unit.name).exists():
            continue
        if source := found.get(own.inputs(unit)["key"]):
            shutil.copytree(source, root / unit.name, copy_function=os.link)
            own.check(unit)


if __name__ == "__main__":
    raslik.register()
    link_units(pathlib.Path(sys.argv[1]), sys.argv[2:])
