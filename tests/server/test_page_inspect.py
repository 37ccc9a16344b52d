"""Inspect: what ``/inspect`` tells to whom, and every part of the view clicked through in Chromium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from tests.server.running import RunningServer, chat_body, wait_until
from tests.whole import takes_long

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install 'weft[test]')")
from selenium.webdriver.common.keys import Keys

from tests.server.browser import ADMIN, KEY, Browser, needs_chromium


def look(server: RunningServer, key: str, **params: str) -> dict[str, object]:
    response = server.client.get("/inspect", params=params, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_texts_and_ids_of_others_need_the_admin_key(mini: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = chat_body("Where is the zebra?", max_tokens=8, request_id="mine")
    answer = mini.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    for view, knows in ((look(mini, KEY), False), (look(mini, ADMIN), True)):
        assert view["is_admin"] is knows
        assert ("zebra" in str(view)) is knows and ("mine" in str(view["requests"])) is knows
        assert view["nodes"] and view["steps"] and "token_ids" not in str(view["nodes"])
    named = look(mini, KEY, request=answer.json()["id"])["requests"]
    assert [r["request_id"] for r in named] == [answer.json()["id"]]  # type: ignore[attr-defined, index]
    assert named[0]["is_own"] and "KV matched 0 of" in named[0]["words"]  # type: ignore[index]


def test_looks_are_shared(server: RunningServer) -> None:
    """However many callers ask, the engine is asked a few times a second."""
    moments = {look(server, "none")["now"] for _ in range(20)}
    assert len(moments) <= 3


def test_inspect_has_history(server: RunningServer) -> None:
    assert server.chat("one two three").status_code == 200 and server.chat("x", temperature=-1).status_code == 400
    wait_until(lambda: look(server, "none")["history"]["responses"].get("refused"), 5)  # type: ignore[index]
    history = dict(look(server, "none")["history"])  # type: ignore[call-overload]
    assert history["num_first_tokens"] >= 1 and history["first_token"][0] > 0
    assert (history["interval_s"], history["span_s"]) == (1, 120)
    hour = dict(look(server, "none", history="hour")["history"])  # type: ignore[call-overload]
    assert (hour["interval_s"], hour["span_s"]) == (10, 3600)


@needs_chromium
@takes_long
def test_tiers_below_the_device_have_pools(tmp_path: Path, browser: Browser) -> None:
    flags = ("--kv-offloading-size", "0.1", "--kv-offloading-dir", str(tmp_path), "--kv-offloading-disk-size", "0.5")
    server = RunningServer("--cpu-cache-gib", "0.1", "--max-num-seqs", "4", *flags, module="weft")
    try:
        server.wait_ready()
        assert server.chat("What is 12 + 30?").status_code == 200
        browser.open(server.url)
        browser.one("#tab-inspect").click()
        browser.one("#tab-cache").click()
        browser.until(lambda: len(browser.all(".pool")) == 5)
        text = browser.text("#pools")
        assert "Host memory, KV" in text and "Host memory, states" in text and re.search(r"Files: .*\b512 MiB", text)
        assert not browser.complaints()
    finally:
        server.close()


@needs_chromium
def test_inspect_follows_a_conversation(mini: RunningServer, browser: Browser) -> None:
    browser.open(mini.url)
    assert "wants an API key" in browser.text("#banner")
    browser.give_key(KEY)
    assert not [c for c in browser.complaints() if "401" not in c]
    browser.set("temperature", 0)
    browser.set("max_tokens", 40)
    browser.ask("What is 12 + 30?")
    assert "KV matched" in browser.text(".about")
    browser.ask("And 5 + 5?")
    browser.open(mini.url)  # what is kept can still be shown
    browser.all(".mark")[-1].click()
    browser.all(".look")[-1].click()

    browser.until(lambda: browser.all("#tree .matched"))
    assert browser.one("#tab-inspect").get_attribute("aria-selected") == "true"
    assert browser.one("#tab-cache").get_attribute("aria-selected") == "true"
    assert browser.all("#tree .state") and browser.all("#tree .reused") and len(browser.all("#tree .matched")) > 2
    assert re.search(r"Reused \d+ of \d+ tokens\. KV matched", browser.text("#explanation"))
    assert len(browser.all(".pool")) == 2 and "cached, free when needed" in browser.text("#pools")
    shares = "return [...document.querySelectorAll('.pool:last-of-type > div')].map((e) => e.clientWidth)"
    assert max(browser.script(shares)) > 0  # type: ignore[type-var, arg-type]

    browser.one("#tab-requests").click()
    check_the_table(browser)
    pressed = ".request[aria-pressed='true']"
    assert len(browser.all(pressed)) == 1 and browser.text(pressed).startswith("Yours: chatcmpl-")
    browser.one("#to-tree").click()
    browser.until(lambda: browser.all("#tree .matched"))
    browser.one("#forget").click()
    browser.until(lambda: not browser.all("#tree .matched") and not browser.one("#chosen").is_displayed())

    browser.one("#tab-throughput").click()
    browser.until(lambda: browser.all("#steps .bar") and browser.all("#throughput .line"))
    assert "decoding; eager" in browser.text("#step")
    assert [e.text for e in browser.all("#steps .legend li")] == ["eager", "duration"], "no mode that does not occur"
    browser.one("#tab-latency").click()
    row = "#percentiles tbody tr:last-child td"
    browser.until(lambda: re.search(r"\d+(\.\d+)? (ms|s)$", browser.text(row)))
    assert browser.all("#first-token .dot") and browser.all("#inter-token .line, #inter-token .dot")
    assert not browser.complaints()


def check_the_table(browser: Browser) -> None:
    """Requests have a time and an age; a column has one unit, which its head names."""
    cells = (
        "return [...document.querySelectorAll(arguments[0])].map((row) => [...row.children].map((e) => e.innerText))"
    )
    (heads,) = cast("list[list[str]]", browser.script(cells, "#requests thead tr"))  # at once: the page redraws rows
    assert heads[:4] == ["request", "arrived", "age", "status"]
    assert all(re.fullmatch(r"(queued|TTFT|per token|whole) (µs|ms|s)", head) for head in heads[-4:])
    rows = cast("list[list[str]]", browser.script(cells, "#requests tbody tr"))
    for _, arrived, age, *_, queued, first, per_token, whole in rows:
        minutes, seconds = map(int, age.split(":"))
        assert re.match(r"\d+:\d\d:\d\d", arrived) and minutes < 9 and seconds < 60
        assert all(re.fullmatch(r"[\d,]+(\.\d+)?|–", figure) for figure in (queued, first, per_token, whole))
    decimals = [{len(row[i].partition(".")[2]) for row in rows if row[i] != "–"} for i in range(-4, 0)]
    assert all(len(found) == 1 for found in decimals), decimals
    clock = "const now = new Date(Date.now() - 1000 * arguments[0]); return now.toLocaleTimeString()"
    minutes, seconds = map(int, rows[0][2].split(":"))
    near = {browser.script(clock, 60 * minutes + seconds + late) for late in range(-1, 4)}
    assert rows[0][1] in near


@takes_long
@needs_chromium
def test_a_request_that_is_forgotten_is_told(mini: RunningServer, browser: Browser) -> None:
    browser.open(mini.url)
    browser.give_key(KEY)
    answer = {"role": "assistant", "content": "y", "cache": "KV matched 0", "request": "chatcmpl-of-yesterday"}
    browser.keep([{"role": "user", "content": "x"}, answer])
    browser.open(mini.url)
    browser.one(".mark").click()
    browser.one(".look").click()
    browser.until(lambda: "does not know this request any more" in browser.text("#explanation"))


@takes_long
@needs_chromium
def test_plots(server: RunningServer, browser: Browser) -> None:
    """Labels lie inside the picture; nothing is drawn through time that was not measured."""
    browser.open(server.url, "inspect")
    browser.until(lambda: browser.all("#throughput svg"))
    result = browser.driver.execute_async_script(
        """
        const done = arguments[0];
        import("/plots.js").then(({ TimePlot }) => {
          const box = document.getElementById("load");
          const series = [{ name: "s", className: "a", pick: (p) => p.y }];
          const plot = new TimePlot(box, series, (v) => `${v.toFixed(3)} long units`);
          const points = [0, 1, 2, 5, 6, 9].map((start) => ({ start: 100 + start, y: start === 6 ? null : 12345.678 }));
          plot.draw({ now: 110, span: 20, interval: 1, began: 100, points });
          const left = box.querySelector(".grid").ownerSVGElement.getBoundingClientRect().left;
          const count = (selector) => box.querySelectorAll(selector).length;
          done([[...box.querySelectorAll(".axis")].map((t) => t.getBoundingClientRect().left - left),
            count(".line"), count("svg > .dot") - count(".swatch > .dot"), count(".unmeasured")]);
        });
        """
    )
    lefts, num_lines, num_dots, num_unmeasured = result
    assert min(lefts) >= 0, "the first digit of a label is cut"
    assert (num_lines, num_dots, num_unmeasured) == (1, 2, 1)


def walk(browser: Browser) -> str:
    """Return the texts shown for each node, from the first node down."""
    browser.press(Keys.HOME)
    told = browser.text("#node")
    for _ in range(len(browser.all("#tree .node"))):
        browser.press(Keys.ARROW_DOWN)
        told += browser.text("#node")
    return told


@takes_long
@needs_chromium
def test_the_tree_folds_and_is_searched_by_keyboard(mini: RunningServer, browser: Browser) -> None:
    for text in ("Tell me of the quetzal.", "Tell me of zebras.", "What is 3 + 4?"):
        body = chat_body(text, max_tokens=4)
        mini.client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    browser.open(mini.url)
    browser.give_key(ADMIN)
    browser.one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert browser.focused().get_attribute("id") == "tab-inspect" and browser.one("#inspect").is_displayed()
    browser.one("#tab-throughput").send_keys(Keys.ARROW_LEFT)
    assert browser.focused().get_attribute("id") == "tab-cache"
    browser.until(lambda: browser.all("#tree .node"))
    folded = len(browser.all("#tree .node"))
    assert not browser.one("#no-texts").is_displayed() and browser.all("#tree .text")
    assert browser.all("#tree [aria-expanded='false']"), "folded in the beginning"
    browser.script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    assert browser.text("#node").startswith("Root")
    browser.one("#unfold").click()
    browser.until(lambda: len(browser.all("#tree .node")) > folded and not browser.all("#tree [aria-expanded='false']"))
    browser.one("#fold").click()
    browser.until(lambda: len(browser.all("#tree .node")) == folded)

    # Looks are shared: the first one may be older than the question.
    browser.one("#tree-search").send_keys("quetzal")
    browser.until(lambda: browser.all("#tree .found"))
    browser.one("#pause").send_keys(Keys.ENTER)
    browser.until(lambda: browser.text("#inspect-state") == "paused")
    assert re.match(r"1 found, \d+ shown of \d+", browser.text("#tree-count"))
    browser.script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    assert re.search(r"Tokens \d+ to \d+ in \d+ pages.*quetzal", walk(browser), re.DOTALL)
    assert "zebras" not in browser.text("#tree")
    browser.one("#tree-search").clear()
    browser.one("#tree-search").send_keys("no such thing")
    assert "0 found, 0 shown" in browser.text("#tree-count")


@takes_long
@needs_chromium
def test_the_tree_has_an_axis(mini: RunningServer, browser: Browser) -> None:
    """Its marks lie where bars of these positions begin and end, and without the admin key texts are not there."""
    headers = {"Authorization": f"Bearer {KEY}"}
    mini.client.post("/v1/chat/completions", json=chat_body("one " * 300, max_tokens=4), headers=headers)
    browser.open(mini.url, "inspect/cache")
    browser.give_key(KEY)
    browser.until(lambda: browser.all("#tree .node"))
    browser.one("#unfold").click()
    browser.until(lambda: not browser.all("#tree [aria-expanded='false']"))
    places = "e => [e.textContent, e.previousSibling.getBoundingClientRect().x]"
    marks = dict(browser.script(f"return [...document.querySelectorAll('.tree-axis text')].map({places})"))  # type: ignore[call-overload]
    bars = [bar.rect for bar in browser.all("#tree .lane rect.span")]
    assert abs(marks.pop("0") - min(bar["x"] for bar in bars)) < 2
    assert {"10", "50", "100"} <= set(marks)
    assert abs(max(marks.values()) - max(bar["x"] + bar["width"] for bar in bars)) < 2
    assert list(marks.values()) != sorted(marks.values()), "the end comes first, then falling round positions"
    assert browser.one("#no-texts").is_displayed() and not browser.all("#tree .text")


@takes_long
@needs_chromium
def test_steps_by_keyboard(mini: RunningServer, browser: Browser) -> None:
    browser.open(mini.url, "inspect")
    browser.give_key(KEY)
    browser.until(lambda: browser.all("#steps .bar"))
    browser.one("#steps").send_keys(Keys.ARROW_LEFT)
    first = browser.text("#step")
    browser.one("#steps").send_keys(Keys.ARROW_LEFT)
    assert browser.text("#step") != first


@needs_chromium
@takes_long
def test_a_replica_is_chosen(browser: Browser) -> None:
    running = RunningServer("--dp", "2", "--device", "cpu").wait_ready()
    try:
        browser.open(running.url, "inspect")
        browser.until(lambda: browser.text("#replicas [aria-pressed='true']") == "Replica 0")
        browser.one("#replica-1").click()
        browser.until(lambda: browser.text("#replicas [aria-pressed='true']") == "Replica 1")
        assert browser.focused().get_attribute("id") == "replica-1" and "of 8" in browser.text("#tiles")
        browser.driver.set_window_size(500, 900)  # narrower than the table of replicas
        assert browser.width("inspect") == browser.script("return innerWidth")
        assert not browser.complaints()
    finally:
        running.close()
