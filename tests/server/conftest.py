"""Fixtures: a server over the fake engine for tests that do not break it, servers over the bundled model, a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.server.running import RunningServer, wait_until

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

    from tests.server.browser import Browser


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--max-queue-size", "40", "--max-n", "16", "--served-model-name", "weft-mini", "other-name")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def mini() -> Iterator[RunningServer]:
    """The bundled model, with keys."""
    from tests.server.browser import ADMIN, KEY

    running = RunningServer(
        "--cpu-cache-gib", "0.1", "--max-num-seqs", "16", "--api-key", KEY, "--admin-key", ADMIN, module="weft"
    )
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="session")
def open_mini() -> Iterator[RunningServer]:
    """The bundled model, for everybody. It ends here and in no test: the order of tests is the runner's to choose."""
    running = RunningServer("--cpu-cache-gib", "0.1", "--max-num-seqs", "16", module="weft")
    try:
        yield running.wait_ready()

        def is_idle() -> bool:  # a client has its last byte a moment before the server has forgotten the request
            load = running.client.get("/load").json()
            return (load["server_load"], load["num_running"], load["num_waiting"]) == (0, 0, 0)

        wait_until(is_idle, 30)
        assert running.stop() == 0, "".join(running.log[-20:])
    finally:
        running.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    from tests.server.browser import start_chromium

    driver = start_chromium(str(tmp_path_factory.mktemp("chromium")))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: WebDriver) -> Iterator[Browser]:
    from tests.server.browser import Browser

    browser = Browser(driver)
    browser.complaints()
    yield browser
    browser.script("sessionStorage.clear(); localStorage.clear()")
    driver.get("about:blank")  # where nothing asks a server without its key
    driver.set_window_size(1200, 900)
