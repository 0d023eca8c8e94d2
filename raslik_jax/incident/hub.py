"""An exported folder on the Hugging Face hub, by the hub's own client."""

import pathlib
from typing import Any

from raslik_jax.base.messages import one_line, shown


def check_hub(repo: str, *, is_public: bool) -> None:
    """Refuses a name of no repository, a missing token, a hub that does not answer, and mix-ups.

    An existing repository is accepted if it is as private as requested. It is called before
    anything is exported.
    """
    import huggingface_hub
    from huggingface_hub import errors, utils

    try:
        utils.validate_repo_id(repo)
        is_name = repo.count("/") == 1
    except errors.HFValidationError:
        is_name = False
    if not is_name:
        raise ValueError(f"--push_to_hub must be OWNER/NAME on the hub, got {shown(repo)}")
    if huggingface_hub.get_token() is None:
        mend = "log in with `hf auth login`, or set HF_TOKEN"
        raise ValueError(f"--push_to_hub needs a token of the hub, got none: {mend}")
    try:
        api = huggingface_hub.HfApi()
        api.whoami()
        found = api.model_info(repo, timeout=10.0) if api.repo_exists(repo) else None
    except Exception as error:  # the client raises its own, its transport's and OS errors
        mend = "leave it out, and upload the folder later"
        raise ValueError(f"--push_to_hub needs the hub, {_said(error)}: {mend}") from error
    if found is not None and bool(found.private) == is_public:
        kind, flag = ("private", "leave --public out") if is_public else ("public", "give --public")
        raise ValueError(f"{repo} on the hub is {kind} already: {flag}, or name another")


def push_folder(folder: pathlib.Path, repo: str, *, is_public: bool) -> str:
    """Uploads a folder as a model, private by default; returns its address.

    Other files of a repository stay.
    """
    import huggingface_hub

    api: Any = huggingface_hub.HfApi()
    try:
        url = api.create_repo(repo, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Written by raslik_jax")
    except Exception as error:  # as above
        mend = f"`hf upload {repo} {folder}` uploads it"
        got = f"{shown(str(folder), 80)} is written, but not on the hub, {_said(error)}"
        raise ValueError(f"{got}: {mend}") from error
    return str(url)


def _said(error: Exception) -> str:
    """Returns the first line of the hub's message or of the network's."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"which refused or did not answer ({one_line(lines[0], 100)})"
