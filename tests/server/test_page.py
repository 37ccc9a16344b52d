"""The page: what is served, what ``/inspect`` tells to whom, and every part of it clicked through in Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.fake_engine import SLOW
from tests.server.running import RunningServer, chat_body, wait_until
from weft.server import page

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install 'weft[test]')")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.remote.webdriver import WebDriver  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium and ChromeDriver are not installed (apt-get install chromium-driver)",
)

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
).split()

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script> & **bold**'
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "<b>UTC</b>"}}\n</tool_call>'
ADMIN, KEY = "the-admin-key", "a-key"
LIMIT_S = 15.0


class Browser:
    """Chromium on one page, with the words of the tests below."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(self, url: str, view: str = "chat") -> None:
        self.driver.get("about:blank")  # so that only the fragment's change does not count as the same page
        self.driver.get(f"{url}/#{view}")
        self.until(lambda: self.text("#model") or self.one("#banner").is_displayed())

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def script(self, code: str, *arguments: object) -> object:
        return self.driver.execute_script(code, *arguments)

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, LIMIT_S)

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        self.focused().send_keys(*keys)

    def set(self, name: str, value: object) -> None:
        """A parameter's value."""
        self.script(
            "document.getElementById('parameters').open = true;"
            "document.getElementById(arguments[0]).value = arguments[1]",
            f"p-{name}",
            str(value),
        )

    def send(self, text: str) -> None:
        message = self.one("#message")
        message.send_keys(text)
        message.send_keys(Keys.ENTER)

    def ask(self, text: str) -> WebElement:
        """Send a message and wait for the end of its answer."""
        count = len(self.all(".assistant"))
        self.send(text)
        self.until(lambda: len(self.all(".assistant")) > count and self.one("#send").is_displayed())
        return self.all(".assistant")[-1]

    def complaints(self) -> list[str]:
        """What the console says: broken scripts, blocked content."""
        return [entry["message"] for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: WebDriver) -> Iterator[Browser]:
    browser = Browser(driver)
    browser.complaints()
    yield browser
    browser.script("sessionStorage.clear()")
    driver.set_window_size(1200, 900)


@pytest.fixture(scope="module")
def mini() -> Iterator[RunningServer]:
    """The bundled model, with keys."""
    running = RunningServer(
        "--cpu-cache-gib", "0.1", "--max-num-seqs", "16", "--api-key", KEY, "--admin-key", ADMIN, module="weft"
    )
    try:
        yield running.wait_ready()
    finally:
        running.close()


# -- without a browser -------------------------------------------------------------------------------------------------


def test_every_file_is_served_without_a_key_and_with_a_strict_policy(mini: RunningServer) -> None:
    for path in page.PATHS:
        response = mini.client.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert mini.client.get("/inspect").status_code == 401
    assert mini.client.get("/__init__.py").status_code in (401, 404)


def test_the_page_names_no_other_host_and_makes_no_markup_of_text() -> None:
    for path in Path(page.__file__).parent.glob("*.*"):
        if path.suffix == ".py":
            continue
        assert f"/{path.name}" in page.PATHS, f"{path.name} is not served"
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), path.name
        assert not re.search(r"\son\w+=|\sstyle=|<style", text), f"{path.name} has inline script or style"


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


# -- chat ------------------------------------------------------------------------------------------------------------


@needs_chromium
def test_chat_shows_texts_as_texts(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.ask(HOSTILE)
    assert browser.text(".assistant > .content") == HOSTILE == browser.text(".user .content")
    assert not browser.all("#log img, #log script, #log b") and browser.driver.title == "Weft"
    assert "prompt tokens" in browser.text(".figures") and "first after" in browser.text(".figures")
    browser.ask("second")
    assert [m.get_attribute("class") for m in browser.all(".message")] == ["message user", "message assistant"] * 2
    browser.one("#clear").click()
    assert not browser.all(".message") and browser.focused().get_attribute("id") == "message"
    assert not browser.complaints()


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
    assert browser.focused().get_attribute("aria-label") == "Result of now"
    browser.press("12:00")
    count = len(browser.all(".assistant"))
    browser.one(".results button").click()
    browser.until(lambda: len(browser.all(".assistant")) > count and browser.one("#send").is_displayed())
    assert browser.text(".result") == "12:00" and not browser.all(".results")
    assert not browser.complaints()


@needs_chromium
@pytest.mark.parametrize("how", ["click", "escape"])
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
    assert "stopped" in browser.text(".figures")
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 2)
    browser.set("priority", "")
    browser.set("max_tokens", 3)
    browser.ask("one two three four five six")
    assert "cut at the token limit" in browser.all(".figures")[-1].text


@needs_chromium
def test_errors_are_told(server: RunningServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.set("tools", "[not json")
    browser.send("hello")
    browser.until(lambda: "Tools are not JSON" in browser.text("#log .error"))
    browser.set("tools", "")
    browser.set("temperature", -1)
    assert browser.one("#message").get_property("value") == "hello", "it can be sent again"
    browser.ask("")
    assert "temperature" in browser.all(".error")[-1].text
    browser.set("temperature", "")
    browser.ask(" again")
    assert browser.all(".assistant > .content")[-1].text == "hello again"


# -- inspect ---------------------------------------------------------------------------------------------------------


def give_key(browser: Browser, key: str) -> None:
    browser.script("document.getElementById('key-box').open = true")
    field = browser.one("#key")
    field.clear()
    field.send_keys(key, Keys.ENTER)
    browser.until(lambda: browser.text("#model") and not browser.one("#banner").is_displayed())


@needs_chromium
def test_inspect_follows_a_conversation(mini: RunningServer, browser: Browser) -> None:
    browser.open(mini.url)
    assert "wants an API key" in browser.text("#banner")
    give_key(browser, KEY)
    assert not [c for c in browser.complaints() if "401" not in c]
    browser.set("temperature", 0)
    browser.set("max_tokens", 40)
    browser.ask("What is 12 + 30?")
    assert "KV matched" in browser.text(".figures")
    browser.ask("And 5 + 5?")
    browser.all(".figures button")[-1].click()

    browser.until(lambda: browser.all("#tree .matched"))
    assert browser.one("#tab-inspect").get_attribute("aria-selected") == "true"
    assert browser.all("#tree .state") and browser.all("#tree .reused") and browser.all("#tree .edge")
    assert re.search(r"Reused \d+ of \d+ tokens\. KV matched", browser.text("#explanation"))
    pressed = browser.all(".request[aria-pressed='true']")
    assert len(pressed) == 1 and pressed[0].text.startswith("Yours: chatcmpl-")
    assert browser.all("#steps .bar") and "decoding; eager" in browser.text("#step")
    assert len(browser.all(".pool")) == 2 and "cached" in browser.text("#pools")
    assert len(browser.all("#latency .dot")) > 2 and browser.all("#throughput .line")
    pressed[0].click()
    assert not browser.all("#tree .matched") and not browser.text("#explanation")
    assert not browser.complaints()


def walk(browser: Browser) -> str:
    """What is told of each node on the way from the first one down."""
    browser.press(Keys.HOME)
    told = browser.text("#node")
    for _ in range(len(browser.all("#tree .node"))):
        browser.press(Keys.ARROW_DOWN)
        told += browser.text("#node")
    return told


@needs_chromium
def test_inspect_by_keyboard(mini: RunningServer, browser: Browser) -> None:
    body = chat_body("Tell me of the quetzal.", max_tokens=4)
    mini.client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    browser.open(mini.url)
    give_key(browser, ADMIN)
    browser.one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert browser.focused().get_attribute("id") == "tab-inspect" and browser.one("#inspect").is_displayed()
    browser.until(lambda: browser.all("#tree .node"))
    browser.script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    assert browser.text("#node").startswith("Root")
    # Looks are shared: the first one may be older than the question.
    browser.until(lambda: re.search(r"Tokens \d+ to \d+ in \d+ pages.*quetzal", walk(browser), re.DOTALL))
    browser.until(lambda: browser.all("#steps .bar"))
    browser.one("#steps").send_keys(Keys.ARROW_LEFT)
    first = browser.text("#step")
    browser.one("#steps").send_keys(Keys.ARROW_LEFT)
    assert browser.text("#step") != first
    browser.one("#pause").send_keys(Keys.ENTER)
    browser.until(lambda: browser.text("#inspect-state") == "paused")


# -- everywhere ------------------------------------------------------------------------------------------------------


@needs_chromium
@pytest.mark.parametrize("view", ["chat", "inspect"])
def test_it_fits_a_phone(mini: RunningServer, browser: Browser, view: str) -> None:
    browser.open(mini.url, view)
    give_key(browser, KEY)
    browser.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    try:
        if view == "inspect":
            browser.until(lambda: browser.all("#tiles .tile"))
        elements = "[document.documentElement, document.body, document.getElementById(arguments[0])]"
        assert browser.script(f"return Math.max(...{elements}.map((e) => e.scrollWidth))", view) == 390
        if view == "chat":
            assert browser.one("#send").rect["y"] + browser.one("#send").rect["height"] <= 800
        small = [b.text for b in browser.all("button") if b.is_displayed() and b.rect["height"] < 32]
        assert not small, "too small for a finger"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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
