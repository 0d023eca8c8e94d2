"""What the files of others ask for ends in bounded time and memory, in every thread."""

import os
import sys
import threading

import pytest
import waiting

from raslik_jax.base import bounded

LOADED_FIRST = "heavy_module"


def _loop(count):
    return sum(1 for _ in range(count))


def _held():
    return len(sys.modules["heavy_module"].held)


def _repeat(text, count):
    return len(text * count)


def _fail(text):
    raise LookupError(text)


def _leave(status):
    os._exit(status)


def _print(text):
    print(text)
    return text


def _in_thread(function):
    """Runs a function off the main thread; returns its result or the error."""
    found = []

    def run():
        try:
            found.append(function())
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(waiting.SECONDS)
    return found[0]


def test_results_and_errors_of_a_function_come_back():
    assert bounded.call(_loop, 1000, what="a loop") == 1000
    assert bounded.call(_print, "a", what="a print") == "a"
    with pytest.raises(ValueError, match="the row 3") as caught:
        bounded.call(_fail, "the row 3", what="a function")
    assert not isinstance(caught.value, bounded.OverLimit)


@pytest.mark.parametrize("run", [lambda function: function(), _in_thread])
def test_an_endless_loop_or_match_ends_at_its_limit(run):
    def endless():
        with pytest.raises(bounded.OverLimit, match="the pattern") as caught:
            bounded.call(_loop, 10**15, what="the pattern", seconds=0.3)
        return caught.value

    run(endless)
    pattern, text = r"(a+)+$", "a" * 60 + "b"

    def backtrack():
        with pytest.raises(bounded.OverLimit, match="the pattern"):
            bounded.call(bounded.match_all, pattern, [text], True, what="the pattern", seconds=0.3)
        return bounded.call(bounded.match_all, r"a+(b)", [text, "b"], True, what="the pattern")

    assert run(backtrack) == [(text, "b"), None]


def test_memory_is_bounded_and_the_next_call_works():
    with pytest.raises(bounded.OverLimit, match="the template"):
        bounded.call(_repeat, "a", 10**10, what="the template")
    assert bounded.call(_repeat, "a", 10**6, what="the template") == 10**6


def test_what_a_module_loads_first_is_outside_the_limits():
    few = {"what": "the template", "most_bytes": 2**26}
    assert bounded.call(_held, **few) == 2**28
    with pytest.raises(bounded.OverLimit, match="the template needs more than 0.0625 GiB"):
        bounded.call(_repeat, "a", 2**28, **few)


def test_a_function_that_ends_the_process_ends_the_child_only():
    with pytest.raises(bounded.OverLimit, match="the tokenizer"):
        bounded.call(_leave, 7, what="the tokenizer")
    assert bounded.call(_repeat, "ab", 2, what="the tokenizer") == 4


def test_a_pattern_that_does_not_compile_is_an_error():
    with pytest.raises(ValueError) as caught:
        bounded.call(bounded.match_all, "(", ["a"], True, what="target_modules")
    assert not isinstance(caught.value, bounded.OverLimit)


def test_many_threads_get_their_own_answers():
    found = {}
    threads = [
        threading.Thread(
            target=lambda n=n: found.update({n: bounded.call(_repeat, "a", n, what="t")})
        )
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(waiting.SECONDS)
    assert found == {n: n for n in range(20)}
