"""The page: what is served, and chat clicked through in Chromium. Answers are in ``test_page_answers.py``."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.server.fake_engine import SLOW
from tests.server.relay import Relay
from tests.server.running import ROOT, RunningServer, wait_until
from tests.whole import takes_long
from weft.server import page

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install 'weft[test]')")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.browser import KEY, Browser, needs_chromium

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script> & **bold**'
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "<b>UTC</b>"}}\n</tool_call>'
FOLDER = Path(page.__file__).parent


# -- without a browser -------------------------------------------------------------------------------------------------


def test_every_file_is_served_without_a_key_and_with_a_strict_policy(mini: RunningServer) -> None:
    for path in page.PATHS:
        response = mini.client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert "trusted-types dompurify" in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        again = mini.client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304 and again.headers["content-security-policy"] == policy
    assert {"/vendor/marked.js", "/vendor/marked.LICENSE", "/vendor/fonts.LICENSE"} < page.PATHS
    assert mini.client.get("/inspect").status_code == 401
    assert mini.client.get("/__init__.py").status_code in (401, 404)


def test_the_page_names_no_other_host_and_makes_no_markup_of_text() -> None:
    for path in FOLDER.glob("*.*"):
        if path.suffix == ".py":
            continue
        assert f"/{path.name}" in page.PATHS, f"{path.name} is not served"
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), path.name
        assert not re.search(r"\son\w+=|\sstyle=|<style", text), f"{path.name} has inline script or style"


def test_other_peoples_code_is_as_published_and_licensed() -> None:
    versions = json.loads((FOLDER / "vendor" / "versions.json").read_text())
    vendor = FOLDER / "vendor"
    files = {str(path.relative_to(vendor)) for path in vendor.rglob("*.*") if path.suffix not in (".LICENSE", ".json")}
    assert set(versions) == files
    for name, said in versions.items():
        content = (vendor / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == said["sha256"], f"{name} was changed"
        assert said["version"].encode() in content or name.startswith("fonts/")
        assert (vendor / said["licence"].partition("(")[2].rstrip(")")).read_text()
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for pattern in patterns["weft.server.page"] for path in FOLDER.glob(pattern)}
    assert packed >= {path for path in FOLDER.rglob("*.*") if path.suffix not in (".py", ".pyc")}


# -- chat ------------------------------------------------------------------------------------------------------------


@needs_chromium
def test_the_first_screen(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    assert browser.text("#welcome h3") == "weft-mini" and "4,096 tokens of context" in browser.text("#welcome")
    assert [e.text for e in browser.all(".chips li")] == ["Text", "Tools", "Reasoning", "Structured output"]
    examples = browser.all(".examples button")
    assert len(examples) == 4
    title, question = browser.one("#title").rect, examples[1].text
    assert not browser.one("#export-menu").is_displayed()
    examples[1].click()
    browser.until(lambda: browser.contents() == [question, question] and browser.one("#send").is_displayed())
    assert not browser.all("#welcome") and browser.one("#export-menu").is_displayed()
    assert browser.one("#title").rect == title, "the title has jumped"


@takes_long
@needs_chromium
def test_the_composer_offers_what_the_model_can_do(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.script("document.getElementById('parameters').open = true")
    fields = browser.all("#parameters input")
    defaults = {e.get_property("id"): e.get_property("placeholder") for e in fields}
    assert defaults["p-temperature"] == "0, greedy" and defaults["p-top_p"] == "1, off"
    assert defaults["p-max_tokens"] == "up to 4,096" and all(defaults.values())
    assert browser.one("#p-tools").is_displayed() and not browser.one("#attach").is_displayed()
    files = "const files = new DataTransfer(); files.items.add(new File(['x'], 'x.png', {type: 'image/png'}));"
    dropped = "new DragEvent('drop', {dataTransfer: files, bubbles: true})"
    browser.script(f"{files} document.getElementById('chat').dispatchEvent({dropped})")
    browser.until(lambda: browser.text("#attach-problem") == "This model reads text only.")
    less = "import('/parameters.js').then((m) => { m.setModel(arguments[0]); arguments[1](); })"
    card = {"max_model_len": 100, "weft": {"tools": False, "thinking_switch": False, "defaults": {"temperature": 0.6}}}
    browser.driver.execute_async_script(less, card)
    assert not browser.one("#p-tools").is_displayed() and not browser.one("#p-thinking").is_displayed()
    assert browser.one("#p-temperature").get_property("placeholder") == "0.6"


@needs_chromium
def test_chat_shows_texts_as_texts(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask(HOSTILE)
    assert browser.text(".user .content") == HOSTILE
    assert browser.text(".assistant > .content") == HOSTILE.replace("**", "") == browser.text(".assistant > .content p")
    assert browser.text(".assistant strong") == "bold"
    assert not browser.all("#log img, #log script, #log [onerror]") and browser.driver.title == "Weft"
    assert "prompt tokens" in browser.text(".about") and "first token after" in browser.text(".about")
    browser.ask("second")
    assert [m.get_attribute("class") for m in browser.all(".message")] == ["message user", "message assistant"] * 2
    assert not browser.complaints()


@takes_long
@needs_chromium
def test_conversations_are_kept(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask("first chat")
    browser.one("#new-chat").click()
    assert not browser.all(".message") and browser.focused().get_attribute("id") == "message"
    browser.set("max_tokens", 7)
    browser.ask("second chat")
    browser.open(server.url)
    assert [b.text for b in browser.all("#conversation-list .open")] == ["second chat", "first chat"]
    assert browser.text(".user .content") == "second chat" and "prompt tokens" in browser.text(".about")
    assert browser.one("#p-max_tokens").get_property("value") == "7"
    browser.all("#conversation-list .open")[1].click()
    assert browser.text(".user .content") == "first chat" and browser.text("#title") == "first chat"
    assert browser.one("#p-max_tokens").get_property("value") == "", "parameters belong to a conversation"

    browser.script(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; }"
    )
    browser.script("document.getElementById('export-menu').open = true")
    browser.one("#export-markdown").click()
    browser.until(lambda: browser.script("return window.saved"))
    assert re.fullmatch(
        r"# first chat\n\n\d.*Z\n\n## User\n\nfirst chat\n\n## Assistant\n\nfirst chat\n",
        str(browser.script("return window.saved")),
    )
    browser.script("window.saved = null")
    browser.one("#export-all").click()
    browser.until(lambda: browser.script("return window.saved"))
    saved = json.loads(str(browser.script("return window.saved")))
    assert [c["title"] for c in saved] == ["second chat", "first chat"]

    browser.script("window.confirm = () => true")
    browser.one("#conversation-list .current .delete").click()
    assert [b.text for b in browser.all("#conversation-list .open")] == ["second chat"] and not browser.all(".message")
    browser.one("#delete-all").click()
    assert browser.script("return localStorage.length") == 0


@takes_long
@needs_chromium
def test_full_storage_drops_the_oldest(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    for number, name in enumerate(("old", "newer")):
        browser.keep([{"role": "user", "content": name + "x" * 2_400_000}], name, updated=number)
    browser.open(server.url)
    browser.one("#new-chat").click()
    browser.script("document.getElementById('message').value = 'y'.repeat(600000)")
    browser.script("document.getElementById('composer').requestSubmit()")
    browser.until(lambda: browser.one("#send").is_displayed())
    titles = [b.text for b in browser.all("#conversation-list .open")]
    assert len(titles) == 2 and "newer" in titles and "old" not in titles


@takes_long
@needs_chromium
def test_edit_and_regenerate(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask("alpha")
    browser.ask("beta")
    browser.button("Edit", ".user").click()
    field = browser.one(".editor textarea")
    browser.until(lambda: browser.focused() == field)
    assert field.get_property("value") == "alpha" and "What follows is replaced" in browser.text(".editor")
    field.clear()
    field.send_keys("gamma")
    browser.one(".editor .primary").click()
    browser.until(lambda: browser.contents() == ["gamma", "gamma"] and browser.one("#send").is_displayed())
    browser.ask("delta")
    browser.script("document.querySelector('.assistant:last-of-type').dataset.before = 1")
    browser.button("Regenerate", ".message:last-of-type").click()
    browser.until(lambda: browser.one("#send").is_displayed() and not browser.all("[data-before]"))
    assert browser.contents() == ["gamma", "gamma", "delta", "delta"]
    browser.script("window.confirm = () => true")
    browser.button("Regenerate", ".assistant").click()
    browser.until(lambda: browser.contents() == ["gamma", "gamma"] and browser.one("#send").is_displayed())
    assert not browser.complaints()


@takes_long
@needs_chromium
def test_two_conversations_answer_at_once(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.set("priority", SLOW)
    browser.set("max_tokens", 150)
    browser.send("slow and steady")
    browser.until(lambda: browser.text(".assistant > .content"))
    browser.one("#new-chat").click()
    browser.set("priority", "")
    browser.set("max_tokens", 9)
    browser.ask("quick")
    assert browser.contents()[0] == "quick"
    browser.all("#conversation-list .open")[1].click()
    browser.until(lambda: browser.one("#send").is_displayed() and "150 new" in browser.text(".about"))
    browser.open(server.url)
    assert {b.text for b in browser.all("#conversation-list .open")} == {"quick", "slow and steady"}


@needs_chromium
def test_reasoning_and_tools(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask("<think>let me see</think>It is so.")
    fold = browser.one(".reasoning")
    assert fold.is_displayed() and not browser.one(".reasoning .content").is_displayed()
    fold.find_element(By.TAG_NAME, "summary").click()
    assert browser.one(".reasoning .content").text == "let me see"
    assert browser.text(".assistant > .content") == "It is so."

    browser.set("tools", '[{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]')
    browser.send(CALL.replace("\n", ""))
    browser.until(lambda: browser.all(".results"))
    assert browser.text(".tool summary") == "Call of now"
    assert '"<b>UTC</b>"' in browser.text(".tool pre") and not browser.all("#log b")
    browser.until(lambda: browser.focused().get_attribute("aria-label") == "Result of now")
    browser.press("12:00")
    count = len(browser.all(".assistant"))
    browser.one(".results button").click()
    browser.until(lambda: len(browser.all(".assistant")) > count and browser.one("#send").is_displayed())
    assert browser.text(".result") == "12:00" and not browser.all(".results")
    assert not browser.complaints()


@needs_chromium
@pytest.mark.parametrize("how", ["click", pytest.param("escape", marks=takes_long)])
def test_stop(server: RunningServer, browser: Browser, how: str) -> None:
    browser.open(server.url)
    browser.set("priority", SLOW)
    browser.set("max_tokens", 3000)
    browser.send("on and on")
    browser.until(lambda: len(browser.text(".assistant > .content")) > 20)
    assert not browser.one("#send").is_displayed()
    if how == "click":
        browser.one("#stop").click()
    else:
        browser.one("#message").send_keys(Keys.ESCAPE)
    browser.until(lambda: browser.one("#send").is_displayed())
    assert browser.one(".note").text == "Stopped."
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 5)
    browser.set("priority", "")
    browser.set("max_tokens", 3)
    browser.ask("one two three four five six")
    assert browser.all(".note")[-1].text == "Cut at the token limit."


@takes_long
@needs_chromium
def test_the_end_stays_in_view(server: RunningServer, browser: Browser) -> None:
    """While an answer grows, and after its figures came; unless the reader scrolled up."""
    browser.open(server.url)
    hidden = "const log = document.getElementById('log'); return log.scrollHeight - log.scrollTop - log.clientHeight"
    for _ in range(3):
        browser.ask("line after line " * 40)
    browser.until(lambda: float(str(browser.script(hidden))) < 2)
    figures, box = browser.all(".actions")[-1].rect, browser.one("#composer").rect
    assert figures["y"] + figures["height"] <= box["y"]
    browser.script("document.getElementById('log').scrollTop = 0")
    browser.until(lambda: browser.one("#to-latest").is_displayed())
    browser.one("#to-latest").click()
    browser.until(lambda: float(str(browser.script(hidden))) < 2 and not browser.one("#to-latest").is_displayed())


@takes_long
@needs_chromium
def test_a_short_question_has_a_small_bubble(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask("hi")
    assert browser.one(".user .content").rect["width"] < 120
    bar, box = browser.one("#new-chat").rect, browser.one("#send").rect
    assert bar["x"] + bar["width"] < box["x"] - 300, "apart, so that no answer is lost by a slip"


@takes_long
@needs_chromium
def test_errors_are_told(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.set("tools", "[not json")
    browser.send("hello")
    browser.until(lambda: "Tools are not JSON" in browser.text("#log .error"))
    browser.set("tools", "")
    browser.set("temperature", -1)
    browser.button("Try again", ".failure").click()
    browser.until(lambda: "temperature" in browser.text("#log .error"))
    browser.set("temperature", "")
    browser.button("Try again", ".failure").click()
    browser.until(lambda: browser.contents() == ["hello", "hello"] and not browser.all("#log .error"))


@takes_long
@needs_chromium
def test_a_server_that_goes_and_comes_back(server: RunningServer, browser: Browser) -> None:
    relay = Relay(int(server.url.rpartition(":")[2]))
    try:
        browser.open(relay.url)
        browser.ask("before")
        relay.close()
        browser.send("while it is away")
        browser.until(lambda: "cannot be reached" in browser.text("#log .error"))
        assert "trying again in" in browser.text("#banner") and browser.one("#banner").is_displayed()
        relay.open()
        browser.script("document.getElementById('retry').click()")
        browser.until(lambda: not browser.one("#banner").is_displayed())
        browser.button("Try again", ".failure").click()
        browser.until(lambda: browser.contents()[-1] == "while it is away" and not browser.all("#log .error"))
        assert len(browser.contents()) == 4
    finally:
        relay.close()


# -- everywhere ------------------------------------------------------------------------------------------------------

PARTS = ["throughput", "latency", "requests", "cache"]


@takes_long
@needs_chromium
def test_it_fits_a_phone(mini: RunningServer, browser: Browser) -> None:
    browser.open(mini.url)
    browser.give_key(KEY)

    def fits(view: str) -> None:
        assert browser.width(view) == 390
        small = [b.text for b in browser.all("button") if b.is_displayed() and b.rect["height"] < 32]
        assert not small, "too small for a finger"

    with browser.phone():
        fits("chat")
        assert browser.one("#send").rect["y"] + browser.one("#send").rect["height"] <= 800
        check_the_drawer(browser)
        browser.script("location.hash = 'inspect'")
        browser.until(lambda: browser.all("#tiles .tile"))
        shown = [tile.text.split("\n") for tile in browser.all("#tiles .tile") if tile.is_displayed()]
        assert len(shown) >= 2, "what runs, and tokens per second"
        assert not [words for words in shown if "0" in words and "output tok/s" not in words], "tiles of zeros"
        for part in PARTS:
            browser.one(f"#tab-{part}").click()
            fits("inspect")


def check_the_drawer(browser: Browser) -> None:
    """The drawer covers the chat, which cannot be used meanwhile. Escape and a click on the scrim close the drawer."""
    drawer, scrim = browser.one("#conversations"), browser.one("#scrim")
    assert not drawer.is_displayed() and not scrim.is_displayed()
    browser.one("#show-conversations").click()
    assert drawer.is_displayed() and browser.one("#column").get_property("inert")
    assert browser.focused().get_attribute("id") == "new-chat"
    browser.press(Keys.ESCAPE)
    assert not drawer.is_displayed() and browser.focused().get_attribute("id") == "show-conversations"
    browser.one("#show-conversations").click()
    assert browser.script("return document.elementFromPoint(380, 400).id") == "scrim"
    browser.script("document.elementFromPoint(380, 400).click()")
    assert not drawer.is_displayed() and not scrim.is_displayed() and not browser.one("#column").get_property("inert")


@takes_long
@needs_chromium
def test_dark_and_light(server: RunningServer, browser: Browser) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.open(server.url)
        style = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
        colours.add(tuple(browser.script(style)))  # type: ignore[arg-type]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert len(colours) == 2
