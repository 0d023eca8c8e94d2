"""Answers of a language model behind an OpenAI-compatible endpoint, kept on disk as they come."""

import concurrent.futures
import dataclasses
import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from raslik_jax.files import parse_json, read_text
from raslik_jax.messages import one_line, shown
from raslik_jax.progress import progress

_ATTEMPTS = 4
# Replies that a moment's wait may mend: too many requests, and a server in trouble.
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where to ask.

    Attributes:
      url: base of the service, such as http://localhost:8000/v1; /chat/completions is added.
      model: name of the model there.
      key_variable: environment variable with the key; none is sent where it is not set.
      cache: JSONL file that keeps every answer, so that nothing is asked twice; empty for none.
      workers: requests under way at a time.
      timeout: seconds until a request counts as lost.
      pause: seconds before the first repetition; each further one waits twice as long.
    """

    url: str
    model: str
    key_variable: str = "OPENAI_API_KEY"
    cache: str = ""
    workers: int = 8
    timeout: float = 120.0
    pause: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"an endpoint must begin with http:// or https://, got {shown(self.url)}"
            )
        if not self.model:
            raise ValueError(f"the model at {shown(self.url)} must have a name, got none")


def ask_all(
    endpoint: Endpoint, questions: Sequence[tuple[str, str]], *, max_tokens: int = 200
) -> list[str]:
    """Returns the model's answer to every (system text, user text), in order.

    Raises:
      ValueError: the service refuses, gives no answer after four attempts, or answers in another
        form; what was answered before stays in the cache.
    """
    fixed = {"model": endpoint.model, "max_tokens": max_tokens, "temperature": 1.0}
    bodies = [
        fixed
        | {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
        for system, user in questions
    ]
    texts = [json.dumps(body, sort_keys=True).encode() for body in bodies]
    keys = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
    answers = _read_cache(endpoint.cache)
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in answers}
    with concurrent.futures.ThreadPoolExecutor(endpoint.workers) as pool:
        waiting = {pool.submit(_ask, endpoint, text): key for key, text in missing.items()}
        done = concurrent.futures.as_completed(waiting)
        try:
            for future in progress(done, "answers", total=len(waiting)):
                key, answers[key] = waiting[future], future.result()
                if endpoint.cache:
                    with open(endpoint.cache, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"key": key, "answer": answers[key]}) + "\n")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [answers[key] for key in keys]


def _read_cache(path: str) -> dict[str, str]:
    """Returns the answers of a cache by key; lines that are damaged count as not there."""
    answers: dict[str, str] = {}
    if not path or not os.path.lexists(path):
        return answers
    lines = read_text(path).split("\n")
    # Behind the last line feed stands what a run was killed at while writing it.
    if lines[-1]:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")
    for line in lines:
        try:
            record = parse_json(line, "the line", {"key": str, "answer": str})
        except ValueError:
            continue
        answers[record["key"]] = record["answer"]
    return answers


def _ask(endpoint: Endpoint, body: bytes) -> str:
    url = endpoint.url.rstrip("/") + "/chat/completions"
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(endpoint.key_variable)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers)
    trouble = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(endpoint.pause * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=endpoint.timeout) as reply:
                return _content(reply.read(), url)
        except urllib.error.HTTPError as error:
            trouble = f"HTTP {error.code} {error.reason}"
            if error.code not in _PASSING:
                break
        except (OSError, http.client.HTTPException) as error:
            trouble = str(getattr(error, "reason", error))
    raise ValueError(
        f"{shown(url, 80)} must answer, got none ({one_line(trouble, 100)}): check address, model "
        f"and the key in {endpoint.key_variable}, then run again"
    )


def _content(raw: bytes, url: str) -> str:
    try:
        content = json.loads(raw)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        content = None
    # A NUL or half a character would be refused when the corpus is read again.
    content = content.replace("\0", "").strip() if isinstance(content, str) else ""
    if not content or any("\ud800" <= c <= "\udfff" for c in content):
        raise ValueError(
            f"the reply of {shown(url, 80)} must be a chat completion with text, got "
            f"{shown(raw, 80)}: check that the endpoint is OpenAI-compatible"
        )
    return content
