"""Fixtures of the tests of the page: a browser for each module, since it holds the thread's event loop, and windows of it.

A page that opens a dialog, writes an error to the console or asks another host than the viewer's for anything fails its test.
"""

from urllib.parse import urlsplit

import pytest
from browser import SECONDS, WIDE, chromium, watch


@pytest.fixture(scope="module")
def chrome():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def window(chrome):
    """Opens a page: `window(url, **context)`. Whether it did what it should not is looked at when the test ends."""
    opened = []

    def open_page(url, may_fail=False, **context):
        context = chrome.new_context(**{"viewport": WIDE, "color_scheme": "light", **context})
        context.set_default_timeout(1000 * SECONDS)
        page = context.new_page()
        wrong = watch(page, urlsplit(url).netloc)
        opened.append((context, [] if may_fail else wrong))
        page.goto(url)
        return page

    yield open_page
    for context, _ in opened:
        context.close()
    assert [wrong for _, wrong in opened] == [[] for _ in opened]
