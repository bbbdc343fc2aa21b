"""What the list of sessions calls browsers."""

import pytest

from console.templatetags.console import browser

WEBKIT = "AppleWebKit/537.36 (KHTML, like Gecko)"


@pytest.mark.parametrize(
    ("agent", "called"),
    [
        (
            f"Mozilla/5.0 (X11; Linux x86_64) {WEBKIT} Chrome/140.0 Safari/537.36",
            "Chrome 140 on Linux",
        ),
        (
            f"Mozilla/5.0 (Windows NT 10.0; Win64; x64) {WEBKIT} Chrome/141.0 Safari/5 Edg/141.0",
            "Edge 141 on Windows",
        ),
        (
            "Mozilla/5.0 (iPhone; CPU iPhone OS 18_1 like Mac OS X) AppleWebKit/605.1.15"
            " (KHTML, like Gecko) Version/18.1 Mobile/15E148 Safari/604.1",
            "Safari 18 on iPhone",
        ),
        (f"Mozilla/5.0 (Linux; Android 15) {WEBKIT} Chrome/140.0 Mobile", "Chrome 140 on Android"),
        (
            "Mozilla/5.0 (Macintosh; Intel Mac OS X 15.7; rv:144.0) Firefox/144.0",
            "Firefox 144 on macOS",
        ),
        ("curl/8.5.0", "curl/8.5.0"),
        ("", ""),
        ("x" * 200, "x" * 60),
    ],
)
def test_browsers_are_called_what_people_call_them(agent: str, called: str) -> None:
    assert browser(agent) == called
