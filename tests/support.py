"""Where the tests find real data, which is never part of the project."""

import os
import pathlib

import pytest

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


def shared_data() -> pathlib.Path:
    """Returns the folder of real data, or skips the test, saying what is missing.

    The folder is named by the environment variable RASLIK_DATA; without it, `shared/data` beside
    the checkout is used.
    """
    folder = pathlib.Path(os.environ.get("RASLIK_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data wanted in {folder}: set RASLIK_DATA to the folder that holds it")
    return folder
