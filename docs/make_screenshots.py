"""Takes pictures of a report's first screen.

  make screenshots
  python docs/make_screenshots.py RUN/report/report.html NAME

The first command runs the quickstart in a temporary folder and takes its report on a laptop and a
phone, in light and in dark. The second takes another report on a laptop in light and writes
NAME.png. Both need chromium, chromedriver and the parity extra.
"""

import base64
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
_SIZES = {"laptop": (1440, 900), "phone": (390, 844)}
_PICTURES = {
    f"report-{size}-{scheme}": (size, scheme) for size in _SIZES for scheme in ("light", "dark")
}


def take(report: pathlib.Path, pictures: Mapping[str, tuple[str, str]]) -> None:
    """Writes pictures of a report next to this file, by their names, of a size and a scheme."""
    sys.path.insert(0, str(_HERE.parent / "tests" / "fixtures"))
    import browser

    with tempfile.TemporaryDirectory() as folder:
        shown: Any = browser.start(pathlib.Path(folder) / "profile")
        shown.get(report.resolve().as_uri())
        for name, (size, scheme) in pictures.items():
            width, height = _SIZES[size]
            feature = {"name": "prefers-color-scheme", "value": scheme}
            shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
            taken = shown.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            (_HERE / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))
        shown.quit()


def main(arguments: list[str]) -> None:
    """Takes the report that the command line names, or that of the quickstart."""
    if arguments:
        report, name = arguments
        take(pathlib.Path(report), {name: ("laptop", "light")})
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "raslik_jax.cli.main",
            "quickstart",
            f"--workdir={folder}/q",
        ]
        subprocess.run(command, check=True)
        take(pathlib.Path(folder) / "q/report/report.html", _PICTURES)


if __name__ == "__main__":
    main(sys.argv[1:])
