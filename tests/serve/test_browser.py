"""The live page in a real Chromium: what a visitor sees, and that nothing leaves the server's origin.

Debian's packages ``chromium`` and ``chromium-driver`` are what it takes. With ``OUTRIDER_SCREENSHOTS`` set to a folder
the pictures are kept there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from outrider import LLM
from tests.serve.serving import PATIENCE, real_server

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium and its driver are not installed"),
]
FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions"""
PHONE = {"deviceMetrics": {"width": 390, "height": 844, "pixelRatio": 2}}


@pytest.fixture(scope="module")
def guessed(folder: str) -> Iterator[LLM]:
    """A model that drafts for itself: every guess is right."""
    drafter = {"method": "model", "model": folder, "num_speculative_tokens": 3}
    llm = LLM(folder, drafter, kv_cache_mib=16, max_num_seqs=4, num_kv_blocks=128)
    yield llm
    assert llm.engine.blocks.n_free == llm.engine.blocks.n_blocks


class Visitor:
    """A browser and what its visitor does."""

    def __init__(self, profile: Path, phone: bool) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1280,800"]:
            options.add_argument(flag)
        if phone:
            options.add_experimental_option("mobileEmulation", PHONE)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self._pictures = Path(os.environ.get("OUTRIDER_SCREENSHOTS") or profile)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).get_property("textContent")).strip()

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, PATIENCE, 0.05, (StaleElementReferenceException,)).until(lambda _: holds())

    def fill(self, selector: str, text: str) -> None:
        self.one(selector).clear()
        self.one(selector).send_keys(text)

    def say(self, text: str, tokens: int) -> None:
        self.fill("#longest", str(tokens))
        self.one("#prompt").send_keys(text + Keys.ENTER)

    def picture(self, name: str) -> None:
        path = self._pictures / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(path))
        assert path.stat().st_size > 10_000

    def check_fits(self) -> None:
        inner, wide = self.driver.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
        assert wide <= inner

    def check_quiet(self, url: str, allowed: str = "") -> None:
        """Nothing was complained about, and nothing was asked of anybody else."""
        logs = [entry["message"] for entry in self.driver.get_log("browser")]
        assert not [message for message in logs if not allowed or allowed not in message]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        assert f"{url}/v1/status" in urls
        inside = ("data", "chrome", "chrome-untrusted")  # the page that a browser begins with is its own
        assert {urlsplit(each).netloc for each in urls if urlsplit(each).scheme not in inside} == {urlsplit(url).netloc}


@pytest.fixture(scope="module")
def visitors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Visitor]]:
    """A browser of each kind, started when it is first asked for; its page is empty, and so are its logs."""
    made: dict[str, Visitor] = {}

    def visitor(kind: str) -> Visitor:
        if kind not in made:
            made[kind] = Visitor(tmp_path_factory.mktemp(kind) / "profile", kind == "phone")
        made[kind].driver.get("about:blank")
        for log in ("browser", "performance"):
            made[kind].driver.get_log(log)
        return made[kind]

    yield visitor
    for each in made.values():
        each.driver.quit()


@pytest.fixture
def visitor(visitors: Callable[[str], Visitor]) -> Visitor:
    return visitors("desktop")


@pytest.mark.parametrize("name", ["desktop", "phone"])
def test_a_chat_shows_what_was_drafted(guessed: LLM, visitors: Callable[[str], Visitor], name: str) -> None:
    visitor = visitors(name)
    with real_server(guessed.engine) as (url, _):
        visitor.driver.get(url)
        visitor.until(lambda: visitor.text("#state") == "ready")
        assert visitor.text("#model") == "tiny"
        visitor.say("Who goes ahead?", 60)
        visitor.until(lambda: visitor.all("article.assistant .drafted"))
        visitor.until(lambda: not visitor.all("article.busy") and visitor.all("article.assistant .note"))
        note = visitor.text("article.assistant .note")
        assert "draft tokens accepted" in note
        drafted, drawn = (len(visitor.all(f"article.assistant .{kind}")) for kind in ("drafted", "drawn"))
        assert drafted > drawn > 0, "three guesses are right for each token that the model draws"
        tints = [
            visitor.one(f"article.assistant .{kind}").value_of_css_property("background-color")
            for kind in ("drafted", "drawn")
        ]
        assert tints[0] != tints[1]
        visitor.until(lambda: visitor.text("#speed") != "–")
        assert float(visitor.text("#per-step")) > 2
        assert visitor.text("#length") == "3.0"
        assert [int(visitor.text(f"#chart div:nth-child({i}) span")) > 50 for i in (1, 2, 3)] == [True] * 3
        assert "position 3" in visitor.one("#chart").get_attribute("aria-label")
        assert visitor.one("#live").get_property("open") == (name == "desktop")
        visitor.check_fits()
        visitor.picture(f"{name}-answer")
        visitor.check_quiet(url)
        if name == "phone":
            visitor.one("summary").click()
            visitor.picture("phone-live")
            visitor.check_fits()


def test_an_answer_can_be_stopped_and_plain_decoding_has_no_tint(
    guessed: LLM, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = guessed.engine.step

    def slow_step() -> object:  # the answer must not end by itself
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(guessed.engine, "step", slow_step)
    with real_server(guessed.engine) as (url, _):
        visitor.driver.get(url)
        visitor.one("#speculate").click()
        visitor.say("On and on", 900)
        visitor.until(lambda: len(visitor.all("article.assistant .drawn")) > 3)
        visitor.until(lambda: visitor.text("#running").startswith("1"))
        assert visitor.text("#state") == "working"
        assert not visitor.one("#send").is_displayed()
        visitor.one("#stop").click()
        visitor.until(lambda: visitor.text("article.assistant .note") == "stopped")
        visitor.until(lambda: visitor.text("#running").startswith("0"))
        assert not visitor.all("article .drafted")
        assert visitor.one("#send").is_displayed()
        visitor.one("#clear").click()
        visitor.until(lambda: not visitor.all("article"))
        visitor.check_quiet(url)


def test_errors_are_shown_and_nothing_is_lost(guessed: LLM, visitor: Visitor) -> None:
    with real_server(guessed.engine) as (url, _):
        visitor.driver.get(url)
        visitor.say("Too much", 5000)
        visitor.until(lambda: visitor.all("article .error"))
        assert "the context has 1024 tokens" in visitor.text("article .error")
        assert visitor.one("#prompt").get_property("value") == "Too much"
        visitor.until(lambda: visitor.text("#state") == "ready")
        visitor.check_quiet(url, allowed="status of 400")
    visitor.until(lambda: visitor.text("#state") == "no connection")


def test_a_key_is_asked_for_once(guessed: LLM, visitor: Visitor) -> None:
    with real_server(guessed.engine, api_key=("sesame",)) as (url, _):
        visitor.driver.get(url)
        visitor.until(lambda: visitor.one("#ask").is_displayed())
        visitor.fill("#key", "wrong")
        visitor.one("#ask button").click()
        visitor.until(lambda: "not accepted" in visitor.text("#ask-note") and visitor.one("#ask").is_displayed())
        visitor.fill("#key", "sesame")
        visitor.one("#ask button").click()
        visitor.until(lambda: visitor.text("#state") == "ready")
        visitor.say("Hello", 8)
        visitor.until(lambda: visitor.all("article.assistant .note"))
        visitor.driver.refresh()
        visitor.until(lambda: visitor.text("#state") == "ready")
        assert not visitor.one("#ask").is_displayed()
        visitor.check_quiet(url, allowed="status of 401")
