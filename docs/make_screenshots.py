"""Takes the pictures of the report's first screen: on a laptop and a phone, in light and in dark.

  make screenshots

Runs the quickstart in a temporary folder. Needs chromium, chromedriver and the parity extra.
"""

import base64
import pathlib
import subprocess
import sys
import tempfile

_HERE = pathlib.Path(__file__).resolve().parent
_SIZES = {"laptop": (1440, 900), "phone": (390, 844)}


def main() -> None:
    """Writes report-SIZE-SCHEME.png next to this file."""
    sys.path.insert(0, str(_HERE.parent / "tests" / "fixtures"))
    import browser

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        command = [sys.executable, "-m", "raslik_jax.cli.main", "quickstart", f"--workdir={root}/q"]
        subprocess.run(command, check=True)
        shown = browser.start(root / "profile")
        shown.get((root / "q/report/report.html").as_uri())
        for size, (width, height) in _SIZES.items():
            for scheme in ("light", "dark"):
                feature = {"name": "prefers-color-scheme", "value": scheme}
                shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
                shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                shown.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
                taken = shown.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
                place = _HERE / f"report-{size}-{scheme}.png"
                place.write_bytes(base64.b64decode(taken["data"]))
        shown.quit()


if __name__ == "__main__":
    main()
