"""The group table: the first row that matches decides, and every parameter and every row is accounted for."""

from __future__ import annotations

import pytest

from bottega.core.errors import UsageError
from bottega.core.groups import Row, assign

NAMES = ["embed.weight", "layers.0.weight", "layers.1.weight", "head.weight"]


def test_the_first_row_that_matches_the_whole_name_decides() -> None:
    rows = [Row("embed.*", None), Row(r"layers\.0\..*", 0.1), Row(".*")]
    assert assign(NAMES, rows) == {NAMES[0]: 0, NAMES[1]: 1, NAMES[2]: 2, NAMES[3]: 2}
    with pytest.raises(UsageError, match=r"no row matches the parameter embed\.weight"):
        assign(NAMES, [Row("embed"), Row("layers.*")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row("layers.*")], "embed.weight; add a last row"),
        ([Row("blocks.*"), Row(".*")], "'blocks.*' matches no parameter, such as embed.weight"),
        ([Row(".*"), Row("head.*")], "'head.*' matches no parameter"),
        ([Row("("), Row(".*")], r"'\(' is not a regular expression"),
        ([Row(".*", None)], "every parameter is frozen"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(rows: list[Row], message: str) -> None:
    with pytest.raises(UsageError, match=r"training\.groups: .*") as caught:
        assign(NAMES, rows)
    assert caught.match(message)
    assert "\n" not in str(caught.value)
