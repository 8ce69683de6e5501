"""Checks once whether the Hugging Face hub is reachable, before anything is downloaded from it.

huggingface_hub retries each file five times with growing delays: behind a proxy that never answers, one name took more than
six minutes to fail. If the hub is unreachable, its local cache is still used.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from bottega.redaction import redact_text

ANSWER_SECONDS = 15.0
"""Time limit for the first response, from the DNS lookup to the end of the headers."""
PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


@contextmanager
def offline_if_hub_unreachable() -> Iterator[str | None]:
    """Set huggingface_hub and datasets to offline mode within the context if the hub is unreachable.

    Yields the reason, or None if the hub is reachable or offline mode was already set.
    """
    from huggingface_hub import constants

    reason = None if constants.HF_HUB_OFFLINE else _find_unreachable_reason(constants.ENDPOINT, _read_proxies())
    modules: list[Any] = [constants]
    if "datasets" in sys.modules:
        modules.append(sys.modules["datasets"].config)
    previous = [settings.HF_HUB_OFFLINE for settings in modules]
    try:
        for settings in modules:
            settings.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE or reason is not None
        yield reason
    finally:
        for settings, was_offline in zip(modules, previous, strict=True):
            settings.HF_HUB_OFFLINE = was_offline


@cache
def _find_unreachable_reason(endpoint: str, proxies: tuple[str, ...]) -> str | None:
    """Return why the hub cannot be reached, or None if it responds, even with an error.

    Cached: one request per endpoint and proxy setting.
    """
    outcome: list[Any] = []

    def send_request() -> None:
        try:
            from huggingface_hub.utils import get_session

            outcome.append(get_session().head(endpoint, timeout=ANSWER_SECONDS))
        except Exception as error:
            outcome.append(error)

    # In a thread, because the library's timeout is per read: a server that sends a byte now and then never hits it.
    thread = threading.Thread(target=send_request, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    via_proxy = f" through {redact_text(proxies[0])}" if proxies else ""
    if not outcome:
        return f"{endpoint}{via_proxy} did not answer within {ANSWER_SECONDS:g} s"
    # Compared by name, because the library uses requests or httpx, depending on its version.
    class_names = {base.__name__ for base in type(outcome[0]).__mro__}
    if class_names & {"TimeoutException", "Timeout", "TimeoutError"}:
        return f"{endpoint}{via_proxy} did not answer within {ANSWER_SECONDS:g} s"
    if class_names & {"TransportError", "ConnectionError"}:
        return f"{endpoint}{via_proxy} could not be reached"
    return None


def _read_proxies() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in PROXY_VARIABLES if os.environ.get(name))
