"""Chromium on the page, with the words that its tests use."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.patience import GUARD_S
from tests.server.running import wait_until

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

ADMIN, KEY = "the-admin-key", "a-key"
LIMIT_S = GUARD_S


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

    @contextlib.contextmanager
    def phone(self) -> Iterator[None]:
        """A small screen, in the block."""
        size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def width(self, view: str) -> object:
        """Return the largest scroll width of the page, its body and the element ``view``."""
        elements = "[document.documentElement, document.body, document.getElementById(arguments[0])]"
        return self.script(f"return Math.max(...{elements}.map((e) => e.scrollWidth))", view)

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        self.focused().send_keys(*keys)

    def set(self, name: str, value: object) -> None:
        """A parameter's value."""
        self.script(
            "document.getElementById('parameters').open = true;"
            "const field = document.getElementById(arguments[0]);"
            "field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}))",
            f"p-{name}",
            str(value),
        )

    def send(self, text: str) -> None:
        message = self.one("#message")
        self.script("arguments[0].focus()", message)
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})  # all keys at once
        message.send_keys(Keys.ENTER)

    def ask(self, text: str) -> WebElement:
        """Send a message and wait for the end of its answer."""
        count = len(self.all(".assistant"))
        self.send(text)
        self.until(lambda: len(self.all(".assistant")) > count and self.one("#send").is_displayed())
        return self.all(".assistant")[-1]

    def button(self, name: str, inside: str) -> WebElement:
        """The first button of this name in the first element that has one."""
        found = [b for b in self.all(f"{inside} button") if b.get_property("textContent") == name]
        self.script("arguments[0].scrollIntoView({block: 'center'})", found[0])
        return found[0]

    def contents(self) -> list[str]:
        """The texts of the conversation."""
        script = "return [...document.querySelectorAll('.message > .content')].map((e) => e.textContent.trim())"
        return list(self.script(script))  # type: ignore[call-overload]

    def keep(self, messages: list[dict[str, object]], name: str = "kept", updated: int = 1) -> None:
        """A conversation in this browser's storage."""
        kept = {"id": name, "title": name, "created": 1, "updated": updated, "parameters": {}, "messages": messages}
        self.script("localStorage.setItem('weft-chat ' + arguments[0], arguments[1])", name, json.dumps(kept))

    def give_key(self, key: str) -> None:
        self.script("document.getElementById('key-box').open = true")
        field = self.one("#key")
        field.clear()
        field.send_keys(key, Keys.ENTER)
        self.until(lambda: self.text("#model") and not self.one("#banner").is_displayed())

    def complaints(self) -> list[str]:
        """Return the console's messages (broken scripts, blocked content), except about the favicon."""
        return [entry["message"] for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


def start_chromium(profile: str) -> WebDriver:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))
