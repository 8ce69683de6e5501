"""Whether the Hugging Face hub answers, asked once before anything is fetched from it.

Its library tries each file five times and waits longer each time: behind a proxy that says nothing, a name took more than
six minutes to fail. Where the hub does not answer, what was fetched before is still read.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from bottega.config.credentials import strip_credentials_in_text

ANSWER_SECONDS = 15.0
"""How long the first answer may take, from looking up the name to the end of the headers."""
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@contextmanager
def offline_if_hub_unreachable() -> Iterator[str | None]:
    """Within it the libraries use the hub, or only what they have here where it does not answer; yields why not."""
    from huggingface_hub import constants

    reason = None if constants.HF_HUB_OFFLINE else _silence(constants.ENDPOINT, _proxies())
    loaded: list[Any] = [constants]
    if "datasets" in sys.modules:
        loaded.append(sys.modules["datasets"].config)
    before = [one.HF_HUB_OFFLINE for one in loaded]
    try:
        for one in loaded:
            one.HF_HUB_OFFLINE = one.HF_HUB_OFFLINE or reason is not None
        yield reason
    finally:
        for one, was in zip(loaded, before, strict=True):
            one.HF_HUB_OFFLINE = was


@cache
def _silence(endpoint: str, proxies: tuple[str, ...]) -> str | None:
    """Why the hub cannot be used; None where it answers, be it with an error. Asked once for each way to reach it."""
    outcome: list[Any] = []

    def ask() -> None:
        try:
            from huggingface_hub.utils import get_session

            outcome.append(get_session().head(endpoint, timeout=ANSWER_SECONDS))
        except Exception as error:
            outcome.append(error)

    # The library's own limits are of single reads, which a byte now and then would prolong for ever.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    through = f" through {strip_credentials_in_text(proxies[0])}" if proxies else ""
    if not outcome:
        return f"{endpoint}{through} did not answer within {ANSWER_SECONDS:g} s"
    kinds = {kind.__name__ for kind in type(outcome[0]).__mro__}
    if kinds & {"TimeoutException", "Timeout", "TimeoutError"}:
        return f"{endpoint}{through} did not answer within {ANSWER_SECONDS:g} s"
    if kinds & {"TransportError", "ConnectionError"}:
        return f"{endpoint}{through} could not be reached"
    return None


def _proxies() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in PROXIES if os.environ.get(name))
