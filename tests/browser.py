"""A headless Chromium that opens pages (Debian's packages chromium and chromium-driver)."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

READY = "return document.documentElement.dataset.ready === 'true'"


class Browser:
    """Pages of files, at the width of a desk or a phone."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = 1280, dark: bool = False) -> None:
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900,
                     deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get(page.as_uri())
        WebDriverWait(self.driver, 60).until(lambda driver: driver.execute_script(READY))

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def point_at(self, element: WebElement, x: int, down: int = 0) -> None:
        """Move the pointer to x pixels from the left, and `down` below half of the height."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        actions = ActionChains(self.driver, duration=0)
        actions.move_to_element_with_offset(element, x - element.size["width"] // 2, down).perform()

    def messages(self) -> list[str]:
        """What the console has, of every level, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Browser]:
    if shutil.which("chromedriver") is None and os.environ.get("CI") != "true":  # there it fails
        pytest.skip("Chromium is not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    # As root, and in a container with little shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
