"""What goes to the hub, and what is refused before it does; the hub is a fake."""

import pathlib
import types

import huggingface_hub
import pytest

from raslik_jax.incident import hub


class _Hub:
    """A hub with one private repository."""

    def __init__(self, calls, error=None):
        self.calls, self.error = calls, error

    def whoami(self):
        if self.error:
            raise self.error
        return {"name": "me"}

    def repo_exists(self, repo):
        return repo == "me/there"

    def model_info(self, repo, timeout):
        return types.SimpleNamespace(private=True)

    def create_repo(self, repo, **options):
        self.calls.append(("create", repo, options))
        return f"https://hub/{repo}"

    def upload_folder(self, **options):
        if self.error:
            raise self.error
        self.calls.append(("upload", options["repo_id"], options["folder_path"]))


@pytest.fixture(name="calls")
def _calls(monkeypatch):
    calls = []
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: _Hub(calls))
    return calls


@pytest.mark.parametrize("is_public", [False, True])
def test_a_folder_is_uploaded_and_private_if_not_told_otherwise(calls, is_public):
    hub.check_hub("me/new", is_public=is_public)
    assert calls == []
    folder = pathlib.Path("out")
    assert hub.push_folder(folder, "me/new", is_public=is_public) == "https://hub/me/new"
    create = ("create", "me/new", {"private": not is_public, "exist_ok": True})
    assert calls == [create, ("upload", "me/new", folder)]


def test_a_repository_that_is_there_is_taken_as_it_is(calls):
    hub.check_hub("me/there", is_public=False)
    with pytest.raises(ValueError, match="me/there on the hub is private already: leave --public"):
        hub.check_hub("me/there", is_public=True)


@pytest.mark.parametrize("repo", ["new", "me/new/more", "me/ne w", "../x", "me/", "me/x.git"])
def test_a_wrong_name_is_a_sentence(calls, repo):
    with pytest.raises(ValueError, match="--push_to_hub must be OWNER/NAME on the hub, got '"):
        hub.check_hub(repo, is_public=False)


def test_without_token_or_network_nothing_is_begun(calls, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: _Hub(calls, OSError("no route\nto it")))
    with pytest.raises(ValueError, match=r"needs the hub, which .* \(no route\): leave it out"):
        hub.check_hub("me/new", is_public=False)
    with pytest.raises(ValueError, match="is written, but .*: `hf upload me/new out` uploads it"):
        hub.push_folder(pathlib.Path("out"), "me/new", is_public=False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="needs a token of the hub, got none: log in with `hf"):
        hub.check_hub("me/new", is_public=False)
