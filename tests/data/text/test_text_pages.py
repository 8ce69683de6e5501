"""HTML to text: tags are removed, blocks become lines, other brackets stay; boilerplate is removed, prose stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.text.boilerplate import remove_boilerplate
from bottega.data.text.html import strip_html


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>One</p><p>Two <b>bold</b> words</p>", "One\n\nTwo bold words"),
        ("<div>a</div><div>b</div>", "a\nb"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<ul><li>x<li>y</ul>", "x\ny"),
        ("<table><tr><th>n</th><td>1</td></tr><tr><td>m</td><td>2</td></tr></table>", "n\t1\nm\t2"),
        ("<p>a\n   b\t c</p>", "a b c"),
        ("<pre>a\n   b</pre>", "a\n   b"),
        ("<p>5 &lt; 6 &amp;&nbsp;&#65;&#x42; &eacute;</p>", "5 < 6 &\xa0AB é"),
        ("<p>a<script>if (a < b) { '</p>' }</script>b<style>p { }</style></p>", "ab"),
        ("<html><head><title>T</title><meta x=y></head><body class='z'>Hi</body></html>", "Hi"),
        ("<html><head><title>T</title><body>Hi</html>", "Hi"),
        ("<p>a<!-- no <b>text</b> -->b</p>", "ab"),
        ("<!DOCTYPE html><?xml version='1'?><p>x</p>", "x"),
        ("<p>x<svg><title>t</title><path d='M0'/></svg>y<noscript>enable</noscript></p>", "xy"),
        ('<a title="a > b" href=x>link</a>', "link"),
        ("<P CLASS=big>Upper</P>", "Upper"),
        ("<p>it's 1 <2 and 3< 4 <- 5</p>", "it's 1 <2 and 3< 4 <- 5"),
        ("<p>unclosed <b bold <i>x", "unclosed <b bold x"),
        ("<p>a</p><script>var x = 1;", "a"),
        ("<p>a</p><svg><p>never closed", "a\n\nnever closed"),
        ("<p>a</p><!-- never closed", "a\n\n<!-- never closed"),
        ("</p></div>text</b><p", "text<p"),
    ],
)
def test_html_is_converted_to_text(page: str, text: str) -> None:
    assert strip_html(page) == text


@pytest.mark.parametrize(
    "text",
    [
        "a < b and c > d",
        "if a<b and c>d:",
        "vector<int> x; #include <stdio.h>",
        "Write to <me@example.org> <3",
        "  indented\n\n\ntext\t<- here",
        "<<<>>> <- -> </>",
    ],
)
def test_text_without_tags_is_unchanged(text: str) -> None:
    assert strip_html(text) == text
    assert strip_html(text + " &amp; &lt;b&gt;") == text + " & <b>"


@given(st.text())
def test_text_without_brackets_and_entities_is_unchanged(text: str) -> None:
    text = text.replace("<", "").replace("&", "")
    assert strip_html(text) == text


PARTS = st.sampled_from(
    [
        "<p>",
        "</p>",
        "<b",
        "<div",
        '"',
        "'",
        "=",
        ">",
        "<",
        "<!--",
        "-->",
        "<script>",
        "</script>",
        "<![CDATA[",
        "]]>",
        "<td>",
        "<pre>",
        "</pre>",
        "<head>",
        "<body>",
        "&lt;",
        "&#",
        "&nGt;",
        "word",
        "<br>",
        "</",
        "<?",
        "<hr/>",
        "<svg/>",
        "<li>",
    ]
)


@given(st.lists(PARTS | st.text(max_size=5) | st.sampled_from(" \n"), max_size=40).map("".join))
def test_stripping_never_makes_a_page_longer(page: str) -> None:
    assert len(strip_html(page)) <= len(page)


@pytest.mark.parametrize(
    "part",
    [
        "<!--",
        "<a ",
        '<a b="',
        "<a 'x' ",
        "<a b=\"<a b='",
        "</",
        "<!",
        "<?",
        "<![CDATA[",
        "<svg>",
        "<div>",
        "&#",
        "<",
        "<a ='<a' ",
    ],
)
def test_hostile_pages_take_linear_time(part: str) -> None:
    """Searching each part to the end of the page would take hours and reach the suite's time limit."""
    strip_html("<p>" + part * (3_000_000 // len(part)))


ARTICLE = """Our garden in March

The first warm days came early this year, and the birds were back before the snow had gone.

We planted beans, peas and a row of carrots."""

PAGE = f"""Skip to content
Home
News

About us
Contact
Home | News | About | Contact
{ARTICLE}
Share on Facebook
[One](https://example.org/one) [Two](https://example.org/two)

We use cookies to give you the best experience. Accept all cookies
© 2024 Example Ltd. All rights reserved.
Privacy Policy · Terms of Use · Imprint
Related
Winter vegetables
Spring flowers
Summer fruit"""


def test_boilerplate_around_an_article_is_removed() -> None:
    assert remove_boilerplate(PAGE) == ARTICLE
    assert remove_boilerplate(ARTICLE) == ARTICLE


@pytest.mark.parametrize(
    "line",
    [
        "She baked cookies for us, and we accepted all of them with pleasure.",
        "In 1709 Parliament passed the first law of copyright, and all printers' rights reserved to it ended.",
        "See https://example.org/a/very/long/address/of/a/page for the details.",
        "https://example.org/a/very/long/address",
        "O Romeo, Romeo! wherefore art thou Romeo?",
        "我们晚上回到家的时候，没有人想到要为第二天买面包。",
    ],
)
def test_prose_is_not_boilerplate(line: str) -> None:
    assert remove_boilerplate(line) == line


@given(
    st.lists(st.sampled_from([*PAGE.split("\n"), "", "", "Heading", "A sentence of the text."]), max_size=20).map(
        "\n".join
    )
)
def test_removing_boilerplate_drops_lines_only_and_is_idempotent(text: str) -> None:
    remaining = remove_boilerplate(text)
    assert remove_boilerplate(remaining) == remaining
    lines = iter(text.split("\n"))
    assert remaining == "" or all(line in lines for line in remaining.split("\n"))


@pytest.mark.skipif("BOTTEGA_DATA" not in os.environ, reason="BOTTEGA_DATA is not set to a folder of data")
def test_shakespeare_has_no_boilerplate() -> None:
    text = Path(os.environ["BOTTEGA_DATA"], "text-lm-tinyshakespeare", "input.txt").read_text()
    assert len(remove_boilerplate(text)) >= 0.9999 * len(text)


def test_python_documentation_has_next_to_no_boilerplate() -> None:
    import argparse
    import collections
    import json
    import logging
    import statistics

    modules = (argparse, collections, json, logging, statistics)
    texts = [
        entry.__doc__
        for module in modules
        for entry in (module, *vars(module).values())
        if isinstance(getattr(entry, "__doc__", None), str)
    ]
    prose = [
        paragraph
        for text in texts
        for paragraph in text.split("\n\n")
        if ">>>" not in paragraph and paragraph.rstrip().endswith(".")
    ]
    assert len(prose) > 200
    assert sum(map(len, map(remove_boilerplate, prose))) >= 0.995 * sum(map(len, prose))
