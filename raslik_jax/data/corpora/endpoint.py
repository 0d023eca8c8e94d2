"""Answers of a language model behind an OpenAI-compatible endpoint, kept on disk as they come."""

import concurrent.futures
import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from raslik_jax.base.files import read_text
from raslik_jax.base.messages import one_line, shown
from raslik_jax.base.progress import progress

_ATTEMPTS = 4
_TIMEOUT = 120.0  # seconds until a request counts as lost
# Replies that a moment's wait may mend: too many requests, and a server in trouble.
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)


def ask_all(
    questions: Sequence[tuple[str, str]],
    url: str,
    model: str,
    *,
    cache: str = "",
    workers: int = 8,
    pause: float = 1.0,
) -> list[str]:
    """Returns the model's answer to every (system text, user text), in order.

    A service that refuses, gives no answer after four attempts, or answers in another form is a
    ValueError; what was answered before stays in the cache.

    `url` is the base of the service, such as http://localhost:8000/v1; its key is that of the
    environment variable OPENAI_API_KEY, if any. `cache` is a JSONL file that keeps every answer, so
    that nothing is asked twice. The first repetition waits for `pause` seconds, each further one
    twice as long.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"an endpoint must begin with http:// or https://, got {shown(url)}")
    url = url.rstrip("/") + "/chat/completions"
    fixed = {"model": model, "max_tokens": 200, "temperature": 1.0}
    texts = []
    for question in questions:
        roles = zip(("system", "user"), question, strict=True)
        messages = [{"role": role, "content": text} for role, text in roles]
        texts.append(json.dumps({**fixed, "messages": messages}, sort_keys=True).encode())
    keys = [hashlib.sha256(text).hexdigest()[:16] for text in texts]
    answers = _read_cache(cache)
    missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in answers}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(_ask, url, text, pause): key for key, text in missing.items()}
        done = concurrent.futures.as_completed(waiting)
        try:
            for future in progress(done, "answers", total=len(waiting)):
                key, answers[key] = waiting[future], future.result()
                if cache:
                    # A line feed first: a run may have been killed while it wrote a line.
                    with open(cache, "a", encoding="utf-8") as file:
                        file.write("\n" + json.dumps({"key": key, "answer": answers[key]}))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [answers[key] for key in keys]


def _read_cache(path: str) -> dict[str, str]:
    """Returns the answers of a cache by key; lines that are damaged count as not there."""
    answers: dict[str, str] = {}
    for line in read_text(path).split("\n") if path and os.path.lexists(path) else ():
        try:
            record = json.loads(line)
            answers[record["key"]] = record["answer"]
        except (ValueError, KeyError, TypeError):
            continue
    return answers


def _ask(url: str, body: bytes, pause: float) -> str:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers)
    trouble = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
                return _content(reply.read(), url)
        except urllib.error.HTTPError as error:
            trouble = f"HTTP {error.code} {error.reason}"
            if error.code not in _PASSING:
                break
        except (OSError, http.client.HTTPException) as error:
            trouble = str(getattr(error, "reason", error))
    raise ValueError(
        f"{shown(url, 80)} must answer, got none ({one_line(trouble, 100)}): check address, model "
        "and the key in OPENAI_API_KEY, then run again"
    )


def _content(raw: bytes, url: str) -> str:
    try:
        content = json.loads(raw)["choices"][0]["message"]["content"]
        # A NUL or half a character would be refused when the corpus is read again.
        content = content.replace("\0", "").strip()
        content.encode()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        content = ""
    if not content:
        raise ValueError(
            f"the reply of {shown(url, 80)} must be a chat completion with text, got "
            f"{shown(raw, 80)}: check that the endpoint is OpenAI-compatible"
        )
    return content
