"""Owns the browser that tests of pages open them in: headless Chromium, without a network, and what it had to say.

`tests/zprof/test_pages.py` starts one for all its tests. It downloads nothing, and looks for a driver on this machine alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Browser", "opened", "why_none"]

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
    # Whatever asks for a host fails, and is seen to have asked.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_SECONDS = 60.0


def why_none() -> str:
    """Why pages cannot be opened here; "" where they can."""
    missing = [name for name, module in (("selenium", "selenium"), ("pillow", "PIL")) if find_spec(module) is None]
    if missing:
        return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}"
    for names in (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)):
        if not any(map(shutil.which, names)):
            return f"needs {names[0]} on the path"
    return ""


class Browser:
    """One window, and the events of each page opened in it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Show a page and wait until its script says that it drew itself."""
        from selenium.webdriver.support.ui import WebDriverWait

        # Away from the browser's own first page, which asks for a great deal of itself.
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.resolve().as_uri())
        WebDriverWait(self.driver, _SECONDS).until(lambda _: self.run("return document.documentElement.dataset.ready"))
        self.settle()

    def run(self, script: str, *arguments: object) -> Any:
        """What the script returns."""
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until the page has drawn what it was asked to: two frames on."""
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def element(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def text(self, css: str) -> str:
        return str(self.element(css).text)

    def click(self, css: str) -> None:
        """Click as a mouse does; the element must be there to be hit."""
        self.element(css).click()
        self.settle()

    def press(self, css: str, keys: str) -> None:
        self.element(css).send_keys(keys)
        self.settle()

    def click_at(self, css: str, x: float, y: float) -> None:
        """Click at a place within an element, in pixels from its upper left corner."""
        self._moved(css, x, y).click().perform()
        self.settle()

    def hover_at(self, css: str, x: float, y: float) -> None:
        """Move the mouse to a place within an element."""
        self._moved(css, x, y).perform()
        self.settle()

    def _moved(self, css: str, x: float, y: float) -> Any:
        from selenium.webdriver.common.action_chains import ActionChains

        node = self.element(css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", node)
        width, height = node.rect["width"], node.rect["height"]
        return ActionChains(self.driver, duration=0).move_to_element_with_offset(node, x - width / 2, y - height / 2)

    def prefers(self, scheme: str) -> None:
        """As somebody whose system is "light" or "dark"."""
        wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)

    def pixels(self, css: str) -> NDArray[np.uint8]:
        """What a screenshot of an element shows: [rows, columns, 3] of red, green and blue."""
        import numpy as np
        from PIL import Image

        self.run("document.activeElement.blur()")
        return np.asarray(Image.open(BytesIO(self.element(css).screenshot_as_png)).convert("RGB"))

    def complaints(self) -> list[str]:
        """Lines the console had since the page was opened, or since the last call: errors, refusals by its policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Addresses the page asked for since it was opened, but for its own file and what it holds itself."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


@contextmanager
def opened(folder: Path, *, width: int = 1400, height: int = 900) -> Iterator[Browser]:
    """A browser of its own profile in ``folder``; closed at the end."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    # Selenium's own finder of drivers asks the network; the path given is one reason not to, this the other.
    os.environ["SE_OFFLINE"] = "true"
    os.environ["SE_AVOID_STATS"] = "true"
    options = ChromeOptions()
    browser = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    options.binary_location = browser
    for flag in (*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(_SECONDS)
        driver.set_page_load_timeout(_SECONDS * 3)
        yield Browser(driver)
    finally:
        driver.quit()
