"""The box that asks an index, in a real headless Chromium: by keyboard, and with hostile rows."""

import json
import threading

import browser
import pytest

from raslik_jax.report import page, serving

_ROW = {"id": "a", "score": 0.5, "sigma": 0.1, "is_target": None, "source": "", "place": 7}
_HOSTILE = "<img src=x onerror=document.title='run'> \u202e\x1b[31m"


def _answer(text):
    question = json.loads(text)
    if question["instruction"] == "wrong":
        raise ValueError("a question must have <b>an answer</b>")
    row = _ROW | {"instruction": _HOSTILE, "input": "", "output": _HOSTILE}
    less = row | {"score": -0.25, "sigma": None, "is_target": True, "place": 0}
    return {"queries": [question], "toward": [row], "against": [less], "seconds": 0.5}


@pytest.mark.heavy
def test_a_question_is_asked_by_keyboard_and_texts_stay_texts(tmp_path):
    chrome = browser.start(tmp_path / "profile")
    html = page.render([], title="Asking", is_served=True)
    with serving.Server(html, _answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            chrome.get(server.url)
            _ask_by_keyboard(chrome)
            assert chrome.title.startswith("Asking")  # no row ran
            logs = [row["message"] for row in chrome.get_log("browser")]
            assert [line for line in logs if "400" not in line] == []
            messages = [
                json.loads(row["message"])["message"] for row in chrome.get_log("performance")
            ]
            urls = {
                message["params"]["request"]["url"]
                for message in messages
                if message["method"] == "Network.requestWillBeSent"
            }
            own = {url for url in urls if not url.startswith(("chrome://", "data:"))}
            assert own == {server.url, f"{server.url}ask"}
        finally:
            chrome.quit()
            server.shutdown()
            thread.join()


def _ask_by_keyboard(chrome):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    def said(text):
        status = "return document.querySelector('#ask-box [role=status]').textContent"
        WebDriverWait(chrome, 120).until(lambda _: text in chrome.execute_script(status))

    chrome.execute_script("document.querySelector('nav a').focus()")
    box = chrome.switch_to.active_element
    while box.tag_name != "textarea":
        box.send_keys(Keys.TAB)
        box = chrome.switch_to.active_element
    box.send_keys("What is a kettle?", Keys.TAB)
    chrome.switch_to.active_element.send_keys("It hums.", Keys.CONTROL, Keys.ENTER)
    said("Traced in 0.50 s.")
    found = "return document.querySelector('[data-found]')."
    text = chrome.execute_script(found + "innerText")
    for part in (
        "It hums.",
        "score +0.5000 ± 0.1000, row 7",
        "score −0.2500",
        "<img src=x",
        "\\u{202e}",
    ):
        assert part in text
    assert chrome.execute_script(found + "querySelectorAll('img').length") == 0
    box.clear()
    box.send_keys("wrong", Keys.TAB, Keys.TAB)
    chrome.switch_to.active_element.send_keys(Keys.ENTER)  # the button
    said("a question must have <b>an answer</b>")
    assert chrome.execute_script(found + "childElementCount") == 0
